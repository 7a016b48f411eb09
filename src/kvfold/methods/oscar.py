"""OSCAR: offline spectral covariance-aware rotation for 2-bit KV-cache quantization."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import NonNegativeInt

from kvfold.format.layout import SlotLayout, affine_slot
from kvfold.format.windows import FIRST_TOKENS
from kvfold.methods.integers import Integers
from kvfold.recipe import Fit, Means, Rotations

if TYPE_CHECKING:
    from torch import Tensor

    from kvfold.calibration.statistics import LayerStatistics
    from kvfold.rope import Rope

CLIPS = (0.84, 0.88, 0.9, 0.92, 0.94, 0.96, 0.98, 1.0)  # values of ρ; calibration takes the best per layer and side


class Oscar(Integers):
    """k' = k·U_Q·H·P, v' = v·U_S·H·P, clipped to the ρ-quantile of a vector's magnitudes, then integers.

    - U_Q: the eigenvectors of E[qᵀq].
    - U_S: the eigenvectors of (1/N)·VᵀSᵀSV with S the softmax. This is the second moment of the attention output.
    - H: a Hadamard matrix. P: a bit reversal.
    - ρ: per layer, the one with the least error of logits (keys) and of outputs (values). The paper fixes ρ: its code
      has 0.96 for keys and 0.92 for values.

    `eigen=false`, `hadamard=false`, `permute=false` and `clip=false` are ablations of the paper.
    """

    options: ClassVar = ("per_head", "eigen", "hadamard", "permute", "clip", *Integers.options)
    folds: ClassVar = True
    sink: NonNegativeInt = 64
    recent: NonNegativeInt = 256
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
        from kvfold.transforms.covariance import spectrum

        metrics = layer.q.second(), layer.out.second(means[1])  # they weigh errors of keys and of values
        fit: dict[str, Tensor] = {}
        for side, metric in zip(("key", "value"), metrics, strict=True):
            moments = metric if self.per_head else metric.mean(dim=0, keepdim=True)
            fit |= {f"{side}_rotation": self._rotation(moments), f"{side}_spectrum": spectrum(moments)}
        return {**fit, **self._clips(layer, fit, means)} if self.clip else fit

    def _clips(self, layer: "LayerStatistics", fit: Fit, means: Means) -> Fit:
        """The best of `CLIPS` for keys and for values."""
        import torch

        sides = zip(("key", "value"), means, strict=True)
        centred = {**fit, **{f"{side}_mean": mean.float() for side, mean in sides if mean is not None}}
        weights = layer.weights().double()
        tried = [
            self._errors(layer, weights, {**centred, "key_clip": clip, "value_clip": clip})
            for clip in torch.tensor(CLIPS)
        ]
        key, value = torch.tensor(tried).argmin(dim=0).tolist()
        return {"key_clip": torch.tensor([CLIPS[key]]), "value_clip": torch.tensor([CLIPS[value]])}

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

    def _errors(self, layer: "LayerStatistics", weights: "Tensor", fit: Fit) -> tuple[float, float]:
        """Squared errors over the prompt: tr(C_Q·E_K) of logits, and ‖S(V − V̂)‖² of outputs.

        C_Q is E[qᵀq], and E_K the sum of eᵀe over the errors e of keys. S are the attention `weights`
        [kv_heads, group, tokens, tokens]. The sink is read raw and has no errors.
        """
        from torch import einsum

        _, k, v = layer.prompt
        key, value = self.codecs(k.shape[-1], v.shape[-1], fit)
        k_error, v_error = (
            (codec.decode(codec.encode(x.transpose(0, 1))).transpose(0, 1) - x).double()
            for codec, x in ((key, k), (value, v))
        )
        sink = min(self.sink, FIRST_TOKENS)
        k_error[:, :sink] = v_error[:, :sink] = 0
        key_error = einsum("htd,hde,hte->", k_error, layer.q.second(), k_error)
        return float(key_error), float((weights @ v_error.unsqueeze(1)).square().sum())
