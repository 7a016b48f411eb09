"""`kvfold bench serving`: a server under load."""

from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any

import typer

from kvfold.cli.inputs import check_columns, check_files
from kvfold.cli.options import GrowingCsvFile, JsonFile, recipe_option
from kvfold.cli.output import collect_rows, out, table, write_json


def serving(
    url: Annotated[str, typer.Argument(help="An OpenAI endpoint, e.g. `http://localhost:8000`.")],
    input_tokens: Annotated[int, typer.Option("--input", help="Tokens of each prompt.", min=1)] = 1024,
    output_tokens: Annotated[int, typer.Option("--output", help="Tokens of each answer.", min=2)] = 128,
    concurrency: Annotated[
        list[int] | None, typer.Option("--concurrency", "-c", help="Users at a time; repeatable. Default: 8.", min=1)
    ] = None,
    prefix_hit: Annotated[
        list[int] | None,
        typer.Option(
            "--prefix-hit", help="Percent of each prompt that is the same for all; repeatable.", min=0, max=100
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Requests of each user, one after the other.", min=1)] = 4,
    model: Annotated[str | None, typer.Option(help="The model's name there. Default: the only one.")] = None,
    recipe: Annotated[str, recipe_option("The server's recipe, for the rows.")] = "bf16",
    gpu: Annotated[str | None, typer.Option(help="The server's GPU, for the rows. Default: this machine's.")] = None,
    json_file: JsonFile = None,
    csv_file: GrowingCsvFile = None,
) -> None:
    """Put a server under load: throughput in total and per user, time to the first token and to the last.

    Example: `kvfold bench serving http://localhost:8000 -r saw-int4 --input 8192 --output 1024 -c 8 -c 32 -c 128`
    """
    from kvfold.bench import serving_times as run

    check_files(json_file, csv_file)
    check_columns(csv_file, run.Row)
    server = run.Server.find(url, model)
    loads = [
        run.Load(input_tokens, output_tokens, users, hit, rounds)
        for hit in prefix_hit or [0]
        for users in concurrency or [8]
    ]
    where = gpu or run.this_machine()
    rows = collect_rows(
        "Timing", lambda advance: run.run(server, loads, recipe, where, advance), json_file, csv_file, add=True
    )
    if not write_json(json_file, rows):
        _print_serving(rows)


def _print_serving(rows: list[dict[str, Any]]) -> None:
    """One table per share of prefix hits."""
    first = rows[0]
    for hit, group in groupby(rows, itemgetter("prefix_hit")):
        columns = ("users", "tokens/s", "of\neach", "TTFT\np50", "p90", "p99", "E2E\np50", "p90", "p99", "KV\ntokens")
        title = f"{first['input']:,} + {first['output']:,} tokens, {hit} % of prompts shared"
        times = [
            (
                str(row["concurrency"]),
                f"{row['system_tps']:,.0f}",
                f"{row['request_tps']:.1f}",
                *(f"{row[f'{name}_p{p}']:.2f}" for name in ("ttft", "e2e") for p in (50, 90, 99)),
                "–" if row["kv_tokens"] is None else f"{row['kv_tokens']:,}",
            )
            for row in group
        ]
        out.print(table(title, columns, times))
    out.print(
        f"{first['model']} with {first['recipe']}, {first['engine']} {first['version']} on {first['gpu']}; "
        f'{first["requests"] // first["concurrency"]} requests per user. Times are in seconds. "of each": '
        "tokens/s of the median request after its first token.",
        highlight=False,
    )
