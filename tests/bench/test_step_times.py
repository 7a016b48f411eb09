"""`kvfold bench step` as far as a machine without a GPU can follow it."""

import csv
import json
import math
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded_graphs import KERNELS, recorder, use_kernels
from tiny_models import SIZES
from transformers import DynamicCache
from typer.testing import CliRunner, Result

from kvfold.bench import model_steps, step_times
from kvfold.bench.cuda_graphs import WARM_UP
from kvfold.bench.dense_cache import DenseCache
from kvfold.bench.model_steps import (
    Decoder,
    check_plain,
    dense_error,
    packed_cache,
    packed_error,
    random_model,
    with_layers,
)
from kvfold.bench.step_times import Case, Row, Turn
from kvfold.cli import app
from kvfold.geometry import Geometry, example_configs
from kvfold.ops import naive
from kvfold.ops.pages import Logits
from kvfold.recipes import parse

CPU = torch.device("cpu")
ASKED = {  # columns that the results must have
    *("recipe", "batch", "context", "layers", "us", "baseline_us", "speedup", "cache_bytes", "peak_bytes"),
    *("tokens_per_s", "gpu", "torch", "triton", "transformers", "date"),
}
TINY = {**SIZES, "model_type": "qwen3"}
TINIEST = {**TINY, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
pytestmark = pytest.mark.usefixtures("_poisoned_memory")


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model(TINY, CPU, torch.float32)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", "step", *map(str, arguments)])


# Cases and shapes


def test_cases():
    case = Case.parse("32x16384")
    assert (case.batch, case.context) == (32, 16384)
    assert case.start + WARM_UP + 1 == case.context
    assert [Case.parse(text).batch for text in step_times.CASES] == [1, 1, 1, 8, 8, 8, 32, 32, 32]


@pytest.mark.parametrize("text", ["16384", "1x8+1", "x8", "1 x 8"])
def test_what_is_no_case(text: str):
    with pytest.raises(ValueError, match="is no case: write BATCHxCONTEXT, as 32x16384"):
        Case.parse(text)


@pytest.mark.parametrize("text", ["0x64", "1x3"])
def test_cases_that_are_too_small(text: str):
    with pytest.raises(ValueError, match=f"{text}: a case has 1 sequence and 4 tokens at least"):
        Case.parse(text)


@pytest.mark.parametrize(("name", "billions"), [("Qwen3-8B", 8.19), ("Qwen3-32B", 32.76), ("Llama-3.1-8B", 8.03)])
def test_examples_have_the_size_of_the_models(name: str, billions: float):
    made = random_model(example_configs()[name], torch.device("meta"))
    assert sum(parameter.numel() for parameter in made.parameters()) / 1e9 == pytest.approx(billions, abs=0.01)
    assert {parameter.dtype for parameter in made.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "gemma3_text", "num_hidden_layers": 6, "sliding_window": 8},
        {"model_type": "qwen3_next", "num_hidden_layers": 4},
        {"model_type": "falcon_h1"},  # Mamba beside full attention in every layer
        {"attn_logit_softcapping": 30.0},
    ],
)
def test_models_with_more_than_full_attention_are_refused(options: dict[str, Any]):
    with pytest.raises(ValueError, match="has more than plain full attention, and its steps cannot be captured"):
        check_plain({**TINY, **options})


def test_a_configuration_with_its_first_layers():
    config = {**TINY, "layer_types": ["full_attention"] * 2}
    assert len(random_model(with_layers(config, 1), CPU, torch.float32).model.layers) == 1
    assert with_layers(config, None) == config


def test_incomplete_configurations_are_refused():
    with pytest.raises(ValueError, match="cannot be built without model_type, vocab_size, hidden_size"):
        random_model(example_configs()["GLM-4.7"], CPU)


# Caches that no prompt has filled


