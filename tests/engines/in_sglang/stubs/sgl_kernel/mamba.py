"""Kernels of linear attention in plain PyTorch, one token after the other."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, silu, softplus

CHUNK = 64  # tokens between two states that SGLang can keep for its prefix cache


def causal_conv1d_fn_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    query_start_loc: Tensor,
    cache_indices: Tensor,
    has_initial_state: Tensor,
    conv_states: Tensor,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """Each channel of x [channels, tokens] with its own weight [channels, width]. States hold the last tokens."""
    out, before = torch.empty_like(x), weight.shape[1] - 1
    for row, slot in enumerate(cache_indices.tolist()):
        tokens = slice(query_start_loc[row], query_start_loc[row + 1])
        past = conv_states[slot] * has_initial_state[row]
        line = torch.cat((past.to(x.dtype), x[:, tokens]), dim=1)
        out[:, tokens] = (line.unfold(1, before + 1, 1) * weight.unsqueeze(1)).sum(dim=-1)
        conv_states[slot] = line[:, -before:].to(conv_states.dtype)
    return _finish(out, None if bias is None else bias.unsqueeze(1), activation)


def causal_conv1d_update_cpu(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: Tensor,
    **_: Any,
) -> Tensor:
    """The same for one token per request, x [requests, channels]."""
    slots = conv_state_indices.long()
    line = torch.cat((conv_state[slots].to(x.dtype), x.unsqueeze(-1)), dim=-1)
    conv_state[slots] = line[..., 1:].to(conv_state.dtype)
    return _finish((line * weight).sum(dim=-1), bias, activation)


def _finish(x: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    x = x if bias is None else x + bias
    return silu(x) if activation == "silu" else x


def fused_gdn_gating_cpu(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Logarithms of decays, and strengths: [1, tokens, heads]."""
    decay = -A_log.float().exp() * softplus(a.float() + dt_bias)
    return decay.unsqueeze(0), b.float().sigmoid().unsqueeze(0)


def fused_rmsnorm_gated_cpu(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    normed = x.float() * torch.rsqrt(x.float().square().mean(dim=-1, keepdim=True) + eps)
    return (normed * weight * silu(gate.float())).to(x.dtype)


def chunk_gated_delta_rule_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    **_: Any,
) -> tuple[Tensor, None, Tensor]:
    """Outputs of queries [1, tokens, heads, d]; and the states before every CHUNK tokens of a request."""
    ratio = v.shape[2] // k.shape[2]
    q, k = (normalize(x[0].float(), dim=-1).repeat_interleave(ratio, dim=1) for x in (q, k))
    q, v, g, beta = q * q.shape[-1] ** -0.5, v[0].float(), g[0], beta[0].float()
    out, kept = torch.empty_like(v), []
    for row, slot in enumerate(initial_state_indices.tolist()):
        state = initial_state[slot].float()  # [heads, d of values, d of keys]
        for n, token in enumerate(range(cu_seqlens[row], cu_seqlens[row + 1])):
            if n % CHUNK == 0:
                kept.append(state)
            state = state * g[token].exp()[:, None, None]
            error = v[token] - torch.einsum("hvk,hk->hv", state, k[token])
            state = state + torch.einsum("hv,hk->hvk", beta[token].unsqueeze(-1) * error, k[token])
            out[token] = torch.einsum("hvk,hk->hv", state, q[token])
        initial_state[slot] = state.to(initial_state.dtype)
    return out.unsqueeze(0), None, torch.stack(kept).unsqueeze(0)


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    **_: Any,
) -> Tensor:
    """The outputs for one token per request."""
    states = {"initial_state": initial_state_source, "initial_state_indices": initial_state_indices}
    gates = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    out, *_ = chunk_gated_delta_rule_cpu(q, k, v, *gates, **states, cu_seqlens=cu_seqlens)
    return out
