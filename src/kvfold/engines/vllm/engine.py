"""kvfold in one vLLM process: what the layers of a model share, and how it follows vLLM's runner."""

from collections.abc import Iterable, Mapping
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
from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheSpec, iter_layer_specs

from kvfold.engines.serving import Layer, Served, Steps
from kvfold.engines.vllm.blocks import fit_blocks
from kvfold.engines.vllm.offload import loaded_blocks
from kvfold.engines.vllm.plan import DRAFT_MODELS, geometry_of, layers_of, logger, make_plan
from kvfold.engines.vllm.requests import Requests
from kvfold.engines.window_memory import check_left
from kvfold.geometry import listed
from kvfold.ops.pages import on_device

# vLLM's pools of memory: what it keeps while it sleeps; what it frees, and takes back with any contents, as for pages
KEPT, FREED = "runtime", "kv_cache"
RUNNERS = ("vllm.v1.worker.gpu_model_runner:GPUModelRunner", "vllm.v1.worker.gpu.model_runner:GPUModelRunner")  # V1, V2


@dataclass(eq=False)
class Group:
    """Packed layers that share a block table of vLLM. A block holds one page or several."""

    served: Served
    number: int  # among vLLM's groups
    ratio: int  # pages per block
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
    """What all layers in this process share. It is made with the first layer, and allocates the shadow pages. Only
    then does vLLM measure the memory that is left for pages."""

    current: ClassVar["Engine | None"] = None
    followed: ClassVar[set[type]] = set()  # runners that `follow` has wrapped

    def __init__(self, config: VllmConfig) -> None:
        self.config = config
        with memory_pool(config, KEPT):
            plan = make_plan(config, get_tensor_model_parallel_rank(), config.device_config.device)
        scheduler, cache = config.scheduler_config, config.cache_config
        shadow_pages = plan.shadows(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        if cache.kv_cache_memory_bytes is not None:  # for pages and shadow pages: vLLM measures nothing then
            given = vars(cache).setdefault("kvfold_given", cache.kv_cache_memory_bytes)  # an engine may be made again
            check_left(given, plan.shadow_bytes(shadow_pages), scheduler.max_num_seqs)
            cache.kv_cache_memory_bytes = given - plan.shadow_bytes(shadow_pages)
        with memory_pool(config, FREED):
            self.served = Served(plan, shadow_pages, logger)
        self.groups: list[Group] = []
        self.layers: dict[str, Layer] = {}  # by vLLM's names
        self.requests = Requests()
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
        """What vLLM knows of each layer's cache, with bytes and tokens per block as they have to be."""
        attention = {name: spec for name, spec in specs.items() if isinstance(spec, AttentionSpec)}
        packed = {
            name: replace(attention[name], state_content_bytes=self.token_bytes[extract_layer_index(name)])
            for name in attention.keys() & self.modules.keys()
        }
        if self.drafted:  # blocks of layers with full attention may differ in size
            return {**specs, **packed}
        others = {name: spec for name, spec in attention.items() if name not in packed}
        every = self.config.compilation_config.static_forward_context
        return {**specs, **fit_blocks(packed, others, {name: every[name].get_attn_backend() for name in others})}

    def open(self, caches: KVCacheConfig) -> None:
        """Serve from blocks that vLLM is about to allocate."""
        plan, modules = self.served.plan, self.modules
        self.groups, self.layers = [], {}
        for index, group in enumerate(caches.kv_cache_groups):
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
            if plan.windows and (caches.cache_hit_alignment_tokens or 0) % tokens:
                raise ValueError(
                    "kvfold: prefix hits would end inside of packed blocks, and shadow pages not follow: add "
                    "--no-enable-prefix-caching"
                )
            self.groups.append(Group(self.served.only(numbers), index, tokens // plan.page_size))
        self.requests = Requests()
        for group in self.groups:
            group.served.open(caches.num_blocks * group.ratio)

    def attach(self) -> None:
        """Serve from the blocks that vLLM has allocated."""
        for name, module in self.modules.items():  # the target of a shared cache comes before its readers
            if (target := module.kv_sharing_target_layer_name) is not None:
                self.layers[name] = self.layers[target]
                self.layers[name].shared = True  # vLLM may choose another target than the configuration names
                continue
            served = self.group(name).served
            pool = module.kv_cache.view(served.pages, served.plan.kv_heads, -1)
            self.layers[name] = served.attach(extract_layer_index(name), pool)

    def announce(self, caches: KVCacheConfig) -> None:
        """Say at start what is served. Tokens are counted as vLLM does."""
        tokens, _ = get_kv_cache_capacity(self.config, caches)
        served, plan = self.groups[0].served, self.served.plan
        logger.info(plan.report(served.pages, served.shadow_pages, tokens))
        self.served.gauges.compressed(plan.compression(served.shadow_pages, tokens))
        self.served.gauges.update([group.served.shown for group in self.groups])
        for group in self.groups:
            group.served.warm_up(in_pool=self.config.model_config.enable_cumem_allocator)

    def forget(self, blocks: Iterable[int]) -> None:
        """Blocks get other contents from elsewhere, before a request reads them."""
        if not (numbers := list(blocks)):
            return
        for group in self.groups:
            device = group.served.plan.device
            group.served.forget(group.pages(on_device([numbers], device, torch.int64)).flatten())

    def before_step(self, group: Group) -> None:
        """Before each step of a group, outside of CUDA graphs."""
        if group is self.groups[0]:
            self.served.gauges.update([group.served.shown for group in self.groups])
        if self.requests.resting:
            least, most, blocks = self.requests.described(group.number, group.served.plan.device)
            group.served.rest(least, most, group.pages(blocks))


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
    """Wrap vLLM's runner class, so that the engine sizes blocks, knows its groups and sees each step."""
    if runner in Engine.followed:
        return
    Engine.followed.add(runner)
    specs, initialize, execute = runner.get_kv_cache_spec, runner.initialize_kv_cache, runner.execute_model

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

    @wraps(execute)
    def executed(self: Any, scheduler_output: Any, *others: Any, **options: Any) -> Any:
        engine = Engine.serving(self.vllm_config)
        if engine is not None and engine.served.plan.windows:  # without windows, no request has shadows to keep
            engine.requests.follow(scheduler_output)
            engine.forget(loaded_blocks(scheduler_output))
        return execute(self, scheduler_output, *others, **options)

    runner.get_kv_cache_spec, runner.initialize_kv_cache, runner.execute_model = sized, initialized, executed
