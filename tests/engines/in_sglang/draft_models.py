"""A draft model of EAGLE, and what SGLang lacks to run draft models on a CPU."""

import json
from pathlib import Path
from typing import Any

import torch
from plain_attention import NAME, PlainBackend
from safetensors.torch import save_file
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.speculative.draft_utils import DraftBackendFactory
from torch import Tensor
from transformers import AutoConfig


def save_eagle(model: Path, folder: Path) -> dict[str, Any]:
    """A draft model of one layer, for a model of Llama's: it drafts from the model's last hidden state, with some
    noise. Returns SGLang's arguments for chains of three drafts."""
    config, generator = AutoConfig.from_pretrained(model), torch.Generator().manual_seed(0)
    width, inner, dims = config.hidden_size, config.intermediate_size, config.head_dim
    shapes = {
        "self_attn.q_proj": (config.num_attention_heads * dims, width),
        "self_attn.k_proj": (config.num_key_value_heads * dims, width),
        "self_attn.v_proj": (config.num_key_value_heads * dims, width),
        "self_attn.o_proj": (width, config.num_attention_heads * dims),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    weights = {name: torch.randn(shape, generator=generator) / 50 for name, shape in shapes.items()}
    tensors = {f"layers.0.{name}.weight": weight for name, weight in weights.items()}
    tensors["layers.0.post_attention_layernorm.weight"] = torch.ones(width)
    tensors["fc.weight"] = torch.cat((torch.zeros(width, width), torch.eye(width)), dim=1)
    tensors["fc.bias"] = torch.zeros(width)
    save_file(tensors, folder / "model.safetensors")
    changes = {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config.to_dict() | changes))
    return {
        "speculative_algorithm": "EAGLE",
        "speculative_draft_model_path": str(folder),
        "speculative_eagle_topk": 1,
        "speculative_num_steps": 3,
        "speculative_num_draft_tokens": 4,
        "speculative_draft_attention_backend": NAME,
    }


class Extending(PlainBackend):
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """There is none."""


class Drafting(Extending):
    """One step of drafts. SGLang's lengths are those before the first step."""

    def __init__(self, runner: ModelRunner, step: int) -> None:
        super().__init__(runner)
        self.step = step

    def forward_decode(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: ForwardBatch, **_: Any) -> Tensor:
        before, batch.seq_lens = batch.seq_lens, batch.seq_lens + self.step + 1
        out = self.forward_extend(q, k, v, layer, batch)
        batch.seq_lens = before
        return out


class Steps:
    def __init__(self, factory: DraftBackendFactory) -> None:
        steps = range(factory.speculative_num_steps)
        self.attn_backends = [Drafting(factory.draft_model_runner, step) for step in steps]

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """There is none."""


def draft_plainly() -> None:
    """Let draft models of SGLang attend in plain PyTorch."""
    DraftBackendFactory._create_triton_decode_backend = lambda factory: (NAME, Steps(factory))
    DraftBackendFactory._create_triton_prefill_backend = lambda factory: (NAME, Extending(factory.draft_model_runner))
