"""k-means residuals (an ablation of the SAW-INT4 paper): integers of the difference from the nearest centroid."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from kvfold.format.layout import SlotLayout
from kvfold.methods.integers import Integers
from kvfold.methods.saw import Saw
from kvfold.recipe import Fit, Means, Number

if TYPE_CHECKING:
    from torch import Tensor

    from kvfold.calibration.statistics import LayerStatistics
    from kvfold.rope import Rope


class KMeans(Integers):
    """k' = k − c, then integers. c is the centroid nearest to the keys of all KV heads of a token. Values alike.

    A layer has one codebook for keys and one for values. The number of the centroid is stored in the slot of every KV
    head, so that a page can be decoded alone.
    """

    options: ClassVar = ("centroids", "seed", *Integers.options)
    centroids: int = Field(default=256, ge=1, le=2**15)  # their numbers are int16
    seed: Number = 0

    def layouts(self, key_dim: int, value_dim: int, fit: Fit) -> tuple[SlotLayout, SlotLayout]:
        key, value = super().layouts(key_dim, value_dim, fit)
        return SlotLayout(key.segments, centroid=True), SlotLayout(value.segments, centroid=True)

    def fit(self, layer: "LayerStatistics", rope: "Rope", means: Means) -> Fit:
        from kvfold.transforms import Transform

        keys, values = layer.samples
        rotations = self.rotations(keys.shape[-1], values.shape[-1], {})
        key, value = (
            self._codebook(Transform(None if mean is None else mean.float(), rotation).forward(samples))
            for samples, mean, rotation in zip(layer.samples, means, rotations, strict=True)
        )
        return {"key_centroids": key, "value_centroids": value}

    def _codebook(self, y: "Tensor") -> "Tensor":
        """Transformed samples [tokens, kv_heads, d] -> centroids float32[kv_heads, centroids, d]."""
        from kvfold.quantizers import kmeans

        if len(y) < self.centroids:
            raise ValueError(
                f"{self}: {len(y)} samples are too few for centroids={self.centroids}: calibrate on more --tokens"
            )
        centroids = kmeans.fit(y.flatten(1), self.centroids, self.seed)
        return centroids.unflatten(1, y.shape[1:]).transpose(0, 1).float().contiguous()


class KMeansSaw(KMeans, Saw):
    """k' = k·diag(H_h, …, H_h) − c: the residuals of SAW-INT4's rotated keys."""

    options: ClassVar = ("centroids", "seed", *Saw.options)
