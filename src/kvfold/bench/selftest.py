"""`kvfold selftest`: every kernel that a recipe gets on this device, against the definitions in ops/naive.py.

A case is one layer with a recipe and a shape. Its history is packed by `naive.store`. Then come the paths:

- `store`: several tokens per sequence. `extend`: their queries attend.
- `step`: one token per sequence, stored and attended as in engines, with a row of padding as in CUDA graphs. `decode`:
  the same queries again, alone.
- `drafts`: a few tokens per sequence, as if drafts were verified.

Steps begin inside open blocks and at their ends, and drafts cross a border. The definitions run on the CPU; attention
is computed in float64. Before each op the device gets the bytes of the definition, so a wrong `store` does not make
`decode` look wrong.

On a GPU the cases compile hundreds of variants of kernels.
"""

import math
import os
import platform
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import count
from multiprocessing import get_context
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvfold.bench import targets
from kvfold.bench.expected_ops import (
    differing_share,
    naive_attend_error,
    naive_store_error,
    on_cpu,
    one_thread,
)
from kvfold.bench.random_fits import random_codecs, random_states
from kvfold.bench.scattered_cache import ScatteredCache
from kvfold.bench.targets import Capability
from kvfold.format.codec import Codec
from kvfold.format.layout import PageLayout
from kvfold.format.open_block import raw_from
from kvfold.models import default_device
from kvfold.ops import naive
from kvfold.ops.dispatch import Choice, New, choose
from kvfold.ops.pages import LayerPages, Logits, Step
from kvfold.recipe import Recipe
from kvfold.recipes import parse
from kvfold.version import __version__

TIES = 0.02  # the share of stored numbers that may differ: sums in another order can round to the next code
MOST_PAIRS = 2**23  # query-token pairs of a step, above which attention is not checked: the definition is too slow
TILE = 64  # tokens that a kernel reads at once
CHUNK = 4096  # tokens of a history that are stored at once
DRAFTED = 4  # tokens of a sequence in a step with drafts
POISON = 0x7FFF  # NaN in 16 bits
WORKERS = 8  # processes on a GPU; each compiles on one core and takes about half a GB of GPU memory


@dataclass(frozen=True)
class Tokens:
    """Tokens per sequence: before the steps, and in the first step. The second step has one, the third has drafts."""

    history: tuple[int, ...]
    new: tuple[int, ...]

    @property
    def pairs(self) -> int:
        return max(self.new) * max(map(sum, zip(self.history, self.new, strict=True)))

    def __str__(self) -> str:
        return ", ".join(f"{old}+{new}+1" for old, new in zip(self.history, self.new, strict=True))


# The first two steps fill pages of 16, 32, 64 and 128 tokens. In the third one, drafts of the first sequence cross a
# border of blocks of 2 to 256 tokens, if these are powers of two.
SHORT = Tokens((500, 120, 0, 381), (9, 10, 16, 2))
# Flash attention reads the first sequence unpacked. The second is too short for that, except for FlashAttention 3.
PROMPT = Tokens((1100, 20), (70, 3))
# More queries than PyTorch's attention takes at a time, and open blocks on both sides of the border
PREFILL = Tokens((0, 20), (2300, 3))
# Each CTA of a decode kernel reads several tiles; `store` takes its larger tiles
LONG = Tokens((29_000, 60), (4_200, 8))


