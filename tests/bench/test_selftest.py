"""`kvfold selftest`: that it checks every kernel, and that it finds those which are wrong."""

import csv
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

from kvfold.bench import selftest
from kvfold.bench.selftest import CASES, CPU_CASES, Case, Tokens
from kvfold.cli import app
from kvfold.format.layout import PageLayout
from kvfold.ops.cards import HOPPER
from kvfold.ops.dispatch import Ops, choose
from kvfold.ops.pages import LayerPages
from kvfold.recipes import RECIPES, parse

FEW = Tokens((130, 37), (5, 9))
BLOCKS, PLAIN = Case("int2:block=32", 64, 2, 16, FEW), Case("saw-int4", 128, 3, 64, FEW)
ASKED = {  # columns of rows
    *("path", "kernel", "reason", "recipe", "page", "head_dim", "value_dim", "q_heads", "kv_heads", "dtype"),
    *("sinks", "cap", "tokens"),
    *("error", "allowed_error", "ok", "problem", "device", "target", "kvfold", "torch", "triton", "date"),
}
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, on which other cases are checked")


def run(monkeypatch: pytest.MonkeyPatch, *options: object, cases: tuple[Case, ...] = (BLOCKS, PLAIN)) -> Result:
    monkeypatch.setattr(selftest, "CPU_CASES", cases)
    return CliRunner().invoke(app, ["selftest", *map(str, options)])


# What is checked


def test_every_recipe_is_checked():
    assert {parse(case.recipe).name for case in CASES} >= RECIPES.keys()


@pytest.mark.filterwarnings("ignore:.*slower")
def test_every_kernel_meets_every_number_of_heads_and_all_pages_dims_and_blocks():
    """The kernel for integers, the one for codebooks, and the portable one for what they do not read."""
    pytest.importorskip("triton")
    met: dict[str, list[Case]] = {}
    paths = set()
    for case in CASES:
        key, value = case.codecs
        layout = PageLayout(key.layout, value.layout, case.page)
        ops = choose(layout, case.ratio, torch.device("cuda"), HOPPER, case.cap is not None)
        kind = "codebooks" if key.layout.segments[0].rule == "codebook" else "integers"
        met.setdefault(kind if ops.decode.implementation == "gluon" else "portable", []).append(case)
        paths |= {(path, choice.implementation) for path, choice in ops._asdict().items()}
    assert paths == {
        ("store", "triton"), ("store", "torch"), ("decode", "gluon"), ("decode", "triton"), ("extend", "unpacked"),
        ("extend", "triton"),
    }  # fmt: skip
    assert met.keys() == {"integers", "codebooks", "portable"}
    for cases in met.values():
        recipes = [parse(case.recipe) for case in cases]
        assert {case.ratio for case in cases} == set(range(1, 9))
        assert {case.page for case in cases} >= {16, 64}
        assert {case.head_dim for case in cases} >= {64, 128}
        assert {case.dtype for case in cases} == {"bfloat16", "float16"}
        assert {recipe.block for recipe in recipes} >= {0, 16, 64}
        assert {case.tokens for case in cases} >= {selftest.SHORT, selftest.LONG}
    assert {(parse(case.recipe).name, case.head_dim) for case in met["integers"]} >= {("int2", 64), ("int2", 256)}
    assert all(any(parse(case.recipe).block == 1 for case in met[kind]) for kind in ("integers", "codebooks"))
    assert all(any(parse(case.recipe).block > 64 for case in cases) for cases in met.values())
    assert {case.head_dim for case in met["portable"]} >= {80, 96, 192, 256}
    assert any(case.dims == (192, 128) for case in met["portable"])
    assert any(case.cap for case in met["portable"])
    assert {bool(parse(case.recipe).block) for case in met["integers"] if case.sinks} == {False, True}


# What is right


@no_gpu
@pytest.mark.parametrize("case", [case for case in CPU_CASES if case.tokens is selftest.SHORT][::5], ids=str)
def test_the_kernels_for_cpus_are_right(case: Case):
    rows = selftest.check(case)
    assert [row.problem for row in rows] == [""] * len(rows)
    assert [row.path for row in rows][:4] == ["store", "extend", "step", "decode"]
    assert all(row.ok and row.error is not None and row.error <= (row.allowed_error or 0) for row in rows)


