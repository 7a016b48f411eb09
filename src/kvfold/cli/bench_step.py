"""`kvfold bench step`: whole decode steps beside a dense 16-bit cache."""

from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any

import typer

from kvfold.cli.inputs import check_files, config_of
from kvfold.cli.options import CsvFile, JsonFile, recipe_option
from kvfold.cli.output import collect_rows, out, write_json
from kvfold.fitting_table import FittingTable
from kvfold.geometry import Geometry


def step(
    shape: Annotated[
        str, typer.Option(help="An example as `Qwen3-8B`, or the configuration of a model: a file, a folder, a Hub id.")
    ] = "Qwen3-8B",
    recipe: Annotated[
        list[str] | None,
        recipe_option("A recipe with options; repeatable. Default: saw-int4, oscar-int2 with one group."),
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(
            "--case",
            help="Sequences and tokens per sequence, `32x16384`; repeatable. Default: 1, 8, 32 of 8k, 32k, 100k.",
        ),
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Layers of the model. Default: all.", min=1)] = None,
    page: Annotated[int, typer.Option(help="Tokens of a page.", min=1)] = 64,
    json_file: JsonFile = None,
    csv_file: CsvFile = None,
) -> None:
    """Time whole decode steps of a model with random weights, captured in CUDA graphs, beside a dense 16-bit cache.

    Example: `kvfold bench step --case 32x16384`
    """
    from kvfold.bench import step_times as run
    from kvfold.bench.model_steps import with_layers
    from kvfold.fitted import Fitted
    from kvfold.recipes import parse

    check_files(json_file, csv_file)
    config = with_layers(config_of(shape), layers)
    geometry = Geometry.from_config(config)
    panel = [parse(name) for name in recipe or run.default_recipes(geometry.key_dim)]
    for each in panel:
        Fitted(each, geometry).check()
    cases = [run.Case.parse(text) for text in case or run.CASES]
    rows = collect_rows(
        "Timing", lambda advance: run.run(shape, config, cases, panel, page, advance), json_file, csv_file
    )
    if not write_json(json_file, rows):
        _print_steps(rows)


def _print_steps(rows: list[dict[str, Any]]) -> None:
    """One table per case."""

    def shown(number: float | None, form: str, unit: float = 1) -> str:
        return "–" if number is None else format(number / unit, form)

    for (batch, context), group in groupby(rows, itemgetter("batch", "context")):
        columns = ("recipe", "ms", "speed-up", "begin ms", "tokens/s", "cache GB", "peak GB")
        table = FittingTable(f"{batch} × {context:,} tokens", *columns)
        for row in group:
            table.add_row(
                row["recipe"],
                shown(row["us"], ".2f", 1e3),
                f"{row['speedup']:.2f}×" if row["speedup"] else "–",
                shown(row["begin_us"], ".2f", 1e3),
                shown(row["tokens_per_s"], ",.0f"),
                shown(row["cache_bytes"], ".2f", 1e9),
                shown(row["peak_bytes"], ".2f", 1e9),
            )
        out.print(table)
    first = rows[0]
    out.print(
        f"{first['shape']} with random weights, {first['layers']} layers, pages of {first['page']} tokens; "
        f"{first['gpu']}, torch {first['torch']}, triton {first['triton']}, transformers {first['transformers']}. "
        f"Attention over the dense cache: {first['baseline']}. A recipe without a time does not fit in memory; "
        "peaks include weights.",
        highlight=False,
    )
