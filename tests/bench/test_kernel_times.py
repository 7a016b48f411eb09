"""`kvfold bench kernels` as far as a machine without a GPU can follow it."""

import csv
import json
import os
import runpy
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from kvfold.bench import expected_ops, kernel_times, selftest, targets
from kvfold.bench.attention_libraries import FP8, missing
from kvfold.bench.kernel_cases import Case
from kvfold.bench.kernel_times import Filled, cases, fill, measure, moved_bytes
from kvfold.bench.selftest import Layer
from kvfold.cli import app
from kvfold.format.layout import PageLayout, affine_slot, channel_slot, codebook_slot
from kvfold.ops import naive
from kvfold.recipes import parse

CPU = torch.device("cpu")
SMALL = {"page": 16, "head_dim": 64, "q_heads": 4, "kv_heads": 2}
INT4 = PageLayout(affine_slot(128, 4), affine_slot(128, 4), 64)
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
pytestmark = pytest.mark.usefixtures("_poisoned_memory")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", "kernels", *map(str, arguments)])


# Cases


@pytest.mark.parametrize(
    ("op", "text", "expected"),
    [
        ("decode", "32x8192", (32, 8192, 1)),
        ("decode", "2x7+1", (2, 8, 1)),
        ("extend", "1x4096", (1, 4096, 512)),
        ("extend", "1x32768+512", (1, 33280, 512)),
        ("store", "32x1", (32, 1, 1)),
        ("store", "4x100+8", (4, 108, 8)),
    ],
)
def test_cases(op: str, text: str, expected: tuple[int, int, int]):
    case = Case.parse(op, text)
    assert (case.batch, case.context, case.new) == expected
    assert case.history == case.context - case.new


