"""What all serving engines need: the configuration, the plan made from it, layers that pack and attend, the report."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby, product
from logging import Logger
from time import monotonic
from typing import Any, Self

import torch
from torch import Tensor

from kvfold.artifact import Artifact
from kvfold.codec import Codec, sixteen_bit
from kvfold.engines.shadow_table import shadows_needed
from kvfold.engines.start import ARTIFACT, RECIPE
from kvfold.fitted import Fitted
from kvfold.geometry import Geometry
from kvfold.layout import PageLayout, raw_slot
from kvfold.ops.dispatch import Ops, check_dtype, choose
from kvfold.ops.pages import Batch, LayerPages, Step
from kvfold.recipe import Recipe
from kvfold.recipes import parse
from kvfold.version import __version__
from kvfold.windows import Windows

WARM_UP = (1, 2, 4, 8, 16, 32, 64, 128, 8192)  # tokens of a request for which steps run different kernels
QUIET = 60.0  # seconds between two warnings of numbers that cannot be stored
MANY_SHORT = (0,) * 64, 128  # and a step of requests, from where on and how many tokens of each, that runs others


@dataclass(frozen=True)
class Config:
    """What to serve with."""

    recipe: Recipe
    artifact: str | None = None  # a folder or a Hub id

    @classmethod
    def read(cls, given: Mapping[str, Any] | None = None) -> Self | None:
        """From {"recipe": …, "artifact": …} of an engine's own configuration, else from the environment; None where
        neither asks for kvfold."""
        if given is None:
            if not (name := os.environ.get(RECIPE)):
                return None
            given = {"recipe": name, "artifact": os.environ.get(ARTIFACT) or None}
        if unknown := given.keys() - {"recipe", "artifact"}:
            raise ValueError(f"kvfold is configured by recipe and artifact, not by {', '.join(sorted(unknown))}")
        if not given.get("recipe"):
            raise ValueError("kvfold needs a recipe, such as saw-int4")
        return cls(parse(given["recipe"]), given.get("artifact"))


@dataclass(frozen=True, eq=False)
class Plan:
    """How one rank of an engine packs a model: all that is the same for every step."""

    recipe: Recipe
    geometry: Geometry  # of the whole model
    kv_heads: int  # of this rank
    ratio: int  # query heads for each of them
    codecs: Sequence[tuple[Codec, Codec]]  # keys and values of each layer
    page_size: int
    wide: torch.dtype  # the 16-bit type
    device: torch.device

    @classmethod
    def make(
        cls,
        config: Config,
        model: Mapping[str, Any],
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        rank: int = 0,
        ranks: int = 1,
        weights: Mapping[str, str] | None = None,
    ) -> Self:
        """For one of several tensor-parallel ranks of a model with this configuration (its config.json) and, if they
        are known, weights (`digest_model`). Ranks beyond the KV heads hold copies, as many of each."""
        recipe, geometry = config.recipe, Geometry.from_config(model)
        artifact = None if config.artifact is None else Artifact.load(config.artifact)
        if artifact is not None:
            artifact.metadata.model.check_files(model, weights)
        elif recipe.centre or recipe.learns:
            raise ValueError(
                f"{recipe} needs an artifact of the model: run `kvfold calibrate MODEL --recipe {recipe.fitted_as} "
                "--out DIR`" + ("" if recipe.learns else ", or use centre=false")
            )
        for layout in Fitted.of(recipe, geometry, artifact).page_layouts(page_size):
            if layout.per_page:
                raise ValueError(f"{recipe} quantizes whole pages, which cannot be served yet: only token-wise recipes")
        parts = min(ranks, geometry.kv_heads)
        if artifact is not None and parts > 1:
            artifact = artifact.shard(rank * parts // ranks, parts)
        wide = sixteen_bit(dtype)
        codecs = Fitted.of(recipe, geometry, artifact).codecs(wide, device)
        heads = geometry.kv_heads // parts, geometry.q_heads // max(ranks, geometry.kv_heads)
        plan = cls(recipe, geometry, *heads, codecs, page_size, wide, torch.device(device))
        for ops in plan.ops if plan.device.type == "cuda" else ():
            if ops.store.implementation == "torch":  # which waits for the device
                raise ValueError(f"{recipe} cannot be served on a GPU: {ops.store.reason}")
        check_dtype(plan.ops, dtype)
        return plan

    @cached_property
    def layouts(self) -> list[PageLayout]:
        return [PageLayout(key.layout, value.layout, self.page_size) for key, value in self.codecs]

    @cached_property
    def ops(self) -> list[Ops]:
        return [choose(layout, self.ratio, self.device) for layout in self.layouts]

    @property
    def windows(self) -> Windows:
        """Those of the layers that are not in 16 bits anyway."""
        return self.recipe.windows

    @property
    def token_bytes(self) -> float:
        """What a token takes in the pages of this rank."""
        return self.kv_heads * sum(layout.page_bytes for layout in self.layouts) / self.page_size

    @property
    def wide_token_bytes(self) -> int:
        """What it would take in 16 bits."""
        return 2 * self.geometry.elements_per_token * self.kv_heads // self.geometry.kv_heads

    def shadows(self, requests: int, tokens: int) -> int:
        """Shadow pages that steps of so many requests and tokens need, so that none of a running request is lost."""
        return shadows_needed(self.windows, self.page_size, requests, tokens)

    def shadow_bytes(self, shadows: int) -> int:
        """What so many take, over all layers."""
        packed = sum(not layout.is_raw for layout in self.layouts)
        page = PageLayout(raw_slot(self.geometry.head_dim), raw_slot(self.geometry.head_dim), self.page_size).page_bytes
        return shadows * packed * self.kv_heads * page

    def allocate_shadows(self, shadows: int) -> Tensor:
        """So many of one layer. Zeros are resident memory, which is what an engine may measure on a CPU."""
        shape = (shadows, self.kv_heads, 2, self.page_size, self.geometry.head_dim)
        return torch.zeros(shape, dtype=self.wide, device=self.device)

    def report(self, pages: int, shadows: int) -> str:
        """What is served, for the engine's log at start."""
        kept = [layer for layer, layout in enumerate(self.layouts) if layout.is_raw]
        lines = [
            f"kvfold {__version__}: {self.recipe}",
            f"layers: {self.geometry.layers - len(kept)} packed"
            + (f", {', '.join(map(str, kept))} in 16 bits as the recipe says" if kept else ""),
            f"bytes per token: {self.token_bytes:,.0f}, against {self.wide_token_bytes:,} in 16 bits: "
            f"{self.wide_token_bytes / self.token_bytes:.2f} times smaller",
            f"pages: {pages:,} of {self.page_size} tokens, so that {pages * self.page_size:,} tokens fit",
        ]
        if self.windows:
            lines.append(
                f"windows: the first {self.windows.sink} and last {self.windows.recent} tokens in 16 bits, in "
                f"{shadows:,} shadow pages, together {self.shadow_bytes(shadows) / 2**20:,.0f} MiB"
            )
        for op, choices in zip(Ops._fields, zip(*self.ops, strict=True), strict=True):
            different = dict.fromkeys(f"{choice.implementation} ({choice.reason})" for choice in choices)
            lines.append(f"{op}: {'; '.join(different)}")
        return "\n  ".join(lines)


