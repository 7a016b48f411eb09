"""Stands in for SGLang's native kernels, of which there is no wheel for CPUs: all names are there, and none works."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"there is no kernel sgl_kernel.{name} here")

    return missing


# what the engine calls at start, to bind threads to cores and for tensor parallelism
for signature in ("init_cpu_threads_env(str cores) -> ()", "initialize(int ranks, int rank) -> ()"):
    name, _, schema = signature.partition("(")
    torch.library.define(f"sgl_kernel::{name}", f"({schema}")
    torch.library.impl(f"sgl_kernel::{name}", "CompositeExplicitAutograd", lambda *_: None)
