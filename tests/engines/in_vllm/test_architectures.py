"""Models of which only some layers are packed, through real vLLM. The other layers stay as vLLM has them."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from defined_attention import Found, defined_attention
from gated_delta_rule import defined_gdn
from host_offload import followed_to_cpu_memory, offloading_on_a_cpu, transfer_config
from prometheus_client import REGISTRY
from tiny_models import HYBRIDS, random_tokens, tiny
from transformers import Cache, DynamicCache, PreTrainedModel
from vllm import SamplingParams, TokensPrompt
from vllm_engine import Engine, answer

import kvfold
from kvfold.engines.vllm.plan import logger
from kvfold.recipes import parse

RECIPE = "int4:block=16"
LENGTHS = (300, 37)  # of prompts
LONGEST, MEMORY = 1024, 2**24  # tokens of a request, bytes
SLIDING, FULL = ["sliding_attention"], ["full_attention"]
# vLLM has a rule of its own for which layers share a cache: those before the first must be sliding, then full.
SHARED = {"num_hidden_layers": 8, "layer_types": (3 * SLIDING + FULL) * 2, "num_kv_shared_layers": 4}
# vLLM's Mamba for CPUs cannot save states inside of a prompt.
NO_PREFIXES = {"enable_prefix_caching": False}
# Model: fields of its configuration that vLLM needs, options of the engine, and what the report says.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "Gemma2": ({}, {}, "2 packed (1, 3), 2 sliding as the engine has them"),
    "Gemma3": ({}, {}, "2 packed (2, 5), 4 sliding as the engine has them"),
    "Gemma3n": (
        {**SHARED, "intermediate_size": [32] * 8, "activation_sparsity_pattern": [0.0] * 8},
        {},
        "1 packed (3), 1 read their pages (7), 3 sliding as the engine has them, 3 shared as the engine has them",
    ),
    "Gemma4": (
        {**SHARED, "layer_types": (SLIDING + FULL) * 4},
        {},
        "2 packed (1, 3), 2 read their pages (5, 7), 2 sliding as the engine has them, 2 shared as the engine has them",
    ),
    "GptOss": ({}, {}, "2 packed (1, 3), 2 sliding as the engine has them"),
    "Olmo3": ({"hidden_size": 128}, {}, "1 packed (3), 3 sliding as the engine has them"),
    "Qwen3Next": (
        {"mlp_only_layers": [0, 1, 2, 3], "linear_key_head_dim": 16, "linear_value_head_dim": 16},
        {},
        "1 packed (3), 3 linear as the engine has them",
    ),
    "Lfm2": (
        {
            **dict.fromkeys(("hidden_size", "conv_dim", "conv_dim_out", "block_dim"), 128),
            "block_auto_adjust_ff_dim": False,
            "num_key_value_heads": 1,
            "block_multiple_of": 32,
            "block_ffn_dim_multiplier": 1.0,
        },
        {},
        "2 packed (1, 3), 2 linear as the engine has them",
    ),
    "FalconH1": ({}, NO_PREFIXES, "2 packed\n"),
    "GraniteMoeHybrid": ({"hidden_size": 128, "mamba_n_heads": 16}, NO_PREFIXES, "2 packed (1, 3), 2 linear as the"),
    "NemotronH": ({}, NO_PREFIXES, "2 packed (1, 3), 2 linear as the engine has them"),
}


@dataclass
class Served:
    """What an engine gave."""

    logprobs: np.ndarray  # of the tokens of prompts
    tokens: int  # that fit, by vLLM's count
    cold: list[tuple[list[int], list[float]]]  # answers
    warm: list[tuple[list[int], list[float]]]  # answers to the same prompts
    cached: int  # tokens of prompts that were found in the prefix cache
    found: Found
    builders: int  # of the first group
    report: str = ""
    ring_bytes: int = 0  # of a request
    token_bytes: float = 0  # by the gauge


@dataclass
class Case:
    name: str
    options: dict[str, Any]
    says: str
    defined: dict[str | None, np.ndarray] = field(default_factory=dict)  # by transformers, None: without kvfold
    served: dict[str | None, Served] = field(default_factory=dict)  # by vLLM


def prompts() -> list[list[int]]:
    return [random_tokens(n, seed=n).tolist() for n in LENGTHS]


@torch.no_grad()
def defined(model: PreTrainedModel, cache: Callable[[], Cache]) -> np.ndarray:
    """The log-probabilities of the prompts' tokens, by transformers."""
    found = []
    for prompt in prompts():
        ids = torch.tensor(prompt)
        each = model(ids[None], past_key_values=cache()).logits[0, :-1].log_softmax(-1)
        found.append(each.gather(1, ids[1:, None]).squeeze(1))
    return torch.cat(found).numpy()


