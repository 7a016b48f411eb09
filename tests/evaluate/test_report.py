import json
import math
from dataclasses import asdict, replace
from io import StringIO

import pytest
from rich.console import Console
from sample_reports import BROKEN, MEASURED, ORDINARY

from kvfold.cli.output import report_tables
from kvfold.evaluate.report import Report, rows


def printed(report: Report, width: int = 120) -> list[str]:
    console = Console(width=width, file=StringIO())
    console.print(report_tables(report))
    return console.file.getvalue().splitlines()


def test_table_puts_the_reference_first_and_spells_numbers_as_people_do():
    lines = [" ".join(line.split()) for line in printed(ORDINARY)]
    first = next(i for i, line in enumerate(lines) if set(line) == {"─"}) + 1
    assert lines[first] == "bf16 (reference) 16.00 16.00 12.00 – 0 0 100.0 %"
    assert "saw-int4:block=4 4.62 4.62 12.15 +1.23 % 0.0123 0.1230 97.1 %" in lines
    assert "int2 2.50 2.50 101,713 +847,512 % 9.7000 97.0000 97.1 %" in lines
    assert "int8 8.50 8.50 12.00 -0.01 % 2e-05 0.0002 97.1 %" in lines


def test_table_says_what_was_measured_and_what_means_nothing():
    caption = " ".join(printed(ORDINARY))
    for words in ("KL 3e-05", "differences mean nothing", "some/model · some text · context 2,048 · 8,192 tokens"):
        assert words in caption


def test_table_shows_what_else_was_measured():
    text = "\n".join(" ".join(line.split()) for line in printed(MEASURED, 80))
    assert "recipe copy needle > 16k > 16k > 16k\n" in text
    assert "bf16 (reference) 50 % 100 % 10.00 0 0\n" in text
    assert "int4 50 % 50 % 10.00 0.1502 1.5020\n" in text
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


@pytest.mark.parametrize("width", [60, 80, 200])
def test_table_shows_every_recipe_in_any_terminal(width: int):
    for shown in (ORDINARY, BROKEN, MEASURED):
        lines = printed(shown, width)
        assert "…" not in "".join(lines)
        names = "".join(line.split(" ")[0] for line in lines)
        assert all(row.recipe in names for row in shown.rows)
        assert max(map(len, lines)) <= width


def test_a_report_without_reference_is_refused():
    with pytest.raises(ValueError, match="no bf16 row"):
        report_tables(replace(ORDINARY, rows=ORDINARY.rows[:-1]))


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
    assert found["tasks"] == {"arc_easy acc": 0.4, "lambada perplexity": 9.5}
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
