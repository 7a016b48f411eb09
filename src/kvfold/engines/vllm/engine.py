"""kvfold in one vLLM process: what the layers of a model share, and how it follows vLLM's runner."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from pkgutil import resolve_name
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import device_allocator
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheSpec, iter_layer_specs

from kvfold.engines.serving import Served
from kvfold.engines.vllm.blocks import fit_blocks
from kvfold.engines.vllm.plan import DRAFT_MODELS, geometry_of, layers_of, logger, make_plan
from kvfold.engines.vllm.rings import NAME, RingLayer, RingSpec, of_layers
from kvfold.geometry import listed
from kvfold.paged.layer import Layer, Steps

KEPT = "runtime"  # vLLM's pool of memory that it keeps while it sleeps
RUNNERS = ("vllm.v1.worker.gpu_model_runner:GPUModelRunner", "vllm.v1.worker.gpu.model_runner:GPUModelRunner")  # V1, V2


@dataclass(eq=False)
class Group:
    """Packed layers that share a block table of vLLM. A block holds one page or several."""

    served: Served
    ratio: int  # pages per block
    rings: Tensor  # int64[requests, blocks]: the blocks of each request's ring, without an open block none
    led: bool = False  # by a builder, which makes the steps
    steps: Steps = ()  # the current ones

    def __post_init__(self) -> None:
        self._within = torch.arange(self.ratio, device=self.served.plan.device)

    def pages(self, blocks: Tensor, out: Tensor | None = None) -> Tensor:
        """The pages int64[requests, pages] of a block table [requests, blocks], in one launch."""
        out = blocks.new_empty(len(blocks), blocks.shape[1] * self.ratio, dtype=torch.int64) if out is None else out
        torch.add(self._within, blocks.unsqueeze(-1), alpha=self.ratio, out=out.unflatten(1, (-1, self.ratio)))
        return out


class Engine:
    """What all layers in this process share. It is made with the first layer."""

    current: ClassVar["Engine | None"] = None
    followed: ClassVar[set[type]] = set()  # runners that `follow` has wrapped

    def __init__(self, config: VllmConfig) -> None:
        self.config = config
        with memory_pool(config, KEPT):
            plan = make_plan(config, get_tensor_model_parallel_rank(), config.device_config.device)
        self.served = Served(plan, logger)
        self.groups: list[Group] = []
        self.layers: dict[str, Layer] = {}  # by vLLM's names
        follow(resolve_name(RUNNERS[config.use_v2_model_runner]))
        if self.drafted:
            from kvfold.engines.vllm.draft_models import keep_raw

            keep_raw()

    @classmethod
    def of(cls, config: VllmConfig) -> "Engine":
        if (current := cls.serving(config)) is None:
            cls.current = None  # frees the memory of the last engine first
            with torch.device("cpu"):  # while vLLM makes layers, the default is their device
                cls.current = current = cls(config)
        return current

    @classmethod
    def serving(cls, config: VllmConfig) -> "Engine | None":
        """The engine of a configuration, if it is made."""
        # the language model of a multimodal one has its own configuration, with the same cache_config
        current = cls.current
        return current if current is not None and current.config.cache_config is config.cache_config else None

    @property
    def drafted(self) -> bool:
        """Whether there are layers that draft too. They stay in 16 bits, and all layers have full attention."""
        speculation = self.config.speculative_config
        return speculation is not None and speculation.method in DRAFT_MODELS

    @property
    def modules(self) -> dict[str, Any]:
        """vLLM's layers that kvfold attends for, by name."""
        every = self.config.compilation_config.static_forward_context
        return {name: module for name, module in every.items() if _engine(module) is self}

    @cached_property
    def token_bytes(self) -> dict[int, int]:
        """Bytes of a token per KV head, by the layer's number."""
        return {number: layout.page_bytes // layout.page_size for number, layout in self.served.plan.layouts.items()}

    def group(self, name: str) -> Group:
        """Whose pages the layer of this name reads."""
        number = extract_layer_index(self.modules[name].kv_sharing_target_layer_name or name)
        return next(group for group in self.groups if number in group.served.plan.codecs)

    def sized(self, specs: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
        """What vLLM knows of each layer's cache, with bytes and tokens per block as they have to be, and of rings."""
        specs = {name: spec for name, spec in specs.items() if not isinstance(spec, RingSpec)}  # of an earlier call
        attention = {name: spec for name, spec in specs.items() if isinstance(spec, AttentionSpec)}
        packed = {
            name: replace(attention[name], state_content_bytes=self.token_bytes[extract_layer_index(name)])
            for name in attention.keys() & self.modules.keys()
        }
        others = {name: spec for name, spec in attention.items() if name not in packed}
        every = self.config.compilation_config.static_forward_context
        if not self.drafted:  # else all have full attention, and blocks of such layers may differ in size
            backends = {name: every[name].get_attn_backend() for name in others}
            specs |= fit_blocks(packed, others, backends)
        else:
            specs |= packed
        rings = self._rings({name: spec for name, spec in specs.items() if name in packed})
        every.update({name: RingLayer(spec) for name, spec in rings.items()})
        return {**specs, **rings}

    def _rings(self, packed: Mapping[str, AttentionSpec]) -> dict[str, RingSpec]:
        """A ring for each packed layer with an open block. Layers differ in how many tokens a block holds. A ring has
        as many blocks as all of them need."""
        plan = self.served.plan
        layouts = {name: plan.layouts[extract_layer_index(name)] for name in packed}
        open_ones = [name for name, layout in layouts.items() if layout.block(plan.block)]
        if not open_ones:
            return {}
        held = [packed[name].page_size_bytes // (2 * plan.kv_heads * layouts[name].raw_numbers) for name in open_ones]
        spec = min((packed[name] for name in open_ones), key=lambda spec: spec.page_size_bytes)
        ring = RingSpec(
            block_size=spec.block_size,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            dtype=spec.dtype,
            state_content_bytes=spec.state_content_bytes,
            dcp_sharded=False,
            blocks=cdiv(plan.ring_tokens, min(held)),
            open_block=plan.block,
        )
        return dict.fromkeys((name + NAME for name in open_ones), ring)

    def open(self, caches: KVCacheConfig) -> None:
        """Serve from blocks that vLLM is about to allocate."""
        plan, modules = self.served.plan, self.modules
        self.groups, self.layers = [], {}
        for group in caches.kv_cache_groups:
            numbers = [extract_layer_index(name) for name in group.layer_names if name in modules]
            if not numbers:
                continue
            specs = list(iter_layer_specs(group.kv_cache_spec))
            tokens = specs[0].block_size
            padded = any(isinstance(spec, AttentionSpec) and spec.page_size_padded for spec in specs)
            whole = self.drafted or len(numbers) == len(group.layer_names)
            if padded or tokens % plan.page_size or not whole:
                raise ValueError(
                    f"kvfold: vLLM's blocks of {tokens} tokens for layers {listed(numbers)} are not whole packed pages "
                    f"of {plan.page_size} tokens: serve this model without a recipe"
                )
            if plan.block and (caches.cache_hit_alignment_tokens or 0) % plan.block:
                raise ValueError(
                    f"kvfold: prefix hits would end inside of open blocks of {plan.block} tokens: add "
                    "--no-enable-prefix-caching"
                )
            with memory_pool(self.config, KEPT):
                rings = self._ring_table(group.layer_names)
                self.groups.append(Group(self.served.only(numbers), tokens // plan.page_size, rings))
                self.groups[-1].served.open(caches.num_blocks * self.groups[-1].ratio)

    def _ring_table(self, names: Sequence[str]) -> Tensor:
        """Where the builder of a group's rings puts their blocks, and the group's steps read them."""
        layers = of_layers(self.config.compilation_config.static_forward_context, names)
        blocks = layers[0].spec.blocks if layers else 0
        requests, device = self.config.scheduler_config.max_num_seqs, self.served.plan.device
        rings = torch.zeros(requests, blocks, dtype=torch.int64, device=device)
        for layer in layers:
            layer.rings = rings
        return rings

    def attach(self) -> None:
        """Serve from the blocks that vLLM has allocated."""
        for name, module in self.modules.items():  # the target of a shared cache comes before its readers
            if (target := module.kv_sharing_target_layer_name) is not None:
                self.layers[name] = self.layers[target]
                self.layers[name].shared = True  # vLLM may choose another target than the configuration names
                continue
            served, cache = self.group(name).served, module.kv_cache
            pages = cache.view(served.pages, served.plan.kv_heads, -1)
            blocks = cache.view(len(cache), served.plan.kv_heads, -1).view(served.plan.raw_dtype)
            self.layers[name] = served.attach(extract_layer_index(name), pages, blocks)

    def announce(self, caches: KVCacheConfig) -> None:
        """Say at start what is served. Tokens are counted as vLLM does."""
        tokens, _ = get_kv_cache_capacity(self.config, caches)
        block_bytes = caches.kv_cache_tensors[0].size // caches.num_blocks
        rings = sum(group.rings.shape[1] for group in self.groups)
        plan = self.served.plan
        logger.info(plan.report(self.groups[0].served.pages, tokens, rings * block_bytes))
        self.served.gauges.compressed(plan.compression(self.served.rings, tokens))
        self.show()
        for group in self.groups:
            group.served.warm_up(in_pool=self.config.model_config.enable_cumem_allocator)

    def show(self) -> None:
        """Before each step, outside of CUDA graphs: update the gauges."""
        self.served.gauges.update([group.served.faults for group in self.groups])


def _engine(module: Any) -> Any:
    """The engine that a layer of vLLM belongs to, None: it is not kvfold's."""
    return getattr(getattr(module, "impl", None), "engine", None)


def check_layers(config: VllmConfig) -> None:
    """After vLLM has made the model: refuse it if a layer that should be packed has another backend."""
    engine = Engine.serving(config)
    found = set() if engine is None else {extract_layer_index(name) for name in engine.modules}
    if missing := sorted((set(layers_of(config)) & set(geometry_of(config).packed)) - found):
        raise ValueError(
            f"kvfold: vLLM gives layers {listed(missing)} to another backend, which would serve them in 16 bits: serve "
            "this model with SGLang, or without a recipe"
        )


def memory_pool(config: VllmConfig, name: str) -> AbstractContextManager[None]:
    """Where tensors are allocated. While vLLM makes layers, that is the pool of weights, which it may empty."""
    asleep = config.model_config.enable_sleep_mode
    return device_allocator.get_mem_allocator_instance().use_memory_pool(name) if asleep else nullcontext()


def follow(runner: Any) -> None:
    """Wrap vLLM's runner class, so that the engine sizes blocks and knows its groups."""
    if runner in Engine.followed:
        return
    Engine.followed.add(runner)
    specs, initialize = runner.get_kv_cache_spec, runner.initialize_kv_cache

    @wraps(specs)
    def sized(self: Any) -> dict[str, KVCacheSpec]:
        engine = Engine.serving(self.vllm_config)
        return specs(self) if engine is None else engine.sized(specs(self))

    @wraps(initialize)
    def initialized(self: Any, kv_cache_config: KVCacheConfig, is_profiling: bool = False, **options: Any) -> None:
        engine = Engine.serving(self.vllm_config)
        if engine is not None:
            engine.open(kv_cache_config)
        initialize(self, kv_cache_config, is_profiling, **options)
        if engine is not None:
            engine.attach()
            if not is_profiling:
                engine.announce(kv_cache_config)

    runner.get_kv_cache_spec, runner.initialize_kv_cache = sized, initialized
