"""A mode under which the numbers of a row do not depend on the other rows of its batch, to the bit.

kvfold promises that the same keys and values give the same bytes and the same answers. A model does not keep its keys
and values the same: matrix products, sums and vectorised functions round in an order that depends on the size of the
batch, on the BLAS and on the CPU. Under `batch_invariant` they do not. So a test can compare with `==` what a request
gets alone, in a batch, in chunks or after a prefix hit, on every machine.

Each PyTorch operation on floating-point numbers is treated in one of these ways:

- A product with a weight is **exact**. Each row of activations is rounded to integers of 24 bits times a power of two,
  and each column of the weight to integers of so many bits that all sums stay below 2^53. Float64 then holds every
  partial sum exactly, in whatever order a BLAS adds, with or without FMA, for any number of rows and threads. The
  rounding of a row depends on that row alone. The model becomes a slightly different one, the same for every batch.
- Attention is computed for **one query at a time**, over the tokens that it sees and no others. Means, sums and
  log-softmax are computed for **one row at a time**. The call, the shapes, the numbers and the alignment of memory are
  the same for every batch, so the result is.
- Functions of single numbers (silu, rsqrt, sigmoid, …) are computed in blocks of 1024 numbers. Those fill whole vectors
  on every CPU, so that every number goes through the same instructions; a remainder might not.
- A single operation of IEEE 754 (+, −, ×, ÷, √), a conversion, a comparison or a copy runs as it is. IEEE 754 allows
  one result.
- Everything else is **refused** by name. So is a product with anything but a weight, such as keys: how a column is
  rounded would depend on the batch. So nothing that depends on the batch goes unnoticed, also on machines that would
  not show it.

Only PyTorch operations are seen. Of kvfold's kernels for CPUs, numba's `store` computes each token by itself in a fixed
order, and numba's `attend` is not run: see `extend_always`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvfold.ops.dispatch import Ops

ROW_BITS = 24  # of the integers that a row of activations is rounded to
EXACT_BITS = 53  # integers up to 2^53 are exact in float64
BLOCK = 1024  # numbers
UNSEEN = -1e29  # masks add less than that to the logits of tokens that a query does not see

MOVES = {
    *("_to_copy", "_unsafe_view", "alias", "as_strided", "block_diag", "cat", "chunk", "clone", "contiguous", "copy"),
    *("detach", "embedding", "empty_like", "expand", "fill", "flatten", "full_like", "gather", "index", "index_put"),
    *("index_select", "lift_fresh", "masked_fill", "mT", "movedim", "narrow", "new_empty", "new_full", "new_zeros"),
    *("permute", "repeat", "reshape", "scatter", "select", "slice", "split", "split_with_sizes", "squeeze", "stack"),
    *("t", "to", "transpose", "unbind", "unflatten", "unsqueeze", "view", "zero", "zeros_like"),
    "_C::cpu_attn_reshape_and_cache",  # of vLLM
}
TRANSPOSES = {"permute", "t", "transpose"}  # which a weight goes through before a product
COMPARES = {
    *("_local_scalar_dense", "all", "amax", "amin", "any", "argmax", "argmin", "bucketize", "clamp", "clamp_max"),
    *("clamp_min", "eq", "equal", "ge", "gt", "isfinite", "isnan", "kthvalue", "le", "lt", "max", "maximum", "min"),
    *("minimum", "ne", "sign", "sort", "topk", "where"),
    "_C::greedy_argmax",  # of vLLM
}
IEEE = {"abs", "add", "ceil", "div", "floor", "mul", "neg", "round", "sqrt", "sub"}
ROW_LOOPS = {"quantized::embedding_bag_byte_unpack"}  # x = scale · code + offset, by a loop over each row
FUNCTIONS = {"cos", "exp", "lerp", "log", "logaddexp", "pow", "reciprocal", "rsqrt", "sigmoid", "silu", "sin", "square"}


class BatchInvariant(TorchDispatchMode):
    """See above. `ops` says how an operation that is not PyTorch's, such as an engine's attention, runs for one row at
    a time. Weights must not change while the mode is on."""

    def __init__(self, ops: Mapping[str, Callable[..., Any]] | None = None) -> None:
        super().__init__()
        self.ops = ops or {}
        self.weights: dict[int, Tensor] = {}  # by address; held, so that nothing else gets it
        self.columns: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}  # weights on their grid

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        plain = name.removesuffix("_")  # without that of operations in place
        if plain in TRANSPOSES and isinstance(args[0], Parameter):
            self.weights[args[0].data_ptr()] = args[0]
        if plain in MOVES or plain in COMPARES or name in ROW_LOOPS:
            return func(*args, **kwargs)
        if plain in IEEE and kwargs.get("alpha", 1) == 1 and not kwargs.get("rounding_mode"):  # else they are several
            return func(*args, **kwargs)
        if name in self.ops:
            return self.ops[name](*args, **kwargs)
        with self:
            composed = func.decompose(*args, **kwargs)
        if composed is not NotImplemented:
            return composed
        if name in ("mm", "bmm"):
            return self.exact_product(*args)
        if name == "addmm" and not kwargs:
            return self.exact_product(*args[1:]) + args[0]
        if name == "_scaled_dot_product_flash_attention_for_cpu":
            return attention(func, *args, **kwargs)
        if name == "_log_softmax":
            return log_softmax(func, *args)
        if name in ("mean", "sum") and has_floats(args):
            return reduced(func, *args, **kwargs)
        if (plain in FUNCTIONS or plain in IEEE) and has_floats(args):
            return by_block(func, args, kwargs)
        if not has_floats((args, kwargs)):
            result = func(*args, **kwargs)
            if not has_floats(result) or not any(isinstance(x, Tensor) for x in tree_leaves((args, kwargs))):
                return result  # integers, or numbers that are made of no tensor
        raise NotImplementedError(f"{func} is not known to give a row the same bits in every batch")

    def exact_product(self, a: Tensor, b: Tensor) -> Tensor:
        """a [..., n, k] times b [..., k, m], exactly for a and b on their grids."""
        k = a.shape[-1]
        if k == 1:
            return a @ b  # nothing is added up
        is_weight = b.data_ptr() in self.weights
        if not is_weight and b.dtype != torch.float64:  # kvfold's rotations are in float64
            raise NotImplementedError(f"a product of {list(a.shape)} with {list(b.shape)}, which is no weight")
        bits = EXACT_BITS - ROW_BITS - (k - 1).bit_length()
        assert bits >= 12, f"sums of {k} products leave only {bits} bits for weights"
        key = (b.data_ptr(), b.shape, b.stride())
        columns = self.columns.get(key) or on_grid(b, -2, bits)
        if is_weight:
            self.columns[key] = columns
        rows = on_grid(a, -1, ROW_BITS)
        return ((rows[0] @ columns[0]) * rows[1] * columns[1]).to(torch.promote_types(a.dtype, b.dtype))


def on_grid(x: Tensor, dim: int, bits: int) -> tuple[Tensor, Tensor]:
    """x as integers of at most 2^bits, in float64, times a power of two for each row along `dim`."""
    x = x.double()
    exponent = torch.frexp(x.abs().amax(dim, keepdim=True)).exponent.long()
    unit = ((exponent - bits + 1023) << 52).view(torch.float64)  # 2^(exponent − bits)
    return (x / unit).round(), unit


def attention(
    flash: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Queries [sequences, heads, n, d] over the tokens that each sees; also the log-sum-exp of their logits."""
    assert not dropout
    sequences, heads, n, _ = q.shape
    out, weight = torch.zeros_like(q), q.new_full((sequences, n, heads), 10 * UNSEEN)
    seen = torch.ones(sequences, n, k.shape[2], dtype=torch.bool)
    if causal:
        seen.tril_()
    if attn_mask is not None:
        assert attn_mask.shape[1] == 1, "a mask for each head"
        assert ((attn_mask == 0) | (attn_mask < UNSEEN)).all(), "a mask that does more than to hide"
        seen &= attn_mask[:, 0] == 0
    for row, i in product(range(sequences), range(n)):
        tokens = seen[row, i].nonzero().squeeze(1)
        if len(tokens):
            own = q[row : row + 1, :, i : i + 1].clone(), *(x[row : row + 1].index_select(2, tokens) for x in (k, v))
            out[row, :, i], weight[row, i] = (x.squeeze(2)[0] for x in flash(*own, scale=scale))
    return out, weight.transpose(1, 2)


