"""Hessian-aware rotation (an ablation of the SAW-INT4 paper): a Hadamard matrix, then the queries' eigenbasis."""

from typing import TYPE_CHECKING

from kvfold.methods.integers import Integers
from kvfold.recipe import Fit, Means, Rotations

if TYPE_CHECKING:
    from kvfold.calibration.statistics import LayerStatistics
    from kvfold.rope import Rope


class Hessian(Integers):
    """k' = k·H·R with R the eigenvectors of E[qᵀq] over all query heads of a layer, then integers.

    The queries in E[qᵀq] are not rotated by H, as in the paper's formulas. With rotated queries, H·R would be the
    eigenbasis of the plain queries, in which keys have outliers again. The paper adds a multiple of the identity to
    E[qᵀq]. That changes no eigenvector, so it is left out.
    """

    def rotations(self, key_dim: int, value_dim: int, fit: Fit) -> Rotations:
        from kvfold.transforms import Matrix

        return Matrix(fit["key_rotation"]), None

    def fit(self, layer: "LayerStatistics", rope: "Rope", means: Means) -> Fit:
        from kvfold.transforms import hadamard_matrix
        from kvfold.transforms.covariance import eigenvectors

        moment = layer.q.second().mean(dim=0)
        rotation = (hadamard_matrix(len(moment)) @ eigenvectors(moment)).float()
        return {"key_rotation": rotation.unsqueeze(0)}
