import json
import math
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvfold.evaluate.needle import TASKS, NeedleRow
from kvfold.evaluate.report import Report, Row, rows, table, write_html
from kvfold.evaluate.tool_calls import ToolCallRow

HOSTILE = "<script>alert(1)</script>&$\\frac$[red]"


def row(recipe: str, bits: float, perplexity: float, kl: float, **rest: Any) -> Row:
    defaults = {"slot_bytes": 36, "top1": 0.971, "tokens": 8192, "copy": 0.5, "needle": None, "needle_by_depth": None}
    defaults["kl_tail"] = 10 * kl
    return Row(
        recipe, bits_per_element_2k=bits, bits_per_element_128k=bits, perplexity=perplexity, kl=kl, **defaults | rest
    )


def report(*rows: Row, noise_floor: float = 3e-5) -> Report:
    bf16 = row("bf16", 16, 12.0, 0.0, top1=1.0, needle=1.0, needle_by_depth={"10 %": 1.0, "90 %": 1.0})
    return Report("some/model", "some text", 2048, 8192, noise_floor, 12.001, {"torch": "2.13.0"}, [*rows, bf16])


ORDINARY = report(
    row("int4", 4.5, 12.6, 0.0751, needle=0.5, needle_by_depth={"10 %": 1.0, "90 %": 0.0}),
    row("saw-int4", 4.5, 12.4, 0.0462),
    row("saw-int4:sink=4", 4.62, 12.148, 0.0123),
    row("int2", 2.5, 101_713.4, 9.7),
    row("quarot-int2:sink=64,recent=256", 4.61, 12.9, 0.095),
    row("int8", 8.5, 11.999, 2e-5),
)
BROKEN = report(
    row("int4:centre=false", 4.25, math.inf, 25.0),
    row("int2", 2.25, math.nan, math.nan),
    row(HOSTILE, 4.25, 1e9, math.inf),
    row("saw-int4:order=64,centre=false,sink=4,recent=256,skip=0+1+29", 4.9, 12.0, 1e-12),
    noise_floor=0.0,
)
REFERENCE_ALONE = report(noise_floor=0.0)


def suite(single: float, others: float) -> list[NeedleRow]:
    """Half as much at depth 100 % as at 0 %, nothing at 32k, and a tenth less in the second text."""
    return [
        NeedleRow(
            text,
            length,
            depth,
            0,
            task,
            (single if task == "single" else others)
            * (1 - depth / 2)
            * (length < 30_000)
            * (1 if text == "novel" else 0.9),
        )
        for text in ("novel", "code")
        for length in (4096, 32768)
        for depth in (0.0, 1.0)
        for task in TASKS
    ]


def calls(exact: float) -> list[ToolCallRow]:
    """Four haystacks of ten calls each, of which one is not valid."""
    return [
        ToolCallRow(text, 4096, trial, call, call < 9, call < 10 * exact and call < 9)
        for text in ("novel", "code")
        for trial in range(2)
        for call in range(10)
    ]


MEASURED = replace(
    ORDINARY,
    rows=[
        replace(
            row,
            suite=suite(1.0, found),
            tool_calls=calls(found),
            gsm8k=found / 2,
            gsm8k_error=0.025,
            tasks={"arc_easy acc": found, "lambada perplexity": 9.5},
            perplexity_beyond_16k=10.0,
            kl_beyond_16k=2 * row.kl,
            kl_tail_beyond_16k=20 * row.kl,
        )
        for row, found in zip(ORDINARY.rows, (0.4, 0.5, 0.6, 0.0, 0.7, 0.8, 1.0), strict=True)
    ],
)


def printed(report: Report, width: int = 120) -> list[str]:
    console = Console(width=width, file=StringIO())
    console.print(table(report))
    return console.file.getvalue().splitlines()


def test_table_puts_the_reference_first_and_spells_numbers_as_people_do():
    lines = [" ".join(line.split()) for line in printed(ORDINARY)]
    first = next(i for i, line in enumerate(lines) if set(line) == {"─"}) + 1
    assert lines[first] == "bf16 (reference) 16.00 16.00 12.00 – 0 0 100.0 %"
    assert "saw-int4:sink=4 4.62 4.62 12.15 +1.23 % 0.0123 0.1230 97.1 %" in lines
    assert "int2 2.50 2.50 101,713 +847,512 % 9.7000 97.0000 97.1 %" in lines
    assert "int8 8.50 8.50 12.00 -0.01 % 2e-05 0.0002 97.1 %" in lines


def test_table_says_what_was_measured_and_what_means_nothing():
    caption = " ".join(printed(ORDINARY))
    for words in ("KL 3e-05", "differences mean nothing", "some/model · some text · context 2,048 · 8,192 tokens"):
        assert words in caption


