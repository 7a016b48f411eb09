"""What vLLM and SGLang share: the configuration, the plan made from it, layers that pack and attend, the report."""

import os
import shlex
from collections import Counter
from collections.abc import Collection, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from logging import Logger
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from kvfold.artifact import Artifact
from kvfold.engines.faults import Faults
from kvfold.engines.start import ARTIFACT, RECIPE
from kvfold.fitted import Fitted
from kvfold.format.codec import Codec, sixteen_bit
from kvfold.format.layout import PageLayout
from kvfold.format.open_block import ring_tokens
from kvfold.geometry import Geometry, listed
from kvfold.ops.dispatch import Ops, check_dtype, choose
from kvfold.ops.pages import HostLengths, LayerPages, Logits, Step, on_device
from kvfold.paged.layer import Layer, Steps
from kvfold.recipe import Recipe
from kvfold.recipes import parse
from kvfold.version import __version__

if TYPE_CHECKING:
    from kvfold.engines.gauges import Gauges

WARM_UP = (1, 2, 4, 8, 16, 32, 64, 128, 8192)  # new tokens of a request: these numbers run different kernels
MANY_SHORT = ([0] * 64, 128), ([0] * 512, 32)  # starts and new tokens per request: these run yet other kernels


@dataclass(frozen=True)
class Config:
    """The recipe and the artifact to serve with."""

    recipe: Recipe
    artifact: str | None = None  # a folder or a Hub id

    @classmethod
    def read(cls, given: Mapping[str, Any] | None = None) -> Self | None:
        """From an engine's own configuration {"recipe": …, "artifact": …}, else from the environment. None: neither
        asks for kvfold."""
        if given is None:
            if not (name := os.environ.get(RECIPE)):
                return None
            given = {"recipe": name, "artifact": os.environ.get(ARTIFACT) or None}
        if unknown := given.keys() - {"recipe", "artifact"}:
            raise ValueError(f"kvfold is configured by recipe and artifact, not by {', '.join(sorted(unknown))}")
        if not given.get("recipe"):
            raise ValueError("kvfold needs a recipe, such as fold4")
        return cls(parse(given["recipe"]), given.get("artifact"))


