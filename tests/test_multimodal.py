"""Models that see and read: what is cached is their language model's, which is all that kvfold looks at."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import SIZES, random_tokens

import kvfold
from kvfold.artifact import Artifact, Fingerprint, digest_model
from kvfold.calibration.capture import collect
from kvfold.folding import check_foldable
from kvfold.geometry import Geometry, UnsupportedModel
from kvfold.models import load_model
from kvfold.recipes import parse

VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "depth": 3,  # as Qwen's vision towers name layers and heads
    "num_heads": 2,
    "out_hidden_size": 128,
}
ROPE = {"rope_type": "default", "rope_theta": 5000.0}
# class: (the language model's configuration beside SIZES, that of the vision tower, others)
MODELS = {
    "Qwen2_5_VL": (
        {"hidden_size": 128, "rope_parameters": {**ROPE, "mrope_section": [4, 6, 6]}},
        VISION,
        {"image_token_id": 5, "vision_start_token_id": 6},
    ),
    "Mistral3": (
        {"model_type": "mistral", "sliding_window": None, "rope_parameters": ROPE},
        {**VISION, "model_type": "pixtral", "head_dim": 16},
        {"image_token_index": 5},
    ),
    "InternVL": (
        {"model_type": "qwen2", "hidden_size": 128, "rope_parameters": ROPE},
        {**VISION, "image_size": [28, 28], "patch_size": [14, 14]},
        {"image_token_id": 5},
    ),
    "Llava": (
        {"model_type": "llama", "rope_parameters": ROPE},
        {**VISION, "model_type": "clip_vision_model", "image_size": 28, "patch_size": 14},
        {"image_token_index": 5},
    ),
    "Gemma3": (
        {
            "num_hidden_layers": 4,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE},
        },
        {**VISION, "image_size": 28, "patch_size": 14},
        {"image_token_id": 5, "mm_tokens_per_image": 4},
    ),
}
IMAGE_TOKENS = {"InternVL": 1}  # of the tiny image; 4 in all other models


def make(name: str) -> Any:
    """A model with random weights."""
    text, vision, others = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(text_config={**SIZES, **text}, vision_config=vision, **others)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    for parameter in model.parameters():
        if not parameter.any() and parameter.ndim > 1:  # the projector of Gemma 3
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def image_prompt(name: str, config: Any) -> dict[str, torch.Tensor]:
    """30 tokens with an image among them, as a processor would make them."""
    ids = 10 + random_tokens(30)[None] % 80
    ids[0, 8], ids[0, 9 : 9 + IMAGE_TOKENS.get(name, 4)] = 6, 5
    generator, patch = torch.Generator().manual_seed(0), config.vision_config.patch_size
    if name == "Qwen2_5_VL":  # 16 patches of two frames, of which 4 become a token
        pixels = torch.randn(16, 2 * 3 * patch**2, generator=generator)
        grid = torch.tensor([[1, 4, 4]])
        return {
            "input_ids": ids,
            "pixel_values": pixels,
            "image_grid_thw": grid,
            "mm_token_type_ids": (ids == 5).long(),
        }
    if name == "Mistral3":
        size = 4 * patch
        pixels = torch.randn(1, 3, size, size, generator=generator)
        return {"input_ids": ids, "pixel_values": pixels, "image_sizes": torch.tensor([[size, size]])}
    prompt = {"input_ids": ids, "pixel_values": torch.randn(1, 3, 28, 28, generator=generator)}
    return {**prompt, "token_type_ids": (ids == 5).long()} if name == "Gemma3" else prompt


@pytest.fixture(params=MODELS)
def folder(request, tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr("kvfold.models.load_tokenizer", lambda name: None)
    make(request.param).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@torch.no_grad()
def test_it_is_loaded_calibrated_and_packed(folder, tmp_path):
    model, _ = load_model(str(folder))
    tokens = random_tokens(120)
    made = kvfold.calibrate(model, tokens, 60, [parse("oscar-int2")])
    keys = [torch.cat(parts, dim=1)[:, :].double() for parts in zip(*_keys(model, tokens), strict=True)]
    for layer, key in enumerate(keys):  # of packed layers
        assert torch.allclose(made.tensors["key_mean"][layer].double(), key.mean(dim=1), atol=1e-5)
    made.save(tmp_path / "fits")
    fits, ids = Artifact.load(tmp_path / "fits"), random_tokens(40).unsqueeze(0)
    exact = model(ids).logits

    def error(recipe: str) -> float:
        return float(
            (model(ids, past_key_values=kvfold.cache(model, recipe, fits)).logits - exact).norm() / exact.norm()
        )

    assert error("bf16") < 0.01
    assert error("int8") < 0.02
    assert 0.05 < error("oscar-int2:block=0") < 0.6
    model.generation_config.pad_token_id = 0
    packed = kvfold.cache(model, "int8", fits)
    assert model.generate(ids, past_key_values=packed, max_new_tokens=3, do_sample=False).shape == (1, 43)
    assert packed.get_seq_length() == 42


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_tokens_of_images_are_tokens(name):
    """Answers to a prompt with an image are those over transformers' own cache, and the image matters."""
    model = make(name)
    prompt = image_prompt(name, model.config)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    exact, answer = model(**prompt).logits, model.generate(**prompt, **options)
    other = model(**{**prompt, "pixel_values": -prompt["pixel_values"]}).logits
    assert (other - exact).norm() > 0.01 * exact.norm()
    made = kvfold.calibrate(model, random_tokens(60), 60)
    cache = kvfold.cache(model, "bf16", made)
    assert (model(**prompt, past_key_values=cache).logits - exact).norm() < 0.005 * exact.norm()
    packed = kvfold.cache(model, "int4:block=4", made)
    assert 1e-4 < (model(**prompt, past_key_values=packed).logits - exact).norm() / exact.norm() < 0.3
    cache = cache.empty()
    assert torch.equal(model.generate(**prompt, past_key_values=cache, **options), answer)
    assert cache.get_seq_length() == 33