def test_table_shows_what_else_was_measured():
    text = "\n".join(" ".join(line.split()) for line in printed(MEASURED, 80))
    assert "recipe copy needle > 16k > 16k > 16k GSM8K\n" in text
    assert "bf16 (reference) 50 % 100 % 10.00 0 0 50.0 % ± 2.5\n" in text
    assert "int4 50 % 50 % 10.00 0.1502 1.5020 20.0 % ± 2.5\n" in text
    assert "arc_easy lambada\nrecipe acc perplexity\n" in text  # what does not fit in 80 characters is a further table
    assert "int4 0.400 9.500\n" in text


def test_table_shows_intervals_over_haystacks():
    """At 4,096 tokens int4 finds (1 + 5 · 0.4) / 6 at depth 0 and half at depth 1, in the second text a tenth less.

    Four haystacks: 50 %, 25 %, 45 % and 22.5 %. The 16-bit cache finds twice as much in each. Of 256 equally likely
    draws, 5 have a mean of at most 23.125 %, and 16 one of at most 23.75 %: that is the 2.5th percentile."""
    text = "\n".join(" ".join(line.split()) for line in printed(MEASURED))
    assert "bf16 (reference) needles 4,096 71.2 % 48 to 95 –\n" in text
    assert "\nint4 needles 4,096 35.6 % 24 to 48 -35.6 (-47.5 to -23.8)\n" in text
    assert "\nneedles 32,768 0.0 % 0 to 0 +0.0 (+0.0 to +0.0)\n" in text
    assert "\nvalid calls 4,096 90.0 % 90 to 90 +0.0 (+0.0 to +0.0)\n" in text
    assert "\nexact calls 4,096 40.0 % 40 to 40 -50.0 (-50.0 to -50.0)\n" in text


@pytest.mark.parametrize("width", [80, 200])
def test_table_shows_every_recipe_in_any_terminal(width: int):
    for shown in (ORDINARY, BROKEN, MEASURED):
        lines = printed(shown, width)
        names = "".join(line.split(" ")[0] for line in lines)
        assert all(row.recipe in names for row in shown.rows)
        assert max(map(len, lines)) <= width


def test_a_report_without_reference_is_refused():
    with pytest.raises(ValueError, match="no bf16 row"):
        table(replace(ORDINARY, rows=ORDINARY.rows[:-1]))


def test_rows_hold_the_report():
    """The reference first, and in every row what it was measured on."""
    found = {row["recipe"]: row for row in json.loads(json.dumps(rows(ORDINARY)))}
    assert next(iter(found)) == "bf16"
    common = {
        key: value for key, value in asdict(ORDINARY).items() if key in ("model", "text", "context", "noise_floor")
    }
    for expected in ORDINARY.rows:
        assert asdict(expected).items() <= found[expected.recipe].items()
        assert common.items() <= found[expected.recipe].items()


def test_rows_hold_what_else_was_measured():
    found = {row["recipe"]: row for row in json.loads(json.dumps(rows(MEASURED)))}["int4"]
    assert (found["gsm8k"], found["tasks"]) == (0.2, {"arc_easy acc": 0.4, "lambada perplexity": 9.5})
    cell = {"text": "novel", "length": 4096, "depth": 1.0, "trial": 0, "task": "multi", "score": 0.2}
    assert cell in found["suite"]
    call = {"text": "code", "length": 4096, "trial": 1, "call": 4, "valid": True, "exact": False}
    assert call in found["tool_calls"]
    assert (found["needles_4096"], found["needles_32768"]) == (pytest.approx(0.35625), 0)
    assert found["needles_4096_low"] < 0.3 < 0.4 < found["needles_4096_high"]
    assert found["needles_4096_difference"] == pytest.approx(-0.35625)
    assert found["needles_4096_difference_low"] < -0.4 < -0.3 < found["needles_4096_difference_high"]
    assert (found["valid_calls_4096"], found["exact_calls_4096"]) == (0.9, pytest.approx(0.4))
    texts = [(one["text"], one["found"]["haystacks"]) for one in found["summaries"] if one["measure"] == "needles"]
    assert texts == [("all texts", 4), ("novel", 2), ("code", 2)] * 2
    reference = rows(MEASURED)[0]
    assert reference.keys() == found.keys()
    assert (reference["needles_4096"], reference["needles_4096_difference"]) == (pytest.approx(0.7125), None)


def test_rows_have_null_for_what_is_not_finite():
    text = json.dumps(rows(BROKEN), allow_nan=False)
    found = {row["recipe"]: row for row in json.loads(text)}
    for row in BROKEN.rows:
        for key in ("perplexity", "kl"):
            value = getattr(row, key)
            assert found[row.recipe][key] == (value if math.isfinite(value) else None)


