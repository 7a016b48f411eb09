"""`kvfold bench kernels`: kernels beside attention of other libraries."""

from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any

import typer

from kvfold.cli.inputs import check_files
from kvfold.cli.options import CsvFile, JsonFile, Target, recipe_option
from kvfold.cli.output import collect_rows, err, out, table, write_csv, write_json
from kvfold.geometry import Geometry


def kernels(
    recipe: Annotated[
        list[str] | None, recipe_option("A recipe with options; repeatable. Default: 4, 3 and 2 bits, no open block.")
    ] = None,
    op: Annotated[
        list[str] | None, typer.Option("--op", help="`decode`, `extend` or `store`; repeatable. Default: all.")
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(
            "--case", help="Sequences and tokens per sequence, `32x8192`, or with new tokens `1x32768+512`; repeatable."
        ),
    ] = None,
    page: Annotated[int, typer.Option(help="Tokens of a page.", min=1)] = 64,
    head_dim: Annotated[int, typer.Option(help="The head dimension.", min=1)] = 128,
    q_heads: Annotated[int, typer.Option(help="Query heads.", min=1)] = 32,
    kv_heads: Annotated[int, typer.Option(help="KV heads.", min=1)] = 8,
    dtype: Annotated[str, typer.Option(help="`bfloat16` or `float16`.")] = "bfloat16",
    explain: Annotated[
        bool, typer.Option("--explain", help="Say which kernel each recipe gets, and why. Needs no GPU.")
    ] = False,
    target: Target = None,
    json_file: JsonFile = None,
    csv_file: CsvFile = None,
) -> None:
    """Verify the kernels, then time them beside other libraries and a plain INT4 store.

    Attention is compared with the fastest of cuDNN and FlashAttention, as far as they are installed, over
    16 bits and over FP8.

    Example: `kvfold bench kernels -r saw-int4 --op decode --case 32x8192`, or `kvfold bench kernels --explain`
    """
    from kvfold.bench import kernel_times as run
    from kvfold.bench.attention_libraries import missing
    from kvfold.fitted import Fitted
    from kvfold.recipes import parse

    check_files(json_file, csv_file)
    panel = [parse(name) for name in recipe or run.default_recipes(head_dim)]
    geometry = Geometry.uniform("any", layers=1, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim)
    for each in panel:
        Fitted(each, geometry).check()
    shape = {"page": page, "head_dim": head_dim, "q_heads": q_heads, "kv_heads": kv_heads, "dtype": dtype}
    cases = run.cases(op, case, **shape)
    if explain:
        rows = run.explain(cases, panel, target)
        write_csv(csv_file, rows)
        if not write_json(json_file, rows):
            _print_choices(rows)
        return
    if any(each.op != "store" for each in cases):
        for name in missing():
            err.print(f"{name} is not installed, so it is not compared with", highlight=False)
    rows = collect_rows("Timing", lambda advance: run.run(cases, panel, advance, target), json_file, csv_file)
    if not write_json(json_file, rows):
        _print_times(rows)


def _print_choices(rows: list[dict[str, Any]]) -> None:
    choices = map(itemgetter("recipe", "op", "kernel", "reason"), rows)
    out.print(table(f"Kernels on {rows[0]['gpu']}", ("recipe", "op", "kernel", "why"), choices))


def _print_times(rows: list[dict[str, Any]]) -> None:
    """One table per case."""
    for (op, batch, context, new), group in groupby(rows, itemgetter("op", "batch", "context", "new")):
        some = list(group)
        title = f"{op}, {batch} × {context:,} tokens, {new:,} of them new"
        times = [
            (
                row["recipe"],
                row["kernel"],
                f"{row['bytes'] / 1e6:.1f}",
                f"{row['us']:.1f}",
                f"{row['tb_per_s']:.2f}",
                f"{row['fraction_of_copy']:.0%}",
                f"{row['speedup']:.2f}×",
            )
            for row in some
        ]
        out.print(table(title, ("recipe", "kernel", "MB", "µs", "TB/s", "of copy", "speed-up"), times))
        beside = [(" or ".join(sorted({row["baseline"] for row in some})), [row["baseline_us"] for row in some])]
        if op == "store":
            beside.append(("a copy", [row["copy_us"] for row in some]))
        elif names := sorted({row["fp8"] for row in some if row["fp8"]}):
            beside.append((" or ".join(names), [row["fp8_us"] for row in some if row["fp8"]]))
        listed = ", ".join(f"{name}: {min(times):.1f} to {max(times):.1f} µs" for name, times in beside)
        out.print(f"beside {listed}\n", highlight=False)
    worst = max(row["error"] / row["allowed_error"] if row["error"] else 0.0 for row in rows)
    first = rows[0]
    out.print(
        f"{first['q_heads']} query and {first['kv_heads']} KV heads of {first['head_dim']}, {first['dtype']}, pages of "
        f"{first['page']} tokens; {first['gpu']}, built for {first['target']}, torch {first['torch']}, triton "
        f"{first['triton']}. A large copy moves {first['copy_tb_per_s']:.2f} TB/s. All were verified "
        f"first: errors reach {worst:.2f} of what is allowed.",
        highlight=False,
    )
