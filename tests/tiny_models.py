"""Tiny randomly initialised models, one of each class that kvfold must read."""

import torch
import transformers

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
MLA = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 4,
    "num_key_value_heads": 4,
}
# class: (configuration beside SIZES, RoPE layout, rotary_dim)
ARCHITECTURES = {
    "Llama": ({}, "half", 32),
    "Qwen2": ({"hidden_size": 128}, "half", 32),
    "Qwen3": ({}, "half", 32),
    "Qwen3Moe": ({**EXPERTS, "num_experts": 4}, "half", 32),
    "Mistral": ({"sliding_window": None}, "half", 32),
    "Glm": ({"partial_rotary_factor": 0.5}, "interleaved", 16),
    "Glm4": ({"partial_rotary_factor": 0.5}, "interleaved", 16),
    "Phi3": ({"hidden_size": 128, "partial_rotary_factor": 0.75}, "half", 24),
    "Gemma": ({"head_dim": 256, "num_key_value_heads": 1}, "half", 256),
    "DeepseekV2": ({**EXPERTS, **MLA}, "interleaved", 16),
}


def tiny(name: str = "Llama", **options: object) -> transformers.PreTrainedModel:
    """A model of a class by its name, with options added to its configuration."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **ARCHITECTURES[name][0], **options})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter_name, parameter in model.named_parameters():  # biases begin at 0 and norms at 1: stir them
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
        elif "embed" not in parameter_name:
            parameter.data *= 3
    return model


def random_tokens(n: int, seed: int = 1) -> torch.Tensor:
    """n of the vocabulary."""
    return torch.randint(1, 97, (n,), generator=torch.Generator().manual_seed(seed))
