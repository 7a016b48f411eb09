"""SGLang's attention over packed pages, and beside layers that are not packed."""

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from torch import Tensor

from kvfold.engines.serving import Plan
from kvfold.engines.sglang import logger
from kvfold.engines.sglang.packed_pool import packed_pool_of
from kvfold.ops.pages import HostLengths, Logits
from kvfold.paged.layer import Steps


class PackedBackend(AttentionBackend):
    needs_cpu_seq_lens = False

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__()
        self.token_to_kv_pool, self.req_to_token_pool = runner.token_to_kv_pool, runner.req_to_token_pool
        self.pool = packed_pool_of(runner.token_to_kv_pool)
        self.served = self.pool.served
        packed = [
            layer
            for layer in runner.model.modules()
            if isinstance(layer, RadixAttention) and layer.layer_id in self.served.layers
        ]
        for layer in packed:
            check(layer, self.served.plan)
        if any(scale not in (None, 1) for layer in packed for scale in (layer.k_scale_float, layer.v_scale_float)):
            logger.info("kvfold: packed layers ignore the checkpoint's scales of an FP8 cache")
        self.req_to_token = self.req_to_token_pool.req_to_token
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

    get_cpu_graph_seq_len_fill_value = get_cuda_graph_seq_len_fill_value

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """Before each step: update the gauges, and copy the page table out of `req_to_token`. While a CUDA graph is
        replayed, SGLang may already write the next step's locations to `req_to_token`."""
        if not requests_in(forward_batch):
            return
        requests = forward_batch.req_pool_indices
        self.table = self.tables[: len(requests)] if len(requests) <= len(self.tables) else self._table(len(requests))
        tokens = self.req_to_token[requests.unsqueeze(1), self.firsts]
        torch.div(tokens, self.pool.page_size, rounding_mode="floor", out=self.table)
        self.served.gauges.update([self.served.faults])

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Begin the step, on the device."""
        mode, table = forward_batch.forward_mode, self.table
        if not requests_in(forward_batch):
            self.steps = []
            return
        one_by_one = mode.is_decode() or mode.is_target_verify()  # with as many drafts each
        if one_by_one and self.captured:
            self._begin_decode(forward_batch)
            return
        locations = forward_batch.out_cache_loc
        locations = torch.where(locations < self.pool.page_size, -1, locations)  # page 0 is for padding
        starts, lengths = starts_of(forward_batch), forward_batch.seq_lens
        if one_by_one:
            drafted = locations.view(len(lengths), -1)
            starts = torch.where(drafted[:, 0] < 0, 0, starts)  # padding reads no page
            lengths = starts + drafted.shape[1]
        starts, lengths = starts.int(), lengths.int()
        if one_by_one:
            host = HostLengths(starts.tolist(), lengths.tolist())
        else:
            before = forward_batch.extend_prefix_lens_cpu
            after = [start + n for start, n in zip(before, forward_batch.extend_seq_lens_cpu, strict=True)]
            host = HostLengths(before, after)
        self.steps = self.served.steps(host, locations, starts, lengths, table, rings_of(forward_batch))

    def _begin_decode(self, forward_batch: ForwardBatch) -> None:
        """Begin a step with one token per request, or with one and its drafts. It takes few launches, since every
        decode step pays for them."""
        from kvfold.engines.sglang.decode_inputs import decode_inputs

        locations, lengths = forward_batch.out_cache_loc, forward_batch.seq_lens
        counted = 1 if forward_batch.forward_mode.is_decode() else 0
        step = decode_inputs(locations, lengths, self.pool.page_size, counted)
        self.steps = [self.served.decode(*step, self.table, rings_of(forward_batch), len(locations) // len(lengths))]

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        if any(other is not None for other in others.values()) or (k is not None and not save_kv_cache):
            raise ValueError(f"kvfold: layer {layer.layer_id} wants another attention than can run over packed pages")
        queries = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        out = queries.new_empty(*queries.shape[:2], layer.v_head_dim)
        if not self.steps:  # padding alone
            return out.zero_().flatten(1)
        logits = Logits(layer.scaling, layer.logit_cap or None, None if sinks is None else sinks.float())
        target = self.served.layers[layer.layer_id]
        self.pool.wait_for(layer.layer_id - self.pool.start_layer)
        if k is None or v is None:  # a layer without a cache of its own has the number of the one whose pages it reads
            target.read(self.steps, queries, logits, out)
        else:
            target.attend(self.steps, queries, k, v, logits, out)
        return out.flatten(1)

    forward_decode = forward_extend


def requests_in(forward_batch: ForwardBatch) -> int:
    """How many requests a step has, without padding. SGLang pads for CUDA graphs, and in data-parallel attention up to
    the steps of other ranks. There it may call the padding of an idle rank a prompt."""
    if not isinstance(forward_batch, ForwardBatch):  # what SGLang gives before a CUDA graph is replayed
        return int(forward_batch.batch_size - forward_batch.num_padding)
    unpadded = forward_batch._original_batch_size
    return forward_batch.batch_size if unpadded is None else unpadded


def rings_of(forward_batch: ForwardBatch) -> Tensor:
    """A request's ring has the number of its row in SGLang's table of requests. Row 0 is for padding."""
    return forward_batch.req_pool_indices.long().unsqueeze(1)


def starts_of(forward_batch: ForwardBatch) -> Tensor:
    """How many tokens each request has before the step. SGLang's lengths include new tokens, but no drafts."""
    if forward_batch.forward_mode.is_decode():
        return forward_batch.seq_lens - 1
    if forward_batch.forward_mode.is_target_verify():
        return forward_batch.seq_lens
    return forward_batch.extend_prefix_lens