@dataclass(frozen=True, eq=False)
class Plan:
    """How one rank of an engine packs its layers: what stays the same in every step."""

    recipe: Recipe
    geometry: Geometry  # of the whole model
    kv_heads: int  # of this rank
    ratio: int  # query heads per KV head
    codecs: Mapping[int, tuple[Codec, Codec]]  # of keys and of values, by the packed layer's number in the model
    page_size: int
    raw_dtype: torch.dtype  # the 16-bit type
    device: torch.device
    layers: range | None = None  # of this rank, packed or not; None: all
    checked: str = "not checked"  # what the report says of `kvfold check`

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
        layers: range | None = None,
    ) -> Self:
        """The plan of one tensor-parallel rank. `model` is the model's config.json. `weights` is its `digest_model`, if
        known. With more ranks than KV heads, every KV head is on the same number of ranks. `layers` are those of a
        pipeline-parallel rank, by default all."""
        recipe, geometry = config.recipe, Geometry.from_config(model)
        artifact = None if config.artifact is None else Artifact.load(config.artifact)
        if artifact is not None:
            artifact.metadata.model.check_files(model, weights)
        elif recipe.centre or recipe.learns:
            raise ValueError(
                f"{recipe} needs an artifact of the model: run `{recipe.fitted_by}`"
                + ("" if recipe.learns else ", or use centre=false")
            )
        Fitted.of(recipe, geometry, artifact).check_served()
        if recipe.block and page_size % recipe.block:
            raise ValueError(
                f"{recipe}: prefix hits end at pages of {page_size} tokens, which have to be whole open blocks of "
                f"{recipe.block}: take pages of a multiple of {recipe.block} tokens"
            )
        checked = _checked(config, artifact, model.get("_name_or_path") or "MODEL")
        parts = min(ranks, geometry.kv_heads)
        if artifact is not None and parts > 1:
            artifact = artifact.shard(rank * parts // ranks, parts)
        fitted = Fitted.of(recipe, geometry, artifact)
        raw_dtype = sixteen_bit(dtype)
        codecs = fitted.codecs(raw_dtype, device)
        if layers is not None:
            codecs = {number: pair for number, pair in codecs.items() if number in layers}
        heads = geometry.kv_heads // parts, geometry.q_heads // max(ranks, geometry.kv_heads)
        plan = cls(recipe, geometry, *heads, codecs, page_size, raw_dtype, torch.device(device), layers, checked)
        for ops in plan.ops.values() if plan.device.type == "cuda" else ():
            if ops.store.implementation == "torch":  # PyTorch's operators wait for the device
                raise ValueError(f"{recipe} cannot be served on a GPU: {ops.store.reason}")
        check_dtype(plan.ops.values(), dtype)
        return plan

    def only(self, numbers: Collection[int]) -> Self:
        """The plan of some of its layers."""
        return replace(self, codecs={number: self.codecs[number] for number in numbers})

    @cached_property
    def layouts(self) -> dict[int, PageLayout]:
        return {
            number: PageLayout(key.layout, value.layout, self.page_size) for number, (key, value) in self.codecs.items()
        }

    @cached_property
    def ops(self) -> dict[int, Ops]:
        cap = self.geometry.shape.cap is not None
        return {number: choose(layout, self.ratio, self.device, cap=cap) for number, layout in self.layouts.items()}

    @property
    def block(self) -> int:
        """Tokens of the open block. Raw layers have none."""
        return self.recipe.block

    @property
    def ring_tokens(self) -> int:
        """Tokens that the ring of a request holds, at least."""
        return ring_tokens(self.block)

    @property
    def ring_bytes(self) -> int:
        """Bytes of a ring of `ring_tokens` tokens, over all layers."""
        numbers = sum(layout.raw_numbers for layout in self.layouts.values() if not layout.is_raw)
        return 2 * self.ring_tokens * self.kv_heads * numbers

    @property
    def token_bytes(self) -> float:
        """Bytes per token in the pages of this rank, over all layers."""
        return self.kv_heads * sum(layout.page_bytes for layout in self.layouts.values()) / self.page_size

    @property
    def raw_token_bytes(self) -> int:
        """The same if all layers were raw."""
        numbers = sum(key.layout.dims + value.layout.dims for key, value in self.codecs.values())
        return 2 * self.kv_heads * numbers

    def allocate_rings(self, number: int, rings: int) -> Tensor:
        """Rings of one layer, which hold `ring_tokens` tokens each. Raw layers have none."""
        layout = self.layouts[number]
        rings, device = 0 if layout.is_raw else rings, self.device
        return layout.allocate_ring(rings, self.ring_tokens, self.kv_heads, self.raw_dtype, device)

    def compression(self, rings: int, tokens: int) -> float:
        """How many times smaller a cache for `tokens` tokens is than in 16 bits, with `rings` rings beside it."""
        return self.raw_token_bytes * tokens / (self.token_bytes * tokens + rings * self.ring_bytes)

    def _layers(self) -> str:
        """Which layers are packed, and what becomes of the others."""
        numbers = range(len(self.geometry.layers)) if self.layers is None else self.layers
        kept = [number for number, layout in self.layouts.items() if layout.is_raw]
        readers = [number for number in numbers if self.geometry.layers[number].target in self.codecs]
        kinds = [self.geometry.layers[number].kind for number in numbers if number not in readers]
        others = Counter(kind for kind in kinds if kind != "full")
        packed = [number for number in self.layouts if number not in kept]
        parts = [f"{len(packed)} packed" + (f" ({listed(packed)})" if packed and (others or readers) else "")]
        if kept:
            parts.append(f"{listed(kept)} in 16 bits as the recipe says")
        if readers:
            parts.append(f"{len(readers)} read their pages ({listed(readers)})")
        parts += [f"{count} {kind} as the engine has them" for kind, count in others.items()]
        return ", ".join(parts)

    def report(self, pages: int, tokens: int | None = None, ring_bytes: int | None = None) -> str:
        """What is served, for the engine's log at start. `tokens` is how many fit, if other layers or rings take pages
        from the same memory. `ring_bytes`: of a request's ring, if it takes more than the raw vectors do."""
        tokens = pages * self.page_size if tokens is None else tokens
        lines = [
            f"kvfold {__version__}: {self.recipe}",
            self.checked,
            f"layers: {self._layers()}",
            f"bytes per token: {self.token_bytes:,.0f}, against {self.raw_token_bytes:,} in 16 bits: "
            f"{self.raw_token_bytes / self.token_bytes:.2f} times smaller",
            f"pages: {pages:,} of {self.page_size} tokens, so that {tokens:,} tokens fit",
        ]
        if self.block:
            lines.append(
                f"open block: up to {self.block} tokens of a running request in 16 bits, "
                f"{(self.ring_bytes if ring_bytes is None else ring_bytes) / 2**20:,.1f} MiB per request"
            )
        for op, choices in zip(Ops._fields, zip(*self.ops.values(), strict=True), strict=True):
            different = dict.fromkeys(f"{choice.implementation} ({choice.reason})" for choice in choices)
            lines.append(f"{op}: {'; '.join(different)}")
        return "\n  ".join(lines)


def _checked(config: Config, artifact: Artifact | None, model: str) -> str:
    """What `kvfold check` found of the recipe, or how to find it."""
    if artifact is not None and (result := artifact.check_result(config.recipe)):
        return str(result)
    where = ["--artifact", config.artifact] if config.artifact else []
    return f"not checked: run `{shlex.join(['kvfold', 'check', model, '--recipe', str(config.recipe), *where])}`"


class Served:
    """The layers of one rank that share a page table. They have one plan and begin each step together.

    It owns the marks of tokens that could not be stored, and the gauges that show them. An engine makes it before it
    knows how many pages fit, calls `open` when it knows, and then `attach` per layer. If an engine has several page
    tables, it takes `only` the layers of each table.
    """

    faults: Faults  # set by `open`

    def __init__(self, plan: Plan, logger: Logger, rings: int = 0) -> None:
        """`rings`: how many the engine reserves beside the pages."""
        self.plan, self.logger, self.rings = plan, logger, rings

    def only(self, numbers: Collection[int]) -> Self:
        """Some of its layers, for a page table of their own. The gauges are those of all layers."""
        part = copy(self)
        part.plan = self.plan.only(numbers)
        return part

    def open(self, pages: int) -> None:
        """Serve from `pages` pages per layer."""
        self.pages = pages
        self.layers: dict[int, Layer] = {}
        self.faults = Faults(pages * self.plan.page_size, self.plan.device)

    def attach(self, number: int, pool: Tensor, ring: Tensor) -> Layer:
        """Add a layer with its pages uint8[pages, kv_heads, page_bytes], and with the blocks of rings [blocks,
        kv_heads, numbers] in 16 bits. Each request has as many of these as hold `Plan.ring_tokens` tokens."""
        if len(pool) != self.pages:
            raise ValueError(f"kvfold: layer {number} has {len(pool)} pages, and the engine said {self.pages}")
        plan = self.plan
        pages = LayerPages.of(plan.codecs[number], plan.layouts[number], plan.block, pool, ring, self.faults.marks)
        self.layers[number] = layer = Layer(pages, plan.ops[number], number in plan.geometry.targets)
        return layer

    @cached_property
    def gauges(self) -> "Gauges":
        from kvfold.engines.gauges import Gauges  # only after the engine has set up prometheus_client

        return Gauges(self.plan.token_bytes, self.logger)

    def announce(self, pages: int) -> None:
        """Say at start what is served: in the log, and in the gauges."""
        self.logger.info(self.plan.report(pages))
        self.gauges.compressed(self.plan.compression(self.rings, pages * self.plan.page_size))
        self.gauges.update([self.faults])

    def decode(
        self,
        locations: Tensor,
        query_starts: Tensor,
        starts: Tensor,
        lengths: Tensor,
        table: Tensor,
        rings: Tensor,
        queries: int = 1,
    ) -> tuple[slice, Step]:
        """The step of requests with one new token each, or with drafts, up to `queries` tokens in all. Only the device
        knows their lengths."""
        step = Step(locations, query_starts, starts, lengths, table, rings, self.plan.page_size, queries)
        return slice(0, len(locations)), step

    def steps(
        self, host: HostLengths, locations: Tensor, starts: Tensor, lengths: Tensor, table: Tensor, rings: Tensor
    ) -> Steps:
        """Split a batch into steps of neighbouring requests: either all of them decode, or none. `starts` and `lengths`
        repeat `host` on the device."""
        counts = host.counts
        described = locations, on_device(host.query_starts, table.device), starts, lengths, table.long()
        step = Step(*described, rings, self.plan.page_size, max(counts, default=0), host)
        return [(rows, part) for _, rows, part in step.split(count == 1 for count in counts)]

    def warm_up(self, in_pool: bool = False) -> None:
        """Compile the kernels of all layers. Otherwise the first requests would wait,
        for seconds each. Does nothing without a GPU, or while a CUDA graph is captured. `in_pool`: the engine allocates
        from a pool of its own, and frees what is left over."""
        if not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():
            return
        for layer in {layer.pages.layout: layer for layer in self.layers.values()}.values():  # one per layout
            if layer.ops.store.implementation != "torch":
                self.warm(layer)
        if not in_pool:
            torch.cuda.empty_cache()

    def warm(self, layer: Layer) -> None:
        """Compile the kernels of a layer, by steps that store nothing."""
        from kvfold.ops.attend import parts

        pages, ratio, shape = layer.pages, self.plan.ratio, self.plan.geometry.shape
        pool, layout = pages.pool, pages.layout
        blocks = -(-pages.block // max(1, pages.ring_tokens)) or 1
        alone = [([start], n) for start, n in product((0, WARM_UP[-1]), WARM_UP)]
        sinks = torch.zeros(ratio * pool.shape[1], device=pool.device) if shape.sink else None
        logits = Logits(1.0, shape.cap, sinks)
        for starts, n in (*alone, *MANY_SHORT):
            table = torch.zeros(len(starts), -(-(starts[0] + n) // layout.page_size), dtype=torch.int64)
            host = HostLengths(starts, [start + n for start in starts])
            rings = torch.zeros(len(starts), blocks, dtype=torch.int64, device=pool.device)
            step = Step.of(host, table, rings, layout.page_size)
            step.locations.fill_(-1)
            tokens = len(step.locations)
            sides = layout.key, layout.value
            k, v = (pages.ring.new_zeros(tokens, pool.shape[1], side.dims) for side in sides)
            q, out = (x.repeat_interleave(ratio, dim=1) for x in (k, v))
            layer.attend([(slice(tokens), step)], q, k, v, logits, out)
            if layer.shared:
                layer.read([(slice(tokens), step)], q, logits, out)
        parts.warm_up(pages, q[:1], logits, out[:1])
