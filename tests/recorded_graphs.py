"""CUDA graphs without a GPU: what a call does to tensors is recorded, and later done again to the same tensors.

As in a capture, all else that the call did is forgotten: Python code does not run again, and whatever needs a number on
the host is refused.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvfold.bench.cuda_graphs import WARM_UP
from kvfold.ops.attend import attend_gpu as attend
from kvfold.ops.cards import card_of
from kvfold.ops.dispatch import AMPERE, Choice, Ops
from kvfold.ops.store import store_gpu as store

aten = torch.ops.aten
REFUSED = (aten._local_scalar_dense, aten.nonzero, aten.lift_fresh, aten.masked_select)
STORE = partial(store.store, card_of(AMPERE))
KERNELS = Ops(*(Choice("triton", "interpreted", run) for run in (STORE, attend.attend, attend.attend)))


class Recording(TorchDispatchMode):
    """Has `replay`, as a torch.cuda.CUDAGraph has. Kernels are recorded where Triton interprets them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        from triton.runtime.interpreter import GridExecutor

        self.calls: list[Callable[[], object]] = []
        self.kernels, self.live = 0, True
        launch = GridExecutor.__call__

        def recorded(executor: Any, *arguments: Any, **options: Any) -> None:
            live, self.live = self.live, False
            launch(executor, *arguments, **options)
            self.live = live
            if live:
                self.kernels += 1
                self.calls.append(lambda: launch(executor, *arguments, **options))

        monkeypatch.setattr(GridExecutor, "__call__", recorded)

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        results = function(*arguments, **options)
        if self.live:
            assert function.overloadpacket not in REFUSED, f"{function} waits for the device, or copies from the host"

            def again() -> None:
                for result, new in zip(tree_leaves(results), tree_leaves(function(*arguments, **options)), strict=True):
                    if isinstance(result, torch.Tensor) and result.data_ptr() != new.data_ptr():
                        result.copy_(new)

            self.calls.append(again)
        return results

    @torch.no_grad()
    def replay(self) -> None:
        for call in self.calls:
            call()


def recorder(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable, Callable], tuple[Recording, Any]]:
    """What stands in for `kvfold.bench.cuda_graphs.capture`."""

    def capture(begin: Callable[[], object], call: Callable[[], Any]) -> tuple[Recording, Any]:
        for _ in range(WARM_UP):
            begin()
            call()
        begin()
        recording = Recording(monkeypatch)
        with recording:
            result = call()
        recording.live = False
        for tensor in tree_leaves(result):
            tensor.fill_(torch.nan)  # a capture computes nothing
        return recording, result

    return capture


def use_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches on the CPU run Triton's kernels, interpreted."""
    monkeypatch.setattr("kvfold.paged.cache.choose", lambda *_, **__: KERNELS)
