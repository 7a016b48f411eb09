"""Stands in for SGLang's native kernels, of which there is no wheel for CPUs. All names are there. Those of linear
attention and of speculative decoding work, the others do not."""

from collections.abc import Callable
from typing import Any

import torch

from sgl_kernel import mamba, speculative


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)
    if hasattr(speculative, name):
        return getattr(speculative, name)

    def missing(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"there is no kernel sgl_kernel.{name} here")

    return missing


class Operators:
    """torch.ops.sgl_kernel. It has only operators for CPUs: if there are others, SGLang registers their shapes."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.endswith("_cpu"):
            raise AttributeError(name)
        return getattr(mamba, name, None) or __getattr__(name)

    def init_cpu_threads_env(self, cores: str) -> None:
        """The engine binds threads to cores at start."""

    def initialize(self, ranks: int, rank: int) -> None:
        """The engine prepares tensor parallelism at start."""


torch.ops.sgl_kernel = Operators()
