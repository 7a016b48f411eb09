import pytest
import torch
import transformers

from kvfold.geometry import Geometry, UnsupportedModel, example_configs

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}


def config(**changes: object) -> dict:
    """LLAMA with other fields; ... removes one."""
    return {name: value for name, value in {**LLAMA, **changes}.items() if value is not ...}


def test_llama():
    assert Geometry.from_config(LLAMA) == Geometry("LlamaForCausalLM", 32, 32, 8, 128, 131072)
    assert Geometry.from_config(LLAMA).elements_per_token == 2 * 32 * 8 * 128


@pytest.mark.parametrize(
    ("changes", "kv_heads", "head_dim"),
    [
        ({"num_key_value_heads": 1}, 1, 128),  # MQA
        ({"num_key_value_heads": 32}, 32, 128),  # MHA
        ({"num_key_value_heads": ...}, 32, 128),  # MHA, as old configurations write it
        ({"num_key_value_heads": None}, 32, 128),
        ({"head_dim": 256}, 8, 256),  # not hidden_size / num_attention_heads
        ({"head_dim": None}, 8, 128),
        ({"hidden_size": 2560, "num_attention_heads": 32}, 8, 80),
        ({"head_dim": 128, "hidden_size": ...}, 8, 128),
    ],
)
def test_heads(changes, kv_heads, head_dim):
    geometry = Geometry.from_config(config(**changes))
    assert (geometry.q_heads, geometry.kv_heads, geometry.head_dim) == (32, kv_heads, head_dim)


def test_a_sliding_window_that_is_not_used_is_no_window():
    """Qwen2 names a window and says that it is off."""
    qwen2 = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "max_window_layers": 28,
        "sliding_window": 32768,
        "use_sliding_window": False,
    }
    assert Geometry.from_config(qwen2) == Geometry("Qwen2ForCausalLM", 28, 12, 2, 128, 32768)
    assert Geometry.from_config({**qwen2, "layer_types": ["full_attention"] * 28}).layers == 28
    with pytest.raises(UnsupportedModel, match="Qwen2ForCausalLM: sliding attention in layers 0, 1, 2"):
        Geometry.from_config({**qwen2, "use_sliding_window": True})


def test_qwen3():
    qwen3 = config(
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        head_dim=128,
        hidden_size=2560,
        num_hidden_layers=36,
        sliding_window=None,
        use_sliding_window=False,
        attention_bias=False,
    )
    assert Geometry.from_config(qwen3) == Geometry("Qwen3ForCausalLM", 36, 32, 8, 128, 131072)


def test_nested_text_config():
    nested = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "vision_config": {"num_hidden_layers": 24, "num_attention_heads": 16, "hidden_size": 1024},
        "text_config": config(architectures=..., num_hidden_layers=40),
    }
    assert Geometry.from_config(nested) == Geometry("LlavaForConditionalGeneration", 40, 32, 8, 128, 131072)
    nested["text_config"]["attn_logit_softcapping"] = 50.0
    with pytest.raises(UnsupportedModel, match=r"LlavaForConditionalGeneration: .*soft-capping"):
        Geometry.from_config(nested)
    assert Geometry.from_config(config(text_config=None)).layers == 32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": 512, "q_lora_rank": 1536}, r"multi-head latent attention \(MLA\)"),
        ({"attn_logit_softcapping": 50.0}, "soft-capping"),
        ({"model_type": "gpt_oss"}, "learned sink logits"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"num_kv_shared_layers": 10}, "share another layer's cache"),
        # Mistral 7B v0.1
        ({"sliding_window": 4096, "num_hidden_layers": 3}, "sliding attention in layers 0, 1, 2 is not supported"),
        (
            {"layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]},
            "sliding attention in layers 0, 2 is not supported",
        ),
        (
            {"layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention"]},
            "linear attention in layers 1, 3 is not supported",
        ),
        ({"layer_types": ["chunked_attention", "full_attention"]}, "chunked attention in layers 0 is not supported"),
    ],
)
def test_what_cannot_be_packed_is_refused_by_name(changes, message):
    with pytest.raises(UnsupportedModel, match=f"SomeForCausalLM: .*{message}") as caught:
        Geometry.from_config(config(architectures=["SomeForCausalLM"], **changes))
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("changes", [{"sliding_window": None}, {"sliding_window": 0}, {"kv_lora_rank": None}])
def test_fields_that_say_nothing_refuse_nothing(changes):
    assert Geometry.from_config(config(**changes)) == Geometry.from_config(LLAMA)


@pytest.mark.parametrize("field", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
@pytest.mark.parametrize("value", [..., None])
def test_a_missing_field_is_named(field, value):
    with pytest.raises(UnsupportedModel, match=f"LlamaForCausalLM: its configuration has no '{field}'"):
        Geometry.from_config(config(**{field: value}))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"architectures": None}, "llama"),
        ({"architectures": []}, "llama"),
        ({"architectures": ...}, "llama"),
        ({"architectures": ..., "model_type": ...}, "unknown"),
        ({"max_position_embeddings": ...}, "LlamaForCausalLM"),
    ],
)
def test_architecture(changes, name):
    assert Geometry.from_config(config(**changes)).architecture == name


def test_an_empty_configuration_is_refused():
    with pytest.raises(UnsupportedModel, match="unknown: its configuration has no"):
        Geometry.from_config({})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen3-4B", Geometry("Qwen3ForCausalLM", 36, 32, 8, 128, 40960)),
        ("Qwen3-8B", Geometry("Qwen3ForCausalLM", 36, 32, 8, 128, 40960)),
        ("Qwen3-32B", Geometry("Qwen3ForCausalLM", 64, 64, 8, 128, 40960)),
        ("Llama-3.1-8B", Geometry("LlamaForCausalLM", 32, 32, 8, 128, 131072)),
        ("GLM-4.7", Geometry("Glm4MoeForCausalLM", 92, 96, 8, 128, 202752)),
    ],
)
def test_examples(name, expected):
    assert Geometry.from_config(example_configs()[name]) == expected


def test_every_example_parses():
    assert len(example_configs()) >= 4
    for name, example in example_configs().items():
        geometry = Geometry.from_config(example)
        assert geometry.q_heads % geometry.kv_heads == 0, name
        assert geometry.max_context, name


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Llama", {"num_key_value_heads": 2}),
        ("Llama", {}),
        ("Qwen2", {"num_key_value_heads": 1}),
        ("Qwen3", {"num_key_value_heads": 2, "head_dim": 32}),
        ("Mistral", {"num_key_value_heads": 2, "sliding_window": None}),
    ],
)
def test_what_transformers_itself_says(kind, options):
    """The shape of the keys that a model of this configuration really caches."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 32}
    made = getattr(transformers, f"{kind}Config")(vocab_size=50, **sizes, **options)
    model = transformers.AutoModelForCausalLM.from_config(made).eval()
    keys = [layer.keys for layer in model(torch.arange(6).unsqueeze(0), use_cache=True).past_key_values.layers]
    geometry = Geometry.from_config(made.to_dict())
    assert len(keys) == geometry.layers
    assert {tuple(key.shape) for key in keys} == {(1, geometry.kv_heads, 6, geometry.head_dim)}
    assert geometry.q_heads == 4
