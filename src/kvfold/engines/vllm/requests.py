"""Which running requests sit a step out, from what vLLM's scheduler sends to a worker.

A running request sits a step out:
- when others use up the token budget;
- when its prompt waits between two chunks;
- when its session waits for input.

The worker is not told. The step just does not name the request.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvfold.ops.pages import on_device

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class Requests:
    def __init__(self) -> None:
        self.blocks: dict[str, list[list[int]]] = {}  # per running request and group of layers
        # per running request that sits the step out: how many tokens it has at least, and at most
        self.resting: dict[str, tuple[int, int]] = {}
        self._last: SchedulerOutput | None = None
        self._described: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # per group

    def follow(self, step: "SchedulerOutput") -> None:
        """Record a step before it runs."""
        before = dict(self.resting)
        for name in (*step.finished_req_ids, *(step.preempted_req_ids or ())):
            self.blocks.pop(name, None)
            self.resting.pop(name, None)
        if self._last is not None:
            left = (self._last.num_scheduled_tokens.keys() - step.num_scheduled_tokens.keys()) & self.blocks.keys()
            if left:
                self.resting |= {name: length for name, length in _lengths(self._last).items() if name in left}
        for name in self.resting.keys() & step.num_scheduled_tokens.keys():
            del self.resting[name]
        for new in step.scheduled_new_reqs:
            self.blocks[new.req_id] = [list(blocks) for blocks in new.block_ids]
        cached = step.scheduled_cached_reqs
        for name, groups in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self.blocks[name] = [list(blocks) for blocks in groups]
            elif groups:
                for held, blocks in zip(self.blocks[name], groups, strict=True):
                    held += blocks
        self._last = step
        if self.resting != before:
            self._described.clear()

    def described(self, group: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Least and most tokens [requests] and blocks [requests, blocks] of the resting requests, in device memory."""
        if group not in self._described:
            bounds = list(zip(*self.resting.values(), strict=True))
            rows = [torch.tensor(self.blocks[name][group], device="cpu") for name in self.resting]
            least, most = on_device(bounds, device, torch.int64)
            table = on_device(pad_sequence(rows, batch_first=True), device, torch.int64)
            self._described[group] = least, most, table
        return self._described[group]


def _lengths(step: "SchedulerOutput") -> dict[str, tuple[int, int]]:
    """Tokens per request after a step, without its drafts and with them: some may be rejected."""
    cached = step.scheduled_cached_reqs
    computed = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
    computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    most = {name: tokens + step.num_scheduled_tokens[name] for name, tokens in computed.items()}
    drafts = step.scheduled_spec_decode_tokens
    return {name: (length - len(drafts.get(name, ())), length) for name, length in most.items()}
