"""The HTML page of a report, as a browser shows it."""

import datetime
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from sample_reports import BROKEN, HOSTILE, MEASURED, ORDINARY, REFERENCE_ALONE

from kvfold.artifact import CheckResult, Measure
from kvfold.evaluate.drawings import frontier
from kvfold.evaluate.needle import TASKS, NeedleRow
from kvfold.evaluate.page import write_html
from kvfold.evaluate.report import Report, spell_kl

CHECKED = replace(
    MEASURED, rows=[MEASURED.rows[0], MEASURED.reference], noise_floor=None, plain_perplexity=None, context=32768
)


def check(needles: float, low: float, high: float) -> CheckResult:
    """KL of 0.0751, and a loss of needles."""
    kl = Measure(name="KL", unit="nats", value=0.0751, reference=0, loss=0.0751, low=0.07, high=0.08, allowed=0.1)
    loss = {"value": 0.9 - needles, "reference": 0.9, "loss": needles, "low": low, "high": high}
    measures = (kl, Measure(name="needles", unit="share", allowed=0.03, **loss))
    about = {"context": 32768, "date": datetime.date(2026, 3, 4), "versions": {}, "fit_sha256": "0" * 64}
    return CheckResult(measures=measures, **about)


def test_a_missing_folder_is_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"no folder .*absent"):
        write_html(ORDINARY, tmp_path / "absent" / "report")