def check(layer: RadixAttention, plan: Plan) -> None:
    """Refuse a layer of the model that cannot run over the plan's packed pages."""
    shape = plan.geometry.shape
    unsupported = {
        "a sliding window": layer.sliding_window_size > -1,
        "chunks": layer.use_irope,
        "a temperature of its own": layer.xai_temperature_len > 0,
        "bidirectional or cross attention": layer.is_cross_attention or layer.attn_type != AttentionType.DECODER,
        "heads of another number or size than its configuration says": (
            (layer.tp_k_head_num, layer.head_dim, layer.v_head_dim) != (plan.kv_heads, shape.key_dim, shape.value_dim)
        ),
    }
    for what, applies in unsupported.items():
        if applies:
            raise ValueError(f"kvfold: attention with {what} in layer {layer.layer_id} cannot run over packed pages")


class MixedBackend(AttentionBackend):
    """Packed layers run in `packed`, all others in the backend that SGLang chose."""

    def __init__(self, packed: PackedBackend, other: AttentionBackend) -> None:
        super().__init__()
        self.packed, self.other = packed, other
        self.attn_backend_list = [packed, other]
        for name in ("needs_cpu_seq_lens", "extend_dummy_seqs_capped_by_req_pool"):
            setattr(self, name, getattr(other, name, False))

    def __getattr__(self, name: str) -> Any:
        """What SGLang and its models ask of a particular backend."""
        return getattr(self.other, name)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for backend in self.attn_backend_list:
            backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return self.other.get_cuda_graph_seq_len_fill_value()

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        for backend in self.attn_backend_list:
            backend.init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        for backend in self.attn_backend_list:
            backend.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        for backend in self.attn_backend_list:
            backend.init_forward_metadata_in_graph(forward_batch)

    def on_after_cuda_graph_warmup(self) -> None:
        self.other.on_after_cuda_graph_warmup()

    def forward(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: RadixAttention, *arguments: Any, **options: Any
    ) -> Tensor:
        backend = self.packed if layer.layer_id in self.packed.served.layers else self.other
        return backend.forward(q, k, v, layer, *arguments, **options)
