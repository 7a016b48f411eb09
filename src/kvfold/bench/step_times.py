"""`kvfold bench step`: decode steps of a whole model as CUDA graphs, with packed caches and with a dense 16-bit one.

Steps are verified, then timed. Only one cache is in memory at a time. Each cache gets several turns, so all see the
same noise.
"""

import gc
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from kvfold.bench.cuda_graphs import REPLAYS, WARM_UP, capture, milliseconds
from kvfold.bench.dense_attention import dense_backend
from kvfold.bench.dense_cache import DenseCache
from kvfold.bench.model_steps import (
    Decoder,
    check_plain,
    dense_error,
    layer_codecs,
    packed_cache,
    packed_error,
    random_model,
    with_layers,
)
from kvfold.engines.transformers import PackedCache
from kvfold.fitted import Fitted
from kvfold.format.layout import PageLayout
from kvfold.geometry import Geometry
from kvfold.ops.dispatch import choose
from kvfold.recipe import Recipe

CASES = tuple(f"{batch}x{context}" for batch in (1, 8, 32) for context in (8192, 32768, 100000))
BASELINE = "dense"
TURNS = 2
BEGINS = 8  # steps whose `begin` is timed
VERIFIED_LAYERS = 2
ALLOWED = 2**-6  # relative error of logits; a few roundings to bfloat16 explain as much


@dataclass(frozen=True)
class Case:
    batch: int
    context: int  # tokens per sequence, the new one included

    def __post_init__(self) -> None:
        if self.batch < 1 or self.start < 1:
            raise ValueError(f"{self.batch}x{self.context}: a case has 1 sequence and {WARM_UP + 2} tokens at least")

    @classmethod
    def parse(cls, text: str) -> "Case":
        """`32x16384`: 32 sequences of 16384 tokens."""
        match = re.fullmatch(r"(\d+)x(\d+)", text)
        if not match:
            raise ValueError(f"{text!r} is no case: write BATCHxCONTEXT, as 32x16384")
        return cls(int(match[1]), int(match[2]))

    @property
    def start(self) -> int:
        """Tokens per sequence before the first step of a packed cache. The captured step makes them `context`."""
        return self.context - WARM_UP - 1


@dataclass(frozen=True)
class Row:
    shape: str
    recipe: str
    batch: int
    context: int
    layers: int
    page: int
    us: float | None  # per replay; None: does not fit in memory
    baseline: str  # the backend of attention over the dense cache
    baseline_us: float | None
    speedup: float | None
    begin_us: float | None  # the host's bookkeeping before a replay, not part of `us`
    tokens_per_s: float | None  # of replays alone
    cache_bytes: int | None
    peak_bytes: int | None  # the most that was allocated, weights included
    error: float  # the relative error of logits
    note: str
    gpu: str
    torch: str
    triton: str
    transformers: str
    date: str


def default_recipes(head_dim: int) -> tuple[str, ...]:
    return "saw-int4", f"oscar-int2:group={head_dim}"


@torch.no_grad()
def run(
    shape: str,
    config: Mapping[str, Any],
    cases: Sequence[Case],
    recipes: Sequence[Recipe],
    page: int = 64,
    progress: Callable[[float], None] = lambda share: None,
) -> Iterator[Row]:
    """Every case with the dense cache and with every recipe: verified on two layers, then timed on all.

    A model whose steps cannot be captured and a recipe without a kernel are refused before anything runs.
    """
    check_plain(config)
    if not torch.cuda.is_available():
        raise ValueError(
            f"steps are captured on a GPU, and torch {torch.__version__} sees none: run this on a machine with one, "
            "with a CUDA build of torch"
        )
    geometry, device = Geometry.from_config(config), torch.device("cuda")
    for recipe in recipes:
        _check(recipe, geometry, page, device)
    errors = _verify(random_model(with_layers(config, VERIFIED_LAYERS), device), recipes, page)
    _free()
    model = random_model(config, device)
    for case in cases:
        turns = _turns(model, case, recipes, page, lambda share: progress(share / len(cases)))
        for name, turn in turns.items():
            plain_us = turns[BASELINE].us
            yield Row(
                shape=shape,
                recipe=name,
                **asdict(case),
                layers=len(geometry.layers),
                page=page,
                **turn._asdict(),
                baseline=dense_backend(
                    geometry.q_heads, geometry.kv_heads, geometry.key_dim, model.dtype, model.device
                ),
                baseline_us=plain_us,
                speedup=round(plain_us / turn.us, 4) if plain_us and turn.us else None,
                tokens_per_s=round(1e6 * case.batch / turn.us, 2) if turn.us else None,
                error=float(f"{errors[name]:.3g}"),
                note="" if turn.us else "does not fit in memory",
                gpu=torch.cuda.get_device_name(),
                torch=torch.__version__,
                triton=version("triton"),
                transformers=version("transformers"),
                date=datetime.now(UTC).date().isoformat(),
            )


