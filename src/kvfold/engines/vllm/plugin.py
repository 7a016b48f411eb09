"""The entry point of vLLM's plugins. Nothing changes unless a recipe is asked for.

Whether one is, a process may learn after vLLM has loaded the plugin. So the plugin always takes the backend CUSTOM,
unless another plugin has it.

KVFOLD_RECIPE asks for one, or `--additional-config '{"kvfold": {"recipe": …, "artifact": …}}'`.

kvfold is vLLM's attention backend CUSTOM. The plugin selects it for layers with full attention. The others keep the
backend that vLLM chooses.

If this module cannot be imported, vLLM only logs it and serves in 16 bits. So it imports nothing that can fail.
"""

import logging
import os
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from kvfold.engines.start import CAUSES, RECIPE, aborting, record
from kvfold.engines.vllm.configuration import SIXTEEN_BITS, asked_for

if TYPE_CHECKING:
    from vllm.config import VllmConfig

BACKEND = "kvfold.engines.vllm.backend.PackedBackend"
OTHERS = ("sliding_window", "encoder_only_attention")  # kinds of layers with attention that are not packed
FAILING = ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor")  # loggers that get what ends a process


@aborting
def register() -> None:
    """Called by vLLM in each process, before it makes its configuration."""
    from vllm.config import VllmConfig

    for name in FAILING if os.environ.get(CAUSES) else ():
        logging.getLogger(name).addFilter(recorded)

    VllmConfig.__post_init__ = prepared(VllmConfig.__post_init__)
    try:
        register_backend()
    except (AttributeError, ImportError):  # this vLLM has moved them
        if os.environ.get(RECIPE):
            raise  # otherwise `check` raises, if a configuration asks for kvfold


def recorded(entry: logging.LogRecord) -> bool:
    """A filter that passes everything, and records errors."""
    if entry.exc_info and (error := entry.exc_info[1]):
        record(error)
    return True


def register_backend() -> None:
    """Make CUSTOM mean kvfold, unless another plugin has it, and check that it is used."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends import registry

    if not registry.AttentionBackendEnum.CUSTOM.is_overridden():
        registry.register_backend(registry.AttentionBackendEnum.CUSTOM, BACKEND)
    platform = type(current_platform)
    if not hasattr(platform.update_block_size_for_backend, "__wrapped__"):
        platform.update_block_size_for_backend = classmethod(checked(platform.update_block_size_for_backend))
    if current_platform.is_cpu() and not hasattr(platform.get_attn_backend_cls, "__wrapped__"):
        platform.get_attn_backend_cls = classmethod(custom_on_cpu(platform.get_attn_backend_cls))


def checked(update: Callable[..., None]) -> Callable[..., None]:
    """Wrap what vLLM calls in each worker when its model is made."""

    @wraps(update)
    def wrapped(_: type, config: "VllmConfig") -> None:
        if _serves(config):
            from kvfold.engines.vllm.engine import check_layers

            check_layers(config)
        update(config)

    return wrapped


def custom_on_cpu(choose: Callable[..., str]) -> Callable[..., str]:
    """Wrap vLLM's choice of a backend on a CPU, which always is its own."""

    @wraps(choose)
    def wrapped(_: type, selected_backend: Any, *others: Any, **options: Any) -> str:
        chosen = getattr(selected_backend, "name", None) == "CUSTOM" and selected_backend.get_path() == BACKEND
        return BACKEND if chosen else choose(selected_backend, *others, **options)

    return wrapped


def prepared(resolve: Callable[["VllmConfig"], None]) -> Callable[["VllmConfig"], None]:
    """Wrap vLLM's `resolve`. If a configuration asks for kvfold and cannot be served, the process ends."""

    @wraps(resolve)
    def wrapped(config: "VllmConfig") -> None:
        prepare(config)
        resolve(config)
        check(config)

    return wrapped


@aborting
def prepare(config: "VllmConfig") -> None:
    """Select kvfold's backend, which vLLM does not do by itself, and a cache that is not quantized otherwise."""
    if not _serves(config):
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND:
        raise ValueError(f"another plugin has the backend CUSTOM, {custom.get_path()}: set VLLM_PLUGINS=kvfold")
    attention = config.attention_config
    per_kind = attention.backend_per_kind
    packing = {attention.backend, *(backend for kind, backend in per_kind.items() if kind not in OTHERS)}
    if others := packing - {None, custom}:
        names = ", ".join(sorted(backend.name for backend in others))
        raise ValueError(f"--attention-backend {names} does not read packed pages: leave it out, or name CUSTOM")
    attention.backend = custom
    attention.backend_per_kind = {**dict.fromkeys(OTHERS), **per_kind}  # None: vLLM chooses
    _override_checkpoint(config)


def _override_checkpoint(config: "VllmConfig") -> None:
    """A checkpoint may say how to quantize the cache: vLLM's configuration asks for it, or else each layer does. The
    recipe says otherwise."""
    from vllm.utils.torch_utils import resolve_kv_cache_dtype_string

    cache, model = config.cache_config, config.model_config
    asked = resolve_kv_cache_dtype_string("auto", model)
    parts = (getattr(part, "quantization_config", None) for part in (model.hf_config, model.hf_text_config))
    by_layers = any(isinstance(part, dict) and part.get("kv_cache_scheme") for part in parts)
    if cache.cache_dtype != asked or (asked == "auto" and not by_layers):
        return
    from kvfold.engines.vllm.plan import logger

    dtype = str(model.dtype).removeprefix("torch.")
    cache.cache_dtype = dtype if dtype in SIXTEEN_BITS else SIXTEEN_BITS[1]
    logger.info("kvfold: the recipe takes the place of the checkpoint's own quantization of the cache")


@aborting
def check(config: "VllmConfig") -> None:
    """Refuse what cannot be served, after vLLM has resolved the configuration."""
    if not _serves(config):
        return
    from kvfold.engines.vllm.offload import check_files
    from kvfold.engines.vllm.plan import choose_block_size, refuse

    register_backend()
    choose_block_size(config)
    refuse(config)
    check_files(config)


def _serves(config: "VllmConfig") -> bool:
    """Whether kvfold serves this configuration. Some have no model, and some only a part of one."""
    model = config.model_config
    return model is not None and not model.is_submodel_config and asked_for(config) is not None