def test_the_same_report_gives_the_same_page(tmp_path: Path):
    write_html(MEASURED, tmp_path / "one")
    write_html(MEASURED, tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_names_are_escaped_everywhere(tmp_path: Path):
    cell = NeedleRow(HOSTILE, 4096, 0.5, 3, HOSTILE, 1.0)
    more = {"suite": [cell, replace(cell, text="other")], "layer_bits": MEASURED.rows[0].layer_bits, "answer": HOSTILE}
    more["tasks"] = {HOSTILE: 1.0}
    rows = [replace(row, for_evaluation=HOSTILE, **more) for row in BROKEN.rows[:-1]]
    bf16 = replace(BROKEN.reference, needle_by_depth={HOSTILE: 1.0}, **more)
    rows[0] = replace(rows[0], for_evaluation=None)
    hostile = Report(HOSTILE, HOSTILE, 2048, 8192, 1e-4, 12.0, {HOSTILE: HOSTILE}, [*rows, bf16], HOSTILE)
    write_html(hostile, tmp_path / "report.html", artifact=HOSTILE)
    page = (tmp_path / "report.html").read_text()
    assert page.count("<script") == 1, "the page's own"
    assert page.count("&lt;script&gt;") > 20


# In a browser.


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    executable = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if executable is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no Chromium found, to open the HTML report with")
    from playwright.sync_api import sync_playwright

    quiet = [
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--no-first-run",
    ]
    with sync_playwright() as playwright:
        # Without its sandbox Chromium also starts for root, as in a container; the page it opens is ours.
        yield playwright.chromium.launch(executable_path=executable, chromium_sandbox=False, args=quiet)


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """Opens a report's page; in the end the console must be clean, and nothing but the page have been asked for."""
    complaints, requests, uris = [], [], []

    def open_page(report: Report, width: int = 1200, scheme: str = "light", **options: Any) -> Any:
        path = tmp_path / f"report-{len(uris)}.html"
        write_html(report, path, **options)
        uris.append(path.as_uri())
        page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        return page

    yield open_page
    assert (complaints, requests) == ([], uris)


def overlap(a: dict[str, float], b: dict[str, float]) -> bool:
    """By more than the space and the halo around letters."""
    sides = (("x", "width"), ("y", "height"))
    return all(min(a[at] + a[size], b[at] + b[size]) - max(a[at], b[at]) > 9 for at, size in sides)


@pytest.mark.parametrize("shown", [ORDINARY, BROKEN], ids=["ordinary", "broken"])
def test_plots_name_every_recipe_in_the_colours_of_the_page(open_page, shown: Report):
    pareto, tails = open_page(shown).locator(".plots svg").all()
    labels = [pareto.locator(f"#label-{i}") for i in range(len(shown.rows))]
    for row, label in zip(shown.ordered, labels, strict=True):
        assert "".join(label.locator("text").all_text_contents()).startswith(row.recipe)
    assert not any(overlap(*two) for two in combinations([label.bounding_box() for label in labels], 2))
    said = "".join(tails.locator("text").all_text_contents())
    for row in shown.ordered[1:]:
        assert f"{row.recipe}{''.join(map(spell_kl, (row.kl, row.kl_99, row.kl_tail)))}" in said
    assert all(svg.get_attribute("role") == "img" and svg.get_attribute("aria-label") for svg in (pareto, tails))
    assert not re.search("(fill|stroke): ?#", pareto.inner_html() + tails.inner_html()), (
        "it would not change in the dark"
    )


def test_less_memory_is_left_and_better_is_low(open_page):
    page, rows = open_page(ORDINARY), ORDINARY.ordered
    at = {row.recipe: page.locator(f"#point-{i}").bounding_box() for i, row in enumerate(rows)}
    assert sorted(rows, key=lambda row: -at[row.recipe]["y"]) == sorted(rows, key=lambda row: row.kl)
    assert at["int2"]["x"] < at["int4"]["x"] < at["saw-int4:block=4"]["x"] < at["int8"]["x"] < at["bf16"]["x"]
    assert page.get_by_text("int2 is a bad example, which the line leaves out").is_visible()


def test_the_frontier_holds_what_is_not_beaten():
    """saw-int4:block=4 has more bits than saw-int4 and quarot-int2:block=64, and a lower KL. int2 is a bad example."""
    assert [row.recipe for row in frontier(ORDINARY)] == ["saw-int4", "saw-int4:block=4", "int8", "bf16"]
    assert [row.recipe for row in frontier(BROKEN)] == ["int4:centre=false", BROKEN.rows[3].recipe, "bf16"]


def test_every_recipe_is_in_the_table_of_results(open_page):
    page = open_page(ORDINARY)
    results, needle = page.locator("table").all()
    names = ["bf16 (reference)", *(row.recipe for row in ORDINARY.ordered[1:])]
    assert results.locator("th[scope=row]").all_inner_texts() == names
    assert needle.locator("tr").all_inner_texts() == ["recipe\t10 %\t90 %", "bf16\t100 %\t100 %", "int4\t100 %\t0 %"]
    tile = page.locator(".tiles > div", has_text="saw-int4:block=4").inner_text()
    said = "saw-int4:block=4 3.5× smaller at 128k tokens 3.5× at 2k KL 0.0123 top-1 97.1 %"
    assert " ".join(tile.split()) == said


def test_what_was_not_measured_is_left_out(open_page):
    ends = ["How this was measured", "Words"]
    bare = [replace(row, needle_by_depth=None, copy=None, needle=None) for row in ORDINARY.rows]
    page = open_page(replace(ORDINARY, rows=bare))
    assert page.locator("h2").all_inner_texts() == ["Quality against memory", "Tails", "Serve it", "Results", *ends]
    assert not {"copy", "needle"} & set(page.locator("th[scope=col]").all_inner_texts())
    assert open_page(REFERENCE_ALONE).locator("h2").all_inner_texts() == ["Results", "Needles", *ends]


def test_haystacks_are_heat_maps_with_intervals(open_page):
    """Of two haystacks, one alone is drawn in a quarter of all draws. So the interval is from one to the other."""
    page = open_page(MEASURED)
    maps = {figure.locator("h3").inner_text(): figure for figure in page.locator(".heat figure").all()}
    after = [f"{what} after 4,096 tokens, 4 haystacks" for what in ("Needles", "Valid calls", "Exact calls")]
    depths = [f"In {where}, by depth" for where in ("short haystacks", "4,096 tokens", "32,768 tokens")]
    assert list(maps) == [after[0], "Needles after 32,768 tokens, 4 haystacks", *after[1:], *depths, "By task"]

    def rows(name: str) -> list[str]:
        return [" ".join(row.split()) for row in maps[name].locator("tr").all_inner_texts()]

    assert rows(after[-1])[:3] == [
        "recipe all texts novel code against bf16, points",
        "bf16 90 % 90–90 90 % 90–90 90 % 90–90 –",
        "int4 40 % 40–40 40 % 40–40 40 % 40–40 −50.0 −50 to −50",
    ]
    # int4 at depth 0: (1 + 5 · 0.4) / 6, and a tenth less in one of two texts
    assert rows(depths[1])[1:3] == ["bf16 95 % 90–100 48 % 45–50", "int4 48 % 45–50 24 % 22–25"]
    assert rows("By task")[0] == " ".join(["recipe", *TASKS])
    colours = "(all) => all.slice(0, 4).map((one) => getComputedStyle(one).backgroundColor)"
    assert len(set(maps[depths[1]].locator("td").evaluate_all(colours))) == 3, "of 95, 48, 48 and 24 %"


def test_bars_are_as_high_as_layers_have_bits(open_page):
    page = open_page(MEASURED)
    figure = page.locator("figure", has=page.locator(".legend")).first
    assert figure.locator(".legend").inner_text().split() == ["keys", "5.50", "values", "2.25"]
    keys, values = ([bar.bounding_box() for bar in figure.locator(f"rect.{side}").all()] for side in ("keys", "values"))
    heights = [bar["height"] for bar in (*keys, *values)]
    assert heights == pytest.approx([bits / 4.5 * heights[0] for bits in (4.5, 5.5, 6.5, 2.25, 2.25, 2.25)], rel=0.01)
    assert figure.locator("title").first.text_content() == "layer 0: keys 4.50, values 2.25 bits"


def test_answers_are_marked_from_the_first_other_word_on(open_page):
    said = {"bf16": "It is about asserts.", "int4": "It is about asserts.", "int2": "It was about 2.", "int8": "It is"}
    rows = [replace(row, answer=said.get(row.recipe, "")) for row in MEASURED.rows]
    page = open_page(replace(MEASURED, rows=rows))
    assert "What is it about?" in page.locator("section", has=page.locator("blockquote")).locator("p").inner_text()
    answers = page.locator("figure:has(blockquote)").all_inner_texts()
    assert [text.split("\n")[0] for text in answers] == ["bf16 (reference)", *(row.recipe for row in rows[:-1])]
    assert [answers[i].split("\n")[-1] for i in (1, 4, 6)] == [said["int4"], said["int2"], "It is (ends here)"]
    assert {"was about 2.", "(ends here)"} <= set(page.locator("mark").all_inner_texts())


def test_a_bad_example_is_called_one_and_not_sold(tmp_path: Path):
    named = replace(ORDINARY, rows=[*ORDINARY.rows, replace(ORDINARY.rows[3], recipe="int2:block=64")])
    write_html(named, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    sold = re.findall(r'<div class="command"><code>(.*?)</code>', page)
    fine = [row.recipe for row in ORDINARY.ordered[1:] if row.recipe != "int2"]
    assert sold == [f"kvfold serve some/model -r {recipe}" for recipe in fine]
    assert all(f"{recipe} is there as a bad example" in page for recipe in ("int2", "int2:block=64"))
    passed = replace(CHECKED, rows=[replace(CHECKED.rows[0], recipe="int2"), CHECKED.reference])
    write_html(passed, tmp_path / "checked", check=check(0.01, -0.01, 0.02))
    assert "kvfold serve some/model -r int2 --require-check" in (tmp_path / "checked").read_text(), "it passed"


def test_a_line_that_serves_is_copied(open_page):
    rows = [replace(row, for_evaluation="no kernel" if row.recipe == "int8" else None) for row in ORDINARY.rows]
    page = open_page(replace(ORDINARY, rows=rows, model="my model"), artifact="it's/fits")
    lines = [shlex.split(line) for line in page.locator(".command code").all_inner_texts()]
    served = [row.recipe for row in ORDINARY.ordered[1:] if row.recipe not in ("int2", "int8")]
    assert lines == [["kvfold", "serve", "my model", "-r", name, "--artifact", "it's/fits"] for name in served]
    assert page.get_by_text("int8 is for evaluation: no kernel.").is_visible()
    button = page.locator(".command button").nth(2)
    button.click()
    assert button.inner_text() == "Copied"
    page.evaluate("document.body.appendChild(document.createElement('textarea')).focus()")
    page.keyboard.press("Control+V")
    assert shlex.split(page.locator("textarea").input_value()) == lines[2]


def test_a_check_says_what_is_lost_and_how_to_serve(open_page):
    page = open_page(CHECKED, check=check(0.01, -0.01, 0.03))
    verdict = page.locator("#verdict")
    assert verdict.locator("p").first.inner_text() == (
        "int4: passed. Its cache is 3.6 times smaller at 128k tokens, and it loses no more than is allowed. Checked on "
        "2026-03-04 at 32,768 tokens."
    )
    assert verdict.locator("tr").all_inner_texts() == [
        "measure\tverdict\tloss\tallowed\t95 %\t16 bits\tpacked",
        "KL\tpassed\t0.0751\t0.1000\t0.0700 to 0.0800\t0.0000\t0.0751",
        "needles\tpassed\t1.0\t3.0\t−1.0 to 3.0\t90.0 %\t89.0 %",
    ]
    assert page.locator(".plots svg").get_by_text("allowed 0.1").is_visible()
    assert page.locator(".command code").inner_text() == "kvfold serve some/model -r int4 --require-check"
    assert "Noise floor" not in page.locator("body").inner_text()
    failed = open_page(CHECKED, check=check(0.2, 0.1, 0.3))
    undecided = open_page(CHECKED, check=check(0.01, -0.01, 0.05))
    assert "int4: failed. needles lose 20.0 points (10.0 to 30.0), and 3 are allowed." in failed.inner_text("#verdict")
    said = undecided.inner_text("#verdict")
    assert said.startswith("int4: not decided. needles lose 1.0 points (-1.0 to 5.0), and 3 are allowed.")
    assert said.endswith("More trials narrow the intervals.")
    assert not any(page.locator(".command").count() for page in (failed, undecided)), "--require-check would refuse it"


# The contrast, as WCAG defines it, of every text and point against what is painted behind it.
CONTRASTS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const luminance = (...layers) => {
    for (const colour of layers) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data.slice(0, 3)].map(
      (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) =>
    element ? [...behind(element.parentElement), getComputedStyle(element).backgroundColor] : ["white"];
  const all = (selector, property) => Array.from(document.querySelectorAll(selector), (one) => {
    const layers = behind(one), colour = getComputedStyle(one)[property];
    const [dark, light] = [luminance(...layers), luminance(...layers, colour)].sort((a, b) => a - b);
    return (light + 0.05) / (dark + 0.05);
  });
  const texts = "h1, h2, h3, p, th, td, small, dt, dd, figcaption, code, button, blockquote, mark, b";
  const text = [...all(texts, "color"), ...all("svg text", "fill")];
  return {text, paper: luminance(...behind(document.body)), drawn: all("rect.keys, rect.values", "fill")};
}"""
# How far content is wider than the box that shows it.
TOO_WIDE = "(all) => Math.max(0, ...all.map((box) => box.scrollWidth - box.clientWidth))"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_drawings_stand_out_in_light_and_dark(open_page, scheme: str):
    contrasts = open_page(MEASURED, scheme=scheme).evaluate(CONTRASTS)
    assert (contrasts["paper"] > 0.5) == (scheme == "light")
    assert min(contrasts["text"]) >= 4.5
    assert min(contrasts["drawn"]) >= 3


@pytest.mark.parametrize("shown", [MEASURED, BROKEN, CHECKED], ids=["measured", "broken", "checked"])
def test_the_page_fits_every_width(open_page, shown: Report):
    long = {"width": 360, "artifact": "a" * 200, "check": check(0, 0, 0) if shown is CHECKED else None}
    page = open_page(replace(shown, text="t" * 300), **long)
    boxes = [svg.bounding_box() for svg in page.locator("figure > svg").all()]
    assert all(box["x"] >= 0 and 300 < box["width"] <= 360 for box in boxes)
    assert page.locator(".heat .scroll").evaluate_all(TOO_WIDE) == 0, "heat maps need no scrolling of their own"
    for width in (360, 768, 1200):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") == width


def test_paper_is_white_and_cuts_nothing_off(open_page):
    page = open_page(MEASURED, width=700, scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    contrasts = page.evaluate(CONTRASTS)
    assert contrasts["paper"] == pytest.approx(1)
    assert min(contrasts["text"]) >= 4.5
    assert not any(button.is_visible() for button in page.locator("button").all())
    edges = "(all) => Math.max(...all.map((one) => one.getBoundingClientRect().right))"
    assert page.locator("table, svg, p, code, dd").evaluate_all(edges) <= 700