@no_gpu
def test_rows_and_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    result = run(monkeypatch, "--json", tmp_path / "rows.json", "--csv", tmp_path / "rows.csv")
    assert result.exit_code == 0, result.exception
    shown = " ".join(result.stdout.split())
    decode = choose(PageLayout(*parse(PLAIN.recipe).layouts(128, 128, {}), 64), 3, torch.device("cpu")).decode
    assert f"decode: {decode.implementation}, since {decode.reason}" in shown
    assert all(text in shown for text in ("saw-int4", "6:2, 128, 64", "8 of 8 checks are ok", torch.__version__))
    assert "WRONG" not in shown
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert all(row.keys() == ASKED for row in rows)
    assert [(row["path"], row["recipe"]) for row in rows] == [
        *((path, BLOCKS.recipe) for path in ("store", "extend", "step", "decode")),
        *((path, PLAIN.recipe) for path in ("store", "extend", "step", "decode")),
    ]
    assert {row["tokens"] for row in rows} == {"130+5+1, 37+9+1"}
    with (tmp_path / "rows.csv").open() as file:
        assert [row["error"] for row in csv.DictReader(file)] == [str(row["error"]) for row in rows]


def test_every_path_has_a_table(monkeypatch: pytest.MonkeyPatch):
    """On a GPU there are paths that CPUs do not have, as steps with drafts."""
    shape, error, versions = (64, 64, 64, 2, 2), (0.0, 0.1), ("0.3", "2.11", "3.6")
    row = selftest.Row(
        *("store", "triton", "it is", "int4", *shape, "bfloat16", False, None, "1+1+1"),
        *(*error, True, "", "GPU", "sm_90", *versions, "2026-11-18"),
    )
    rows = [replace(row, path=path) for path in ("store", "drafts", "step")]
    monkeypatch.setattr(selftest, "run", lambda *_: iter(rows))
    printed = CliRunner().invoke(app, ["selftest"]).stdout
    assert [line.split(":")[0].strip() for line in printed.splitlines() if "since it is" in line] == [
        "store",
        "drafts",
        "step",
    ]
    assert "3 of 3 checks are ok" in printed


@no_gpu
def test_without_transformers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(selftest, "find_spec", lambda name: None)
    assert "pip install transformers" in str(run(monkeypatch).exception)


# What is wrong, on purpose


def attends(change: Callable[[LayerPages, Tensor], tuple[LayerPages, Tensor]]) -> Callable[..., Tensor]:
    """An `attend` that is given other pages or queries."""

    def broken(right: Any, pages: LayerPages, q: Tensor, new: Any, logits: Any, out: Any = None) -> Tensor:
        return right(*change(pages, q), new, logits, out)

    return broken


def other_token(pages: LayerPages, q: Tensor) -> tuple[LayerPages, Tensor]:
    """Of the longest sequence the last token of the first page is read in place of the first of the next."""
    pool = pages.pool.clone()
    views = pages.layout.views(pool, together=pages.key.quantizes_like(pages.value))
    first, second, *_ = pages.step.table[0]
    for array in (array for _, *both in views for arrays in both for array in arrays):
        array[second, 0] = array[first, -1]
    return replace(pages, pool=pool, views=views), q