@pytest.mark.parametrize("recipe", ["saw-int4", "oscar-int2:group=32,block=8", "gtq-k3v3", "kivi-2", "bf16"])
def test_filled_pages(model: Any, recipe: str):
    """All are written, in random order, and what is read is as defined."""
    cache = packed_cache(model, parse(recipe), batch=2, start=37, capacity=60, page=8)
    paged = cache.paged
    assert paged is not None
    assert paged.lengths == [37, 37]
    assert cache.tokens == 37
    held = paged.tables.pages[0] + paged.tables.pages[1]
    assert len(set(held)) == len(held)
    assert held != sorted(held)
    assert all(len(pool) == 2 * math.ceil(60 / 8) and (pool == pool[0]).all() for pool in paged.pools)
    assert not any(ring.isnan().any() for ring in paged.rings)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, heads, 32, generator=generator) for heads in (4, 2, 2))
    cache.begin(2, 1)
    out = paged.attend(0, *(x.unsqueeze(1) for x in (q, k, v)), Logits(0.3)).squeeze(1)
    new = tuple(
        codec.transform.forward(x).to(paged.rings[0].dtype) for codec, x in zip(paged.codecs[0], (k, v), strict=True)
    )
    expected = naive.attend(paged.pages(0), q, new if paged.blocks[0] else None, Logits(0.3))
    assert out.isfinite().all()
    assert out.abs().max() < 10
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_steps_are_the_same_for_every_cache(model: Any):
    both = [Decoder(model, packed_cache(model, parse("int4"), 3, 5, 20, 8), 3) for _ in range(2)]
    for position in range(5, 12):
        for steps in both:
            steps.begin()
        assert torch.equal(both[0].ids, both[1].ids)
        assert (both[0].positions == position).all()
        assert torch.equal(both[0].run(), both[1].run())


def test_dense_attention_is_plain_attention(model: Any):
    """The logits of transformers' own cache, which is fed the same tokens."""
    geometry, steps = Geometry.from_config(TINY), 12
    dense = Decoder(model, DenseCache(geometry, 3, 0, steps, torch.float32, CPU), 3)
    own = DynamicCache(config=model.config)
    for _ in range(steps):
        dense.begin()
        logits = dense.run()
        model.set_attn_implementation("sdpa")
        with torch.no_grad():
            expected = model(dense.ids, past_key_values=own, use_cache=True).logits
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert dense.cache.allocated_bytes == 2 * 2 * 3 * 2 * 12 * 32 * 4


def test_a_step_over_a_full_dense_cache_takes_the_place_of_the_last(model: Any):
    dense = Decoder(model, DenseCache(Geometry.from_config(TINY), 2, 7, 8, torch.float32, CPU), 2)
    seen = []
    for _ in range(3):
        dense.begin()
        dense.run()
        assert (dense.positions == 7).all()
        seen.append([layer.keys.clone() for layer in dense.cache.layers])
    for layer in range(2):
        assert torch.equal(seen[0][layer][:, :, :7], seen[2][layer][:, :, :7])
        assert not torch.equal(seen[0][layer][:, :, 7], seen[2][layer][:, :, 7])


def test_the_dense_cache_takes_one_token_and_no_mask(model: Any):
    cache = DenseCache(Geometry.from_config(TINY), 1, 0, 8, torch.float32, CPU)
    with pytest.raises(ValueError, match="a step brings 1 token for each of 1 sequences, not 2 for 1"):
        cache.begin(1, 2)
    cache.begin(1, 1)
    model.set_attn_implementation("kvfold-dense")
    with pytest.raises(ValueError, match="one token of each sequence, and no mask"):
        model(torch.ones(1, 1, dtype=torch.int64), attention_mask=torch.ones(1, 1), past_key_values=cache)


# Replays, with what they do to tensors recorded and repeated


