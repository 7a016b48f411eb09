"""`kvfold recipes` and `kvfold plan`."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import HEAD_DIM, KV_HEADS, LAYERS, plain, run
from model_configs import MODELS

from kvfold.geometry import example_configs
from kvfold.recipes import RECIPES

GIB = 2**30
EVALUATED = ["kmeans-int4", "kmeans-saw-int4", "kivi-2", "kivi-4", "kitty-2"]  # no kernel stores these
SERVED = [name for name in RECIPES if name not in EVALUATED]
BITS = {  # with a 16-bit scale and offset for each head of 128
    "bf16": 16,
    "int8": 8.25,
    "int4": 4.25,
    "int2": 2.25,
    "saw-int4": 4.25,
    "quarot-int2": 2.25,
}
CONFIG = {
    "architectures": ["SomeForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "hidden_size": 512,
}


@pytest.fixture
def config_file(tmp_path: Path) -> Callable[..., Path]:
    def write(**changes: object) -> Path:
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**CONFIG, **changes}))
        return path

    return write


@pytest.mark.parametrize(("head_dim", "metadata"), [(128, 0.25), (64, 0.5)])
def test_recipes_as_json(head_dim: int, metadata: float):
    rows = json.loads(run("recipes", "--head-dim", head_dim, "--json", "-").stdout)
    assert [row["recipe"] for row in rows] == list(RECIPES)
    for row in rows:
        assert row["summary"]
        if (bits := BITS.get(row["recipe"])) is None:
            continue
        expected = bits if bits == 16 else int(bits) + metadata
        assert row["bits_per_element_2k"] == row["bits_per_element_128k"] == expected
        assert row["key_slot_bytes"] == row["value_slot_bytes"] == expected * head_dim / 8
        assert row["needs"] == ("nothing" if row["recipe"] == "bf16" else "means")
    folds = {"fold4", "fold3", "fold2"}
    learning = folds | {
        "kmeans-int4",
        "kmeans-saw-int4",
        "hessian-int4",
        "oscar-int2",
        "gtq-k2v2",
        "gtq-k3v3",
        "gtq-k4v4",
    }
    assert {row["recipe"] for row in rows if row["needs"] == "calibration"} == learning
    assert [row["recipe"] for row in rows if row["for_evaluation"]] == EVALUATED
    options = {row["recipe"]: set(row["options"]) for row in rows}
    assert options["bf16"] == set()
    assert options["int4"] == {"block", "centre", "skip", "group"}
    assert options["saw-int4"] == options["int4"] | {"order", "values"}


def test_recipes_as_a_table():
    shown = plain(run("recipes").stdout)
    assert all(name in shown for name in RECIPES), "a name is cut off in a terminal of 80 columns"
    assert all(number in shown for number in ("16", "8.25", "4.25", "2.25", "68 + 68", "36 + 36"))
    assert re.search(r"oscar-int2 .*\bcalibration\b", shown)
    assert re.search(r"saw-int4 .*\bmeans\b", shown)
    words = " ".join(shown.split())
    assert words.count(", for evaluation") == len(EVALUATED)
    assert "No kernel stores recipes for evaluation: vLLM and SGLang refuse them" in words
    assert max(map(len, shown.splitlines())) <= 80
    assert "head dimension 64" in plain(run("recipes", "--head-dim", 64).stdout)


@pytest.mark.parametrize("recipe", [*EVALUATED, "gtq-k3v3:per_head=true"])
def test_serve_refuses_recipes_for_evaluation_before_it_calibrates(
    error_of, small: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
):
    monkeypatch.setattr("kvfold.cli.command_serve.calibrated_folder", lambda *_: pytest.fail("calibrated"))
    line = error_of("serve", small, "-r", recipe)
    assert line.startswith(f"error: {recipe} is for evaluation, as no kernel stores it (")
    assert line.endswith("): serve fold4, fold3 or fold2")


def test_recipes_that_do_not_fit_are_left_out_and_named(config_file):
    """Halves of 36 dims, OSCAR's groups, are no whole bytes; and Block-GTQ takes 8 dims at a time."""
    path = config_file(hidden_size=8 * 36)
    for names, arguments in ((RECIPES, ("recipes", "--head-dim", 36)), (SERVED, ("plan", path, "--memory", "1GB"))):
        rows = json.loads(run(*arguments, "--json", "-").stdout)
        assert [row["recipe"] for row in rows] == [name for name in names if name[:3] not in ("osc", "gtq", "fol")]
        shown = plain(run(*arguments).stdout)
        assert "oscar-int2 does not fit: group=18: 18 codes of 2 bits do not fill whole bytes\n" in shown
        assert "gtq-k2v2 does not fit: Block-GTQ takes heads of a multiple of 8 dims, not 36\n" in shown
        assert "fold4 does not fit: heads of a multiple of 8 dims are needed, not 36\n" in shown
        assert shown.count("does not fit") == 7


