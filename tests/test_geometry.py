"""Geometry: what it reads from configurations, against `model_configs`, against transformers, and field by field."""

import logging

import pytest
import torch
import transformers
from model_configs import MODELS, Model

from kvfold.geometry import Geometry, LayerShape, UnsupportedModel, example_configs

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
PACKABLE = {name: model for name, model in MODELS.items() if not model.refused}


def config(**changes: object) -> dict:
    """LLAMA with other fields; ... removes one."""
    return {name: value for name, value in {**LLAMA, **changes}.items() if value is not ...}


@pytest.mark.parametrize("name", PACKABLE)
def test_layers_of_real_models(name: str):
    model = MODELS[name]
    geometry = Geometry.from_config(model.config)
    assert geometry.packed == tuple(model.packed)
    for kind in ("sliding", "chunked", "linear"):
        assert [number for number, layer in enumerate(geometry.layers) if layer.kind == kind] == list(
            getattr(model, kind)
        )
    targets = {number: layer.target for number, layer in enumerate(geometry.layers) if layer.kind == "shared"}
    assert targets == model.shared
    packed = LayerShape(
        "full", model.q_heads, model.kv_heads, model.key_dim, model.value_dim, sink=model.sink, cap=model.cap
    )
    assert {geometry.layers[layer] for layer in model.packed} == {packed}
    windowed = {_sizes(geometry.layers[layer]) for layer in (*model.sliding, *model.chunked)}
    assert windowed <= {model.windowed or _sizes(packed)}


def _sizes(layer: LayerShape) -> tuple[int, int, int, int]:
    return layer.q_heads, layer.kv_heads, layer.key_dim, layer.value_dim


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.refused])
def test_models_that_are_refused_in_one_line(name: str):
    model = MODELS[name]
    with pytest.raises(UnsupportedModel) as caught:
        Geometry.from_config(model.config)
    assert str(caught.value) == f"{model.config['architectures'][0]}: {model.refused}"
    assert "\n" not in str(caught.value)


def test_the_table_of_real_models_covers_every_way_to_state_kinds():
    fields = {name for model in MODELS.values() for name in _text(model)}
    assert len(MODELS) >= 60
    assert fields >= {
        *("layer_types", "hybrid_override_pattern", "hybrid_layer_pattern", "attn_type_list", "attn_layer_indices"),
        *("full_attn_idxs", "attn_layer_period", "full_attention_interval", "no_rope_layers", "sliding_window_pattern"),
        *("num_kv_shared_layers", "global_head_dim", "attention_other_setting", "v_head_dim"),
    }


def _text(model: Model) -> dict:
    return model.config.get("text_config", model.config.get("llm_config", model.config))


@pytest.mark.parametrize("name", [name for name, model in PACKABLE.items() if "transformers" in model.engines])
def test_transformers_writes_the_same_geometry_in_other_fields(name: str, monkeypatch):
    """transformers renames fields, fills in defaults, and has its own rules for the kinds of layers."""
    monkeypatch.setattr(logging.getLogger("transformers"), "disabled", True)
    published = MODELS[name].config
    written = transformers.AutoConfig.for_model(**published).to_dict()
    geometry = Geometry.from_config({"architectures": published["architectures"], **written})
    sizes = [(layer.kind, *_sizes(layer), layer.target) for layer in geometry.layers]
    expected = [(layer.kind, *_sizes(layer), layer.target) for layer in Geometry.from_config(published).layers]
    assert [size for size in sizes if size[0] != "sliding"] == [size for size in expected if size[0] != "sliding"]
    assert geometry.packed == tuple(MODELS[name].packed)
    assert (geometry.shape.sink, geometry.shape.cap) == (MODELS[name].sink, MODELS[name].cap)


def test_llama():
    assert Geometry.from_config(LLAMA) == Geometry.uniform("LlamaForCausalLM", 32, 32, 8, 128, 131072)
    assert Geometry.from_config(LLAMA).elements_per_token == 2 * 32 * 8 * 128