def test_what_images_need_is_refused_where_it_is_missing():
    """In Gemma 3, tokens of an image see each other."""
    model = make("Gemma3")
    prompt, made = image_prompt("Gemma3", model.config), kvfold.calibrate(model, random_tokens(60), 60)
    with torch.no_grad():
        for earlier in (10, 30):  # 30: as many as in the prompt
            model(random_tokens(earlier)[None], past_key_values=(cache := kvfold.cache(model, "int4", made)))
            with pytest.raises(ValueError, match=r"only in the first step: .* images at the beginning of the prompt"):
                model(**prompt, past_key_values=cache)
            assert {layer.get_seq_length() for layer in cache.layers} == {0}  # sliding layers cannot take a step back
        with pytest.raises(ValueError, match="kivi-2 quantizes whole pages, which tokens of an image cannot read"):
            model(**prompt, past_key_values=kvfold.cache(model, "kivi-2", made))


def _keys(model, tokens):
    """Of each window and layer [kv_heads, n, d], without the first four tokens."""
    return [[key[:, 4:] for _, key, _, _ in collect(model, window).values()] for window in tokens.split(60)]


def test_its_files_and_the_loaded_model_are_one_model(folder):
    """Names in the files and the class of the loaded model differ from those of a language model alone."""
    model, _ = load_model(str(folder))
    fingerprint = Fingerprint.of(model)
    config = json.loads((folder / "config.json").read_text())
    rope = fingerprint.rope.get("full_attention", fingerprint.rope)
    assert rope["rope_theta"] == 5000.0, "which text_config nests"
    assert fingerprint.model_type == model.get_decoder().config.model_type
    for as_read in (config, model.config.to_dict()):
        fingerprint.check_files(as_read, digest_model(str(folder)))
    weights = load_file(folder / "model.safetensors")
    vision = next(name for name in weights if "vis" in name)
    save_file({**weights, vision: weights[vision] + 1}, folder / "model.safetensors", metadata={"format": "pt"})
    fingerprint.check_files(config, digest_model(str(folder)))  # which nothing that is cached comes from directly
    text = [name for name in weights if name.endswith("layers.1.self_attn.k_proj.weight") and "vis" not in name]
    save_file({**weights, text[0]: weights[text[0]] + 1}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"its weights are others, layers\.1\.self_attn\.k_proj\.weight among them"):
        fingerprint.check_files(config, digest_model(str(folder)))
    rope = config["text_config"]["rope_parameters"]
    rope.get("full_attention", rope)["rope_theta"] = 1e6
    with pytest.raises(ValueError, match="its rope is"):
        fingerprint.check_files(config, None)


def test_what_is_not_supported_stays_refused(tmp_path):
    sliding = {**SIZES, "sliding_window": 16, "layer_types": ["sliding_attention"] * 2}
    with pytest.raises(UnsupportedModel, match="all its layers are sliding"):
        Geometry.from_config(transformers.Gemma3Config(text_config=sliding).to_dict())
    (tmp_path / "config.json").write_text(json.dumps(transformers.CLIPVisionConfig().to_dict()))
    with pytest.raises(UnsupportedModel, match=r"transformers .* knows no language model 'clip_vision_model'"):
        load_model(str(tmp_path))
    with pytest.raises(UnsupportedModel, match="values of multimodal models cannot be folded yet"):
        check_foldable(parse("oscar-int2"), {"text_config": {"num_hidden_layers": 2}})
