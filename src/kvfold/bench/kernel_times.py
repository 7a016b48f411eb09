"""`kvfold bench kernels`: the ops of one layer on a GPU. They are verified, then timed.

Baselines are attention over 16 bits and FP8, a plain INT4 store and a device copy.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvfold.bench import targets
from kvfold.bench.attention_libraries import FP8, library_calls
from kvfold.bench.cuda_graphs import Calls, copies, times
from kvfold.bench.expected_ops import attend_error, store_error
from kvfold.bench.kernel_cases import CASES, Case
from kvfold.bench.random_fits import random_codecs, random_states
from kvfold.bench.targets import Capability
from kvfold.format.layout import PageLayout
from kvfold.format.open_block import raw_from, ring_tokens
from kvfold.ops.dispatch import Choice, New, Ops, choose
from kvfold.ops.pages import LayerPages
from kvfold.paged import PagedCache
from kvfold.recipe import Recipe
from kvfold.recipes import parse

PLAIN_STORE = "int4:centre=false"
COPIED = 2**30  # bytes of the device copy that measures bandwidth
FILL_TOKENS = 2**16  # tokens that one call stores while pages are filled


@dataclass(frozen=True)
class Row:
    op: str
    recipe: str
    batch: int
    context: int
    new: int
    page: int
    head_dim: int
    q_heads: int
    kv_heads: int
    dtype: str
    kernel: str
    bytes: int  # see `moved_bytes`
    us: float
    baseline: str  # the fastest that reads 16 bits
    baseline_us: float
    speedup: float
    fp8: str | None  # the fastest that reads FP8, if one is installed; not for `store`
    fp8_us: float | None
    copy_us: float | None  # a device copy of the same keys and values; `store` only
    tb_per_s: float
    copy_tb_per_s: float  # a large device copy; reads and writes both count
    fraction_of_copy: float
    error: float  # relative
    allowed_error: float  # twice the error of the definition in the same precision
    gpu: str
    target: str  # what its kernels were built for
    torch: str
    triton: str
    date: str


def default_recipes(head_dim: int) -> tuple[str, ...]:
    """4, 2 and 3 bits, without an open block."""
    oscar = "oscar-int2:block=0"
    return "saw-int4", f"{oscar},group={head_dim}", oscar, "gtq-k3v3"


def cases(ops: Sequence[str] | None, texts: Sequence[str] | None, **shape: Any) -> list[Case]:
    """Every text (see `Case.parse`) for every op. The default is all ops, each with its own cases."""
    return [Case.parse(op, text, **shape) for op in ops or CASES for text in texts or CASES.get(op, ("",))]


def run(
    cases: Sequence[Case],
    recipes: Sequence[Recipe],
    progress: Callable[[float], None] = lambda share: None,
    target: str | None = None,
) -> Iterator[Row]:
    """Verify and time every case with every recipe. A recipe without a kernel is refused before anything runs.

    Kernels are built for `target`, as in targets.py.
    """
    if not torch.cuda.is_available():
        raise ValueError(
            f"kernels are timed on a GPU, and torch {torch.__version__} sees none: run this on a machine with one, "
            "with a CUDA build of torch, or ask with --explain what would run there"
        )
    device, capability = torch.device("cuda"), targets.build_for(target)
    for case in cases:
        for recipe in recipes:
            choice = _choice(case, ops_of(case, recipe, device, capability))
            if choice.implementation == "torch":
                raise ValueError(f"{recipe} has no kernel for {case}: {choice.reason}")
    copied = torch.empty(COPIED // 4, dtype=torch.int32, device=device).random_()
    # neg is a kernel. copy_ would be a memcpy node of the graph, which is slower.
    copy_us = times({"copy": [partial(torch.neg, copied, out=torch.empty_like(copied))]})["copy"]
    del copied
    for case in cases:
        for recipe in recipes:
            yield measure(case, recipe, 2 * COPIED / copy_us, device, capability)
            progress(1 / (len(cases) * len(recipes)))


def explain(cases: Sequence[Case], recipes: Sequence[Recipe], target: str | None = None) -> list[dict[str, Any]]:
    """Which kernel each op gets with each recipe, and why: on the target, on this machine's GPU, or on an H200."""
    if target is None and torch.cuda.is_available():
        gpu, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    else:
        gpu, capability = target or "an H200", targets.parse(target or "sm_90")
    rows = []
    for recipe in recipes:
        for case in {case.op: case for case in cases}.values():
            choice = _choice(case, ops_of(case, recipe, torch.device("cuda"), capability))
            row = {"recipe": str(recipe), "op": case.op, "kernel": choice.implementation, "reason": choice.reason}
            rows.append({**row, "gpu": gpu})
    return rows


