"""Gated linear attention (GDN) by its definition, in any dtype.

vLLM's own for CPUs is for bfloat16 alone, and runs only where the CPU has instructions for it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus
from vllm import _custom_ops as ops
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.model_executor.models.qwen3_next import Qwen3NextForCausalLM
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name


def gates(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """How much of the state stays, as a logarithm, and how much of a token goes in: float32[1, tokens, heads]."""
    stays = -A_log.float().exp() * softplus(a.float() + dt_bias.float())
    return stays.unsqueeze(0), b.float().sigmoid().unsqueeze(0)


def attend(query, key, value, g, beta, initial_state, initial_state_indices, cu_seqlens, **_) -> tuple[Tensor, Tensor]:
    """Tokens [1, tokens, heads, d] of several sequences, one after the other. States [slots, heads, d_k, d_v] change in
    place."""
    times, ends = value.shape[2] // key.shape[2], cu_seqlens.tolist()
    q, k = (normalize(x[0].float(), dim=-1).repeat_interleave(times, dim=1) for x in (query, key))
    v, out = value[0].float(), torch.empty_like(value[0])
    for slot, first, end in zip(initial_state_indices.tolist(), ends[:-1], ends[1:], strict=True):
        state = initial_state[slot].float()
        for t in range(first, end):
            state = state * g[0, t].exp()[:, None, None]
            new = beta[0, t].unsqueeze(1) * (v[t] - torch.einsum("hk,hkv->hv", k[t], state))
            state = state + torch.einsum("hk,hv->hkv", k[t], new)
            out[t] = torch.einsum("hk,hkv->hv", q[t], state) * k.shape[-1] ** -0.5
        initial_state[slot] = state
    return out.unsqueeze(0), initial_state


def decode(A_log, dt_bias, q, k, v, a, b, initial_state_source, initial_state_indices, **more) -> Tensor:
    g, beta = gates(A_log, a, b, dt_bias)
    return attend(q, k, v, g, beta, initial_state_source, initial_state_indices, **more)[0].transpose(0, 1)


def core(mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: LayerNameType) -> None:
    context = get_forward_context()
    if context.attn_metadata is not None:
        layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
        step = context.attn_metadata[layer.prefix]
        gdn_attention._cpu_gdn_attention_nonspec(layer, step, mixed_qkv, b, a, core_attn_out)


@contextmanager
def defined_gdn() -> Iterator[None]:
    """For Qwen3-Next, also without experts: vLLM's are for bfloat16 too."""
    patches = (
        (torch.cpu, "_is_avx512_bf16_supported", lambda: False),
        (gdn_attention, "is_arm_bf16", lambda: False),
        (gdn_attention, "cpu_gdn_attention_core", core),  # vLLM registers it with the first layer
        (ops, "fused_gdn_gating_cpu", gates),
        (ops, "chunk_gated_delta_rule_cpu", attend),
        (ops, "fused_sigmoid_gating_delta_rule_update_cpu", decode),
        (Qwen3NextForCausalLM, "set_moe_parameters", lambda _: None),
    )
    with ExitStack() as stack:
        for patched in patches:
            stack.enter_context(patch.object(*patched))
        yield
