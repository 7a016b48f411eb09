"""Steps of kernels against the definitions of their ops, which run on the CPU."""

import torch
from torch import Tensor

from kvfold.bench.expected_ops import naive_attend_error, naive_store_error, on_cpu
from kvfold.ops import naive
from kvfold.ops.pages import LayerPages, Logits


def assert_defined(
    before: LayerPages, after: LayerPages, q: Tensor, k: Tensor, v: Tensor, logits: Logits, out: Tensor
) -> None:
    """A step of q, k and v that led from the bytes `before` to those `after`, both on the CPU, and to `out`."""
    expected = on_cpu(before)
    q, k, v = (x.cpu() for x in (q, k, v))
    new = naive.store(expected, k, v)
    for error, allowed in (
        naive_store_error(before, expected, after, k, v),
        naive_attend_error(after, q, new, logits, out),
    ):
        assert error <= allowed
    assert torch.isfinite(out).all()