def log_softmax(func: Any, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    assert dim % x.ndim == x.ndim - 1, "log_softmax of columns"
    rows = x.reshape(-1, x.shape[-1])
    return torch.stack([func(row.clone(), 0, half_to_float) for row in rows]).view(x.shape)


def reduced(func: Any, x: Tensor, dims: list[int] | None = None, keep: bool = False, **kwargs: Any) -> Tensor:
    """mean or sum over one dimension, for each row along it. The sum of a whole tensor belongs to no row: what is left
    of it is whether it is finite."""
    if dims is None:
        return func(x, **kwargs) * 0
    if not x.numel():
        return func(x, dims, keep, **kwargs)
    assert len(dims) == 1, f"{func} over {dims}"
    rows = x.movedim(dims[0], -1)
    results = [func(row.clone(), [0], **kwargs) for row in rows.reshape(-1, rows.shape[-1])]
    result = torch.stack(results).view(rows.shape[:-1])
    return result.unsqueeze(dims[0]) if keep else result


def by_block(func: Any, args: Any, kwargs: Any) -> Tensor:
    """A function of single numbers, by a call for each BLOCK of them. A call in place changes its first tensor."""
    tensors = [x for x in args if isinstance(x, Tensor)]
    shape = torch.broadcast_shapes(*(x.shape for x in tensors))
    count = shape.numel()
    blocks = [x.new_ones(-(-count // BLOCK), BLOCK) for x in tensors]
    for block, x in zip(blocks, tensors, strict=True):
        block.flatten()[:count] = x.expand(shape).flatten()
    results = []
    for each in zip(*blocks, strict=True):
        own = iter(each)
        results.append(func(*(next(own) if isinstance(x, Tensor) else x for x in args), **kwargs))
    result = torch.cat(results)[:count].view(shape) if results else func(*args, **kwargs)
    return args[0].copy_(result) if func._schema.name.endswith("_") else result


def has_floats(tree: Any) -> bool:
    return any(isinstance(x, Tensor) and x.is_floating_point() for x in tree_leaves(tree))


def extend_always() -> Any:
    """A patch: one of kvfold's kernels reads single queries and another reads several, and the two round differently.
    Which of them a query meets depends on the schedule. With this it is always the one for several."""
    return patch.object(Ops, "attend", lambda self, *arguments: self.extend.run(*arguments))


@contextmanager
def batch_invariant(ops: Mapping[str, Callable[..., Any]] | None = None) -> Iterator[None]:
    with extend_always(), BatchInvariant(ops):
        yield
