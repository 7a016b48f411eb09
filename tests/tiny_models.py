"""Tiny randomly initialised models, one of each class that kvfold must read."""

from typing import Any

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
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
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
}
SLIDING = {"sliding_window": 12}
SHARED = {
    **SLIDING,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 8,
}
# Models with other layers than full attention, or with other softmax: configuration beside SIZES, packed layers.
HYBRIDS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "Gemma2": ({**SLIDING, "num_hidden_layers": 4, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 3.0}, (1, 3)),
    "Gemma3": ({**SLIDING, "num_hidden_layers": 6, "sliding_window_pattern": 3}, (2, 5)),
    "Gemma3n": (
        {**SHARED, "intermediate_size": [32] * 6, "activation_sparsity_pattern": [0.0] * 6, "laurel_rank": 4},
        (2,),
    ),
    "Gemma4": ({**SHARED, "global_head_dim": 64}, (2,)),
    "GptOss": ({**SLIDING, **EXPERTS, "num_hidden_layers": 4, "num_local_experts": 4}, (1, 3)),
    "MiMoV2Flash": (
        {
            **SLIDING,
            **EXPERTS,
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "v_head_dim": 24,
            "n_routed_experts": 4,
        },
        (0, 3),
    ),
    "Olmo3": ({**SLIDING, "num_hidden_layers": 4, "eos_token_id": 1}, (3,)),
    "Llama4": (
        {
            "num_hidden_layers": 4,
            "attention_chunk_size": 12,
            "no_rope_layers": [1, 1, 1, 0],
            "floor_scale": 8,
            "num_local_experts": 2,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 32,
        },
        (3,),
    ),
    "Qwen3Next": (
        {
            **EXPERTS,
            "num_hidden_layers": 4,
            "num_experts": 4,
            "shared_expert_intermediate_size": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "partial_rotary_factor": 0.5,
        },
        (3,),
    ),
    "Lfm2": ({"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2, "block_ff_dim": 32}, (1, 3)),
    "FalconH1": ({**MAMBA, "mamba_d_ssm": 128}, (0, 1)),
    "GraniteMoeHybrid": (
        {
            **MAMBA,
            **EXPERTS,
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "attention"] * 2,
            "num_local_experts": 4,
            "shared_intermediate_size": 32,
        },
        (1, 3),
    ),
    "NemotronH": (
        {
            "num_hidden_layers": 4,
            "hybrid_override_pattern": "M*-*",
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 1,
            "ssm_state_size": 8,
            "chunk_size": 16,
        },
        (1, 3),
    ),
}
# Classes whose configuration of a language model has a name of its own.
CONFIGS = {"Gemma3": "Gemma3Text", "Gemma3n": "Gemma3nText", "Gemma4": "Gemma4Text", "Llama4": "Llama4Text"}


def tiny(name: str = "Llama", **options: object) -> transformers.PreTrainedModel:
    """A model of a class by its name, with options added to its configuration."""
    torch.manual_seed(0)
    own = (ARCHITECTURES[name] if name in ARCHITECTURES else HYBRIDS[name])[0]
    config = getattr(transformers, f"{CONFIGS.get(name, name)}Config")(**{**SIZES, **own, **options})
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