class Late:
    """A number on the device as it was the last time it was asked for, or a little later: nothing waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._seen = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")

    def read(self, number: Tensor) -> int:
        seen = int(self._seen)
        self._seen.copy_(number, non_blocking=True)
        return seen


class Faults:
    """Counts tokens of which something could not be stored: `store` marks their slots, and goes on with zeros.

    A token counts once, in whatever layers and heads it shows: marks are taken away when they are counted, which is
    long before a slot gets another token.
    """

    def __init__(self, slots: int, device: torch.device, logger: Logger) -> None:
        self.marks = torch.zeros(slots, dtype=torch.uint8, device=device)
        self.logger = logger
        self._counted = torch.zeros(1, dtype=torch.int64, device=device)
        self._seen = Late(device)
        self._told, self._quiet_until = 0, 0.0

    def count(self) -> int:
        """All tokens up to the last call of this. Says in the log how many are new, at most once a minute."""
        self._counted += self.marks.sum()
        self.marks.zero_()
        count = self._seen.read(self._counted)
        if count > self._told and monotonic() >= self._quiet_until:
            self.logger.warning(
                "kvfold: keys or values of %d tokens held NaN, Inf or numbers beyond the range of 16-bit floats; zeros "
                "are stored in their place. Only the requests of these tokens see it. Check the model's weights, and "
                "its dtype: float16 overflows where bfloat16 does not",
                count - self._told,
            )
            self._told, self._quiet_until = count, monotonic() + QUIET
        return count


class Layer:
    """One layer in an engine: packs the tokens of a step into the engine's pages and lets its queries read."""

    def __init__(self, plan: Plan, index: int, pool: Tensor, shadows: Tensor, faults: Tensor) -> None:
        (key, value), layout = plan.codecs[index], plan.layouts[index]
        self.ops, self.ratio = plan.ops[index], plan.ratio
        self.pages = LayerPages(
            NO_STEP,
            key,
            value,
            layout,
            layout.windows(plan.windows),
            pool,
            layout.sides(pool, together=key.quantizes_like(value)),
            shadows,
            faults,
        )

    def warm_up(self) -> None:
        """Let kernels be compiled, by steps of which nothing is stored."""
        from kvfold.ops.attend import parts

        pool, layout = self.pages.pool, self.pages.layout
        no_shadow = torch.full((1,), -1, device=pool.device)
        alone = [((start,), n) for start, n in product((0, WARM_UP[-1]), WARM_UP)]
        for starts, n in (*alone, MANY_SHORT):
            lengths, tokens = [start + n for start in starts], len(starts) * n
            table = torch.zeros(len(starts), -(-lengths[0] // layout.page_size), dtype=torch.int64, device=pool.device)
            slots = torch.full((tokens,), -1, device=pool.device)
            first, last = torch.tensor([starts, lengths], dtype=torch.int32, device=pool.device)
            shape = (tokens, pool.shape[1], layout.key.dims)
            k = torch.zeros(shape, dtype=self.pages.shadows.dtype, device=pool.device)
            q = k.repeat_interleave(self.ratio, dim=1)
            described = (slots, first, last)
            steps = steps_of(starts, lengths, table, layout.page_size, no_shadow, described, ragged=True)
            self.attend(steps, q, k, k, 1.0, torch.empty_like(q))
        parts.warm_up(q[:1], self.pages.value.transform, torch.empty_like(q[:1]))

    def attend(
        self, steps: Sequence[tuple[slice, Step]], q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor
    ) -> None:
        """Pack k and v [tokens, kv_heads, d], then let queries [tokens, q_heads, d] read, into `out`.

        Each of `steps` comes with the slice of its tokens, which are without padding. Requests may share pages with
        others of the same batch: all are packed before the first query reads, but for those of the first step, which
        `Ops.step` packs as its queries need them.
        """
        first, *others = (
            (replace(self.pages, step=step), *(x[tokens].unflatten(0, step.shape) for x in (q, k, v, out)))
            for tokens, step in steps
        )
        stored = [self.ops.store.run(pages, k, v) for pages, _, k, v, _ in others]
        pages, q, k, v, out = first
        self.ops.step(pages, q, k, v, scale, out)
        for (pages, q, _, _, out), new in zip(others, stored, strict=True):
            self.ops.attend(pages, q, new, scale, out)


def warm_up(layers: Iterable[Layer]) -> None:
    """Compile the kernels of all layers, and let cuDNN build its graphs, for which the first requests would wait, for
    seconds each. Nothing happens where there are none, or while a CUDA graph is captured."""
    if not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():
        return
    for layer in {layer.pages.layout: layer for layer in layers}.values():  # others of the layout run the same
        if layer.ops.store.implementation != "torch":
            layer.warm_up()
        if layer.ops.extend.implementation == "unpacked":
            from kvfold.ops.attend.unpacked_prefill import build_graphs

            build_graphs(layer.pages, layer.ratio)
    torch.cuda.empty_cache()


NO_STEP = Step(0, (), (), 1, torch.empty(0, 0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))


def decode_step(
    slots: Tensor,
    query_starts: Tensor,
    starts: Tensor,
    lengths: Tensor,
    table: Tensor,
    shadow_of: Tensor,
    page_size: int,
) -> tuple[slice, Step]:
    """One token of each request, described in device memory alone (see `Batch`): kernels ask for nothing else."""
    unknown = [0] * len(lengths)
    batch = Batch(slots, query_starts, starts, lengths, table, shadow_of, max_queries=1)
    return slice(len(lengths)), Step(1, unknown, unknown, page_size, table, shadow_of).described(batch)


def steps_of(
    starts: Sequence[int],
    lengths: Sequence[int],
    table: Tensor,
    page_size: int,
    shadow_of: Tensor,
    described: tuple[Tensor, Tensor, Tensor],
    ragged: bool,
) -> list[tuple[slice, Step]]:
    """A batch of tokens that lie one request after the other, as steps without padding, of requests that follow each
    other. Each with the slice of its tokens.

    For kernels of GPUs, which take `ragged` ones, of those that bring several tokens, or one, which are decoded; else
    of those that bring as many. `described` are slots, starts and lengths in device memory (see `Batch`), so that
    kernels wait for no copy of them.
    """
    steps: list[tuple[slice, Step]] = []
    token = row = 0
    slots, device_starts, device_lengths = described
    counts = [length - start for start, length in zip(starts, lengths, strict=True)]
    for _, group in groupby(counts, key=(lambda count: count == 1) if ragged else None):
        each = list(group)
        rows, tokens = slice(row, row := row + len(each)), slice(token, token := token + sum(each))
        if n := max(each):
            pages = table[rows, : -(-max(lengths[rows]) // page_size)].long()
            ends = list(accumulate(each, initial=0))
            query_starts = torch.tensor(ends, dtype=torch.int32, device="cpu", pin_memory=table.is_cuda)
            on_device = query_starts.to(table.device, non_blocking=True), device_starts[rows], device_lengths[rows]
            batch = Batch(slots[tokens], *on_device, pages, shadow_of, n)
            own_ends = ends[1:] if ragged and n > 1 else ()
            step = Step(n, starts[rows], lengths[rows], page_size, pages, shadow_of, own_ends)
            steps.append((tokens, step.described(batch)))
    return steps