@torch.no_grad()
def measure(
    case: Case, recipe: Recipe, copy_rate: float, device: torch.device, capability: Capability | None = None
) -> Row:
    """One case with one recipe; `copy_rate` is in bytes per microsecond."""
    filled = fill(case, recipe, device, capability)
    ops, pages, q, k, v, new = filled
    if case.op == "store":
        error, allowed = store_error(pages, k, v, new)
    else:
        outputs = _choice(case, ops).run(pages, q, new, case.logits)
        error, allowed = attend_error(pages, q, new, case.logits, outputs)
    if not error <= allowed:
        raise ValueError(f"{recipe} is wrong by {error:.2g}, {allowed:.2g} at most, and not timed: {case}")
    size = moved_bytes(case, pages.layout, pages.block)
    runs, others, fp8 = {"own": _calls(case, filled, size)}, dict[str, Calls](), dict[str, Calls]()
    if case.op == "store":
        runs["copy"] = _copy_calls(k, v)
        plain = fill(case, parse(PLAIN_STORE), device, capability)
        others[PLAIN_STORE] = _calls(case, plain, moved_bytes(case, plain.pages.layout, plain.pages.block))
    else:
        others = library_calls(case, device, case.torch_dtype)
        fp8 = {f"{name} FP8": calls for name, calls in library_calls(case, device, FP8).items()}
    if not others:
        raise ValueError(f"no library has a kernel to compare with: {case}")
    us = times(runs | others | fp8)
    own, copy_us = us["own"], us.get("copy")
    baseline, fp8_baseline = min(others, key=us.__getitem__), min(fp8, key=us.__getitem__, default=None)
    return Row(
        **asdict(case),
        recipe=str(recipe),
        kernel=_choice(case, ops).implementation,
        bytes=size,
        us=round(own, 3),
        baseline=baseline,
        baseline_us=round(us[baseline], 3),
        speedup=round(us[baseline] / own, 4),
        fp8=fp8_baseline,
        fp8_us=None if fp8_baseline is None else round(us[fp8_baseline], 3),
        copy_us=None if copy_us is None else round(copy_us, 3),
        tb_per_s=round(size / own / 1e6, 4),
        copy_tb_per_s=round(copy_rate / 1e6, 4),
        fraction_of_copy=round(size / own / copy_rate, 4),
        error=float(f"{error:.3g}"),
        allowed_error=float(f"{allowed:.3g}"),
        gpu=torch.cuda.get_device_name() if device.type == "cuda" else device.type,
        target=targets.name(capability) if capability else device.type,
        torch=torch.__version__,
        triton=version("triton") if find_spec("triton") else "",
        date=datetime.now(UTC).date().isoformat(),
    )


