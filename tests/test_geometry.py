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
            {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4},
            "sliding attention in layers 0, 2 is not supported",
        ),
        (
            {"layer_types": ["full_attention", "linear_attention"] * 2, "num_hidden_layers": 4},
            "linear attention in layers 1, 3 is not supported",
        ),
        (
            {"layer_types": ["chunked_attention", "full_attention"], "num_hidden_layers": 2},
            "chunked attention in layers 0 is not supported",
        ),
    ],
)
def test_what_cannot_be_packed_is_refused_by_name(changes, message):
    with pytest.raises(UnsupportedModel, match=f"SomeForCausalLM: .*{message}") as caught:
        Geometry.from_config(config(architectures=["SomeForCausalLM"], **changes))
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("changes", [{"sliding_window": None}, {"sliding_window": 0}, {"kv_lora_rank": None}])
def test_fields_that_say_nothing_refuse_nothing(changes):
    assert Geometry.from_config(config(**changes)) == Geometry.from_config(LLAMA)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0: it must be a whole number, 1 or more"),
        ({"num_hidden_layers": -4}, "num_hidden_layers is -4: it must be a whole number, 1 or more"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000, which is beyond any model"),
        ({"num_hidden_layers": 10**12, "sliding_window": 4096}, "num_hidden_layers is 1000000000000, which is beyond"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True: it must be a whole number"),
        ({"num_attention_heads": -8}, "num_attention_heads is -8: it must be a whole number, 1 or more"),
        ({"num_attention_heads": "eight"}, "num_attention_heads is 'eight': it must be a whole number, 1 or more"),
        ({"num_attention_heads": [32, 32]}, "num_attention_heads is [32, 32]: it must be a whole number"),
        ({"num_attention_heads": 10**12}, "num_attention_heads is 1000000000000, which is beyond any model"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0: it must be a whole number, 1 or more"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, which does not divide num_attention_heads, 32"),
        ({"num_key_value_heads": 64}, "num_key_value_heads is 64, which does not divide num_attention_heads, 32"),
        ({"head_dim": 0}, "head_dim is 0: it must be a whole number, 1 or more"),
        ({"head_dim": -64}, "head_dim is -64: it must be a whole number, 1 or more"),
        ({"head_dim": 64.5}, "head_dim is 64.5: it must be a whole number, 1 or more"),
        ({"head_dim": 2**40}, "head_dim is 1099511627776, which is beyond any model"),
        ({"hidden_size": 0}, "hidden_size is 0: it must be a whole number, 1 or more"),
        ({"hidden_size": 2**60}, "hidden_size is 1152921504606846976, which is beyond any model"),
        ({"hidden_size": 4095}, "hidden_size is 4095, which num_attention_heads, 32, does not divide"),
        ({"max_position_embeddings": -1}, "max_position_embeddings is -1: it must be a whole number, 1 or more"),
        ({"max_position_embeddings": "long"}, "max_position_embeddings is 'long': it must be a whole number"),
        ({"layer_types": "full"}, "layer_types is 'full': it must be a list with the kind of each layer"),
        ({"layer_types": ["full_attention"] * 31}, "layer_types has 31 entries, and num_hidden_layers is 32"),
        ({"text_config": "text"}, "text_config is 'text', not an object"),
    ],
)
def test_numbers_that_no_model_has_are_refused_by_the_name_of_their_field(changes, message):
    with pytest.raises(UnsupportedModel) as caught:
        Geometry.from_config(config(**changes))
    assert str(caught.value).startswith(f"LlamaForCausalLM: {message}")


@pytest.mark.parametrize("numbers", [(0, 8, 8, 64), (2, 8, 3, 64), (2, 8, 8, 2**40), (2, 8, 8, 64.0), (2, 8, 8, 64, 0)])
def test_a_geometry_that_is_written_down_is_checked_too(numbers):
    with pytest.raises(
        ValueError, match=r"^(num_hidden_layers|num_key_value_heads|head_dim|max_position_embeddings) is"
    ):
        Geometry.uniform("any", *numbers)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        # layers of another kind, or of different kinds
        ({"mamba_d_ssm": 1024, "mamba_d_state": 256}, "mamba_d_ssm"),  # Falcon-H1
        ({"mamba_d_state": 256, "attn_layer_indices": None}, "mamba_d_state"),  # Bamba without a list of layers
        ({"attn_layer_indices": [9, 18, 27]}, "attn_layer_indices"),  # Bamba
        ({"num_key_value_heads": None, "block_configs": [{"attention": {"n_heads_in_group": 8}}]}, "block_configs"),
        ({"cross_attention_layers": [3, 8]}, "cross_attention_layers"),  # Llama 3.2 Vision
        ({"conv_L_cache": 3}, "conv_L_cache"),  # LFM2
        # KV heads under another name
        ({"num_key_value_heads": ..., "multi_query_group_num": 2}, "multi_query_group_num"),  # ChatGLM
        ({"num_key_value_heads": ..., "num_attention_groups": 1}, "num_attention_groups"),  # Step3
        ({"num_key_value_heads": ..., "num_kv_heads": 8}, "num_kv_heads"),
    ],
)
def test_fields_that_mean_another_shape_are_named(changes, field):
    with pytest.raises(UnsupportedModel, match=f"its configuration sets '{field}'"):
        Geometry.from_config(config(**changes))


@pytest.mark.parametrize("kind", ["FalconH1", "Bamba", "Mllama", "Lfm2"])
def test_hybrids_are_refused_as_transformers_writes_them(kind):
    """Each layer of Falcon-H1 keeps a recurrent state beside its keys; Bamba has layers without keys."""
    with pytest.raises(UnsupportedModel):
        Geometry.from_config(getattr(transformers, f"{kind}Config")().to_dict())


def test_other_names_that_say_the_same_refuse_nothing():
    assert Geometry.from_config(config(num_kv_heads=8)).kv_heads == 8
    kinds = ["full_attention"] * 32
    assert Geometry.from_config(config(mamba_d_state=256, layer_types=kinds)).layers == 32, "all layers are listed"


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
        ({"architectures": "LlamaForCausalLM"}, "llama"),
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
        ("Qwen3-4B", Geometry.uniform("Qwen3ForCausalLM", 36, 32, 8, 128, 40960)),
        ("Qwen3-8B", Geometry.uniform("Qwen3ForCausalLM", 36, 32, 8, 128, 40960)),
        ("Qwen3-32B", Geometry.uniform("Qwen3ForCausalLM", 64, 64, 8, 128, 40960)),
        ("Llama-3.1-8B", Geometry.uniform("LlamaForCausalLM", 32, 32, 8, 128, 131072)),
        ("GLM-4.7", Geometry.uniform("Glm4MoeForCausalLM", 92, 96, 8, 128, 202752)),
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