def test_dense_replays(model: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(model_steps, "capture", recorder(monkeypatch))
    assert dense_error(model, 8, steps=9) < 2**-7


@pytest.mark.parametrize("recipe", ["saw-int4", "int2:block=3", "bf16"])
def test_packed_replays(monkeypatch: pytest.MonkeyPatch, recipe: str):
    """Kernels are interpreted; steps cross a page and a block."""
    made = random_model(TINIEST, CPU)
    use_kernels(monkeypatch)
    monkeypatch.setattr(model_steps, "capture", recorder(monkeypatch))
    assert packed_error(made, parse(recipe), 4, steps=4) < 2**-9


def test_a_graph_that_does_not_follow_is_found_out(monkeypatch: pytest.MonkeyPatch):
    """Without `reserve` every step describes itself elsewhere, and replays read what the captured one did."""
    made = random_model(TINIEST, CPU)
    use_kernels(monkeypatch)
    monkeypatch.setattr(model_steps, "capture", recorder(monkeypatch))
    monkeypatch.setattr("kvfold.ops.pages.Step.placed_in", lambda step, _: step)
    assert packed_error(made, parse("saw-int4"), 4, steps=4) > step_times.ALLOWED


# The command


@pytest.fixture
def _fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models stay on the CPU, replays are eager steps, and the dense cache takes 20 µs, others 8."""
    named = {"is_available": True, "get_device_name": "a GPU", "max_memory_allocated": 123}
    nothing = ("empty_cache", "synchronize", "reset_peak_memory_stats", "is_current_stream_capturing")
    for name, result in {**named, **dict.fromkeys(nothing)}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, result=result: result)

    class Graph:
        def __init__(self, call: Callable[[], torch.Tensor]) -> None:
            self.call, self.logits = call, call().clone()

        def replay(self) -> None:
            if self.call.__self__.cache.begun:  # type: ignore[attr-defined]
                self.logits.copy_(self.call())

    def capture(begin: Callable[[], object], call: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        for _ in range(WARM_UP):
            begin()
            call()
        begin()
        graph = Graph(call)
        return graph, graph.logits

    monkeypatch.setattr(DenseCache, "begun", 0, raising=False)
    monkeypatch.setattr(model_steps, "capture", capture)
    monkeypatch.setattr(step_times, "capture", capture)
    taken = {"DenseCache": 0.02, "PackedCache": 0.008}
    monkeypatch.setattr(
        step_times, "milliseconds", lambda replay: taken[type(replay.__self__.call.__self__.cache).__name__]
    )
    monkeypatch.setattr(step_times, "random_model", lambda config, device: random_model(config, CPU, torch.float32))
    monkeypatch.setattr(step_times, "dense_error", lambda model, page: dense_error(model, page, steps=5))
    monkeypatch.setattr(
        step_times, "packed_error", lambda model, recipe, page: packed_error(model, recipe, page, steps=5)
    )
    monkeypatch.setattr(step_times, "choose", lambda *_: KERNELS)


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**TINY, "num_hidden_layers": 3}))
    return file


def test_rows_have_all_columns():
    assert {field.name for field in fields(Row)} >= ASKED


@pytest.mark.usefixtures("_fake_gpu")
def test_rows(shape: Path, tmp_path: Path):
    recipes = ("-r", "saw-int4", "-r", "oscar-int2:group=32,block=8")
    files = ("--csv", tmp_path / "rows.csv", "--json", tmp_path / "rows.json")
    result = run("--shape", shape, "--case", "2x40", "--case", "1x50", *recipes, "--page", 16, *files, "--layers", 2)
    assert not result.exit_code, result.exception
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["recipe"], row["batch"], row["context"]) for row in rows] == [
        (recipe, *case)
        for case in ((2, 40), (1, 50))
        for recipe in ("dense", "saw-int4", "oscar-int2:block=8,group=32")
    ]
    dense, saw, _ = rows[:3]
    assert (dense["us"], dense["baseline_us"], dense["speedup"], dense["begin_us"]) == (20, 20, 1, None)
    assert (saw["us"], saw["baseline_us"], saw["speedup"], saw["tokens_per_s"]) == (8, 20, 2.5, 250000)
    assert saw["begin_us"] > 0
    assert dense["cache_bytes"] == 2 * 2 * 2 * 2 * 40 * 32 * 4  # sides, layers, sequences, KV heads, float32
    assert saw["cache_bytes"] == 2 * 2 * 2 * 3 * 16 * 2 * (16 + 4)  # 3 pages for 48 tokens, codes and metadata
    assert all(row["peak_bytes"] == 123 and row["layers"] == 2 and row["error"] < step_times.ALLOWED for row in rows)
    assert all(row["baseline"] == "FlashAttention" and not row["note"] for row in rows)
    with (tmp_path / "rows.csv").open() as file:
        assert [row["speedup"] for row in csv.DictReader(file)] == ["1.0", "2.5", "2.5"] * 2
    shown = " ".join(result.stdout.split())
    assert all(text in shown for text in ("2 × 40 tokens", "1 × 50 tokens", "2.50×", "peaks include weights", "a GPU"))


@pytest.mark.usefixtures("_fake_gpu")
def test_what_does_not_fit_has_a_row_that_says_so(shape: Path, monkeypatch: pytest.MonkeyPatch):
    def too_large(*arguments: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(step_times, "DenseCache", too_large)
    rows = json.loads(run("--shape", shape, "--case", "2x40", "-r", "saw-int4", "--json", "-").stdout)
    assert [(row["us"], row["baseline_us"], row["speedup"], row["note"]) for row in rows] == [
        (None, None, None, "does not fit in memory"),
        (8, None, None, ""),
    ]
    assert "–" in run("--shape", shape, "--case", "2x40", "-r", "saw-int4").stdout


@pytest.mark.usefixtures("_fake_gpu")
def test_what_is_wrong_is_not_timed(shape: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(step_times, "packed_error", lambda *_: 0.5)
    monkeypatch.setattr(step_times, "_turns", lambda *_: pytest.fail("timed"))
    result = run("--shape", shape, "--case", "2x40", "-r", "saw-int4")
    assert "saw-int4 is wrong by 0.5, 0.016 at most, and not timed" in str(result.exception)


@pytest.mark.usefixtures("_fake_gpu")
def test_a_run_that_breaks_off_leaves_its_rows(shape: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    turns = iter([{"dense": Turn(8.0), "saw-int4": Turn(4.0)}])
    monkeypatch.setattr(step_times, "_turns", lambda *_: next(turns))
    assert run(
        "--shape", shape, "--case", "2x40", "--case", "1x40", "-r", "saw-int4", "--csv", tmp_path / "rows.csv"
    ).exception
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 3


@pytest.mark.usefixtures("_fake_gpu")
def test_recipes_without_kernels_are_refused(shape: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(step_times, "choose", lambda layout, ratio, device: model_steps.choose(layout, ratio, CPU))
    result = run("--shape", shape, "--case", "2x40", "-r", "kivi-2")
    assert "kivi-2 has no kernel, and plain torch cannot be captured: there is no kernel for these keys" in str(
        result.exception
    )


@no_gpu
def test_without_a_gpu_nothing_is_timed():
    result = run("--case", "1x8192")
    assert isinstance(result.exception, ValueError)
    assert "sees none: run this on a machine with one, with a CUDA build of torch" in str(result.exception)
    assert not result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--case", "32"), "'32' is no case"),
        (("-r", "saw-int4:order=48"), "order=48 does not divide the head dimension 128"),
        (("--csv", "missing/rows.csv"), "there is no folder missing"),
        (("-r", "saw-int4:skip=7", "--layers", "4"), "the packed layers are 0 to 3"),
    ],
)
def test_refusals(arguments: tuple[str, ...], message: str):
    assert message in str(run(*arguments).exception)


def test_rows_are_plain():
    row = Row(
        "Qwen3-8B", "int4", 1, 8, 2, 64, 1.0, "cuDNN", 2.0, 2.0, 3.0, 4.0, 5, 6, 0.0, "", "", "", "", "", "2026-01-01"
    )
    assert json.loads(json.dumps(asdict(row))) == asdict(row)