def smaller_block(pages: LayerPages, q: Tensor) -> tuple[LayerPages, Tensor]:
    return replace(pages, block=pages.block // 4), q


def other_ring(pages: LayerPages, q: Tensor) -> tuple[LayerPages, Tensor]:
    """Each sequence reads older raw tokens of another one."""
    return pages.during(replace(pages.step, rings=pages.step.rings.roll(1, dims=0))), q


def swapped_heads(pages: LayerPages, q: Tensor) -> tuple[LayerPages, Tensor]:
    return pages, torch.cat([q[:, 1:2], q[:, :1], q[:, 2:]], dim=1)


def forgets_a_token(right: Any, pages: LayerPages, k: Tensor, v: Tensor) -> Any:
    """The last one of the last sequence. Padding may follow it."""
    at = pages.step.locations[pages.step.locations >= 0][-1] // pages.step.page_size
    kept = pages.pool[at].clone()
    new = right(pages, k, v)
    pages.pool[at] = kept
    return new


def stores_other_values(right: Any, pages: LayerPages, k: Tensor, v: Tensor) -> Any:
    """By a part in 50 of another coordinate: another code for some."""
    return right(pages, k, v + 0.02 * v.roll(1, dims=-1))


def returns_other_copies(right: Any, pages: LayerPages, k: Tensor, v: Tensor) -> Any:
    new = right(pages, k, v)
    return new and (new[0], new[1].roll(1, dims=1))


def raises(right: Any, *_: Any) -> Any:
    raise RuntimeError("PassManager::run failed\nmore of it")


BROKEN: list[tuple[str, Callable[..., Any], Case, set[str], str]] = [
    # an op, what it does instead, with which case, the paths that are wrong then, what is said of it
    ("decode", attends(other_token), PLAIN, {"decode", "step"}, "an error of"),
    ("extend", attends(other_token), PLAIN, {"extend"}, "an error of"),
    ("decode", attends(smaller_block), BLOCKS, {"decode", "step"}, "an error of"),
    ("extend", attends(smaller_block), BLOCKS, {"extend"}, "an error of"),
    ("decode", attends(other_ring), BLOCKS, {"decode", "step"}, "an error of"),
    ("extend", attends(other_ring), BLOCKS, {"extend"}, "an error of"),
    ("decode", attends(swapped_heads), BLOCKS, {"decode", "step"}, "an error of"),
    ("decode", attends(swapped_heads), PLAIN, {"decode", "step"}, "an error of"),
    ("store", forgets_a_token, PLAIN, {"store", "step"}, "of the stored numbers differ"),
    ("store", forgets_a_token, BLOCKS, {"store", "step"}, "of the stored numbers differ"),
    ("store", stores_other_values, PLAIN, {"store", "step"}, "of the stored numbers differ"),
    ("store", returns_other_copies, BLOCKS, {"store", "step"}, ""),
    ("decode", raises, PLAIN, {"decode", "step"}, "RuntimeError: PassManager::run failed"),
    ("store", raises, PLAIN, {"store", "step"}, "RuntimeError: PassManager::run failed"),
]


@no_gpu
@pytest.mark.parametrize(("op", "broken", "case", "paths", "said"), BROKEN)
def test_a_wrong_kernel_is_found(
    monkeypatch: pytest.MonkeyPatch,
    op: str,
    broken: Callable[..., Any],
    case: Case,
    paths: set[str],
    said: str,
):
    """In its own rows, and in those of the steps that it is part of; other ops stay right."""

    def chosen(*arguments: Any, **options: Any) -> Ops:
        ops = choose(*arguments, **options)
        right = getattr(ops, op)
        return ops._replace(**{op: right._replace(run=lambda *given: broken(right.run, *given))})

    monkeypatch.setattr(selftest, "choose", chosen)
    result = run(monkeypatch, "--json", "-", cases=(case,))
    assert result.exit_code == 1
    rows = json.loads(result.stdout)
    assert {row["path"] for row in rows if not row["ok"]} == paths
    assert all(said in row["problem"] for row in rows if not row["ok"])
    assert str(result.exception).startswith(f"{len(paths)} of {len(rows)} checks are WRONG on ")
    assert case.recipe in str(result.exception)
    assert "\n" not in str(result.exception)


@no_gpu
def test_a_table_of_what_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The command's output as a user sees it, and rows in a file all the same."""
    monkeypatch.setattr(selftest, "differing_share", lambda *_: 0.5)
    result = run(monkeypatch, "--csv", tmp_path / "rows.csv", cases=(PLAIN,))
    assert result.exit_code == 1
    assert result.stdout.count("WRONG") == 2
    assert "2 of 4 checks are ok" in result.stdout
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 5


# Several processes, as on a GPU: these have none and check the kernels for CPUs


def end(case: Case, capability: tuple[int, int]) -> None:
    os.abort()


@no_gpu
def test_processes_share_the_cases(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(selftest, "CASES", (BLOCKS, PLAIN))
    monkeypatch.setattr(selftest, "WORKERS", 1)
    shares: list[float] = []
    rows = list(selftest.run(shares.append))
    assert {row.recipe for row in rows} == {BLOCKS.recipe, PLAIN.recipe}
    assert all(row.ok for row in rows)
    assert shares == [0.5, 0.5]


@no_gpu
def test_a_kernel_that_ends_its_process_is_reported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(selftest, "CASES", (PLAIN,))
    monkeypatch.setattr(selftest, "check", end)
    with pytest.raises(ValueError, match="a kernel ended the process that checked it"):
        list(selftest.run())
