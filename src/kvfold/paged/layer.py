"""A packed layer, whoever owns its pages: a `PagedCache` or an engine."""

from collections.abc import Sequence

from torch import Tensor

from kvfold.ops.dispatch import New, Ops
from kvfold.ops.pages import LayerPages, Logits, Step

Steps = Sequence[tuple[slice, Step]]  # the parts of one call of the model, each with the rows of its tokens


class Layer:
    """It packs new tokens into its pages and lets the queries read.

    `shared`: other layers read its pages, in the same step.
    """

    def __init__(self, pages: LayerPages, ops: Ops, shared: bool = False) -> None:
        self.pages, self.ops, self.shared = pages, ops, shared
        self.new: list[New] = []  # if it is shared: what `store` returned, per part of the last step

    def attend(self, steps: Steps, q: Tensor, k: Tensor, v: Tensor, logits: Logits, out: Tensor) -> None:
        """Pack k and v [tokens, kv_heads, d], then attend the queries [tokens, q_heads, d]. Outputs go to `out`.

        Requests of one batch may share pages. So all tokens are packed before queries read. Those of the first step are
        packed last, right before its queries read.
        """
        parts = [(rows, self.pages.during(step)) for rows, step in steps]
        new = [self.ops.store.run(pages, k[rows], v[rows]) for rows, pages in reversed(parts)][::-1]
        for (rows, pages), own in zip(parts, new, strict=True):
            self.ops.attend(pages, q[rows], own, logits, out[rows])
        if self.shared:
            self.new = new

    def read(self, steps: Steps, q: Tensor, logits: Logits, out: Tensor) -> None:
        """Let the queries of another layer read what `attend` packed in the same steps. Outputs go to `out`."""
        assert self.shared, "what a step stored is kept for layers that are shared"
        for (rows, step), new in zip(steps, self.new, strict=True):
            self.ops.read(self.pages.during(step), q[rows], new, logits, out[rows])