def test_only_packed_layers_count_as_elements():
    """Gemma-3-270M: 3 of 18 layers, one KV head of 256."""
    assert Geometry.from_config(MODELS["Gemma-3-270M"].config).elements_per_token == 3 * (256 + 256)
    assert Geometry.from_config(MODELS["MiMo-V2-Flash"].config).elements_per_token == 9 * 4 * (192 + 128)


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
    assert _sizes(geometry.shape) == (32, kv_heads, head_dim, head_dim)


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
    full = Geometry.uniform("Qwen2ForCausalLM", 28, 12, 2, 128, 32768)
    assert Geometry.from_config(qwen2) == full
    assert Geometry.from_config({**qwen2, "layer_types": ["full_attention"] * 28}) == full
    used = {**qwen2, "use_sliding_window": True}
    assert Geometry.from_config(used) == full, "the layers from number 28 on slide, and there are none"
    assert Geometry.from_config({**used, "max_window_layers": 20}).packed == tuple(range(20))
    with pytest.raises(UnsupportedModel, match="Qwen2ForCausalLM: all its layers are sliding"):
        Geometry.from_config({**used, "max_window_layers": 0})


def test_nested_text_config():
    nested = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "vision_config": {"num_hidden_layers": 24, "num_attention_heads": 16, "hidden_size": 1024},
        "text_config": config(architectures=..., num_hidden_layers=40),
    }
    assert Geometry.from_config(nested) == Geometry.uniform("LlavaForConditionalGeneration", 40, 32, 8, 128, 131072)
    nested["text_config"]["is_encoder_decoder"] = True
    with pytest.raises(UnsupportedModel, match=r"LlavaForConditionalGeneration: encoder-decoder"):
        Geometry.from_config(nested)
    assert Geometry.from_config(config(text_config=None)) == Geometry.from_config(LLAMA)


def test_a_text_config_inside_another():
    """Qwen-Omni's thinker is a multimodal model of its own."""
    omni = {"architectures": ["Omni"], "thinker_config": {"text_config": LLAMA, "vision_config": {"depth": 32}}}
    assert Geometry.from_config(omni) == Geometry.uniform("Omni", 32, 32, 8, 128, 131072)


def test_a_refusal_is_a_value_error():
    with pytest.raises(ValueError, match=r"^SomeForCausalLM: encoder-decoder"):
        Geometry.from_config(config(architectures=["SomeForCausalLM"], is_encoder_decoder=True))


def test_layers_that_differ_in_shape_are_refused():
    changes = {"per_layer_config": {"07": {"num_key_value_heads": 4}}}
    with pytest.raises(UnsupportedModel, match="its layers with full attention differ in shape"):
        Geometry.from_config(config(**changes))
    kinds = ["full_attention"] * 7 + ["sliding_attention"] + ["full_attention"] * 24
    geometry = Geometry.from_config(config(layer_types=kinds, **changes))
    assert (geometry.layers[7].kind, geometry.layers[7].kv_heads, geometry.kv_heads) == ("sliding", 4, 8)


@pytest.mark.parametrize("changes", [{"sliding_window": None}, {"sliding_window": 0}, {"kv_lora_rank": None}])
def test_fields_that_say_nothing_refuse_nothing(changes):
    assert Geometry.from_config(config(**changes)) == Geometry.from_config(LLAMA)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0: it must be a whole number, 1 or more"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000, which is beyond any model"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True: it must be a whole number"),
        ({"num_attention_heads": -8}, "num_attention_heads is -8: it must be a whole number, 1 or more"),
        ({"num_attention_heads": "eight"}, "num_attention_heads is 'eight': it must be a whole number, 1 or more"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0: it must be a whole number, 1 or more"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, which does not divide num_attention_heads, 32"),
        ({"head_dim": 0}, "head_dim is 0: it must be a whole number, 1 or more"),
        ({"head_dim": 64.5}, "head_dim is 64.5: it must be a whole number, 1 or more"),
        ({"head_dim": 2**40}, "head_dim is 1099511627776, which is beyond any model"),
        ({"hidden_size": 0}, "hidden_size is 0: it must be a whole number, 1 or more"),
        ({"hidden_size": 2**60}, "hidden_size is 1152921504606846976, which is beyond any model"),
        ({"hidden_size": 4095}, "hidden_size is 4095, which num_attention_heads, 32, does not divide"),
        ({"max_position_embeddings": -1}, "max_position_embeddings is -1: it must be a whole number, 1 or more"),
        ({"layer_types": "full"}, "layer_types is 'full': it must be a list with the kind of each layer"),
        ({"layer_types": ["full_attention"] * 31}, "layer_types has 31 entries, and num_hidden_layers is 32"),
        ({"layer_types": ["ring"] * 32}, "ring in layer 0 is not supported"),
        ({"hybrid_layer_pattern": [0] * 31 + [2]}, "2 in layer 31 is not supported"),
        ({"hybrid_override_pattern": ["*"] * 32}, "hybrid_override_pattern is ['*', "),
        ({"full_attention_interval": 0}, "full_attention_interval is 0: it must be a whole number, 1 or more"),
        ({"attn_layer_period": "8"}, "attn_layer_period is '8': it must be a whole number, 1 or more"),
        (
            {"sliding_window": 64, "sliding_window_pattern": -1},
            "sliding_window_pattern is -1: it must be a whole number, 1 or more",
        ),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers is -1: it must be a whole number, 1 or more"),
        ({"num_kv_shared_layers": 32}, "num_kv_shared_layers is 32, which is beyond any model"),
        (
            {"num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 31 + ["sliding_attention"]},
            "num_kv_shared_layers leaves layer 31 no layer of its kind to read from",
        ),
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
        # layers of different kinds, and no word of which is which
        ({"mamba_d_ssm": 1024, "mamba_d_state": 256}, "mamba_d_ssm"),
        ({"linear_num_key_heads": 16}, "linear_num_key_heads"),
        ({"mixer_types": ["minicpm4", "lightning-attn"] * 16}, "mixer_types"),  # MiniCPM-SALA
        ({"global_attn_every_n_layers": 3, "local_attention": 128}, "global_attn_every_n_layers"),
        # heads that differ from layer to layer
        ({"num_key_value_heads": None, "block_configs": [{"attention": {"n_heads_in_group": 8}}]}, "block_configs"),
        # KV heads under another name
        ({"num_key_value_heads": ..., "multi_query_group_num": 2}, "multi_query_group_num"),  # ChatGLM
        ({"num_key_value_heads": ..., "num_kv_heads": 8}, "num_kv_heads"),
    ],
)
def test_fields_that_mean_another_shape_are_named(changes, field):
    with pytest.raises(UnsupportedModel, match=f"its configuration sets '{field}'"):
        Geometry.from_config(config(**changes))