def _check(recipe: Recipe, geometry: Geometry, page: int, device: torch.device) -> None:
    Fitted(recipe, geometry).check()
    for layer in geometry.packed:
        key, value = layer_codecs(recipe, geometry, layer, torch.bfloat16)
        ops = choose(PageLayout(key.layout, value.layout, page), geometry.q_heads // geometry.kv_heads, device)
        for choice in (ops.store, ops.decode):
            if choice.implementation == "torch":
                raise ValueError(f"{recipe} has no kernel, and plain torch cannot be captured: {choice.reason}")


def _verify(model: PreTrainedModel, recipes: Sequence[Recipe], page: int) -> dict[str, float]:
    """Errors of logits per cache; see `packed_error` and `dense_error`."""
    errors = {BASELINE: dense_error(model, page)}
    errors |= {str(recipe): packed_error(model, recipe, page) for recipe in recipes}
    for name, error in errors.items():
        if not error <= ALLOWED:
            raise ValueError(f"{name} is wrong by {error:.2g}, {ALLOWED:.2g} at most, and not timed")
    return errors


class Turn(NamedTuple):
    us: float | None = None
    begin_us: float | None = None
    cache_bytes: int | None = None
    peak_bytes: int | None = None


def _turns(
    model: PreTrainedModel, case: Case, recipes: Sequence[Recipe], page: int, progress: Callable[[float], None]
) -> dict[str, Turn]:
    """The medians of all turns, per cache."""
    geometry = Geometry.from_config(model.config.to_dict())
    caches: dict[str, Callable[[], PackedCache | DenseCache]] = {
        BASELINE: partial(DenseCache, geometry, case.batch, case.context, case.context, model.dtype, model.device)
    }
    for recipe in recipes:
        caches[str(recipe)] = partial(packed_cache, model, recipe, case.batch, case.start, case.context + BEGINS, page)
    taken: dict[str, list[Turn]] = {name: [] for name in caches}
    for _ in range(TURNS):
        for name, make in caches.items():
            taken[name].append(_turn(model, make, case.batch))
            progress(1 / (TURNS * len(caches)))
    return {
        name: turns[-1]._replace(us=_median(turn.us for turn in turns), begin_us=_median(t.begin_us for t in turns))
        for name, turns in taken.items()
    }


def _turn(model: PreTrainedModel, make: Callable[[], PackedCache | DenseCache], batch: int) -> Turn:
    """One turn: the cache is alone in memory with the model."""
    torch.cuda.reset_peak_memory_stats()
    try:
        return _time(Decoder(model, make(), batch))
    except torch.OutOfMemoryError:
        return Turn()
    finally:
        _free()


def _time(decoder: Decoder) -> Turn:
    """Time replays at one length, then `begin` of some more steps."""
    graph, logits = capture(decoder.begin, decoder.run)
    us = [1000 * milliseconds(graph.replay) for _ in range(REPLAYS + 1)][1:]  # the first replay warms up
    if not logits.isfinite().all():
        raise ValueError("the model's logits are not finite")
    begins: list[float] = []
    if isinstance(decoder.cache, PackedCache):
        for _ in range(BEGINS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            decoder.begin()
            torch.cuda.synchronize()
            begins.append(1e6 * (time.perf_counter() - start))
            graph.replay()
        assert decoder.cache.paged is not None
        decoder.cache.paged.check_faults()
    return Turn(_median(us), _median(begins), decoder.cache.allocated_bytes, torch.cuda.max_memory_allocated())


def _median(numbers: Iterator[float | None] | Sequence[float]) -> float | None:
    there = [number for number in numbers if number is not None]
    return round(statistics.median(there), 1) if there else None


def _free() -> None:
    """Free caches. A cache and its layers refer to each other, so only the garbage collector frees them."""
    gc.collect()
    torch.cuda.empty_cache()
