"""An attention backend of SGLang in plain PyTorch, for all of its models.

SGLang's own backend for CPUs knows neither sinks nor soft-caps, and in a pool of its own for sliding layers it reads
tokens from the places that they have in the other pool. Its Triton kernels are wrong in Triton's interpreter.
"""

from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from torch import Tensor

NAME = "triton"  # the backend that every model allows


class PlainBackend(AttentionBackend):
    def __init__(self, runner: ModelRunner) -> None:
        super().__init__()
        self.pool, self.requests = runner.token_to_kv_pool, runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool, self.req_to_token_pool = runner.token_to_kv_pool, runner.req_to_token_pool

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        sliding = layer.sliding_window_size > -1 and isinstance(self.pool, SWAKVPool)
        if save_kv_cache and k is not None:
            elsewhere = self.pool.translate_loc_from_full_to_swa(batch.out_cache_loc) if sliding else None
            self.pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, elsewhere), k, v)
        keys, values = self.pool.get_kv_buffer(layer.layer_id)
        q = q.view(-1, layer.tp_q_head_num, layer.head_dim).float()
        counts = [1] * len(batch.seq_lens) if batch.forward_mode.is_decode() else batch.extend_seq_lens.tolist()
        out = []
        for row, length, queries in zip(batch.req_pool_indices, batch.seq_lens.tolist(), q.split(counts), strict=True):
            places = self.requests[row, :length].long()
            if sliding:
                places = self.pool.translate_loc_from_full_to_swa(places)
            out.append(attend(queries, keys[places].float(), values[places].float(), layer, sinks))
        return torch.cat(out).flatten(1).to(torch.float32 if v is None else v.dtype)

    forward_decode = forward_extend


def attend(q: Tensor, k: Tensor, v: Tensor, layer: RadixAttention, sinks: Tensor | None) -> Tensor:
    """Causal attention of the last tokens [n, heads, d] of a request over all of them."""
    ratio = layer.tp_q_head_num // layer.tp_k_head_num
    k, v = (x.repeat_interleave(ratio, dim=1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q, k) * layer.scaling
    if layer.logit_cap:
        logits = layer.logit_cap * torch.tanh(logits / layer.logit_cap)
    ahead = torch.arange(len(k)) - torch.arange(len(k) - len(q), len(k)).unsqueeze(1)
    hidden = ahead > 0
    if layer.sliding_window_size > -1:
        hidden |= ahead < -layer.sliding_window_size
    logits = logits.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        logits = torch.cat((logits, sinks.float()[:, None, None].expand(-1, len(q), 1)), dim=-1)
    weights = logits.softmax(dim=-1)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, v)


def attend_plainly() -> None:
    """Let SGLang use it."""
    ATTENTION_BACKENDS[NAME] = PlainBackend
