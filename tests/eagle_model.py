"""A draft model of EAGLE for a model of Llama's."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, PreTrainedConfig


def random_layer(config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    """Small weights of a layer, but for its norms: it changes hidden states a little."""
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
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) / 50 for name, shape in shapes.items()}


def save_eagle(model: Path, folder: Path, architecture: str) -> None:
    """One layer, which drafts from the model's last hidden state, with some noise. Engines name the architecture in
    their own ways."""
    config = AutoConfig.from_pretrained(model)
    width = config.hidden_size
    tensors = {f"layers.0.{name}.weight": weight for name, weight in random_layer(config).items()}
    tensors["layers.0.post_attention_layernorm.weight"] = torch.ones(width)
    tensors["fc.weight"] = torch.cat((torch.zeros(width, width), torch.eye(width)), dim=1)
    tensors["fc.bias"] = torch.zeros(width)
    save_file(tensors, folder / "model.safetensors")
    changes = {"architectures": [architecture], "num_hidden_layers": 1, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config.to_dict() | changes))
