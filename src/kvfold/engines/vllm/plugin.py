"""The entry point of vLLM's plugins. Nothing changes unless a recipe is asked for.

KVFOLD_RECIPE asks for one, or `--additional-config '{"kvfold": {"recipe": …, "artifact": …}}'`.

- On a GPU, kvfold is vLLM's backend CUSTOM. The plugin selects it.
- On a CPU, vLLM has a single backend. kvfold takes its place, and gives back vLLM's own if no recipe is asked for.

If this module cannot be imported, vLLM only logs it and serves in 16 bits. So it imports nothing that can fail.
"""

import os
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from kvfold.engines.start import RECIPE, aborting
from kvfold.engines.vllm.configuration import asked_for

if TYPE_CHECKING:
    from vllm.config import VllmConfig

BACKEND, CPU_BACKEND = "kvfold.engines.vllm.backend.PackedBackend", "CpuBackend"


@aborting
def register() -> None:
    """Called by vLLM in each process, before it makes its configuration."""
    from vllm.config import VllmConfig

    VllmConfig.__post_init__ = prepared(VllmConfig.__post_init__)
    try:
        register_backends()
    except (AttributeError, ImportError):  # this vLLM has moved them
        if os.environ.get(RECIPE):
            raise  # otherwise `check` raises, if a configuration asks for kvfold


def register_backends() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{CPU_BACKEND}")


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
    """Select kvfold's backend. On a GPU, vLLM does not do so by itself."""
    from vllm.platforms import current_platform

    if not _serves(config) or current_platform.is_cpu():
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    attention = config.attention_config
    others = {attention.backend, *attention.backend_per_kind.values()} - {None, AttentionBackendEnum.CUSTOM}
    if others:
        names = ", ".join(sorted(backend.name for backend in others))
        raise ValueError(f"--attention-backend {names} does not read packed pages: leave it out, or name CUSTOM")
    attention.backend = AttentionBackendEnum.CUSTOM


@aborting
def check(config: "VllmConfig") -> None:
    """Refuse what cannot be served, after vLLM has resolved the configuration."""
    if not _serves(config):
        return
    from kvfold.engines.vllm.engine import refuse

    register_backends()
    refuse(config)


def _serves(config: "VllmConfig") -> bool:
    """Whether kvfold serves this configuration. Some have no model, and some only a part of one."""
    model = config.model_config
    return model is not None and not model.is_submodel_config and asked_for(config) is not None


def __getattr__(name: str) -> Any:
    """`CpuBackend`. vLLM asks for it when it makes the first layer of a model."""
    if name != CPU_BACKEND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.config import get_current_vllm_config

    if asked_for(get_current_vllm_config()) is None:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        return CPUAttentionBackend
    from kvfold.engines.vllm.backend import PackedBackend

    return PackedBackend