@pytest.mark.parametrize(
    ("op", "text", "shape", "message"),
    [
        ("prefill", "1x1", {}, "unknown op 'prefill': there are decode, extend, store"),
        ("decode", "8192", {}, "'8192' is no case: write BATCHxCONTEXT"),
        ("decode", "1x8192+", {}, "is no case"),
        ("decode", "0x8192", {}, "sizes are at least 1"),
        ("store", "8x64+0", {}, "sizes are at least 1"),
        ("decode", "1x8+17", {}, "decode has 1 to 16 new tokens"),
        ("extend", "1x100", {}, "of which 512 new"),
        ("decode", "1x8", {"q_heads": 12}, "12 query and 8 KV heads of 128, pages of 64, bfloat16: query heads"),
        ("decode", "1x8", {"dtype": "float32"}, "the kernels take bfloat16 and float16"),
    ],
)
def test_what_is_no_case(op: str, text: str, shape: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        Case.parse(op, text, **shape)


def test_every_op_has_its_own_cases_by_default():
    assert {case.op for case in cases(None, None)} == {"decode", "extend", "store"}
    assert [(case.op, case.new) for case in cases(["store", "decode"], ["2x600"])] == [("store", 600), ("decode", 1)]


# Bytes, by hand: a slot of 128 coordinates of 4 bits has 64 bytes of codes and 4 of metadata


@pytest.mark.parametrize(
    ("op", "text", "block", "head_bytes"),
    [
        ("decode", "1x1000", 0, 1000 * 2 * 68),
        ("decode", "1x1000", 64, 960 * 2 * 68 + 40 * 512),
        ("decode", "1x1025", 64, 1024 * 2 * 68 + 512),
        ("decode", "1x8", 64, 8 * 512),
        ("extend", "1x900+100", 0, 1000 * 2 * 68),
        # the first query is at 900 and reads tokens from 896 on in 16 bits, the last at 999 those up to 959 packed
        ("extend", "1x900+100", 64, 960 * 2 * 68 + (1000 - 896) * 512),
        ("store", "1x1000", 0, 1000 * (512 + 2 * 68)),
        # 16-bit copies of all new tokens are returned, and those of a block and 16 tokens kept
        ("store", "1x1000", 64, 1000 * (512 + 2 * 68 + 512) + 80 * 512),
        ("store", "1x900+10", 64, 10 * (512 + 2 * 68 + 2 * 512)),
    ],
)
def test_bytes(op: str, text: str, block: int, head_bytes: int):
    case = Case.parse(op, text)
    assert moved_bytes(case, INT4, block) == 8 * head_bytes
    assert moved_bytes(replace(case, batch=3, kv_heads=2), INT4, block) == 3 * 2 * head_bytes


def test_bytes_of_pages_that_are_quantized():
    """Of 15 full pages that hold 960 tokens; 40 tokens have no full page yet."""
    layout = PageLayout(channel_slot(128, 2, boosted=32), affine_slot(128, 2), 64)
    packed = 960 * (32 + 8 + 32 + 4) + 15 * (2 * 256 + 32)
    assert moved_bytes(Case.parse("decode", "1x1000"), layout, layout.block(0)) == 8 * (packed + 40 * 512)


def test_bytes_of_codebooks():
    layout = PageLayout(codebook_slot([(64, 4), (64, 2)]), codebook_slot([(128, 3)]), 64)
    assert moved_bytes(Case.parse("decode", "2x50"), layout, 0) == 2 * 8 * 50 * (32 + 16 + 4 + 48 + 2)


# Verification


@pytest.mark.parametrize("recipe", ["saw-int4", "oscar-int2:block=20,group=16", "gtq-k3v3", "kivi-2", "bf16"])
@pytest.mark.parametrize(("op", "text"), [("decode", "2x50"), ("extend", "2x37+9"), ("extend", "1x0+21")])
def test_the_reference_is_that_of_the_naive_op(recipe: str, op: str, text: str):
    case = Case.parse(op, text, **SMALL)
    _, pages, q, _, _, new = fill(case, parse(recipe), CPU)
    expected = naive.attend(pages, q, new, case.logits)
    got = torch.cat([expected_ops.attend(pages, q, new, case.logits, row) for row in range(case.batch)])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("recipe", ["saw-int4", "int4:block=9", "kivi-2:block=0"])
def test_the_reference_of_uneven_steps_is_that_of_the_naive_op(recipe: str):
    layer = Layer(selftest.Case(recipe, 64, 2, 16, selftest.Tokens((40, 17, 0), (3, 9, 5))), CPU)
    layer.begin((3, 9, 5))
    q = layer.queries()
    expected = naive.attend(layer.expected, q, layer.new, layer.logits)
    got = torch.cat([expected_ops.attend(layer.expected, q, layer.new, layer.logits, row) for row in range(3)])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_errors_are_allowed_by_the_precision():
    largest = []
    for dtype in ("bfloat16", "float16"):
        case = Case.parse("extend", "2x60+4", **SMALL, dtype=dtype)
        _, pages, q, _, _, new = fill(case, parse("saw-int4:block=8"), CPU)
        error, allowed = expected_ops.attend_error(pages, q, new, case.logits, naive.attend(pages, q, new, case.logits))
        assert error < 1e-5
        largest.append(allowed)
    assert 2**-12 < largest[0] < 2**-6
    assert 4 < largest[0] / largest[1] < 16  # bfloat16 has three bits less


def test_pages_come_in_random_order_and_hold_all_tokens():
    case = Case.parse("decode", "3x100", **SMALL)
    pages = fill(case, parse("int4"), CPU).pages
    numbers = pages.step.table.flatten().tolist()
    assert sorted(numbers) == list(range(3 * 7)) == list(range(len(pages.pool)))
    assert numbers != sorted(numbers)
    assert pages.step.known == ([99] * 3, [100] * 3)


@pytest.fixture
def fake_times(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Runs what would be timed once, at 8 microseconds for the op and 20 or more for everything else; gives calls by
    name. Two libraries read 16 bits, and one of them FP8."""
    counted: dict[str, int] = {}

    def times(runs: dict[str, list[Callable[[], object]]]) -> dict[str, float]:
        for name, calls in runs.items():
            counted[name] = len([call() for call in calls])
        return {name: {"own": 8.0, "slow": 30.0, "fast FP8": 10.0}.get(name, 20.0) for name in runs}

    def library_calls(case: Case, device: torch.device, dtype: torch.dtype) -> dict[str, list[Callable[[], object]]]:
        return {"fast": [list]} if dtype == FP8 else {"slow": [list], "cuDNN": [list]}

    monkeypatch.setattr(kernel_times, "times", times)
    monkeypatch.setattr(kernel_times, "library_calls", library_calls)
    return counted


@pytest.mark.parametrize("recipe", ["saw-int4:block=8", "oscar-int2:block=0", "gtq-k3v3", "int8", "bf16"])
@pytest.mark.parametrize(("op", "text"), [("decode", "2x50"), ("extend", "1x40+9"), ("store", "2x20+30")])
def test_a_measurement(fake_times: dict[str, int], recipe: str, op: str, text: str):
    case = Case.parse(op, text, **SMALL)
    row = measure(case, parse(recipe), 1000.0, CPU)
    assert row.error <= row.allowed_error
    assert row.kernel == ("torch" if op == "extend" else "numba")
    assert (row.us, row.baseline_us, row.speedup) == (8, 20, 2.5)
    assert row.fraction_of_copy == pytest.approx(row.bytes / 8 / 1000, abs=1e-4)
    assert row.tb_per_s == pytest.approx(row.bytes / 8e-6 / 1e12, abs=1e-4)
    assert fake_times["own"] == 2
    if op == "store":
        assert (row.baseline, row.copy_us, row.fp8, row.fp8_us) == ("int4:centre=false", 20, None, None)
    else:
        assert (row.baseline, row.copy_us, row.fp8, row.fp8_us) == ("cuDNN", None, "fast FP8", 10)


@pytest.mark.parametrize("op", ["decode", "extend", "store"])
def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch, op: str):
    """A byte of each of the first tokens is changed after it was stored, or before it is compared."""
    right = kernel_times.fill

    def wrong(*arguments: Any) -> Filled:
        filled = right(*arguments)
        choice = getattr(filled.ops, op)
        if op == "store":
            page, offset = filled.pages.step.places
            filled.pages.views[0].codes[0][page[:4], offset[:4]] ^= 0x55
            return filled
        spoiled = choice._replace(run=lambda *inputs: choice.run(*inputs) * 1.05)
        return filled._replace(ops=filled.ops._replace(**{op: spoiled}))

    monkeypatch.setattr(kernel_times, "fill", wrong)
    monkeypatch.setattr(kernel_times, "times", lambda runs: pytest.fail("timed"))
    with pytest.raises(ValueError, match=rf"saw-int4 is wrong by .* not timed: {op}, 1 × 46 tokens of which"):
        measure(Case.parse(op, "1x45+1" if op == "decode" else "1x30+16", **SMALL), parse("saw-int4"), 1.0, CPU)


def test_without_any_library_nothing_is_timed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernel_times, "library_calls", lambda *arguments: {})
    monkeypatch.setattr(kernel_times, "times", lambda runs: pytest.fail("timed"))
    with pytest.raises(ValueError, match="no library has a kernel to compare with: decode, 1 × 20 tokens"):
        measure(Case.parse("decode", "1x20", **SMALL), parse("saw-int4"), 1.0, CPU)


# The command


@no_gpu
def test_without_a_gpu_nothing_is_timed():
    result = run("--op", "decode", "-r", "int4")
    assert isinstance(result.exception, ValueError)
    assert "sees none: run this on a machine with one, with a CUDA build of torch, or ask with --explain" in str(
        result.exception
    )
    assert not result.stdout


@no_gpu
def test_explain_without_a_gpu(tmp_path: Path):
    pytest.importorskip("triton")
    recipes = ("-r", "saw-int4", "-r", "kivi-2", "-r", "gtq-k3v3")
    result = run("--explain", *recipes, "--json", "-", "--csv", tmp_path / "rows.csv", "--head-dim", 64)
    rows = json.loads(result.stdout)
    assert {(row["recipe"], row["op"]) for row in rows} == {
        (recipe, op) for recipe in ("saw-int4", "kivi-2", "gtq-k3v3") for op in ("decode", "extend", "store")
    }
    assert all(row["kernel"] != "torch" for row in rows if row["recipe"] != "kivi-2")
    by_page = {row["op"]: row for row in rows if row["recipe"] == "kivi-2"}
    assert {op: row["kernel"] for op, row in by_page.items()} == {
        "decode": "triton", "extend": "triton", "store": "torch"
    }  # fmt: skip
    assert all("whole pages are quantized together" in by_page[op]["reason"] for op in ("extend", "store"))
    with (tmp_path / "rows.csv").open() as file:
        assert list(csv.DictReader(file)) == rows
    shown = run("--explain", "-r", "kivi-2", "--op", "store").stdout
    assert all(word in shown for word in ("kivi-2", "store", "torch", "whole pages"))
    assert "extend" not in shown


def test_explain_of_another_gpu():
    pytest.importorskip("triton")
    rows = json.loads(run("--explain", "-r", "saw-int4", "--op", "decode", "--target", "sm_86", "--json", "-").stdout)
    assert [(row["kernel"], row["gpu"]) for row in rows] == [("gluon", "sm_86")]


def test_targets(monkeypatch: pytest.MonkeyPatch):
    """Kernels are built for the GPU at hand or for an older one. Processes that are started later do the same."""
    monkeypatch.delenv("TRITON_OVERRIDE_ARCH", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert targets.build_for(None) == (9, 0)
    assert "TRITON_OVERRIDE_ARCH" not in os.environ
    with pytest.raises(ValueError, match="NVIDIA H200 is sm_90, and cannot run kernels for sm_100"):
        targets.build_for("sm_100")
    assert targets.build_for("sm_80") == (8, 0)
    assert os.environ["TRITON_OVERRIDE_ARCH"] == "sm80"
    monkeypatch.delenv("TRITON_OVERRIDE_ARCH")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--op", "prefill"), "unknown op 'prefill'"),
        (("--case", "32"), "'32' is no case"),
        (("-r", "saw-int4:order=48"), "order=48 does not divide the head dimension 128"),
        (("--csv", "missing/rows.csv"), "there is no folder missing"),
        (("--target", "80"), "'80' is no target: write sm_ and the compute capability"),
    ],
)
def test_refusals(arguments: tuple[str, ...], message: str):
    result = run("--explain", *arguments)
    assert result.exit_code
    assert message in str(result.exception)


def test_shapes_without_a_kernel_are_refused_by_shape(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(kernel_times, "times", lambda runs: pytest.fail("timed"))
    result = run("-r", "int4:group=4", "--case", "2x640", "--op", "decode", "--page", 32)
    expected = (
        "int4:group=4 has no kernel for decode, 2 × 640 tokens of which 1 new, 32 query and 8 KV heads of 128, "
        "pages of 32"
    )
    assert str(result.exception).startswith(expected)


@pytest.fixture
def measured(fake_times: dict[str, int]) -> list[kernel_times.Row]:
    names = ("saw-int4", "oscar-int2:block=0")
    texts = (("decode", "2x50"), ("decode", "1x80"), ("extend", "1x40+9"), ("store", "2x20+30"))
    return [measure(Case.parse(op, text, **SMALL), parse(name), 1e4, CPU) for op, text in texts for name in names]


def test_tables_and_rows(monkeypatch: pytest.MonkeyPatch, measured: list[kernel_times.Row], tmp_path: Path):
    monkeypatch.setattr(kernel_times, "run", lambda *arguments: iter(measured))
    result = run("--csv", tmp_path / "rows.csv", "--json", tmp_path / "rows.json")
    assert not result.exit_code, result.exception
    shown = " ".join(result.stdout.split())
    assert all(text in shown for text in ("decode, 2 × 50 tokens", "2.50×", "cuDNN: 20.0 to 20.0 µs", "verified first"))
    assert "int4:centre=false: 20.0 to 20.0 µs, a copy: 20.0 to 20.0 µs" in shown
    assert "fast FP8: 10.0 to 10.0 µs" in shown
    assert result.stderr.count("is not installed, so it is not compared with") == len(missing())
    assert json.loads((tmp_path / "rows.json").read_text()) == [asdict(row) for row in measured]
    with (tmp_path / "rows.csv").open() as file:
        assert [row["us"] for row in csv.DictReader(file)] == ["8.0"] * len(measured)


def test_the_picture(fake_times: dict[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Of 16-bit keys and values, 2 × 50 tokens of two heads of 64 coordinates are 51,200 bytes."""
    pytest.importorskip("matplotlib")
    names = "saw-int4", "fold2:block=0", "int8:block=4"
    rows = [measure(Case.parse("decode", "2x50", **SMALL), parse(name), 1e4, CPU) for name in names]
    monkeypatch.setattr(kernel_times, "run", lambda *arguments: iter(rows))
    run("--csv", tmp_path / "rows.csv")
    script = str(Path(__file__).parents[2] / "benchmarks" / "bandwidth.py")
    monkeypatch.setattr("sys.argv", [script, str(tmp_path / "rows.csv"), str(tmp_path / "it.svg"), "--case", "2x50"])
    defined, picture = runpy.run_path(script, run_name="__main__"), (tmp_path / "it.svg").read_text()
    assert all(f"<!-- {name} -->" in picture for name in (*names, "cuDNN, 16 bits"))
    bars = defined["bars"]([{name: str(value) for name, value in asdict(row).items()} for row in rows])
    assert bars[0] == ("cuDNN, 16 bits", pytest.approx(51200 / 20 / 1e4), "20 µs")
    assert {name: share for name, share, _ in bars[1:]} == {
        row.recipe: pytest.approx(row.bytes / 8 / 1e4, abs=1e-4) for row in rows
    }
    assert {label for _, _, label in bars[1:]} == {"8 µs, 2.5×"}
