"""`kvfold demo`: an evaluation and answers of the embedded model."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from kvfold.cli.inputs import check, load, needed_artifact
from kvfold.cli.output import out, progress, report_tables
from kvfold.models import EMBEDDED
from kvfold.text import DOCUMENTATION, read_text, tokenize

DEMO_RECIPES = ("fold4", "fold3", "fold2", "int2")  # the last one is a bad example


def demo(
    html: Annotated[Path, typer.Option(help="Where to write the report.")] = Path("kvfold-report.html"),
    tokens: Annotated[int, typer.Option(help="Tokens to score.", min=1024)] = 1024,
) -> None:
    """See what a KV cache of 4, 3 and 2 bits gains and costs on a real language model, without a GPU, in a few minutes.

    Example: `kvfold demo --html report.html`
    """
    from kvfold.evaluate.page import write_html
    from kvfold.recipes import parse

    panel, words = [parse(name) for name in DEMO_RECIPES], read_text(None, "evaluation")
    check(EMBEDDED, panel, html)
    network, tokenizer = load(EMBEDDED)
    from kvfold.evaluate.run import evaluate  # late: without transformers, `load` says how to install it

    means = needed_artifact(None, EMBEDDED, (network, tokenizer), panel)
    with progress(f"Evaluating {len(panel)} recipes") as advance:
        report = evaluate(
            network,
            tokenizer,
            panel,
            tokenize(words, tokenizer, tokens),
            1024,
            artifact=means,
            names=(EMBEDDED, DOCUMENTATION),
            answers=True,
            advance=advance,
        )
    out.print(report_tables(report))
    write_html(report, html)
    out.print(f"\nThe same with plots: {escape(str(html))}", highlight=False)
    out.print(f"\nEach cache reads a page of Python's documentation. {report.question}")
    for row in report.ordered:
        out.print(f"\n[bold]{escape(row.recipe)}[/]\n{escape(row.answer or '')}", highlight=False)
