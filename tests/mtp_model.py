"""MiMo, which has a layer for multi-token prediction (MTP), made of a model of Llama's."""

import json
from pathlib import Path

import torch
from eagle_model import random_layer
from safetensors.torch import load_file, save_file
from torch.nn.functional import rms_norm
from transformers import AutoModelForCausalLM


@torch.no_grad()
def save_mimo(model: Path, folder: Path, text: list[int]) -> None:
    """It computes what the model computes. Its layers have biases, which are 0. The last norm is a part of the head, so
    that hidden states are wanted without it.

    The layer that drafts guesses the next hidden state from the last one and from the next token: by least squares over
    the text, with some noise."""
    tensors = load_file(model / "model.safetensors")
    norm, embedding = tensors["model.norm.weight"], tensors["model.embed_tokens.weight"]
    given, tokens = AutoModelForCausalLM.from_pretrained(model), torch.tensor(text).view(-1, 64)
    config, width = given.config, norm.shape
    hidden, embedded = rms_norm(given.model(tokens)[0] / norm, width), rms_norm(embedding[tokens], width)
    last, wanted = torch.cat((hidden[:, :-1], embedded[:, 1:]), dim=-1), hidden[:, 1:]
    drafts = {f"{name}.weight": weight for name, weight in random_layer(config).items()}
    drafts["input_proj.weight"] = torch.linalg.lstsq(last.flatten(0, 1), wanted.flatten(0, 1)).solution.T.contiguous()
    for name in ("input", "post_attention", "token", "hidden", "final"):
        drafts[f"{name}_layernorm.weight"] = torch.ones(width)
    tensors |= {f"model.mtp_layers.0.{name}": tensor for name, tensor in drafts.items()}
    tensors |= {"lm_head.weight": embedding * norm, "model.norm.weight": torch.ones(width)}
    for name in [name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        tensors[name.replace("weight", "bias")] = torch.zeros(len(tensors[name]))
    save_file(tensors, folder / "model.safetensors")
    changes = {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",  # MiMo's own type is not known to transformers
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config.to_dict() | changes))