def moved_bytes(case: Case, layout: PageLayout, block: int) -> int:
    """Bytes that an op has to move; queries and outputs do not count.

    - `decode`, `extend`: every cached token once. It is packed, or raw in an open block. It counts as both if one query
      reads it packed and another reads it raw.
    - `store`: keys, values and their slots. With an open block, also the raw vectors that it returns, and those that it
      keeps in rings.
    """
    slot, raw = layout.key.slot_bytes + layout.value.slot_bytes, 2 * (layout.key.dims + layout.value.dims)
    if case.op == "store":
        size = case.new * (raw + slot)
        if block:
            size += (case.new + min(case.new, ring_tokens(block))) * raw
    else:
        packed = raw_from(case.context - 1, block)
        near = case.context - raw_from(case.history, block) if block else 0
        page_meta = sum(slot.meta_bytes for slot in (layout.key, layout.value) if slot.per_page)
        size = packed * slot + -(-packed // case.page) * page_meta + near * raw
    return case.batch * case.kv_heads * size


class Filled(NamedTuple):
    """The pages of a layer after a step was stored, and the tensors of that step."""

    ops: Ops
    pages: LayerPages
    q: Tensor  # [tokens, q_heads, d]
    k: Tensor  # [tokens, kv_heads, d]
    v: Tensor
    new: New


def fill(case: Case, recipe: Recipe, device: torch.device, capability: Capability | None = None) -> Filled:
    """Let the op itself store random tokens, in pages of random order."""
    key, value = random_codecs(recipe, case.head_dim, case.q_heads, case.kv_heads, case.torch_dtype)
    cache = PagedCache(
        [(key.to(device), value.to(device))],
        case.kv_heads,
        case.batch,
        ratio=case.q_heads // case.kv_heads,
        block=recipe.block,
        page_size=case.page,
        raw_dtype=case.torch_dtype,
        device=device,
    )
    pages = case.batch * -(-case.context // case.page)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).tolist()
    cache.tables.references, cache.tables.free = [0] * pages, order
    generator, ops = torch.Generator(device).manual_seed(0), ops_of(case, recipe, device, capability)

    def tokens(n: int, heads: int) -> Tensor:
        return random_states((case.batch * n, heads, case.head_dim), generator).to(case.torch_dtype)

    chunk = max(1, FILL_TOKENS // case.batch)
    for start in range(0, case.history, chunk):
        n = min(chunk, case.history - start)
        cache.extend([n] * case.batch)
        ops.store.run(cache.pages(0), tokens(n, case.kv_heads), tokens(n, case.kv_heads))
    cache.extend([case.new] * case.batch)
    q, k, v = (tokens(case.new, heads) for heads in (case.q_heads, case.kv_heads, case.kv_heads))
    return Filled(ops, cache.pages(0), q, k, v, ops.store.run(cache.pages(0), k, v))


def ops_of(case: Case, recipe: Recipe, device: torch.device, capability: Capability | None = None) -> Ops:
    key, value = random_codecs(recipe, case.head_dim, case.q_heads, case.kv_heads, case.torch_dtype)
    layout = PageLayout(key.layout, value.layout, case.page)
    return choose(layout, case.q_heads // case.kv_heads, device, capability)


def _copy_calls(k: Tensor, v: Tensor) -> Calls:
    """A device copy of keys and values. Each call copies other memory."""
    both = torch.stack((k, v))
    sources = [both.clone() for _ in range(copies(2 * both.nbytes, both.device))]
    return [partial(torch.empty_like(source).copy_, source) for source in sources]


def _choice(case: Case, ops: Ops) -> Choice:
    return getattr(ops, case.op)


def _calls(case: Case, filled: Filled, size: int) -> Calls:
    """The op on several copies of the layer, one call per copy."""
    ops, pages, q, k, v, new = filled
    out = torch.empty_like(q)  # in the dtype of q, as engines and baselines have it
    calls: Calls = []
    for _ in range(copies(size, pages.pool.device)):
        pool = pages.pool.clone()
        views = pages.layout.views(pool, together=pages.key.quantizes_like(pages.value))
        copy = replace(pages, pool=pool, views=views, ring=pages.ring.clone())
        inputs = (k.clone(), v.clone()) if case.op == "store" else (q, new, case.logits, out)
        calls.append(partial(_choice(case, ops).run, copy, *inputs))
    return calls
