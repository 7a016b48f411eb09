"""The entry point of vLLM's plugins: nothing changes unless a recipe is asked for.

It is asked for by KVFOLD_RECIPE, or by `--additional-config '{"kvfold": {"recipe": …, "artifact": …}}'`. On a GPU,
`--attention-backend CUSTOM` is needed beside it. The CPU platform has a single backend, whatever the flag says, so that
is replaced, and vLLM's own stands in where nothing is asked for.
"""

from typing import Any

NAME = "CpuBackend"


def register() -> None:
    """Called by vLLM in each of its processes. Imports come late: vLLM swallows those that fail with this module, and
    would serve without kvfold."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from kvfold.engines.serving import Config
    from kvfold.engines.vllm.backend import PackedBackend, check_version

    if Config.read() is not None:  # what can be refused without knowing the model
        check_version()
    register_backend(AttentionBackendEnum.CUSTOM, f"{PackedBackend.__module__}.{PackedBackend.__qualname__}")
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{NAME}")


def __getattr__(name: str) -> Any:
    """`CpuBackend`, when the first layer of a model is made."""
    if name != NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.config import get_current_vllm_config
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    from kvfold.engines.vllm.backend import PackedBackend, asked_for

    return CPUAttentionBackend if asked_for(get_current_vllm_config()) is None else PackedBackend
