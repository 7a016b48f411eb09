"""QuaRot (its KV cache): outlier-free inference in rotated language models."""

from kvfold.methods.saw import Saw


class QuaRot(Saw):
    """k' = k·H, v' = v·H with the Hadamard matrix over the whole head where its size is a power of two, then integers."""

    values: bool = True