def test_recipes_into_a_file_shows_the_table_too(tmp_path: Path):
    shown = run("recipes", "--json", tmp_path / "recipes.json").stdout
    assert "saw-int4" in shown
    assert json.loads((tmp_path / "recipes.json").read_text())[0]["recipe"] == "bf16"


# plan: these examples have 8 KV heads of 128, so a token takes 2·8·128 numbers in each layer


@pytest.mark.parametrize(
    ("model", "layers", "context"),
    [("Qwen3-8B", 36, 40960), ("Qwen3-32B", 64, 40960), ("Llama-3.1-8B", 32, 131072), ("GLM-4.7", 92, 202752)],
)
def test_plan_of_plain_examples(model: str, layers: int, context: int):
    rows = json.loads(run("plan", model, "--memory", "80GiB", "--json", "-").stdout)
    assert [row["recipe"] for row in rows] == SERVED
    for row in (row for row in rows if row["recipe"] in BITS):
        bits = BITS[row["recipe"]]
        per_token = layers * 2048 * bits / 8
        assert row["bytes_per_token"] == per_token
        assert row["compression"] == pytest.approx(16 / bits)
        assert row["tokens"] == 80 * GIB // per_token
        assert (row["context"], row["requests"]) == (context, 80 * GIB // (per_token * context))


WINDOWS = {  # tokens of sliding and chunked layers
    "Gemma-3-12B": 1024,
    "Gemma-4-31B": 1024,
    "Gemma-4-E4B": 512,
    "gpt-oss-20b": 128,
    "gpt-oss-120b": 128,
    "MiMo-V2-Flash": 128,
    "Llama-4-Scout": 8192,
}


@pytest.mark.parametrize("name", example_configs())
def test_plan_counts_packed_layers_and_windows_apart(name: str):
    """Against the table of real models: a vector of d numbers takes d bytes and 4 more as `int8`."""
    model, context = MODELS[name], 16384
    rows = json.loads(run("plan", name, "--memory", "80GiB", "--context", context, "--json", "-").stdout)
    vectors = len(model.packed) * model.kv_heads
    expected = {
        "bf16": 2 * vectors * (model.key_dim + model.value_dim),
        "int8": vectors * (model.key_dim + model.value_dim + 8),
    }
    _, kv_heads, key_dim, value_dim = model.windowed or (0, model.kv_heads, model.key_dim, model.value_dim)
    window_layers = len(model.sliding) + len(model.chunked)
    window = 2 * window_layers * kv_heads * (key_dim + value_dim) * WINDOWS.get(name, 0)
    bf16 = expected["bf16"] * context + window
    for row in (row for row in rows if row["recipe"] in expected):
        request = expected[row["recipe"]] * context + window
        assert row["bytes_per_token"] == expected[row["recipe"]]
        assert row["window_bytes"] == window
        assert row["requests"] == 80 * GIB // request
        assert row["tokens"] == 80 * GIB * context // request
        assert row["compression"] == pytest.approx(bf16 / request)
    assert sum(rows[0]["layers"].values()) == len(model.packed) + window_layers + len(model.linear) + len(model.shared)


def test_a_window_that_is_longer_than_the_context_holds_the_context():
    (row, *_) = json.loads(run("plan", "Gemma-3-12B", "--memory", "1GiB", "--context", 256, "--json", "-").stdout)
    assert row["window_bytes"] == 40 * 8 * 512 * 2 * 256


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "Gemma-3-12B",
            (
                "8 of 48 layers, 16 query and 8 KV heads of 256",
                "40 sliding layers take 335,544,320 bytes per request: 1,024 tokens in 16 bits",
            ),
        ),
        (
            "Gemma-4-E4B",
            (
                "20 sliding layers take 20,971,520 bytes per request: 512 tokens in 16 bits",
                "18 layers read the cache of another layer and have none",
            ),
        ),
        (
            "Qwen3-Next-80B-A3B",
            (
                "12 of 48 layers, 16 query and 2 KV heads of 256",
                "36 layers have no cache that grows: what the engine keeps there is not counted",
            ),
        ),
        ("MiMo-V2-Flash", ("9 of 48 layers, 64 query and 4 KV heads of 192 and 128",)),
    ],
)
def test_plan_says_what_is_not_packed(name: str, lines: tuple[str, ...]):
    shown = plain(run("plan", name, "--memory", "40GiB", "--context", 32768).stdout)
    assert max(map(len, shown.splitlines())) <= 80
    assert all(line in " ".join(shown.split()) for line in lines)


