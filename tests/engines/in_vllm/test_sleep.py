"""Sleep mode: vLLM frees pages and weights while it sleeps. Means and rotations are kept."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm import device_allocator
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm_engine import Engine, platform


class Pools(TorchDispatchMode):
    """A stand-in for vLLM's allocator of a GPU: which memory was allocated in which pool. What it frees is overwritten:
    floats become NaN, and addresses point nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.entered: list[str] = []
        self.memory: dict[int, tuple[str, torch.UntypedStorage]] = {}  # by address

    def __torch_dispatch__(self, op, types, given=(), options=None):
        made = op(*given, **(options or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self.memory.setdefault(storage.data_ptr(), (self.entered[-1], storage))
        return made

    @contextmanager
    def use_memory_pool(self, tag: str) -> Iterator[None]:
        self.entered.append(tag)
        with self:
            yield
        self.entered.pop()

    def pool(self, tensor: torch.Tensor) -> str:
        return self.memory[tensor.untyped_storage().data_ptr()][0]

    def sleep(self, offload_tags: tuple[str, ...]) -> None:
        for tag, storage in self.memory.values():
            if tag not in offload_tags:
                torch.empty(0, dtype=torch.uint8).set_(storage).fill_(255)

    def wake_up(self, tags: list[str] | None) -> None:
        pass


def sleep(worker: CPUWorker, level: int = 1) -> None:
    """As the worker of a GPU does it."""
    buffers = worker.model_runner.model.named_buffers() if level == 2 else ()
    worker._sleep_saved_buffers = {name: buffer.clone() for name, buffer in buffers}
    worker.sleep_mode_backend.suspend(level)


def wake_up(worker: CPUWorker, tags: list[str] | None = None) -> None:
    worker.sleep_mode_backend.resume(tags)
    for name, buffer in worker.model_runner.model.named_buffers():
        if name in worker._sleep_saved_buffers:
            buffer.copy_(worker._sleep_saved_buffers[name])


@pytest.fixture
def pools() -> Iterator[Pools]:
    pools = Pools()
    with (
        patch.object(device_allocator, "get_mem_allocator_instance", lambda: pools),
        patch.object(platform, "is_sleep_mode_available", lambda _: True),
        patch.object(CPUWorker, "_maybe_get_memory_pool_context", lambda _, tag: pools.use_memory_pool(tag)),
        patch.object(CPUWorker, "sleep", sleep),
        patch.object(CPUWorker, "wake_up", wake_up),
    ):
        yield pools


def test_answers_are_the_same_after_sleep(small, small_artifact, pools, words):
    """With weights kept in CPU memory, and with weights that are loaded again. Pages hold NaN then."""
    engine = Engine(small, "oscar-int2:block=32", small_artifact, enable_sleep_mode=True)
    prompts = [words[100 * i : 100 * i + 90] for i in range(3)]
    before = engine.run(prompts)
    (group,) = engine.packed.groups
    assert {pools.pool(group.rings), pools.pool(group.served.faults.marks)} == {"runtime"}
    for number, (key, value) in group.served.plan.codecs.items():
        layer = group.served.layers[number]
        assert {pools.pool(layer.pages.pool), pools.pool(layer.pages.ring)} == {"kv_cache"}
        assert {pools.pool(key.transform.mean), pools.pool(value.transform.mean)} == {"runtime"}
    for level in (1, 2):
        engine.llm.sleep(level)
        assert all((layer.pages.pool == 255).all() for layer in group.served.layers.values())
        engine.llm.wake_up()
        if level == 2:
            engine.llm.collective_rpc("reload_weights")
        assert engine.run(prompts) == before
    engine.close()