def serve(folder, recipe: str | None, options: dict[str, Any], artifact: bool = True) -> Served:
    settings = {"max_model_len": LONGEST, "max_num_seqs": 4, "max_num_batched_tokens": 256, **options}
    with patch.object(logger, "info", wraps=logger.info) as told:
        engine = Engine(
            *(folder, recipe, str(folder / "fits") if artifact else None),
            skip_tokenizer_init=True,
            kv_cache_memory_bytes=MEMORY,
            **settings,
        )
    with defined_attention() as found:
        cold = engine.run(prompts(), chunk=64)
        again = engine.generate(prompts(), chunk=256)
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    given = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts()]
    outputs = engine.llm.generate(given, sampling, use_tqdm=False)
    tokens = [next(iter(token.values())).logprob for output in outputs for token in output.prompt_logprobs[1:]]
    served = Served(
        np.array(tokens),
        engine.llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens,
        cold,
        [answer(output) for output in again],
        sum(output.num_cached_tokens for output in again),
        found,
        len(engine.runner.attn_groups[0]),
    )
    if recipe is not None:
        served.report = "\n".join(str(call.args[0]) for call in told.call_args_list)
        served.ring_bytes = engine.ring * (MEMORY // engine.blocks)
        served.token_bytes = REGISTRY.get_sample_value("kvfold:bytes_per_token")
    engine.close()
    return served


@pytest.fixture(scope="module", params=MODELS)
def case(request, tmp_path_factory) -> Iterator[Case]:
    fields, options, says = MODELS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    model = tiny(request.param, max_position_embeddings=LONGEST, **fields)
    model.save_pretrained(folder)
    artifact = kvfold.calibrate(model, random_tokens(64, seed=3), context=64)
    artifact.save(folder / "fits")
    case = Case(request.param, options, says)
    # before vLLM, which changes transformers' own classes of some models
    stock = tiny(request.param, max_position_embeddings=LONGEST, **fields)
    stock.set_attn_implementation("eager")  # SDPA knows neither soft-caps nor sinks
    case.defined[None] = defined(stock, lambda: DynamicCache(config=stock.config))
    for recipe in ("bf16", RECIPE):
        case.defined[recipe] = defined(model, lambda recipe=recipe: kvfold.cache(model, recipe, artifact))
    with defined_gdn() if request.param == "Qwen3Next" else nullcontext():
        for recipe in (None, "bf16", RECIPE):
            case.served[recipe] = serve(folder, recipe, options)
    return case


@pytest.mark.parametrize(("recipe", "error"), [("bf16", 0.4), (RECIPE, 0.1)])
def test_answers_are_moved_as_in_transformers(case, recipe, error):
    """By the rounding to 16 bits, and by the recipe. Keys and values of two implementations differ in their last bits,
    so that now and then a number is rounded otherwise."""
    expected = case.defined[recipe] - case.defined[None]
    found = case.served[recipe].logprobs - case.served[None].logprobs
    assert np.abs(found - expected).mean() < error * np.abs(expected).mean()


def test_attention_is_what_its_definition_says(case):
    """For every query of the packed layers, of prompts, of answers, and after prefix hits."""
    for recipe in ("bf16", RECIPE):
        found = case.served[recipe].found
        assert found.queries > len(HYBRIDS[case.name][1]) * sum(LENGTHS)
        assert found.error < 1e-5


def test_a_cached_prefix_changes_no_answer(case):
    """Keys and values differ in their last bits, which changes a code of a packed cache now and then. There,
    `defined_attention` says that hits change nothing."""
    served = case.served["bf16"]
    assert (served.cached > 0) == ("enable_prefix_caching" not in case.options)
    for (tokens, logprobs), (again, same) in zip(served.cold, served.warm, strict=True):
        assert again == tokens
        np.testing.assert_allclose(same, logprobs, atol=1e-4)


def test_as_many_tokens_fit_as_the_report_says(case):
    """By vLLM's count, and by what packed layers gain: other layers take what they took."""
    stock, packed = case.served[None], case.served[RECIPE]
    report = packed.report
    assert case.says in report
    assert f"so that {packed.tokens:,} tokens fit" in report
    assert f"bytes per token: {packed.token_bytes:,.0f}, against" in report
    raw, smaller = re.search(r"against ([\d,]+) in 16 bits: ([\d.]+) times smaller", report).groups()
    full = LONGEST * 2 * int(raw.replace(",", ""))  # bytes of a request in packed layers; vLLM has float32
    request = LONGEST * MEMORY / stock.tokens
    expected = LONGEST * MEMORY / (request - full + full / (2 * float(smaller)) + packed.ring_bytes)
    assert packed.tokens > 0.85 * expected


@pytest.mark.parametrize("recipe", [f"{RECIPE},skip=0", "gtq-k3v3:widths=all,block=16"])
def test_layers_of_unequal_size_share_a_page_table(recipe, tmp_path):
    """vLLM has a builder per size. The first one begins each step for all of them."""
    model = tiny(max_position_embeddings=LONGEST, num_hidden_layers=3)
    model.save_pretrained(tmp_path)
    artifact = kvfold.calibrate(model, random_tokens(256, seed=3), 128, [parse(recipe)])
    artifact.save(tmp_path / "fits")
    expected = defined(model, lambda: kvfold.cache(model, recipe, artifact))
    served = serve(tmp_path, recipe, {})
    assert served.builders > 1
    assert served.found.error < 1e-5
    assert np.abs(served.logprobs - expected).mean() < 1e-4


SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
QUANTIZED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "config_groups": {},
    "ignore": ["lm_head"],
    "kv_cache_scheme": SCHEME,
}


