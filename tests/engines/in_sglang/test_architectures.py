"""Models of which only some layers are packed, through real SGLang. The others stay as SGLang has them."""

import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from defined_attention import defined_attention
from plain_attention import NAME, attend_plainly
from safetensors.torch import load_file, save_file
from sglang_engine import Answer, ask, poison_fresh_memory, serve, tokens_that_fit
from tiny_models import HYBRIDS, SIZES, random_tokens, tiny
from transformers import PreTrainedModel
from without_gpu import run_without_gpu

import kvfold
from kvfold.engines.transformers import PackedLayer
from kvfold.geometry import Geometry
from kvfold.recipes import parse

PAGE, BUDGET = 16, 4 * 2**20
LENGTHS, TOKENS = (70, 33, 100), 6  # of prompts, and of their answers
ENGINE: dict[str, Any] = {
    "context_length": 256,
    "chunked_prefill_size": 64,
    "max_running_requests": 4,
    "kv_cache_dtype": "bfloat16",  # of SGLang's own layers, which would be in 32 bits
    "budget": BUDGET,
    "prepare": (attend_plainly, run_without_gpu, poison_fresh_memory),
}
SLIDING: dict[str, Any] = {"attention_backend": NAME}
STATES: dict[str, Any] = {"max_mamba_cache_size": 48}
NO_PREFIXES = {**STATES, "disable_radix_cache": True}
# What SGLang needs beside the configuration of a tiny model, and engine options.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Gemma2": ({"hidden_act": "gelu_pytorch_tanh"}, SLIDING),
    "Gemma3": ({}, SLIDING),
    "Gemma3n": ({}, SLIDING),
    "Gemma4": (
        {"swa_num_key_value_heads": 2}
        | dict.fromkeys(("global_head_dim", "v_head_dim", "swa_head_dim", "swa_v_head_dim"), 32),
        SLIDING,
    ),
    "GptOss": ({"swiglu_limit": 7.0}, SLIDING),
    "Olmo3": ({"head_dim": 16}, SLIDING),
    "Qwen3Next": ({"full_attention_interval": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}, STATES),
    "Lfm2": ({"hidden_size": 128}, NO_PREFIXES),
    "FalconH1": ({}, NO_PREFIXES),
    "GraniteMoeHybrid": ({"head_dim": 16, "num_local_experts": 0, "num_experts_per_tok": 0}, NO_PREFIXES),
    "NemotronH": ({}, NO_PREFIXES),
}
RECIPES = {
    **dict.fromkeys(("Gemma2", "Gemma3n", "Gemma4", "GptOss", "Qwen3Next", "Lfm2"), "int8:block=16"),
    "Gemma3": "int8:skip=5,block=16",  # layers of unequal size
}
LIKE_TRANSFORMERS = ("Gemma2", "Gemma3", "GptOss", "Qwen3Next", "Lfm2")  # stock SGLang's Gemma 3n and 4 are not


class Served(NamedTuple):
    """What an engine gave."""

    fit: int  # tokens
    cold: list[Answer]
    warm: list[Answer]

    @property
    def tokens(self) -> list[list[int]]:
        return [answer.tokens for answer in self.cold]

    @property
    def logprobs(self) -> np.ndarray:
        return np.array([answer.logprobs for answer in self.cold])


def twice(engine) -> Served:
    prompts = [random_tokens(n, seed=n).tolist() for n in LENGTHS]
    return Served(tokens_that_fit(engine), ask(engine, prompts, TOKENS), ask(engine, prompts, TOKENS))


def check_equal(own: Served, stock: Served) -> None:
    assert own.tokens == stock.tokens
    assert np.abs(own.logprobs - stock.logprobs).max() < 1e-5
    assert [answer.cached for answer in own.warm] == [answer.cached for answer in stock.warm]
    assert [answer.tokens for answer in own.warm] == own.tokens
    assert own.fit >= stock.fit


@pytest.mark.parametrize("name", MODELS)
def test_answers_in_16_bits_are_those_of_sglang(name, tmp_path):
    more, options = MODELS[name]
    # transformers 5.12 renames the embedding of NemotronH, which SGLang then does not load: transformers#48075.
    tiny(name, **more).save_pretrained(tmp_path, save_original_format=name != "NemotronH")
    served = partial(serve, twice, model_path=str(tmp_path), **ENGINE, **options)
    check_equal(served("bf16"), served())


@pytest.mark.parametrize("name", RECIPES)
def test_answers_with_a_recipe_are_those_of_its_definition(name, tmp_path, capfd, monkeypatch):
    """With centring and an open block, sinks and soft-caps, layers in 16 bits, and layers that read the pages of
    others. The definition is that of attention, step by step, and the same recipe in transformers. Prefix hits change
    no token. The log says which layers are packed, and how many tokens fit."""
    monkeypatch.setattr(PackedLayer, "__abstractmethods__", frozenset())  # SGLang's transformers is older than kvfold's
    (more, options), recipe = MODELS[name], RECIPES[name]
    model = tiny(name, **more)
    model.save_pretrained(tmp_path)
    artifact = kvfold.calibrate(model, random_tokens(256, seed=3), context=64)
    artifact.save(tmp_path / "fits")
    with defined_attention() as found:
        fits = str(tmp_path / "fits")
        own = serve(twice, recipe, fits, model_path=str(tmp_path), **ENGINE, **options, log_level="info")
    assert found.queries >= sum(LENGTHS) + 2 * len(LENGTHS) * TOKENS
    assert found.error < 1e-5
    assert [answer.tokens for answer in own.warm] == own.tokens
    if name in LIKE_TRANSFORMERS:
        assert np.abs(own.logprobs - in_transformers(model, recipe, artifact, own.tokens)).max() < 0.02
    printed = capfd.readouterr().err
    skipped = parse(recipe).skip
    packed = [str(layer) for layer in HYBRIDS[name][1] if layer not in skipped]
    assert f"{len(packed)} packed ({', '.join(packed)})" in printed
    assert own.fit == room(name, Geometry.from_config(model.config.to_dict()), len(skipped))
    assert f"so that {own.fit:,} tokens fit" in printed


