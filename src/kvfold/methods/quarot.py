"""QuaRot (its KV cache): outlier-free inference in rotated language models."""

from kvfold.methods.saw import Saw


class QuaRot(Saw):
    """k' = k·H, v' = v·H with a Hadamard matrix over the whole head (at most 128 dims), then integers."""

    values: bool = True
