"""`kvfold plan`: how many tokens and requests fit into memory."""

import re
from typing import Annotated, Any

import typer

from kvfold.cli.inputs import config_of, fitting_recipes
from kvfold.cli.options import JsonFile
from kvfold.cli.output import new_table, out, write_json
from kvfold.fitted import Fitted
from kvfold.geometry import Geometry
from kvfold.recipes import RECIPES


def plan(
    model: Annotated[str, typer.Argument(help="A model, its config.json, or one of the examples, e.g. `Qwen3-8B`.")],
    memory: Annotated[str, typer.Option(help="Memory for the cache, e.g. `80GiB` or `512MB`.")],
    context: Annotated[
        int | None, typer.Option(help="Tokens of a request; default: the longest the model takes.", min=1)
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Show how many tokens and requests fit, for every recipe, from the model's configuration alone.

    Example: `kvfold plan Qwen3-8B --memory 40GiB --context 32768`
    """
    geometry = Geometry.from_config(config_of(model))
    budget = _bytes(memory)
    context = context or geometry.max_context or 32768
    raw_bytes = Fitted(RECIPES["bf16"], geometry).sequence_bytes(context)
    fitting, others = fitting_recipes(geometry)
    rows: list[dict[str, Any]] = []
    for name, recipe in fitting.items():
        per_request = Fitted(recipe, geometry).sequence_bytes(context)
        rows.append(
            {
                "recipe": name,
                "bytes_per_token": per_request / context,
                "compression": raw_bytes / per_request,
                "tokens": budget * context // per_request,
                "requests": budget // per_request,
                "context": context,
            }
        )
    if write_json(json_file, rows):
        return
    title = (
        f"{model}: {len(geometry.layers)} layers, {geometry.q_heads} query and {geometry.kv_heads} KV heads of "
        f"{geometry.key_dim}; {memory} of cache"
    )
    table = new_table(title, "recipe", "bytes per token", "smaller by", "tokens", f"requests of {context:,}")
    for row in rows:
        table.add_row(
            row["recipe"],
            f"{row['bytes_per_token']:,.0f}",
            f"{row['compression']:.2f}×",
            f"{row['tokens']:,}",
            f"{row['requests']:,}",
        )
    out.print(table)
    for line in others:
        out.print(line, highlight=False)


def _bytes(text: str) -> int:
    """The bytes in `80GiB`, `512 MB` or `1e9`."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)\s*([KMGT]i?)?B?", text.strip(), re.IGNORECASE)
    if not match:
        raise ValueError(f"{text!r} is no amount of memory: write for example 80GiB or 512MB")
    unit = (match[2] or "").upper()
    power = " KMGT".index(unit[0]) if unit else 0
    exact = float(match[1]) * (1024 if unit.endswith("I") else 1000) ** power
    if exact >= 2**63:
        raise ValueError(f"{text!r} is more memory than any machine has")
    amount = int(exact)
    if not unit and amount < 2**20:
        raise ValueError(f"{text!r} is less than a megabyte: write a unit, for example 80GiB or 512MB")
    return amount
