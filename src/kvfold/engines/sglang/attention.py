"""SGLang's attention over packed pages: the pool that holds them, and the backend that packs and attends."""

from logging import getLogger
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVCache
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from torch import Tensor

from kvfold.engines.serving import Plan, Served, Steps
from kvfold.ops.pages import HostLengths, Logits

logger = getLogger("sglang.kvfold")  # a child of SGLang's logger, so that it is shown


class PackedPool(KVCache):
    """Pages uint8[pages, kv_heads, page_bytes] per layer, and shadow pages for the windows. SGLang decides which token
    lies where. It reads no bytes."""

    def __init__(
        self,
        plan: Plan,
        shadow_pages: int,
        size: int,
        *,
        page_size: int,
        layer_num: int,
        device: str,
        enable_memory_saver: bool,
        start_layer: int | None,
        end_layer: int | None,
        **_: Any,
    ) -> None:
        # uint8, because SGLang's RoPE kernels write keys into a pool that has the dtype of K and V
        super().__init__(size, page_size, torch.uint8, layer_num, device, enable_memory_saver, start_layer, end_layer)
        pages = size // page_size + 1  # page 0 is SGLang's, for padding
        self.served = Served(plan, shadow_pages, logger)
        self.served.open(pages)
        for number, layout in plan.layouts.items():
            self.served.attach(number, layout.allocate(pages, plan.kv_heads, plan.device))
        self._finalize_allocation_log(size)
        self.served.announce(pages - 1)

    def get_kv_size_bytes(self) -> int:
        layers = self.served.layers.values()
        return sum(layer.pages.pool.nbytes + layer.pages.shadows.nbytes for layer in layers)

    def _packed(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("keys and values are packed: only kvfold's attention backend reads and writes them")

    get_key_buffer = get_value_buffer = get_kv_buffer = set_kv_buffer = _packed


class PackedBackend(AttentionBackend):
    needs_cpu_seq_lens = False

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__()
        if not isinstance(runner.token_to_kv_pool, PackedPool):
            raise ValueError(f"kvfold: SGLang made a {type(runner.token_to_kv_pool).__name__} instead of packed pages")
        for layer in runner.model.modules():
            if isinstance(layer, RadixAttention):
                refuse(layer)
        self.pool, self.served = runner.token_to_kv_pool, runner.token_to_kv_pool.served
        self.requests = runner.req_to_token_pool
        self.req_to_token = self.requests.req_to_token
        self.lengths = torch.zeros(len(self.req_to_token), dtype=torch.int32, device=runner.device)  # per request
        # per page of a request: the position of its first token
        self.firsts = torch.arange(0, self.req_to_token.shape[1], self.pool.page_size, device=runner.device)
        # kernels for GPUs read a step from device memory alone, so a CUDA graph can be captured
        self.captured = all(ops.decode.implementation in ("triton", "gluon") for ops in self.served.plan.ops.values())
        self.tables = self._table(0)
        self.table = self.tables  # of the step
        self.steps: Steps = []
        self.served.warm_up()

    def _table(self, requests: int) -> Tensor:
        return torch.zeros(requests, len(self.firsts), dtype=torch.int64, device=self.firsts.device)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the page tables that CUDA graphs read. The graphs make all else from tensors that SGLang keeps in
        place."""
        self.tables = self._table(max_bs)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """Before each step: update the gauges, and copy the page table out of `req_to_token`. While a CUDA graph is
        replayed, SGLang may already write the next step's locations to `req_to_token`."""
        if forward_batch.forward_mode.is_idle():
            return
        requests = forward_batch.req_pool_indices
        self.table = self.tables[: len(requests)] if len(requests) <= len(self.tables) else self._table(len(requests))
        self._read_pages(requests, self.table)
        resting = None
        if self.served.plan.windows:
            if not forward_batch.forward_mode.is_decode():  # new requests reuse the rows of finished ones
                self.lengths[requests] = forward_batch.extend_prefix_lens.int()
            resting = self._resting(forward_batch)
        self.served.before_step(resting)

    def _read_pages(self, requests: Tensor, table: Tensor) -> None:
        tokens = self.req_to_token[requests.unsqueeze(1), self.firsts]
        torch.div(tokens, self.pool.page_size, rounding_mode="floor", out=table)

    def _resting(self, forward_batch: ForwardBatch) -> tuple[Tensor, Tensor] | None:
        """Lengths and pages of all running requests, if some of them sit the step out:
        - requests that decode, during a prefill;
        - a prompt between two chunks, while others decode.
        """
        padding = 0 if isinstance(forward_batch, ForwardBatch) else forward_batch.num_padding  # for a CUDA graph
        free = self.requests.free_slots
        if len(self.lengths) - 1 - len(free) <= forward_batch.batch_size - padding:
            return None
        running = sorted(set(range(1, len(self.lengths))) - set(free))  # row 0 is for padding
        rows = torch.tensor(running, dtype=torch.int64, pin_memory=self.lengths.is_cuda)
        rows = rows.to(self.lengths.device, non_blocking=True)
        self._read_pages(rows, table := self._table(len(rows)))
        return self.lengths[rows], table

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Begin the step, on the device."""
        mode, table = forward_batch.forward_mode, self.table
        if mode.is_idle():
            return
        if mode.is_decode() and self.captured:
            self._begin_decode(forward_batch)
            return
        lengths, locations = forward_batch.seq_lens, forward_batch.out_cache_loc
        starts = lengths - 1 if mode.is_decode() else forward_batch.extend_prefix_lens
        locations = torch.where(locations < self.pool.page_size, -1, locations)  # page 0 is for padding
        if self.served.plan.windows:
            self.lengths[forward_batch.req_pool_indices] = lengths.int()
            kept = torch.where(locations < 0, 0, lengths) if mode.is_decode() else lengths  # padding needs no windows
            self.served.begin(locations, torch.minimum(starts, kept), kept, table)
        starts, lengths = starts.int(), lengths.int()
        if mode.is_decode():
            host = HostLengths(starts.tolist(), lengths.tolist())
        else:
            before = forward_batch.extend_prefix_lens_cpu
            after = [start + n for start, n in zip(before, forward_batch.extend_seq_lens_cpu, strict=True)]
            host = HostLengths(before, after)
        self.steps = self.served.steps(host, locations, starts, lengths, table)

    def _begin_decode(self, forward_batch: ForwardBatch) -> None:
        """Begin a step with one token per request. It takes few launches, since every decode step pays for them."""
        from kvfold.engines.sglang.decode_inputs import decode_inputs

        locations, requests = forward_batch.out_cache_loc, forward_batch.req_pool_indices
        step = decode_inputs(locations, forward_batch.seq_lens, requests, self.lengths, self.pool.page_size)
        self.served.begin(step.locations, step.kept_starts, step.kept_lengths, self.table)
        described = (step.locations, step.query_starts, step.starts, step.lengths)
        self.steps = [self.served.decode(*described, self.table)]

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **others: Any,
    ) -> Tensor:
        if k is None or v is None or not save_kv_cache or any(other is not None for other in others.values()):
            raise ValueError(f"kvfold: layer {layer.layer_id} wants another attention than can run over packed pages")
        queries = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        out = torch.empty_like(queries)
        self.served.layers[layer.layer_id].attend(self.steps, queries, k, v, Logits(layer.scaling), out)
        return out.flatten(1)

    forward_decode = forward_extend


def refuse(layer: RadixAttention) -> None:
    unsupported = {
        "a sliding window": layer.sliding_window_size > -1,
        "logit soft-capping": layer.logit_cap > 0,
        "a temperature of its own": layer.xai_temperature_len > 0,
        "values of another size than keys": layer.v_head_dim != layer.head_dim,
        "bidirectional or cross attention": layer.is_cross_attention or layer.attn_type != AttentionType.DECODER,
    }
    for what, applies in unsupported.items():
        if applies:
            raise ValueError(f"kvfold: attention with {what} in layer {layer.layer_id} cannot run over packed pages")
