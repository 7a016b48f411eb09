"""Real models: the published fields of their configurations that a geometry needs, and what the geometry must be.

Both were written by hand, from each model's config.json and from the code of the engines that run it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
ENGINES = ("transformers", "vLLM", "SGLang")


@dataclass(frozen=True)
class Model:
    """`packed` has the layers that kvfold packs; `sliding`, `chunked`, `linear` those that the engine keeps.

    `shared` has the target of each layer that reads the cache of another. Heads and dimensions are of packed layers;
    `windowed` has query heads, KV heads, key and value dimensions of sliding layers where they are others.
    A model with `refused` is refused with this reason. `engines` have code for the model, with kvfold or without;
    `refused_by` has the reasons why kvfold refuses it in single engines.
    """

    family: str
    config: Mapping[str, Any]
    packed: Sequence[int] = ()
    sliding: Sequence[int] = ()
    chunked: Sequence[int] = ()
    linear: Sequence[int] = ()
    shared: Mapping[int, int] = field(default_factory=dict)
    q_heads: int = 0
    kv_heads: int = 0
    key_dim: int = 128
    value_dim: int = 128
    sink: bool = False
    cap: float | None = None
    windowed: tuple[int, int, int, int] | None = None
    refused: str | None = None
    engines: Sequence[str] = ENGINES
    refused_by: Mapping[str, str] = field(default_factory=dict)


def text(**fields: Any) -> dict[str, Any]:
    """The fields of a language model, under the short names of this file."""
    names = {
        "layers": "num_hidden_layers",
        "q": "num_attention_heads",
        "kv": "num_key_value_heads",
        "hidden": "hidden_size",
        "context": "max_position_embeddings",
    }
    return {names.get(name, name): value for name, value in fields.items()}


def config(architecture: str, model_type: str, **fields: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type, **text(**fields)}


def every(period: int, layers: int) -> list[int]:
    """The last layer of every `period` layers."""
    return list(range(period - 1, layers, period))


def rest(layers: int, *taken: Sequence[int]) -> list[int]:
    """The layers that are not taken."""
    return sorted(set(range(layers)).difference(*taken))


def kinds(layers: int, other: str, full: Sequence[int], full_word: str = FULL) -> list[str]:
    """The field `layer_types`."""
    return [full_word if layer in full else other for layer in range(layers)]


PLAIN = "Llama, Qwen2 and 3, Mistral, Phi-4, GLM-4, MiniMax-M2, SmolLM3"
GEMMA = "Gemma 2 and 3"
GEMMA_4 = "Gemma 4"
SHARED = "Gemma 3n and 4-E (shared caches)"
GPT_OSS = "gpt-oss"
MIMO = "MiMo-V2"
SLIDING_HYBRIDS = "Olmo 3, EXAONE 4, Command A and R7B, Step-3.5"
LLAMA_4 = "Llama 4"
QWEN_HYBRIDS = "Qwen3-Next, Qwen3.5 to 3.8"
MAMBA = "Granite 4-H, Nemotron-H and 3, Jamba, Bamba"
FALCON_H1 = "Falcon-H1"
LFM2 = "LFM2"
MINIMAX_1 = "MiniMax-Text-01"
VISION = "Qwen2.5-VL, Qwen3-VL, Mistral Small 3.2, InternVL3, Step3"
MLA = "DeepSeek V2 and V3, Kimi K2, Kimi-Linear, GLM-4.7-Flash, GLM-5, Ring-2.5 (MLA)"
SPARSE = "DeepSeek V4, MiniMax-M3, Qwen4-Exp (sparse attention)"
ALL_SLIDING = "Mistral-7B-v0.1, Phi-3-mini (every layer slides)"
RECURRENT = "Mamba, RWKV"
CROSS = "Llama-3.2-Vision, T5 (cross attention)"
OTHER = "Falcon-40B, ChatGLM, Nemotron-NAS, MPT, BLOOM"

MLA_REASON = (
    "multi-head latent attention (MLA) caches one latent vector of 512 and one RoPE key of 64 numbers "
    "per token for all heads together, which cannot be packed yet: see docs/mla.md"
)
SPARSE_REASON = "sparse attention is not supported"
SLIDING_REASON = "all its layers are sliding: there is no full attention, whose cache grows, to pack"
RECURRENT_REASON = "it has no attention, so there is no cache that grows to pack"

# fmt: off
PLAIN_MODELS = {
    "Llama-3.1-8B": Model(
        PLAIN, config("LlamaForCausalLM", "llama", layers=32, q=32, kv=8, hidden=4096, context=131072),
        packed=range(32), q_heads=32, kv_heads=8,
    ),
    "Qwen2.5-7B": Model(
        PLAIN,
        config(
            "Qwen2ForCausalLM", "qwen2", layers=28, q=28, kv=4, hidden=3584, context=131072, use_sliding_window=False,
            sliding_window=131072, max_window_layers=28,
        ),
        packed=range(28), q_heads=28, kv_heads=4,
    ),
    "Qwen3-8B": Model(
        PLAIN,
        config(
            "Qwen3ForCausalLM", "qwen3", layers=36, q=32, kv=8, head_dim=128, hidden=4096, context=40960,
            use_sliding_window=False, sliding_window=None, max_window_layers=36,
        ),
        packed=range(36), q_heads=32, kv_heads=8,
    ),
    "Qwen3-4B": Model(
        PLAIN,
        config("Qwen3ForCausalLM", "qwen3", layers=36, q=32, kv=8, head_dim=128, hidden=2560, context=40960),
        packed=range(36), q_heads=32, kv_heads=8,
    ),
    "Qwen3-32B": Model(
        PLAIN,
        config("Qwen3ForCausalLM", "qwen3", layers=64, q=64, kv=8, head_dim=128, hidden=5120, context=40960),
        packed=range(64), q_heads=64, kv_heads=8,
    ),
    "Qwen3-30B-A3B": Model(
        PLAIN,
        config(
            "Qwen3MoeForCausalLM", "qwen3_moe", layers=48, q=32, kv=4, head_dim=128, hidden=2048, context=40960,
            use_sliding_window=False, sliding_window=None, max_window_layers=48,
        ),
        packed=range(48), q_heads=32, kv_heads=4,
    ),
    "Mistral-Small-24B-2501": Model(
        PLAIN,
        config(
            "MistralForCausalLM", "mistral", layers=40, q=32, kv=8, head_dim=128, hidden=5120, context=32768,
            sliding_window=None,
        ),
        packed=range(40), q_heads=32, kv_heads=8,
    ),
    "Phi-4": Model(
        PLAIN,
        config(
            "Phi3ForCausalLM", "phi3", layers=40, q=40, kv=10, hidden=5120, context=16384, sliding_window=None,
            original_max_position_embeddings=16384,
        ),
        packed=range(40), q_heads=40, kv_heads=10,
    ),
    "SmolLM3-3B": Model(
        PLAIN,
        config(
            "SmolLM3ForCausalLM", "smollm3", layers=36, q=16, kv=4, hidden=2048, context=65536,
            layer_types=[FULL] * 36, no_rope_layers=[1, 1, 1, 0] * 9, no_rope_layer_interval=4,
            use_sliding_window=False, sliding_window=None, max_window_layers=28,
        ),
        packed=range(36), q_heads=16, kv_heads=4, engines=("transformers", "vLLM"),
    ),
    "GLM-4.7": Model(
        PLAIN,
        config("Glm4MoeForCausalLM", "glm4_moe", layers=92, q=96, kv=8, head_dim=128, hidden=5120, context=202752),
        packed=range(92), q_heads=96, kv_heads=8,
    ),
    "MiniMax-M2": Model(
        PLAIN,
        config(
            "MiniMaxM2ForCausalLM", "minimax_m2", layers=62, q=48, kv=8, head_dim=128, hidden=3072, context=196608,
            attn_type_list=[1] * 62,
        ),
        packed=range(62), q_heads=48, kv_heads=8,
    ),
    "EXAONE-4.0-1.2B": Model(
        SLIDING_HYBRIDS,
        config(
            "Exaone4ForCausalLM", "exaone4", layers=30, q=32, kv=8, head_dim=64, hidden=2048, context=65536,
            layer_types=[FULL] * 30, sliding_window=None, sliding_window_pattern=None,
        ),
        packed=range(30), q_heads=32, kv_heads=8, key_dim=64, value_dim=64,
    ),
}

SLIDING_MODELS = {
    "Gemma-2-9B": Model(
        GEMMA,
        config(
            "Gemma2ForCausalLM", "gemma2", layers=42, q=16, kv=8, head_dim=256, hidden=3584, context=8192,
            sliding_window=4096, attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
        ),
        packed=every(2, 42), sliding=range(0, 42, 2), q_heads=16, kv_heads=8, key_dim=256, value_dim=256, cap=50.0,
    ),
    "Gemma-3-270M": Model(
        GEMMA,
        config(
            "Gemma3ForCausalLM", "gemma3_text", layers=18, q=4, kv=1, head_dim=256, hidden=640, context=32768,
            sliding_window=512, _sliding_window_pattern=6, layer_types=kinds(18, SLIDING, every(6, 18)),
            attn_logit_softcapping=None,
        ),
        packed=[5, 11, 17], sliding=rest(18, [5, 11, 17]), q_heads=4, kv_heads=1, key_dim=256, value_dim=256,
    ),
    # these three leave fields to the defaults of transformers
    "Gemma-3-4B": Model(
        GEMMA,
        {
            "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
            "text_config": text(model_type="gemma3_text", layers=34, hidden=2560, sliding_window=1024),
            "vision_config": text(layers=27, q=16, hidden=1152),
        },
        packed=[5, 11, 17, 23, 29], sliding=rest(34, [5, 11, 17, 23, 29]), q_heads=8, kv_heads=4, key_dim=256,
        value_dim=256,
    ),
    "Gemma-3-12B": Model(
        GEMMA,
        {
            "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
            "text_config": text(model_type="gemma3_text", layers=48, q=16, kv=8, hidden=3840, sliding_window=1024),
            "vision_config": text(layers=27, q=16, hidden=1152),
        },
        packed=every(6, 48), sliding=rest(48, every(6, 48)), q_heads=16, kv_heads=8, key_dim=256, value_dim=256,
    ),
    "Gemma-3-27B": Model(
        GEMMA,
        {
            "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
            "text_config": text(
                model_type="gemma3_text", layers=62, q=32, kv=16, head_dim=128, hidden=5376, sliding_window=1024,
                query_pre_attn_scalar=168,
            ),
            "vision_config": text(layers=27, q=16, hidden=1152),
        },
        packed=every(6, 62), sliding=rest(62, every(6, 62)), q_heads=32, kv_heads=16,
    ),
    # keys and values of a full layer come from one projection; they still differ in the cache
    "Gemma-4-31B": Model(
        GEMMA_4,
        {
            "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4",
            "text_config": text(
                model_type="gemma4_text", layers=60, q=32, kv=16, head_dim=256, hidden=5376, context=262144,
                global_head_dim=512, num_global_key_value_heads=4, attention_k_eq_v=True, num_kv_shared_layers=0,
                sliding_window=1024, layer_types=kinds(60, SLIDING, every(6, 60)), final_logit_softcapping=30.0,
            ),
            "vision_config": text(layers=27, q=16, hidden=1152),
        },
        packed=every(6, 60), sliding=rest(60, every(6, 60)), q_heads=32, kv_heads=4, key_dim=512, value_dim=512,
        windowed=(32, 16, 256, 256),
    ),
    "Gemma-4-26B-A4B": Model(
        GEMMA_4,
        {
            "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4",
            "text_config": text(
                model_type="gemma4_text", layers=30, q=16, kv=8, head_dim=256, hidden=2816, context=262144,
                global_head_dim=512, num_global_key_value_heads=2, attention_k_eq_v=True, num_kv_shared_layers=0,
                sliding_window=1024, layer_types=kinds(30, SLIDING, every(6, 30)), final_logit_softcapping=30.0,
            ),
            "vision_config": text(layers=27, q=16, hidden=1152),
        },
        packed=every(6, 30), sliding=rest(30, every(6, 30)), q_heads=16, kv_heads=2, key_dim=512, value_dim=512,
        windowed=(16, 8, 256, 256),
    ),
    "gpt-oss-20b": Model(
        GPT_OSS,
        config(
            "GptOssForCausalLM", "gpt_oss", layers=24, q=64, kv=8, head_dim=64, hidden=2880, context=131072,
            sliding_window=128, layer_types=kinds(24, SLIDING, every(2, 24)),
        ),
        packed=range(1, 24, 2), sliding=range(0, 24, 2), q_heads=64, kv_heads=8, key_dim=64, value_dim=64, sink=True,
    ),
    "gpt-oss-120b": Model(
        GPT_OSS,
        config(
            "GptOssForCausalLM", "gpt_oss", layers=36, q=64, kv=8, head_dim=64, hidden=2880, context=131072,
            sliding_window=128, layer_types=kinds(36, SLIDING, every(2, 36)),
        ),
        packed=range(1, 36, 2), sliding=range(0, 36, 2), q_heads=64, kv_heads=8, key_dim=64, value_dim=64, sink=True,
    ),
    # only its sliding layers have sinks; `attention_chunk_size` means nothing here
    "MiMo-V2-Flash": Model(
        MIMO,
        config(
            "MiMoV2FlashForCausalLM", "mimo_v2_flash", layers=48, q=64, kv=4, head_dim=192, v_head_dim=128,
            hidden=4096, swa_num_attention_heads=64, swa_num_key_value_heads=8, swa_head_dim=192, swa_v_head_dim=128,
            hybrid_layer_pattern=[0 if layer in (0, *every(6, 48)) else 1 for layer in range(48)], context=262144,
            add_full_attention_sink_bias=False, add_swa_attention_sink_bias=True, attention_chunk_size=128,
            sliding_window=128, sliding_window_size=128, attention_value_scale=0.707,
        ),
        packed=[0, 5, 11, 17, 23, 29, 35, 41, 47], sliding=rest(48, [0, 5, 11, 17, 23, 29, 35, 41, 47]), q_heads=64,
        kv_heads=4, key_dim=192, windowed=(64, 8, 192, 128),
        refused_by={
            "vLLM": "values of another size than keys are not supported: vLLM gives such layers a backend of its own"
        },
    ),
    "Olmo-3-7B": Model(
        SLIDING_HYBRIDS,
        config(
            "Olmo3ForCausalLM", "olmo3", layers=32, q=32, kv=32, hidden=4096, context=65536, sliding_window=4096,
            layer_types=kinds(32, SLIDING, every(4, 32)),
        ),
        packed=every(4, 32), sliding=rest(32, every(4, 32)), q_heads=32, kv_heads=32,
    ),
    "EXAONE-4.0-32B": Model(
        SLIDING_HYBRIDS,
        config(
            "Exaone4ForCausalLM", "exaone4", layers=64, q=40, kv=8, head_dim=128, hidden=5120, context=131072,
            sliding_window=4096, sliding_window_pattern="LLLG", layer_types=kinds(64, SLIDING, every(4, 64)),
        ),
        packed=every(4, 64), sliding=rest(64, every(4, 64)), q_heads=40, kv_heads=8,
    ),
    "Command-R7B": Model(
        SLIDING_HYBRIDS,
        config(
            "Cohere2ForCausalLM", "cohere2", layers=32, q=32, kv=8, head_dim=128, hidden=4096, context=132096,
            sliding_window=4096, sliding_window_pattern=4,
        ),
        packed=every(4, 32), sliding=rest(32, every(4, 32)), q_heads=32, kv_heads=8,
    ),
    "Command-A": Model(
        SLIDING_HYBRIDS,
        config(
            "Cohere2ForCausalLM", "cohere2", layers=64, q=96, kv=8, head_dim=128, hidden=12288, context=131072,
            sliding_window=4096, layer_types=kinds(64, SLIDING, every(4, 64)),
        ),
        packed=every(4, 64), sliding=rest(64, every(4, 64)), q_heads=96, kv_heads=8,
    ),
    # its list of kinds goes on with the layers that predict further tokens
    "Step-3.5-Flash": Model(
        SLIDING_HYBRIDS,
        config(
            "Step3p5ForCausalLM", "step3p5", layers=45, q=64, num_attention_groups=8, head_dim=128, hidden=4096,
            layer_types=kinds(48, SLIDING, range(0, 48, 4)), sliding_window=512, context=262144,
            num_nextn_predict_layers=3,
            attention_other_setting={
                "attention_type": SLIDING, "num_attention_heads": 96, "num_attention_groups": 8, "head_dim": 128,
            },
        ),
        packed=range(0, 45, 4), sliding=rest(45, range(0, 45, 4)), q_heads=64, kv_heads=8,
        windowed=(96, 8, 128, 128), engines=("vLLM", "SGLang"),
    ),
    "Llama-4-Scout": Model(
        LLAMA_4,
        {
            "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4",
            "text_config": text(
                model_type="llama4_text", layers=48, q=40, kv=8, head_dim=128, hidden=5120, context=10485760,
                attention_chunk_size=8192, no_rope_layers=[],
            ),
            "vision_config": text(layers=34, q=16, hidden=1408),
        },
        packed=every(4, 48), chunked=rest(48, every(4, 48)), q_heads=40, kv_heads=8,
        refused_by={
            "vLLM": "chunked attention is not supported: vLLM does not tell its layers from those with full attention"
        },
    ),
}

LINEAR_MODELS = {
    "Qwen3-Next-80B-A3B": Model(
        QWEN_HYBRIDS,
        config(
            "Qwen3NextForCausalLM", "qwen3_next", layers=48, q=16, kv=2, head_dim=256, hidden=2048, context=262144,
            full_attention_interval=4, linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
            linear_value_head_dim=128, linear_conv_kernel_dim=4,
        ),
        packed=every(4, 48), linear=rest(48, every(4, 48)), q_heads=16, kv_heads=2, key_dim=256, value_dim=256,
    ),
    "Qwen3.8-27B": Model(
        QWEN_HYBRIDS,
        {
            "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
            "text_config": text(
                model_type="qwen3_5_text", layers=64, q=24, kv=4, head_dim=256, hidden=5120, context=262144,
                layer_types=kinds(64, LINEAR, every(4, 64)), full_attention_interval=4, linear_num_key_heads=16,
                linear_num_value_heads=48,
            ),
            "vision_config": {"depth": 27, "hidden_size": 1152, "num_heads": 16},
        },
        packed=every(4, 64), linear=rest(64, every(4, 64)), q_heads=24, kv_heads=4, key_dim=256, value_dim=256,
    ),
    "Qwen3.6-35B-A3B": Model(
        QWEN_HYBRIDS,
        {
            "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
            "text_config": text(
                model_type="qwen3_5_moe_text", layers=40, q=16, kv=2, head_dim=256, hidden=2048, context=262144,
                full_attention_interval=4, linear_num_key_heads=16, linear_num_value_heads=32,
            ),
            "vision_config": {"depth": 27, "hidden_size": 1152, "num_heads": 16},
        },
        packed=every(4, 40), linear=rest(40, every(4, 40)), q_heads=16, kv_heads=2, key_dim=256, value_dim=256,
    ),
    "Granite-4.0-H-Small": Model(
        MAMBA,
        config(
            "GraniteMoeHybridForCausalLM", "granitemoehybrid", layers=40, q=32, kv=8, hidden=4096, context=131072,
            layer_types=kinds(40, "mamba", [5, 15, 25, 35], "attention"), mamba_d_state=128, mamba_n_heads=128,
        ),
        packed=[5, 15, 25, 35], linear=rest(40, [5, 15, 25, 35]), q_heads=32, kv_heads=8,
    ),
    "Nemotron-H-8B": Model(
        MAMBA,
        config(
            "NemotronHForCausalLM", "nemotron_h", layers=52, q=32, kv=8, attention_head_dim=128, hidden=4096,
            hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", context=8192,
            mamba_num_heads=128, mamba_head_dim=64, ssm_state_size=128,
        ),
        packed=[7, 18, 29, 40], linear=rest(52, [7, 18, 29, 40]), q_heads=32, kv_heads=8,
    ),
    "Nemotron-3-Nano-30B-A3B": Model(
        MAMBA,
        config(
            "NemotronHForCausalLM", "nemotron_h", layers=52, q=32, kv=2, head_dim=128, hidden=2688, context=262144,
            hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", mamba_num_heads=64,
            mamba_head_dim=64, ssm_state_size=128,
        ),
        packed=[5, 12, 19, 26, 33, 42], linear=rest(52, [5, 12, 19, 26, 33, 42]), q_heads=32, kv_heads=2,
    ),
    "Jamba-1.5-Mini": Model(
        MAMBA,
        config(
            "JambaForCausalLM", "jamba", layers=32, q=32, kv=8, hidden=4096, context=262144, sliding_window=None,
            attn_layer_period=8, attn_layer_offset=4, expert_layer_period=2, expert_layer_offset=1, mamba_d_state=16,
        ),
        packed=[4, 12, 20, 28], linear=rest(32, [4, 12, 20, 28]), q_heads=32, kv_heads=8,
        engines=("transformers", "vLLM"),
    ),
    "Bamba-9B": Model(
        MAMBA,
        config(
            "BambaForCausalLM", "bamba", layers=32, q=32, kv=8, hidden=4096, context=262144,
            attn_layer_indices=[9, 18, 27], mamba_d_state=128, mamba_n_heads=128,
        ),
        packed=[9, 18, 27], linear=rest(32, [9, 18, 27]), q_heads=32, kv_heads=8, engines=("transformers",),
    ),
    # every layer has attention and, beside it, a recurrent state
    "Falcon-H1-7B": Model(
        FALCON_H1,
        config(
            "FalconH1ForCausalLM", "falcon_h1", layers=44, q=12, kv=2, head_dim=128, hidden=3072, context=262144,
            attn_layer_indices=None, mamba_d_ssm=3072, mamba_d_state=256, mamba_n_heads=24,
        ),
        packed=range(44), q_heads=12, kv_heads=2,
    ),
    "LFM2-1.2B": Model(
        LFM2,
        config(
            "Lfm2ForCausalLM", "lfm2", layers=16, q=32, kv=8, hidden=2048, context=128000,
            full_attn_idxs=[2, 5, 8, 10, 12, 14], conv_L_cache=3, block_dim=2048,
        ),
        packed=[2, 5, 8, 10, 12, 14], linear=rest(16, [2, 5, 8, 10, 12, 14]), q_heads=32, kv_heads=8, key_dim=64,
        value_dim=64,
    ),
    "LFM2-8B-A1B": Model(
        LFM2,
        config(
            "Lfm2MoeForCausalLM", "lfm2_moe", layers=24, q=32, kv=8, hidden=2048, context=128000, conv_L_cache=3,
            layer_types=kinds(24, "conv", [2, 6, 10, 14, 18, 21]),
        ),
        packed=[2, 6, 10, 14, 18, 21], linear=rest(24, [2, 6, 10, 14, 18, 21]), q_heads=32, kv_heads=8, key_dim=64,
        value_dim=64,
    ),
    "MiniMax-Text-01": Model(
        MINIMAX_1,
        config(
            "MiniMaxForCausalLM", "minimax", layers=80, q=64, kv=8, head_dim=128, hidden=6144, context=10240000,
            layer_types=kinds(80, LINEAR, every(8, 80)), linear_attn_alpha_factor=3.5565588200778455,
        ),
        packed=every(8, 80), linear=rest(80, every(8, 80)), q_heads=64, kv_heads=8, engines=("transformers",),
    ),
    "MiniMax-M1-80k": Model(
        MINIMAX_1,
        config(
            "MiniMaxM1ForCausalLM", "minimax_m1", layers=80, q=64, kv=8, head_dim=128, hidden=6144, context=10240000,
            attn_type_list=[0, 0, 0, 0, 0, 0, 0, 1] * 10,
        ),
        packed=every(8, 80), linear=rest(80, every(8, 80)), q_heads=64, kv_heads=8, engines=(),
    ),
}

SHARED_MODELS = {
    "Gemma-3n-E4B": Model(
        SHARED,
        {
            "architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n",
            "text_config": text(
                model_type="gemma3n_text", layers=35, q=8, kv=2, head_dim=256, hidden=2048, context=32768,
                layer_types=kinds(35, SLIDING, every(5, 35)), num_kv_shared_layers=15, sliding_window=512,
                final_logit_softcapping=30.0,
            ),
            "vision_config": {"hidden_size": 2048},
            "audio_config": {"hidden_size": 1536, "conf_num_attention_heads": 8},
        },
        packed=[4, 9, 14, 19], sliding=rest(20, [4, 9, 14, 19]),
        shared={layer: 19 if layer in (24, 29, 34) else 18 for layer in range(20, 35)}, q_heads=8, kv_heads=2,
        key_dim=256, value_dim=256,
    ),
    "Gemma-4-E4B": Model(
        SHARED,
        {
            "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4",
            "text_config": text(
                model_type="gemma4_text", layers=42, q=8, kv=2, head_dim=256, hidden=2560, context=131072,
                global_head_dim=512, num_global_key_value_heads=None, attention_k_eq_v=False, num_kv_shared_layers=18,
                sliding_window=512, layer_types=kinds(42, SLIDING, every(6, 42)), final_logit_softcapping=30.0,
            ),
            "audio_config": {"hidden_size": 1024},
        },
        packed=[5, 11, 17, 23], sliding=rest(24, [5, 11, 17, 23]),
        shared={layer: 23 if layer in (29, 35, 41) else 22 for layer in range(24, 42)}, q_heads=8, kv_heads=2,
        key_dim=512, value_dim=512, windowed=(8, 2, 256, 256),
    ),
}

VISION_MODELS = {
    # the fields of the language model are not nested
    "Qwen2.5-VL-7B": Model(
        VISION,
        {
            **config(
                "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", layers=28, q=28, kv=4, hidden=3584,
                context=128000, use_sliding_window=False, sliding_window=32768, max_window_layers=28,
            ),
            "vision_config": {"depth": 32, "hidden_size": 1280, "num_heads": 16},
        },
        packed=range(28), q_heads=28, kv_heads=4,
    ),
    "Qwen3-VL-8B": Model(
        VISION,
        {
            "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl",
            "text_config": text(
                model_type="qwen3_vl_text", layers=36, q=32, kv=8, head_dim=128, hidden=4096, context=262144
            ),
            "vision_config": {"depth": 27, "hidden_size": 1152, "num_heads": 16},
        },
        packed=range(36), q_heads=32, kv_heads=8,
    ),
    "Mistral-Small-3.2-24B": Model(
        VISION,
        {
            "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3",
            "text_config": text(
                model_type="mistral", layers=40, q=32, kv=8, head_dim=128, hidden=5120, context=131072,
                sliding_window=None,
            ),
            "vision_config": text(model_type="pixtral", layers=24, q=16, head_dim=64, hidden=1024),
        },
        packed=range(40), q_heads=32, kv_heads=8,
    ),
    "InternVL3-8B-hf": Model(
        VISION,
        {
            "architectures": ["InternVLForConditionalGeneration"], "model_type": "internvl",
            "text_config": text(
                model_type="qwen2", layers=28, q=28, kv=4, hidden=3584, context=32768, use_sliding_window=False,
                sliding_window=None, max_window_layers=70,
            ),
            "vision_config": text(layers=24, q=16, hidden=1024),
        },
        packed=range(28), q_heads=28, kv_heads=4, engines=("transformers", "vLLM"),
    ),
    "InternVL3-8B": Model(
        VISION,
        {
            "architectures": ["InternVLChatModel"], "model_type": "internvl_chat",
            "llm_config": config(
                "Qwen2ForCausalLM", "qwen2", layers=28, q=28, kv=4, hidden=3584, context=32768,
                use_sliding_window=False, sliding_window=None, max_window_layers=70,
            ),
            "vision_config": text(layers=24, q=16, hidden=1024),
        },
        packed=range(28), q_heads=28, kv_heads=4, engines=("vLLM", "SGLang"),
    ),
    "Step3": Model(
        VISION,
        {
            "architectures": ["Step3VLForConditionalGeneration"], "model_type": "step3_vl",
            "text_config": text(
                model_type="step3_text", layers=61, q=64, num_attention_groups=1, head_dim=256, hidden=7168,
                share_q_dim=2048, max_seq_len=65536,
            ),
        },
        packed=range(61), q_heads=64, kv_heads=1, key_dim=256, value_dim=256, engines=("vLLM", "SGLang"),
    ),
}

REFUSED_MODELS = {
    "DeepSeek-V3": Model(
        MLA,
        config(
            "DeepseekV3ForCausalLM", "deepseek_v3", layers=61, q=128, kv=128, hidden=7168, context=163840,
            kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        ),
        refused=MLA_REASON,
    ),
    "Kimi-K2": Model(
        MLA,
        config(
            "DeepseekV3ForCausalLM", "kimi_k2", layers=61, q=64, kv=64, hidden=7168, context=131072, kv_lora_rank=512,
            q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        ),
        refused=MLA_REASON,
    ),
    "Kimi-Linear-48B-A3B": Model(
        MLA,
        config(
            "KimiLinearForCausalLM", "kimi_linear", layers=27, q=32, kv=32, head_dim=72, hidden=2304,
            model_max_length=1048576, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
            linear_attn_config={
                "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
                "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
                "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
            },
        ),
        refused=MLA_REASON,
    ),
    "GLM-4.7-Flash": Model(
        MLA,
        config(
            "Glm4MoeLiteForCausalLM", "glm4_moe_lite", layers=47, q=20, kv=20, hidden=2048, context=202752,
            kv_lora_rank=512, q_lora_rank=768, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256,
        ),
        refused=MLA_REASON,
    ),
    "GLM-5": Model(
        MLA,
        config(
            "GlmMoeDsaForCausalLM", "glm_moe_dsa", layers=78, q=64, kv=64, head_dim=64, hidden=6144, context=202752,
            kv_lora_rank=512, q_lora_rank=2048, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256,
            index_topk=2048, index_n_heads=32, index_head_dim=128,
        ),
        refused=MLA_REASON,
    ),
    "Ring-2.5-1T": Model(
        MLA,
        config(
            "BailingMoeV2_5ForCausalLM", "bailing_hybrid", layers=80, q=64, kv=64, head_dim=128, hidden=8192,
            context=131072, layer_group_size=8, kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128,
            qk_rope_head_dim=64, v_head_dim=128,
        ),
        refused=MLA_REASON,
    ),
    "DeepSeek-V4-Flash": Model(
        SPARSE,
        config(
            "DeepseekV4ForCausalLM", "deepseek_v4", layers=43, q=64, kv=1, head_dim=512, hidden=4096, context=1048576,
            q_lora_rank=1024, qk_rope_head_dim=64, index_n_heads=64, index_head_dim=128, index_topk=512,
            sliding_window=128, compress_ratios=[0, 0, *[4, 128] * 20, 4],
        ),
        refused=SPARSE_REASON,
    ),
    "MiniMax-M3": Model(
        SPARSE,
        {
            "architectures": ["MiniMaxM3SparseForConditionalGeneration"], "model_type": "minimax_m3_vl",
            "text_config": text(
                model_type="minimax_m3_vl_text", layers=60, q=64, kv=4, head_dim=128, hidden=6144, context=524288,
                sparse_attention_config={
                    "sparse_num_index_heads": 4, "sparse_index_dim": 128, "sparse_block_size": 128,
                    "sparse_attention_freq": [0, 0, 0, *[1] * 57],
                },
            ),
        },
        refused=SPARSE_REASON,
    ),
    "Qwen4-Exp": Model(
        SPARSE,
        {
            "architectures": ["Qwen4ExpForConditionalGeneration"], "model_type": "qwen4_exp",
            "text_config": text(
                model_type="qwen4_exp_text", layers=40, q=16, kv=2, head_dim=256, hidden=2048, context=262144,
                layer_types=kinds(40, LINEAR, every(4, 40), "qwen_sparse_attention"),
            ),
        },
        refused="qwen sparse attention in layer 3 is not supported",
    ),
    "Mistral-7B-v0.1": Model(
        ALL_SLIDING,
        config("MistralForCausalLM", "mistral", layers=32, q=32, kv=8, hidden=4096, context=32768, sliding_window=4096),
        refused=SLIDING_REASON,
    ),
    "Phi-3-mini-4k": Model(
        ALL_SLIDING,
        config("Phi3ForCausalLM", "phi3", layers=32, q=32, kv=32, hidden=3072, context=4096, sliding_window=2047),
        refused=SLIDING_REASON,
    ),
    "Falcon-Mamba-7B": Model(
        RECURRENT,
        config("FalconMambaForCausalLM", "falcon_mamba", layers=64, hidden=4096, state_size=16, conv_kernel=4),
        refused=RECURRENT_REASON,
    ),
    "RWKV-6-World-7B": Model(
        RECURRENT,
        config("Rwkv6ForCausalLM", "rwkv6", layers=32, q=64, hidden=4096, attention_hidden_size=4096, head_size=64),
        refused=RECURRENT_REASON,
    ),
    "Llama-3.2-11B-Vision": Model(
        CROSS,
        {
            "architectures": ["MllamaForConditionalGeneration"], "model_type": "mllama",
            "text_config": text(
                model_type="mllama_text_model", layers=40, q=32, kv=8, hidden=4096, context=131072,
                cross_attention_layers=[3, 8, 13, 18, 23, 28, 33, 38],
            ),
            "vision_config": {"hidden_size": 1280, "num_hidden_layers": 32, "attention_heads": 16},
        },
        refused="cross attention is not supported",
    ),
    "T5-Large": Model(
        CROSS,
        {
            "architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "is_encoder_decoder": True,
            "d_model": 1024, "d_kv": 64, "num_heads": 16, "num_layers": 24, "num_decoder_layers": 24,
        },
        refused="encoder-decoder models are not supported",
    ),
    "Falcon-40B": Model(
        OTHER,
        config(
            "FalconForCausalLM", "falcon", layers=60, q=128, hidden=8192, num_kv_heads=8, alibi=False,
            new_decoder_architecture=True, multi_query=True,
        ),
        refused="its configuration sets 'multi_query', which is not supported",
    ),
    "ChatGLM3-6B": Model(
        OTHER,
        {
            "architectures": ["ChatGLMModel"], "model_type": "chatglm", "num_layers": 28, "num_attention_heads": 32,
            "multi_query_attention": True, "multi_query_group_num": 2, "kv_channels": 128, "hidden_size": 4096,
            "seq_length": 8192,
        },
        refused="its configuration sets 'kv_channels', which is not supported",
    ),
    "Llama-3.3-Nemotron-Super-49B": Model(
        OTHER,
        config(
            "DeciLMForCausalLM", "nemotron-nas", layers=80, q=64, kv=None, hidden=8192, context=131072,
            block_configs=[
                {"attention": {"n_heads_in_group": 8, "no_op": False, "replace_with_linear": False}},
                {"attention": {"n_heads_in_group": None, "no_op": True, "replace_with_linear": False}},
            ]
            * 40,
        ),
        refused="its configuration sets 'block_configs', which is not supported",
    ),
    "MPT-7B": Model(
        OTHER,
        {
            "architectures": ["MPTForCausalLM"], "model_type": "mpt", "n_layers": 32, "n_heads": 32, "d_model": 4096,
            "max_seq_len": 2048, "attn_config": {"alibi": True, "attn_type": "multihead_attention"},
        },
        refused="attention with ALiBi is not supported",
    ),
    "BLOOM-7B1": Model(
        OTHER,
        {"architectures": ["BloomForCausalLM"], "model_type": "bloom", "n_layer": 30, "n_head": 32, "n_embed": 4096},
        refused="its configuration has no 'num_hidden_layers'",
    ),
}

# fmt: on
MODELS: dict[str, Model] = {
    **PLAIN_MODELS,
    **SLIDING_MODELS,
    **LINEAR_MODELS,
    **SHARED_MODELS,
    **VISION_MODELS,
    **REFUSED_MODELS,
}