@dataclass(frozen=True)
class Case:
    recipe: str
    head_dim: int
    ratio: int  # query heads per KV head
    page: int
    tokens: Tokens = SHORT
    dtype: str = "bfloat16"
    kv_heads: int = 2
    sinks: bool = False  # learned ones
    cap: float | None = None  # of logits
    value_dim: int | None = None  # None: as head_dim

    @property
    def q_heads(self) -> int:
        return self.ratio * self.kv_heads

    @property
    def dims(self) -> tuple[int, int]:
        """Of keys and of values."""
        return self.head_dim, self.value_dim or self.head_dim

    @property
    def codecs(self) -> tuple[Codec, Codec]:
        both = (
            random_codecs(parse(self.recipe), dim, self.q_heads, self.kv_heads, self.torch_dtype) for dim in self.dims
        )
        (key, _), (_, value) = both
        return key, value

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def __str__(self) -> str:
        dims = "/".join(map(str, dict.fromkeys(self.dims)))
        shape = f"{self.q_heads}:{self.kv_heads} heads of {dims}, pages of {self.page}, {self.dtype}"
        return shape + ", learned sinks" * self.sinks + (f", logits up to {self.cap}" if self.cap else "")


# Each kernel meets 1 to 8 query heads per KV head, both page sizes, several head dimensions and sizes of open blocks
CASES = (
    # integers
    Case("saw-int4", 128, 4, 64, LONG),
    Case("saw-int4:block=64", 64, 1, 16),
    Case("saw-int4:block=16", 256, 7, 16, PROMPT),
    Case("int4", 64, 8, 64, dtype="float16"),
    Case("int4:block=1", 128, 3, 16),
    Case("int8:block=32", 256, 2, 16),
    Case("int8", 64, 5, 16),
    Case("int2", 256, 6, 64),
    Case("int2:block=40", 64, 8, 16),
    Case("oscar-int2", 128, 8, 64, LONG),
    Case("oscar-int2:group=128,block=64", 128, 4, 16, dtype="float16"),
    Case("oscar-int2:block=0", 64, 1, 16),
    Case("quarot-int2", 128, 5, 64, PROMPT, kv_heads=8),
    Case("hessian-int4:block=128", 64, 2, 64),
    # evenly spaced levels
    Case("fold2", 128, 4, 64, LONG),
    Case("fold2:block=0", 64, 1, 16),
    Case("fold2:block=2", 128, 6, 16),
    Case("fold3", 128, 8, 64, LONG),
    Case("fold3:block=32", 64, 2, 16),
    Case("fold3:block=128", 128, 7, 64, dtype="float16"),
    Case("fold4:block=16", 256, 3, 64),
    Case("fold4", 128, 5, 16, PROMPT, kv_heads=8),
    # codebooks
    Case("tq-k4v4", 128, 1, 64),
    Case("tq-k2v2:block=64", 64, 4, 16),
    Case("tq-k3v3", 64, 3, 64, dtype="float16"),
    Case("gtq-k3v3", 128, 8, 16, LONG),
    Case("gtq-k4v4:block=16", 64, 2, 64, PREFILL),
    Case("gtq-k2v2:block=256", 128, 6, 64),
    Case("tq-k6v5", 128, 5, 16),
    Case("tq-k1v6:block=1", 128, 7, 16),
    # decoded by the portable kernel
    Case("bf16", 128, 4, 64, LONG),
    Case("bf16", 64, 8, 16, PROMPT, "float16"),
    Case("int4:group=32,block=8", 128, 3, 64),
    Case("kivi-2", 64, 2, 32),
    Case("kivi-4:block=0", 128, 1, 32),
    Case("kitty-2", 128, 4, 128),
    Case("kmeans-int4", 64, 7, 16),
    Case("kmeans-saw-int4:block=64", 128, 1, 64),
    Case("gtq-k3v3:per_head=true", 128, 5, 16),
    Case("tq-k8v7", 128, 6, 64),
    Case("oscar-int2:per_head=true,block=16", 64, 6, 16),
    # what newer models need: learned sinks, capped logits, other head dimensions
    Case("saw-int4:values=true,block=64", 64, 8, 64, PROMPT, sinks=True),
    Case("saw-int4", 128, 4, 16, sinks=True),
    Case("int4:block=32", 256, 2, 16, PROMPT, cap=30.0),
    Case("saw-int4:block=16", 80, 4, 64, PROMPT),
    Case("tq-k3v3", 96, 3, 16),
    Case("oscar-int2:block=64", 192, 4, 64, PROMPT, value_dim=128),
)
# On CPUs longer contexts and more heads run the same code
CPU_CASES = tuple(replace(case, tokens=SHORT if case.tokens is SHORT else PROMPT, kv_heads=2) for case in CASES)


