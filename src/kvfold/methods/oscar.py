"""OSCAR: offline spectral covariance-aware rotation for 2-bit KV-cache quantization."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from kvfold.format.layout import SlotLayout, affine_slot
from kvfold.methods.integers import Integers
from kvfold.recipe import Fit, Means, Number, Rotations

if TYPE_CHECKING:
    from torch import Tensor

    from kvfold.calibration.statistics import LayerStatistics
    from kvfold.format.codec import Codec
    from kvfold.rope import Rope

CLIPS = tuple(n / 20 for n in range(12, 31))
MOST = 1.1  # the chosen clip loses at most this many times what the best one loses


class Oscar(Integers):
    """k' = k·U_Q·H·P, v' = v·U_S·H·P, then integers of groups that are clipped at c·√(Σx⁴/Σx²).

    - U_Q: the eigenvectors of E[qᵀq].
    - U_S: the eigenvectors of (1/N)·VᵀSᵀSV with S the softmax. This is the second moment of the attention output.
    - H: a Hadamard matrix. P: a bit reversal.
    - c: per layer, the largest of `CLIPS` that loses hardly more than the best. What is lost is the divergence of
      attention weights (keys) and the error of outputs (values). The paper clips at a fixed quantile of a vector's
      magnitudes, which takes longer to find and loses more (docs/notes/calibration.md).

    `eigen=false`, `hadamard=false`, `permute=false` and `clip=false` are ablations of the paper.
    """

    options: ClassVar = ("per_head", "eigen", "hadamard", "permute", "clip", *Integers.options)
    folds: ClassVar = True
    block: Number = 256
    per_head: bool = False  # a rotation per KV head
    eigen: bool = True
    hadamard: bool = True
    permute: bool = True
    clip: bool = True

    def layouts(self, key_dim: int, value_dim: int, fit: Fit) -> tuple[SlotLayout, SlotLayout]:
        key, value = (affine_slot(dims, self.bits, self.group or dims // 2) for dims in (key_dim, value_dim))
        return key, value

    def rotations(self, key_dim: int, value_dim: int, fit: Fit) -> Rotations:
        """Values have no rotation if it was folded into the model's weights."""
        from kvfold.transforms import Matrix

        return Matrix(fit["key_rotation"]), None if "value_folded" in fit else Matrix(fit["value_rotation"])

    def fit(self, layer: "LayerStatistics", rope: "Rope", means: Means) -> Fit:
        metrics = layer.q.second(), layer.out.second(means[1])  # they weigh errors of keys and of values
        fit: dict[str, Tensor] = {}
        for side, metric in zip(("key", "value"), metrics, strict=True):
            fit[f"{side}_rotation"] = self._rotation(metric if self.per_head else metric.mean(dim=0, keepdim=True))
        return {**fit, **self._clips(layer, fit, means)} if self.clip else fit

    def _clips(self, layer: "LayerStatistics", fit: Fit, means: Means) -> Fit:
        """What counts is what the prompt's queries lose if far tokens are decoded: the divergence of their attention
        weights (keys), and the squared error of their outputs (values)."""
        from kvfold.ops.dense import divergence

        _, k, v = layer.prompt
        sides = zip(("key", "value"), means, strict=True)
        centred = {**fit, **{f"{side}_mean": mean.float() for side, mean in sides if mean is not None}}
        key, value = self.codecs(k.shape[-1], v.shape[-1], centred)
        weights = layer.log_weights()
        far = weights[..., : k.shape[1]].exp() * layer.far

        def keys_lose(decoded: "Tensor") -> "Tensor":
            return divergence(weights, layer.log_weights(decoded)).double().mean()

        def values_lose(decoded: "Tensor") -> "Tensor":
            return (far @ (decoded - v).unsqueeze(1)).double().square().sum()

        return {"key_clip": _largest(key, k, keys_lose), "value_clip": _largest(value, v, values_lose)}

    def _rotation(self, moments: "Tensor") -> "Tensor":
        """float64[heads, d, d] -> float32[heads, d, d]"""
        import torch

        from kvfold.transforms import hadamard_matrix
        from kvfold.transforms.covariance import bit_reversal, eigenvectors

        dims = moments.shape[-1]
        rotation = eigenvectors(moments) if self.eigen else torch.eye(dims, dtype=torch.float64).expand_as(moments)
        if self.hadamard:
            rotation = rotation @ hadamard_matrix(dims)
        return (rotation[..., bit_reversal(dims)] if self.permute else rotation).float().contiguous()


def _largest(codec: "Codec", x: "Tensor", loss: Callable[["Tensor"], "Tensor"]) -> "Tensor":
    """The largest of `CLIPS` whose `loss`, of x [kv_heads, n, d] as decoded, is hardly more than the least: float32[1].

    Large clips spare the few tokens whose large coordinates matter. Mean losses hardly show these.
    """
    import torch

    y = codec.transform.forward(x.transpose(0, 1)).unsqueeze(-2)
    losses = []
    for clip in CLIPS:
        clipped = replace(codec, clip=clip)
        decoded = clipped.dequantize(*clipped.quantize(y)).squeeze(-2)
        losses.append(max(0.0, float(loss(codec.transform.inverse(decoded).transpose(0, 1)))))
    return torch.tensor([max(clip for clip, lost in zip(CLIPS, losses, strict=True) if lost <= MOST * min(losses))])