def test_a_missing_folder_is_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"no folder .*absent"):
        write_html(ORDINARY, tmp_path / "absent" / "report")


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "kvfold\[report\]"'):
        write_html(ORDINARY, tmp_path / "report.html")
    assert not list(tmp_path.iterdir())


def test_the_same_report_gives_the_same_page(tmp_path: Path):
    for name in ("one", "two"):
        write_html(ORDINARY, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_names_are_escaped_everywhere(tmp_path: Path):
    cell = NeedleRow(HOSTILE, 4096, 0.5, 3, HOSTILE, 1.0)
    rows = [replace(row, suite=[cell, replace(cell, text="other")]) for row in BROKEN.rows[:-1]]
    bf16 = replace(BROKEN.reference, needle_by_depth={HOSTILE: 1.0}, suite=rows[0].suite, tasks={HOSTILE: 1.0})
    hostile = Report(HOSTILE, HOSTILE, 2048, 8192, 1e-4, 12.0, {HOSTILE: HOSTILE}, [*rows, bf16])
    write_html(hostile, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 8  # title, heading, two plots, two tables, four facts


# In a browser.


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    executable = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if executable is None:
        reason = "no Chromium found, with which the HTML report would be opened"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]
    with sync_playwright() as playwright:
        # Without its sandbox Chromium also starts for root, as in a container; the page it opens is ours.
        browser = playwright.chromium.launch(
            executable_path=executable, chromium_sandbox=False, args=["--disable-gpu", *quiet]
        )
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """Opens a report's page; in the end the console must be clean, and nothing but the page have been asked for."""
    complaints: list[str] = []
    requests: list[str] = []
    uris: list[str] = []
    context = browser.new_context()

    def open_page(report: Report, width: int = 1200, scheme: str = "light") -> Any:
        path = tmp_path / f"report-{len(uris)}.html"
        write_html(report, path)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme=scheme)
        page.goto(path.as_uri())
        uris.append(path.as_uri())
        return page

    yield open_page
    context.close()
    assert not complaints
    assert requests == uris


@pytest.mark.parametrize("shown", [ORDINARY, BROKEN, REFERENCE_ALONE], ids=["ordinary", "broken", "reference-alone"])
def test_plots_have_one_named_point_for_each_recipe_inside_the_axes(open_page, shown: Report):
    page = open_page(shown)
    for plot in ("kl", "perplexity"):
        svg = page.locator(f"svg[role=img][aria-label]:has(#{plot})")
        assert svg.bounding_box()["width"] > 400
        frame = page.locator(f"#{plot}-frame path").bounding_box()
        assert frame["width"] > 250
        assert frame["height"] > 250
        points = [point.bounding_box() for point in page.locator(f"[id^={plot}-point-] use").all()]
        assert len(points) == len(shown.rows)
        for point in points:
            assert 5 < point["width"] < 20
            x, y = point["x"] + point["width"] / 2, point["y"] + point["height"] / 2
            assert frame["x"] <= x <= frame["x"] + frame["width"]
            # A triangle's middle lies a little off the point it marks.
            assert frame["y"] - 2 <= y <= frame["y"] + frame["height"]
        for i, row in enumerate(shown.ordered):
            label = page.locator(f"#{plot}-label-{i}")
            assert label.is_visible()
            assert "".join(label.locator("text").all_text_contents()).startswith(row.recipe)


def test_a_better_recipe_is_lower_and_a_smaller_one_further_left(open_page):
    page = open_page(ORDINARY)
    recipes = [row.recipe for row in ORDINARY.ordered]
    for plot in ("kl", "perplexity"):
        at = {name: page.locator(f"#{plot}-point-{i} use").bounding_box() for i, name in enumerate(recipes)}
        heights = [at[name]["y"] for name in ("int2", "int4", "saw-int4", "saw-int4:sink=4", "int8")]
        assert heights == sorted(heights)
        lefts = [at[name]["x"] for name in ("int2", "int4", "saw-int4:sink=4", "int8", "bf16")]
        assert lefts == sorted(lefts)


def test_labels_do_not_overlap(open_page):
    page = open_page(ORDINARY)
    for plot in ("kl", "perplexity"):
        boxes = [label.bounding_box() for label in page.locator(f"[id^={plot}-label-]").all()]
        for i, a in enumerate(boxes):
            for b in boxes[:i]:
                apart_x = a["x"] + a["width"] <= b["x"] or b["x"] + b["width"] <= a["x"]
                apart_y = a["y"] + a["height"] <= b["y"] or b["y"] + b["height"] <= a["y"]
                assert apart_x or apart_y