def test_a_recipe_takes_the_place_of_a_checkpoints_own_scheme(tmp_path):
    tiny(max_position_embeddings=LONGEST).save_pretrained(tmp_path)
    recipe, file = "int4:centre=false", tmp_path / "config.json"
    plain = serve(tmp_path, recipe, {}, artifact=False)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": QUANTIZED}))
    served = serve(tmp_path, recipe, {}, artifact=False)
    assert "the recipe takes the place of the checkpoint's own quantization of the cache" in served.report
    assert (served.tokens, served.found.error < 1e-5) == (plain.tokens, True)
    np.testing.assert_array_equal(served.logprobs, plain.logprobs)


def test_blocks_of_all_layers_come_back_from_cpu_memory(tmp_path):
    """Those of sliding layers beside packed ones, which hold several pages. Rings do not leave."""
    tiny("Gemma3", max_position_embeddings=LONGEST).save_pretrained(tmp_path)
    prompts = [random_tokens(300, seed=seed).tolist() for seed in range(3)]
    with offloading_on_a_cpu():
        options = {"kv_cache_memory_bytes": MEMORY, "kv_transfer_config": transfer_config()}
        engine = Engine(tmp_path, f"{RECIPE},centre=false", None, skip_tokenizer_init=True, **options)
        (group,) = engine.packed.groups
        assert group.ratio > 1
        with defined_attention() as found, followed_to_cpu_memory(found, group.ratio) as loaded:
            engine.alone(prompts[0])
            (hit,) = engine.generate(prompts[:1])
            assert hit.num_cached_tokens > 200
            engine.forget()
            with engine.only(23 + engine.ring):  # one prompt needs 22, and its ring
                again = [engine.generate([prompt])[0] for prompt in (*prompts[1:], *prompts)]
        engine.close()
    assert [output.num_cached_tokens for output in again] == [0, 0, *[hit.num_cached_tokens] * 3]
    assert len(loaded) > 2
    assert found.error < 1e-5