@torch.no_grad()
def in_transformers(model: PreTrainedModel, recipe: str, artifact: kvfold.Artifact, answers: list) -> np.ndarray:
    """The log-probabilities of the same answers."""
    found = []
    for n, tokens in zip(LENGTHS, answers, strict=True):
        ids = torch.cat((random_tokens(n, seed=n), torch.tensor(tokens)))
        logits = model(ids[None], past_key_values=kvfold.cache(model, recipe, artifact=artifact)).logits[0]
        found.append(logits[n - 1 : -1].float().log_softmax(-1).gather(1, ids[n:, None]).squeeze(1))
    return torch.stack(found).numpy()


def room(name: str, geometry: Geometry, skipped: int) -> int:
    """How many tokens fit, in bytes of 2 KV heads of 32 coordinates."""
    raw, packed = 2 * 2 * (2 * 32), 2 * 2 * (32 + 4)
    full, kinds = len(geometry.packed), [layer.kind for layer in geometry.layers]
    token = (full - skipped) * packed + skipped * raw
    if name in ("GptOss", "Gemma4"):  # SGLang has a pool for 0.8 of the tokens, and keeps nothing of layers 4 and 5
        token += 0.8 * raw * (kinds.count("sliding") + (2 if name == "Gemma4" else 0))
    else:
        token += raw * kinds.count("sliding")
    left = BUDGET - (1 + 4) * (16 + 16) * raw * (full - skipped)  # rings of padding and 4 requests
    return int(left // token) // PAGE * PAGE


def test_layers_of_unequal_size_have_pages_of_their_own(tmp_path):
    """Bits that are chosen per layer."""
    model, recipe = tiny(), "gtq-k3v3:widths=all"
    model.save_pretrained(tmp_path)
    kvfold.calibrate(model, random_tokens(512, seed=3), 128, [parse(recipe)]).save(tmp_path / "fits")
    with defined_attention() as found:
        own = serve(twice, recipe, str(tmp_path / "fits"), model_path=str(tmp_path), **ENGINE)
    assert found.error < 1e-5
    assert [answer.tokens for answer in own.warm] == own.tokens


def test_a_pipeline_of_two_ranks_answers_as_one(tmp_path, monkeypatch):
    """Of a model with sliding layers. The packed layer of the first rank is in 16 bits, and that of the second is not.
    The larger tokens of the first decide how many fit."""
    tiny("GptOss", **MODELS["GptOss"][0]).save_pretrained(tmp_path)
    options = {**ENGINE, **SLIDING, "model_path": str(tmp_path)}

    def served(ranks: int) -> tuple[Served, int]:
        monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "|".join("0" * ranks))
        with defined_attention() as found:
            answers = serve(twice, "int8:centre=false,skip=1,block=16", pp_size=ranks, **options)
        assert found.error < 1e-5
        return answers, found.queries

    (alone, reads), (shared, shared_reads) = served(1), served(2)
    check_equal(shared, alone)
    assert shared_reads == reads


def test_a_multimodal_model_reads_text(tmp_path):
    torch.manual_seed(0)
    text = {**SIZES, "hidden_size": 128, "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6]}}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 128}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    transformers.Qwen2_5_VLForConditionalGeneration(config).save_pretrained(tmp_path)
    served = partial(serve, twice, model_path=str(tmp_path), **ENGINE, enable_multimodal=False)  # needs no processor
    check_equal(served("bf16"), served())


def test_scales_of_an_fp8_cache_are_ignored(tmp_path, capfd):
    """Of a checkpoint that comes with them."""
    tiny().save_pretrained(tmp_path)
    served = partial(serve, twice, "int4:centre=false", model_path=str(tmp_path), **ENGINE, dtype="bfloat16")
    plain = served()
    with_scales(tmp_path)
    scaled = served(log_level="info")
    assert scaled.tokens == plain.tokens
    assert scaled.fit == plain.fit
    assert "packed layers ignore the checkpoint's scales of an FP8 cache" in capfd.readouterr().err


def with_scales(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "ignore": ["lm_head"],
        "kv_cache_scheme": scheme,
    }
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        weights |= {f"model.layers.{layer}.self_attn.{side}_scale": torch.tensor([0.05]) for side in "kv"}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def test_a_model_whose_prefixes_sglang_cannot_page_is_refused(tmp_path):
    tiny("Lfm2", **MODELS["Lfm2"][0]).save_pretrained(tmp_path)
    with pytest.raises(
        SystemExit, match=r"cannot keep prefixes of Lfm2\w+ in pages of 16 tokens.*disable-radix-cache$"
    ):
        serve(tokens_that_fit, "int4:centre=false", model_path=str(tmp_path), **ENGINE)
