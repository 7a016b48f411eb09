"""`kvfold bench decode`: decoding beside transformers' own cache."""

from functools import partial
from typing import Annotated

import typer

from kvfold.cli.inputs import check, find_artifact, load, needed_artifact
from kvfold.cli.options import ArtifactFolder, CsvFile, JsonFile, Model, recipe_option
from kvfold.cli.output import collect_rows, out, write_json
from kvfold.fitting_table import FittingTable
from kvfold.text import read_text, tokenize


def decode(
    model: Model,
    recipe: Annotated[list[str], recipe_option("A recipe with options, e.g. `saw-int4:block=64`; repeatable.")],
    context: Annotated[int, typer.Option(help="Tokens in the cache before decoding.", min=1)] = 2048,
    batch: Annotated[int, typer.Option(help="Sequences decoded together.", min=1)] = 1,
    steps: Annotated[int, typer.Option(help="Steps to time.", min=1)] = 32,
    artifact: ArtifactFolder = None,
    json_file: JsonFile = None,
    csv_file: CsvFile = None,
) -> None:
    """Time decoding with packed caches beside transformers' own cache, in turns.

    Example: `kvfold bench decode embedded -r saw-int4 --context 2048`
    """
    from kvfold.bench.decode_times import decode as run
    from kvfold.recipes import parse

    panel, means = [parse(name) for name in recipe], find_artifact(artifact, model, recipe)
    check(model, panel, json_file, csv_file, artifact=means)
    network, tokenizer = load(model)
    means = needed_artifact(means, model, (network, tokenizer), panel)
    words = tokenize(read_text(None, "evaluation"), tokenizer, context)
    timed = partial(run, network, words, panel, means, batch, steps)
    rows = collect_rows("Timing", timed, json_file, csv_file)
    if write_json(json_file, rows):
        return
    title = f"Decoding {model} at {context:,} tokens, batch {batch}, {rows[0]['device']}"
    table = FittingTable(title, "recipe", "tokens/s", "ratio", "cache MiB")
    for row in rows:
        numbers = (f"{row['tokens_per_s']:.2f}", f"{row['ratio']:.2f}×", f"{row['cache_bytes'] / 2**20:.1f}")
        table.add_row(row["recipe"], *numbers)
    out.print(table)