@dataclass(frozen=True)
class Row:
    path: str
    kernel: str
    reason: str
    recipe: str
    page: int
    head_dim: int
    value_dim: int
    q_heads: int
    kv_heads: int
    dtype: str
    sinks: bool
    cap: float | None
    tokens: str
    error: float | None  # relative; None: not finite
    allowed_error: float | None  # twice the error of the definition with operands and outputs of 16 bits
    ok: bool
    problem: str
    device: str
    target: str  # what its kernels were built for
    kvfold: str
    torch: str
    triton: str
    date: str


def run(progress: Callable[[float], None] = lambda share: None, target: str | None = None) -> Iterator[Row]:
    """The rows of all cases, on the GPU if there is one. On a GPU several processes compile kernels in parallel, for
    `target` as in targets.py."""
    if find_spec("transformers") is None:
        raise ValueError(
            "selftest fits recipes to random layers, and needs transformers for that: pip install transformers"
        )
    if not torch.cuda.is_available() and target is None:
        yield from _advancing(map(check, CPU_CASES), progress)
        return
    capability = targets.build_for(target)
    longest_first = sorted(CASES, key=lambda case: case.tokens.pairs, reverse=True)
    workers = min(WORKERS, os.cpu_count() or 1)
    try:
        with ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
            yield from _advancing(pool.map(partial(check, capability=capability), longest_first), progress)
    except BrokenExecutor as error:
        raise ValueError(f"a kernel ended the process that checked it: {error}") from None


def _advancing(checked: Iterable[list[Row]], progress: Callable[[float], None]) -> Iterator[Row]:
    for rows in checked:
        yield from rows
        progress(1 / len(CASES))


