"""Reports with numbers written by hand."""

import math
from dataclasses import replace
from typing import Any

from kvfold.evaluate.needle import TASKS, NeedleRow
from kvfold.evaluate.report import LayerBits, Report, Row
from kvfold.evaluate.tool_calls import ToolCallRow

HOSTILE = "<script>alert(1)</script>&$\\frac$[red]"


def row(recipe: str, bits: float, perplexity: float, kl: float, **rest: Any) -> Row:
    defaults = {"slot_bytes": 36, "top1": 0.971, "tokens": 8192, "copy": 0.5, "needle": None, "needle_by_depth": None}
    defaults |= {"kl_99": 4 * kl, "kl_tail": 10 * kl}
    return Row(
        recipe, bits_per_element_2k=bits, bits_per_element_128k=bits, perplexity=perplexity, kl=kl, **defaults | rest
    )


def report(*rows: Row, noise_floor: float = 3e-5) -> Report:
    bf16 = row("bf16", 16, 12.0, 0.0, top1=1.0, needle=1.0, needle_by_depth={"10 %": 1.0, "90 %": 1.0})
    return Report("some/model", "some text", 2048, 8192, noise_floor, 12.001, {"torch": "2.13.0"}, [*rows, bf16])


ORDINARY = report(
    row("int4", 4.5, 12.6, 0.0751, needle=0.5, needle_by_depth={"10 %": 1.0, "90 %": 0.0}),
    row("saw-int4", 4.5, 12.4, 0.0462),
    row("saw-int4:block=4", 4.62, 12.148, 0.0123),
    row("int2", 2.5, 101_713.4, 9.7),
    row("quarot-int2:block=64", 4.61, 12.9, 0.095),
    row("int8", 8.5, 11.999, 2e-5),
)
BROKEN = report(
    row("int4:centre=false", 4.25, math.inf, 25.0),
    row("int2", 2.25, math.nan, math.nan),
    row(HOSTILE, 4.25, 1e9, math.inf),
    row("saw-int4:order=64,centre=false,skip=0+1+29,block=256", 4.9, 12.0, 1e-12),
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
    question="What is it about?",
    rows=[
        replace(
            row,
            suite=suite(1.0, found),
            tool_calls=calls(found),
            tasks={"arc_easy acc": found, "lambada perplexity": 9.5},
            perplexity_beyond_16k=10.0,
            kl_beyond_16k=2 * row.kl,
            kl_tail_beyond_16k=20 * row.kl,
            layer_bits=[LayerBits(layer, 4.5 + layer, 2.25) for layer in range(3)],
            answer=f"It is about {row.recipe}.",
        )
        for row, found in zip(ORDINARY.rows, (0.4, 0.5, 0.6, 0.0, 0.7, 0.8, 1.0), strict=True)
    ],
)
