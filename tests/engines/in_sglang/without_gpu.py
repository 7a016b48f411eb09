"""What SGLang lacks to run models with linear attention on a CPU."""

from typing import Any

import torch
from sgl_kernel import mamba as kernels
from sglang.kernels.ops.attention.fla import fused_norm_gate
from sglang.srt.arg_groups import mamba_hook
from sglang.srt.configs import update_config
from sglang.srt.environ import envs
from sglang.srt.layers.attention.mamba import mamba
from sglang.srt.models import lfm2
from torch import Tensor
from torch.nn.functional import silu


def run_without_gpu() -> None:
    """Let SGLang call kernels in plain PyTorch, and keep states of linear attention for prefixes."""
    lfm2.causal_conv1d_fn, lfm2.causal_conv1d_update = kernels.causal_conv1d_fn_cpu, kernels.causal_conv1d_update_cpu
    fused_norm_gate._use_cpu = True
    mamba.MambaMixer2.forward = stateless
    mamba_hook._platform_supports_mamba_cache_extra_buffer = lambda: True
    envs.SGLANG_MAMBA_CONV_DTYPE.set("float32")
    torch.Tensor.pin_memory = lambda tensor, *_: tensor
    update_config.update_intermediate_size = lambda config, *_: config  # it takes a number, and Gemma 3n has a list


def stateless(
    self: mamba.MambaMixer2, *, hidden_states: Tensor, output: Tensor | None = None, **_: Any
) -> tuple[Tensor, None, None]:
    """Stands in for Mamba, whose kernels are for GPUs alone: its gate, without its state."""
    projected, _ = self.in_proj(hidden_states)
    out, _ = self.out_proj(silu(projected[..., : self.intermediate_size // self.tp_size]))
    if output is not None:
        output.copy_(out)
    return out, None, None