@torch.no_grad()
def check(case: Case, capability: Capability | None = None) -> list[Row]:
    """The rows of one case, one per path."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the column `reason` says what `choose` warns of
        layer = Layer(case, torch.device(default_device()), capability)
    rows = [layer.store()]
    if case.tokens.pairs <= MOST_PAIRS:
        rows.append(layer.attend("extend", layer.ops.extend))
    rows += [layer.step(), layer.attend("decode", layer.ops.decode)]
    if layer.ops.decode.queries > 1:
        rows.append(layer.step(DRAFTED))
    return rows


class Found(NamedTuple):
    error: float
    allowed: float
    problem: str = ""

    @property
    def wrong(self) -> str:
        """What is wrong; empty if nothing is."""
        if self.problem or self.error <= self.allowed:
            return self.problem
        if not math.isfinite(self.error):
            return "NaN or Inf"
        return f"an error of {self.error:.2g}, and {self.allowed:.2g} is allowed"


class Layer:
    """The layer of a case: a cache on the device, and the same cache as the definitions fill it."""

    def __init__(self, case: Case, device: torch.device, capability: Capability | None = None) -> None:
        self.case, recipe, (key, value) = case, parse(case.recipe), case.codecs
        self.target = targets.name(capability) if capability else device.type
        layout = PageLayout(key.layout, value.layout, case.page)
        self.ops = choose(layout, case.ratio, device, capability, case.cap is not None)
        self.cache = _poisoned_cache(case, recipe, (key.to(device), value.to(device)), device)
        self.generator = torch.Generator().manual_seed(0)
        self.turn = count()
        sinks = torch.linspace(-3, 3, case.q_heads) if case.sinks else None
        self.logits = Logits(case.head_dim**-0.5, case.cap, sinks)
        self.expected = on_cpu(self.pages)
        self.keys = [torch.empty(0, case.kv_heads, case.head_dim)] * len(case.tokens.new)  # per sequence
        for start in range(0, max(case.tokens.history), CHUNK):
            self.begin([max(0, min(CHUNK, tokens - start)) for tokens in case.tokens.history])

    @property
    def pages(self) -> LayerPages:
        return self.cache.pages(0)

    @one_thread()
    def begin(self, counts: Sequence[int]) -> None:
        """Begin a step of random tokens, and let the definition store them."""
        self.resume()
        self.cache.extend(counts)
        self.before, self.expected = on_cpu(self.pages), on_cpu(self.pages)
        self.k, self.v = (self._random(sum(counts), self.case.kv_heads, dim) for dim in self.case.dims)
        for row, new in enumerate(self.k.split(list(counts))):
            self.keys[row] = torch.cat([self.keys[row], new.float()])
        self.new = naive.store(self.expected, self.k, self.v)

    def _random(self, tokens: int, heads: int, dim: int) -> Tensor:
        return random_states((tokens, heads, dim), self.generator).to(self.case.torch_dtype)

    def queries(self) -> Tensor:
        """Queries of the current step. Each puts about half of its weight on one token.

        That token lies beside a border of a tile, page or block, or anywhere. A kernel that misses it is far off.
        """
        block, step = self.pages.block, self.pages.step
        q = 0.3 * self._random(len(step.locations), self.case.q_heads, self.case.head_dim).float()
        query = iter(q)
        for keys, new in zip(self.keys, self.cache.counts, strict=True):
            length, keys = len(keys), keys - keys.mean(dim=0)
            for position in range(length - new, length):
                borders = {0, TILE, self.case.page, raw_from(position, block), position + 1}
                near = sorted({t for border in borders for t in (border - 1, border) if 0 <= t <= position})
                anywhere = torch.randint(position + 1, (len(near),), generator=self.generator).tolist()
                sought = [[*near, *anywhere][next(self.turn) % (2 * len(near))] for _ in range(self.case.q_heads)]
                found = keys[sought, torch.arange(self.case.q_heads) // self.case.ratio]  # [q_heads, d]
                logit = math.log(position + 1) + 1
                squares = found.square().sum(dim=-1, keepdim=True).clamp_min(1)
                next(query).add_(logit / self.logits.scale / squares * found)
        return q.to(self.case.torch_dtype)

    def resume(self) -> None:
        """Copy the bytes of the definition to the device."""
        self.pages.pool.copy_(self.expected.pool)
        self.pages.ring.copy_(self.expected.ring)

    def _there(self, *tensors: Tensor) -> list[Tensor]:
        return [x.to(self.cache.device) for x in tensors]

    @property
    def _logits_there(self) -> Logits:
        sinks = self.logits.sinks
        return self.logits if sinks is None else self.logits._replace(sinks=sinks.to(self.cache.device))

    def store(self) -> Row:
        """`store` of several tokens per sequence."""
        self.begin(self.case.tokens.new)
        choice = self.ops.store
        return self._row("store", choice, lambda: self.stored(choice.run(self.pages, *self._there(self.k, self.v))))

    def attend(self, path: str, choice: Choice) -> Row:
        """`attend` with the queries of the last step, over what the definition stored."""
        self.resume()
        q = self.queries()

        def found() -> Found:
            new = self._there(*self.new) if self.new else None
            out = choice.run(self.pages, *self._there(q), new, self._logits_there)
            return Found(*naive_attend_error(self.expected, q, self.new, self.logits, out))

        return self._row(path, choice, found)

    def step(self, most: int = 1) -> Row:
        """Tokens are stored and their queries attend, in one call, as in engines: one token of each sequence, or up to
        `most` as if there were drafts. A row of padding follows them."""
        self.begin([most - i % most for i in range(len(self.case.tokens.new))])
        states = self.queries(), self.k, self.v

        def found() -> Found:
            pages = self.pages.during(_padded(self.pages.step))
            q, k, v = (pad(x, (0, 0, 0, 0, 0, 1), value=math.nan) for x in self._there(*states))
            out = self.ops.store_and_attend(pages, q, k, v, self._logits_there)[: len(states[0])]
            stored = self.stored(self.new)
            read = Found(*naive_attend_error(on_cpu(self.pages), states[0], self.new, self.logits, out))
            return stored if stored.wrong else read

        return self._row("step" if most == 1 else "drafts", self.ops.decode, found)

    def stored(self, new: New) -> Found:
        """Compare what the device stored, and returned as `new`, with the definition."""
        got = on_cpu(self.pages)
        shares = [differing_share(self.before.pool, self.expected.pool, got.pool)]
        shares.append(differing_share(*(_bits(pages.ring) for pages in (self.before, self.expected, got))))
        if self.new and new:
            shares += [
                differing_share(torch.full_like(_bits(mine), POISON), _bits(mine), _bits(other.cpu()))
                for mine, other in zip(self.new, new, strict=True)
            ]
        problem = f"{max(shares):.1%} of the stored numbers differ from the definition" if max(shares) > TIES else ""
        return Found(*naive_store_error(self.before, self.expected, got, self.k, self.v), problem)

    def _row(self, path: str, choice: Choice, find: Callable[[], Found]) -> Row:
        try:
            found = find()
        except Exception as error:  # errors of compiler, driver and the kernel's checks all belong in the table
            lines = str(error).strip().splitlines()
            found = Found(math.nan, math.nan, f"{type(error).__name__}: {lines[0] if lines else ''}")
        case, on_gpu = self.case, self.pages.pool.is_cuda
        return Row(
            path=path,
            kernel=choice.implementation,
            reason=choice.reason,
            recipe=case.recipe,
            page=case.page,
            head_dim=case.head_dim,
            value_dim=case.dims[1],
            q_heads=case.q_heads,
            kv_heads=case.kv_heads,
            dtype=case.dtype,
            sinks=case.sinks,
            cap=case.cap,
            tokens=str(case.tokens),
            error=_number(found.error),
            allowed_error=_number(found.allowed),
            ok=not found.wrong,
            problem=found.wrong,
            device=torch.cuda.get_device_name() if on_gpu else platform.machine(),
            target=self.target,
            kvfold=__version__,
            torch=torch.__version__,
            triton=version("triton") if find_spec("triton") else "",
            date=datetime.now(UTC).date().isoformat(),
        )


def _poisoned_cache(case: Case, recipe: Recipe, codecs: tuple[Codec, Codec], device: torch.device) -> ScatteredCache:
    """An empty cache with room for all tokens of the case. Its pages hold NaN."""
    size, tokens = case.page, case.tokens
    pages = sum(-(-(old + new + 1) // size) for old, new in zip(tokens.history, tokens.new, strict=True))
    cache = ScatteredCache(
        [codecs], case.kv_heads, len(tokens.new), ratio=case.ratio, capped=case.cap is not None,
        pages=pages, block=recipe.block, page_size=size, raw_dtype=case.torch_dtype, device=device,
    )  # fmt: skip
    cache.extend([0] * len(tokens.new))
    cache.pools[0].fill_(0xFF)
    return cache


def _padded(step: Step) -> Step:
    """A decode step with one more sequence, which fills up a CUDA graph. The host knows nothing of it."""
    return replace(
        step, locations=pad(step.locations, (0, 1), value=-1),
        query_starts=torch.cat((step.query_starts, step.query_starts[-1:] + 1)),
        starts=pad(step.starts, (0, 1)), lengths=pad(step.lengths, (0, 1), value=1),
        table=pad(step.table, (0, 0, 0, 1)), rings=pad(step.rings, (0, 0, 0, 1)),
    )  # fmt: skip


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16)


def _number(x: float) -> float | None:
    return float(f"{x:.3g}") if math.isfinite(x) else None