def test_tables_show_every_recipe_and_where_needles_were_found(open_page):
    page = open_page(ORDINARY)
    results, needle = page.locator("table").all()
    names = results.locator("th[scope=row]").all_inner_texts()
    assert names == ["bf16 (reference)", *(row.recipe for row in ORDINARY.ordered[1:])]
    assert needle.locator("tr").all_inner_texts() == ["recipe\t10 %\t90 %", "bf16\t100 %\t100 %", "int4\t100 %\t0 %"]


def test_without_needles_there_is_no_section_about_them(open_page):
    bare = replace(ORDINARY, rows=[replace(row, needle_by_depth=None) for row in ORDINARY.rows])
    assert open_page(bare).locator("h2").all_inner_texts() == ["Results", "How this was measured"]


def test_the_needle_suite_is_shown_by_task_and_as_a_map_for_each_recipe(open_page):
    page = open_page(MEASURED)
    headings = ["Needle retrieval by depth", "Long contexts", "Needle suite"]
    assert page.locator("h2").all_inner_texts()[1:4] == headings
    _, _, intervals, tasks, *maps = page.locator("table").all()
    shown = intervals.locator("tr").all_inner_texts()
    assert shown[0] == "recipe\tmeasure\ttext\ttokens\thaystacks\tshare\t95 %\tagainst bf16, points"
    assert "bf16\tvalid calls\tall texts\t4,096\t4\t90.0 %\t90 to 90\t–" in shown
    assert "int4\texact calls\tcode\t4,096\t2\t40.0 %\t40 to 40\t-50.0 (-50.0 to -50.0)" in shown
    assert len(shown) == 1 + len(MEASURED.rows) * (2 * 3 + 2 * 3)
    assert tasks.locator("tr").all_inner_texts()[:3] == [
        "\t".join(["recipe", *TASKS]),
        "bf16\t36 %\t36 %\t36 %\t36 %\t36 %\t36 %",
        "int4\t36 %\t14 %\t14 %\t14 %\t14 %\t14 %",
    ]
    assert page.locator("h3").all_inner_texts() == [row.recipe for row in MEASURED.ordered]
    assert len(maps) == len(MEASURED.rows)
    assert maps[1].locator("tr").all_inner_texts() == [
        "depth\t4,096\t32,768",
        "0 %\t48 %\t0 %",  # (1 + 5 · 0.4) / 6, and a tenth less in one of two texts
        "100 %\t24 %\t0 %",
    ]
    alpha = "cell => +getComputedStyle(cell).backgroundColor.match(/([\\d.]+)\\)$/)[1]"
    assert [round(cell.evaluate(alpha), 2) for cell in maps[1].locator("td").all()] == [0.19, 0.0, 0.1, 0.0]


# The contrast, as WCAG defines it, of every text and point against what is painted behind it.
CONTRASTS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const luminance = (...layers) => {
    for (const colour of layers) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data.slice(0, 3)].map(
      (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const paper = getComputedStyle(document.body).backgroundColor;
  const contrast = (element, property) => {
    const style = getComputedStyle(element);
    const behind = [paper, style.backgroundColor];
    const [dark, light] = [luminance(...behind), luminance(...behind, style[property])].sort((a, b) => a - b);
    return (light + 0.05) / (dark + 0.05);
  };
  const all = (selector, property) => [...document.querySelectorAll(selector)].map((e) => contrast(e, property));
  return {
    paper: luminance(paper),
    text: [...all("h1, h2, h3, p, th, td, dt, dd, figcaption", "color"), ...all("svg text", "fill")],
    points: [...all("[id*='-point-']:not([id$='-0']) use", "fill"), ...all("[id$='-point-0'] use", "stroke")],
  };
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_points_stand_out_in_light_and_dark(open_page, scheme: str):
    contrasts = open_page(MEASURED, scheme=scheme).evaluate(CONTRASTS)
    assert (contrasts["paper"] > 0.5) == (scheme == "light")
    assert len(contrasts["points"]) == 2 * len(ORDINARY.rows)
    assert min(contrasts["text"]) >= 4.5
    assert min(contrasts["points"]) >= 3


@pytest.mark.parametrize("shown", [MEASURED, BROKEN], ids=["measured", "broken"])
def test_the_page_fits_a_phone(open_page, shown: Report):
    page = open_page(replace(shown, text="t" * 300), width=375)
    assert page.evaluate("document.documentElement.scrollWidth") == 375
    for svg in page.locator("svg").all():
        box = svg.bounding_box()
        assert box["x"] >= 0
        assert 300 < box["width"] <= 375