def test_plan_counts_whole_pages():
    """1000 tokens take 63 pages of 16."""
    rows = json.loads(run("plan", "Qwen3-8B", "--memory", "1GiB", "--context", 1000, "--json", "-").stdout)
    request = {row["recipe"]: row["bytes_per_token"] * 1000 for row in rows}
    assert request["int4"] == 36 * 1088 * 1008
    without = [row for row in rows if not row["open_block_bytes"]]
    assert [row["requests"] for row in without] == [GIB // int(request[row["recipe"]]) for row in without]


@pytest.mark.parametrize("context", [20, 4096, 32768])
def test_plan_counts_the_open_block_of_every_request(context: int):
    """A token of `fold4` has 36 layers and 8 heads of 256 numbers. The ring has 64 + 16 of them in 16 bits."""
    rows = json.loads(run("plan", "Qwen3-8B", "--memory", "20GiB", "--context", context, "--json", "-").stdout)
    named = {row["recipe"]: row for row in rows}
    taken = (64 + 16) * 36 * 8 * 256 * 2
    assert {name: named[name]["open_block_bytes"] for name in ("bf16", "int4", "fold4", "oscar-int2")} == {
        "bf16": 0, "int4": 0, "fold4": taken, "oscar-int2": taken // 80 * (256 + 16),
    }  # fmt: skip
    whole_pages = -(-context // 16) * 16
    key, value = (32 * 8 + 64 * 4 + 32 * 2) // 8 + 3, 128 * 4 // 8 + 1  # codes, and a scale for each width
    per_token = 36 * 8 * (key + value)
    assert named["fold4"]["bytes_per_token"] == per_token * whole_pages / context
    request = per_token * whole_pages + taken
    assert named["fold4"]["requests"] == 20 * GIB // request
    assert named["fold4"]["tokens"] == 20 * GIB * context // request
    assert named["fold4"]["compression"] == pytest.approx(36 * 4096 * whole_pages / request)
    shown = " ".join(plain(run("plan", "Qwen3-8B", "--memory", "20GiB", "--context", context).stdout).split())
    assert "each running request has an open block in 16 bits, up to 38.2 MiB, counted here" in shown


def test_plan_as_a_table(tmp_path: Path):
    shown = plain(run("plan", "Qwen3-8B", "--memory", "80GiB", "--json", tmp_path / "plan.json").stdout)
    assert all(name in shown for name in RECIPES)
    assert f"engines do not serve {', '.join(EVALUATED)}: these are for evaluation" in " ".join(shown.split())
    for text in ("36 layers", "32 query and 8 KV heads of 128", "39,168", "3.76×", "2,193,100", "53", "40,960"):
        assert text in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert json.loads((tmp_path / "plan.json").read_text())[SERVED.index("int4")]["requests"] == 53


@pytest.mark.parametrize(
    ("memory", "amount"),
    [("80GiB", 80 * GIB), ("512MB", 512e6), ("1.5 gb", 1.5e9), ("2TiB", 2048 * GIB), ("64kib", 65536), ("1e9", 1e9)],
)
def test_memory(memory: str, amount: float):
    (row, *_) = json.loads(run("plan", "Qwen3-8B", "--memory", memory, "--context", 16, "--json", "-").stdout)
    assert row["tokens"] == amount // (36 * 4096)


@pytest.mark.parametrize("memory", ["lots", "80 GiBs", "", "GB", "1.2.3GB", "5 PB"])
def test_memory_that_is_none(error_of, memory: str):
    assert f"{memory!r} is no amount of memory" in error_of("plan", "Qwen3-8B", "--memory", memory)


@pytest.mark.parametrize("memory", ["1e400GiB", "1e400", "9" * 400 + "GB", "1e9TiB"])
def test_memory_that_no_machine_has(error_of, memory: str):
    assert f"'{memory}' is more memory than any machine has" in error_of("plan", "Qwen3-8B", "--memory", memory)


def test_memory_without_a_unit(error_of):
    assert "'40' is less than a megabyte: write a unit" in error_of("plan", "Qwen3-8B", "--memory", 40)


def test_plan_names_its_examples(error_of):
    assert "examples are Qwen3-4B, Qwen3-8B" in error_of("plan", "Qwen3-5B", "--memory", "40GiB")


def test_plan_of_a_configuration_without_weights(config_file, small: Path):
    path = config_file(max_position_embeddings=4096)
    for model in (path, path.parent):
        rows = json.loads(run("plan", model, "--memory", "1GB", "--json", "-").stdout)
        taken = {row["recipe"]: row["bytes_per_token"] for row in rows}
        assert [taken[name] for name in ("bf16", "int8", "int4")] == [10 * 128 * bits / 8 for bits in (16, 8.5, 4.5)]
        assert {row["context"] for row in rows} == {4096}
    (row, *_) = json.loads(run("plan", small, "--memory", "1GB", "--json", "-").stdout)
    assert row["bytes_per_token"] == 2 * LAYERS * KV_HEADS * HEAD_DIM * 2


def test_plan_without_a_longest_context(config_file):
    (row, *_) = json.loads(run("plan", config_file(), "--memory", "1GB", "--json", "-").stdout)
    assert row["context"] == 32768


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_lora_rank": 512}, "multi-head latent attention (MLA)"),
        ({"sliding_window": 4096}, "all its layers are sliding"),
        ({"layer_types": ["full_attention", "ring_attention"] * 5}, "ring attention in layer 1 is not supported"),
        ({"is_encoder_decoder": True}, "encoder-decoder models are not supported"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries, and num_hidden_layers is 10"),
    ],
)
def test_plan_refuses_what_cannot_be_packed(error_of, config_file, changes: dict, reason: str):
    line = error_of("plan", config_file(**changes), "--memory", "1GB")
    assert line.startswith("error: SomeForCausalLM: ")
    assert reason in line


def test_a_head_dimension_that_no_model_has(error_of):
    assert "head_dim is 1099511627776, which is beyond any model" in error_of("recipes", "--head-dim", 2**40)


def test_a_configuration_that_is_missing(error_of, tmp_path: Path):
    assert f"there is no file {tmp_path}/config.json" in error_of("plan", tmp_path / "config.json", "--memory", "1GB")
    (tmp_path / "notes.txt").touch()
    line = error_of("plan", tmp_path / "notes.txt", "--memory", "1GB")
    assert f"{tmp_path}/notes.txt is neither a config.json nor a .gguf file" in line


def test_a_configuration_that_is_none(error_of, config_file):
    path = config_file()
    path.write_text("{")
    assert "is not JSON" in error_of("plan", path, "--memory", "1GB")
