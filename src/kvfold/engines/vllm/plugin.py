"""The entry point of vLLM's plugins: nothing changes unless a recipe is asked for.

It is asked for by KVFOLD_RECIPE, or by `--additional-config '{"kvfold": {"recipe": …, "artifact": …}}'`. On a GPU,
kvfold is vLLM's backend CUSTOM, which is chosen then. The CPU platform has a single backend, whatever is chosen. There
kvfold takes its place, and vLLM's own stands in where nothing is asked for.

vLLM logs it when this module cannot be imported, and serves in 16 bits. So it imports nothing that can fail.
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
    """Called by vLLM in each of its processes, before it makes its configuration."""
    from vllm.config import VllmConfig

    VllmConfig.__post_init__ = prepared(VllmConfig.__post_init__)
    try:
        register_backends()
    except (AttributeError, ImportError):  # in a vLLM that has moved them
        if os.environ.get(RECIPE):
            raise  # else `check` does, where a configuration asks for kvfold


def register_backends() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{CPU_BACKEND}")


def prepared(resolve: Callable[["VllmConfig"], None]) -> Callable[["VllmConfig"], None]:
    """How vLLM resolves a configuration: after it, the configuration is served as it asks, or the process has ended."""

    @wraps(resolve)
    def wrapped(config: "VllmConfig") -> None:
        prepare(config)
        resolve(config)
        check(config)

    return wrapped


@aborting
def prepare(config: "VllmConfig") -> None:
    """Choose kvfold's backend, which vLLM does not do by itself on a GPU."""
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
    """Refuse what cannot be served, once vLLM has filled in the rest."""
    if not _serves(config):
        return
    from kvfold.engines.vllm.engine import refuse

    register_backends()
    refuse(config)


def _serves(config: "VllmConfig") -> bool:
    """Whether a model is to be served with kvfold. There are configurations without one, and of parts of one."""
    model = config.model_config
    return model is not None and not model.is_submodel_config and asked_for(config) is not None


def __getattr__(name: str) -> Any:
    """`CpuBackend`, when the first layer of a model is made."""
    if name != CPU_BACKEND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.config import get_current_vllm_config

    if asked_for(get_current_vllm_config()) is None:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        return CPUAttentionBackend
    from kvfold.engines.vllm.backend import PackedBackend

    return PackedBackend