def test_other_names_that_say_the_same_refuse_nothing():
    assert Geometry.from_config(config(num_kv_heads=8)).kv_heads == 8
    listed = config(mamba_d_state=256, layer_types=["full_attention"] * 32)
    assert Geometry.from_config(listed) == Geometry.from_config(LLAMA), "all layers are listed"


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


def test_examples_are_models_of_the_table():
    """`kvfold plan` knows them by name. They may leave out lists that their type stands for."""
    examples = example_configs()
    assert len(examples) >= 12
    for name, example in examples.items():
        geometry = Geometry.from_config(example)
        assert geometry.max_context, name
        assert geometry == Geometry.from_config(MODELS[name].config), name


SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 32}
MIXTURE = {"num_local_experts": 2, "num_experts_per_tok": 1}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Llama", {"num_key_value_heads": 2}),
        ("Llama", {}),
        ("Qwen2", {"num_key_value_heads": 1}),
        ("Qwen3", {"num_key_value_heads": 2, "head_dim": 32}),
        ("Mistral", {"num_key_value_heads": 2, "sliding_window": None}),
        ("Gemma3Text", {"num_key_value_heads": 2, "head_dim": 32, "sliding_window": 4, "sliding_window_pattern": 2}),
        ("Olmo3", {"num_key_value_heads": 2, "sliding_window": 4}),
        ("Exaone4", {"num_key_value_heads": 2, "sliding_window": 4, "sliding_window_pattern": 2}),
        ("GptOss", {"num_key_value_heads": 2, "head_dim": 32, "sliding_window": 4, **MIXTURE}),
        ("Lfm2", {"num_key_value_heads": 2, "full_attn_idxs": [1, 3]}),
        ("GraniteMoeHybrid", {"layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 4, **MIXTURE}),
    ],
)
def test_what_transformers_itself_says(kind, options):
    """The shape of the keys that a model of this configuration really caches: only full layers keep all 9 tokens."""
    made = getattr(transformers, f"{kind}Config")(vocab_size=50, pad_token_id=0, **SIZES, **options)
    model = transformers.AutoModelForCausalLM.from_config(made).eval()
    cache = model(torch.arange(9).unsqueeze(0), use_cache=True).past_key_values
    keys = [getattr(layer, "keys", None) for layer in cache.layers]
    geometry = Geometry.from_config(made.to_dict())
    assert len(keys) == len(geometry.layers) == 4
    grown = [number for number, key in enumerate(keys) if key is not None and key.shape[2] == 9]
    assert geometry.packed == tuple(grown)
    assert {tuple(keys[layer].shape) for layer in grown} == {(1, geometry.kv_heads, 9, geometry.key_dim)}
    assert geometry.q_heads == 4
