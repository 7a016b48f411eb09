"""`kvfold bench soak`: a server under mixed load for a long time."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from kvfold.cli.inputs import check_columns, check_files
from kvfold.cli.options import GrowingCsvFile, JsonFile, recipe_option
from kvfold.cli.output import add_to_csv, err, out, progress, write_json

if TYPE_CHECKING:
    from kvfold.bench.soak import Row


def soak(
    url: Annotated[str, typer.Argument(help="An OpenAI endpoint, e.g. `http://localhost:8000`.")],
    users: Annotated[int, typer.Option("--users", "-c", help="Users at a time.", min=1)] = 128,
    minutes: Annotated[float, typer.Option(help="How long new requests are sent.", min=0.01)] = 30,
    requests: Annotated[int | None, typer.Option(help="Requests at most. Default: no limit.", min=1)] = None,
    longest: Annotated[int, typer.Option(help="Tokens of the longest prompt.", min=8)] = 4096,
    output_tokens: Annotated[int, typer.Option("--output", help="Tokens of the longest answer.", min=1)] = 256,
    leaving: Annotated[int, typer.Option(help="Percent of users that leave early.", min=0, max=99)] = 5,
    model: Annotated[str | None, typer.Option(help="The model's name there. Default: the only one.")] = None,
    recipe: Annotated[str, recipe_option("The server's recipe, for the row.")] = "bf16",
    gpu: Annotated[str | None, typer.Option(help="The server's GPU, for the row. Default: this machine's.")] = None,
    json_file: JsonFile = None,
    csv_file: GrowingCsvFile = None,
) -> None:
    """Put a server under mixed load for a long time: no answer may be lost.

    Lengths differ, some prompts begin alike, and some users leave before their answer is complete.
    The command fails if an answer is lost.

    Example: `kvfold bench soak http://localhost:8000 -r fold4 --users 128 --minutes 30 --csv soak.csv`
    """
    from kvfold.bench import soak as bench
    from kvfold.bench.client import Server, this_machine

    check_files(json_file, csv_file)
    check_columns(csv_file, bench.Row)
    server = Server.find(url, model)
    load = bench.Soak(users, 60 * minutes, requests, longest, output_tokens, leaving)
    with progress("Soaking") as advance:
        row, lost = bench.run(server, load, recipe, gpu or this_machine(), advance)
    add_to_csv(csv_file, [asdict(row)])
    if not write_json(json_file, [asdict(row)]):
        out.print(_told(row), highlight=False)
    if lost:
        err.print(f"[bold red]error:[/] {len(lost)} answers were lost, the first because: {lost[0]}", highlight=False)
        raise typer.Exit(1)


def _told(row: "Row") -> str:
    what = f"{row.model} with {row.recipe}, {row.engine} {row.version} on {row.gpu}"
    lines = [
        f"{what}: {row.users} users, {row.seconds:,.0f} s",
        f"requests:       {row.requests:,}: {row.answered:,} answered, {row.left:,} users left, {row.lost:,} lost",
        f"tokens/s:       {row.system_tps:,.0f}",
        f"first token:    {row.ttft_p50:.3f} s in the median, 99 % within {row.ttft_p99:.3f} s",
        f"between tokens: {1000 * row.gap_p50:.1f} ms in the median, 99 % within {1000 * row.gap_p99:.1f} ms",
    ]
    if row.kv_tokens_left is not None:
        lines.append(f"cache:          {row.kv_tokens_left:,} tokens held after the last answer")
    if row.memory_begin_mib is not None:
        lines.append(f"GPU memory:     {row.memory_begin_mib:,} MiB, {row.memory_end_mib:,} MiB at the end")
    return "\n".join(lines)
