"""`kvfold plan`: how many tokens and requests fit into memory."""

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from kvfold.cli.inputs import bytes_in, check_files, config_of, fitting_recipes
from kvfold.cli.options import JsonFile
from kvfold.cli.output import out, table, write_json
from kvfold.geometry import Geometry, example_configs, text_config
from kvfold.layer_kinds import Kind

WINDOWS: dict[Kind, str] = {"sliding": "sliding_window", "chunked": "attention_chunk_size"}  # fields with their tokens


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A model, its config.json, or one of the examples, e.g. `Qwen3-8B`.",
            autocompletion=lambda: list(example_configs()),
        ),
    ],
    memory: Annotated[str, typer.Option(help="Memory for the cache, e.g. `80GiB` or `512MB`.")],
    context: Annotated[
        int | None, typer.Option(help="Tokens of a request; default: the longest the model takes.", min=1)
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Show how many tokens and requests fit, for every recipe that is served, from the model's configuration alone.

    Bytes per token are those of packed layers. Sliding and chunked layers keep 16 bits and the tokens of their window,
    which every request is charged with, as it is with its open block.

    Example: `kvfold plan Qwen3-8B --memory 40GiB --context 32768`
    """
    from kvfold.fitted import Fitted
    from kvfold.recipes import RECIPES

    check_files(json_file)
    config = config_of(model)
    geometry = Geometry.from_config(config)
    budget = bytes_in(memory)
    context = context or geometry.max_context or 32768
    text = text_config(config)
    windows = {kind: min(text.get(field) or context, context) for kind, field in WINDOWS.items()}
    windowed = {kind: _window_bytes(geometry, kind, window) for kind, window in windows.items()}
    raw_bytes = Fitted(RECIPES["bf16"], geometry).sequence_bytes(context) + sum(windowed.values())
    fitting, others = fitting_recipes(geometry)
    rows: list[dict[str, Any]] = []
    unserved: list[str] = []
    for name, recipe in fitting.items():
        fitted = Fitted(recipe, geometry)
        if fitted.for_evaluation:
            unserved.append(name)
            continue
        packed_bytes = Fitted(recipe.model_copy(update={"block": 0}), geometry).sequence_bytes(context)
        open_bytes = fitted.sequence_bytes(context) - packed_bytes
        per_request = packed_bytes + open_bytes + sum(windowed.values())
        rows.append(
            {
                "recipe": name,
                "bytes_per_token": packed_bytes / context,
                "window_bytes": sum(windowed.values()),
                "open_block_bytes": open_bytes,
                "compression": raw_bytes / per_request,
                "tokens": budget * context // per_request,
                "requests": budget // per_request,
                "context": context,
                "layers": Counter(layer.kind for layer in geometry.layers),
            }
        )
    if write_json(json_file, rows):
        return
    shown = [
        (
            row["recipe"],
            f"{row['bytes_per_token']:,.0f}",
            f"{row['compression']:.2f}×",
            f"{row['tokens']:,}",
            f"{row['requests']:,}",
        )
        for row in rows
    ]
    columns = ("recipe", "bytes per token", "smaller by", "tokens", f"requests of {context:,}")
    out.print(table(f"{model}: {_packed(geometry)}; {memory} of cache", columns, shown))
    if unserved:
        others.append(f"engines do not serve {', '.join(unserved)}: these are for evaluation")
    if most := max(row["open_block_bytes"] for row in rows):
        others.append(f"each running request has an open block in 16 bits, up to {most / 2**20:,.1f} MiB, counted here")
    for line in (*_unpacked(geometry, windows, windowed), *others):
        out.print(line, highlight=False)


def _packed(geometry: Geometry) -> str:
    """The packed layers, in words."""
    layers, packed, dims = len(geometry.layers), len(geometry.packed), {geometry.key_dim, geometry.value_dim}
    return (
        f"{layers if packed == layers else f'{packed} of {layers}'} layers, {geometry.q_heads} query and "
        f"{geometry.kv_heads} KV heads of {' and '.join(map(str, sorted(dims, reverse=True)))}"
    )


def _unpacked(geometry: Geometry, windows: dict[Kind, int], windowed: dict[Kind, int]) -> Iterator[str]:
    """A line per kind of layers that are not packed."""
    counts = Counter(layer.kind for layer in geometry.layers)
    for kind, taken in windowed.items():
        if counts[kind]:
            yield f"{counts[kind]} {kind} layers take {taken:,} bytes per request: {windows[kind]:,} tokens in 16 bits"
    if counts["linear"]:
        yield f"{counts['linear']} layers have no cache that grows: what the engine keeps there is not counted"
    if counts["shared"]:
        yield f"{counts['shared']} layers read the cache of another layer and have none"


def _window_bytes(geometry: Geometry, kind: Kind, window: int) -> int:
    """Bytes that a request takes in all layers of a kind, for the tokens of a window in 16 bits."""
    layers = (layer for layer in geometry.layers if layer.kind == kind)
    return sum(2 * window * layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in layers)
