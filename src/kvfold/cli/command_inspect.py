"""`kvfold inspect`: what an artifact holds."""

from typing import Annotated

import typer

import kvfold
from kvfold.cli.inputs import check_files
from kvfold.cli.options import JsonFile
from kvfold.cli.output import check_table, out, table, write_json


def inspect(
    folder: Annotated[str, typer.Argument(help="A folder written by `kvfold calibrate`, or its Hub id.")],
    json_file: JsonFile = None,
) -> None:
    """Show what an artifact holds: its model, its text, what was found per recipe and layer, and its checks.

    Example: `kvfold inspect fits`
    """
    from kvfold.calibration.describe import describe
    from kvfold.recipes import parse

    check_files(json_file)
    artifact = kvfold.Artifact.load(folder)
    rows = describe(artifact)
    checks = {name: result for name in artifact.metadata.checks if (result := artifact.check_result(parse(name)))}
    if write_json(json_file, [*rows, *(row for name, result in checks.items() for row in result.rows(name))]):
        return
    model, made = artifact.metadata.model, artifact.metadata.calibration
    packed = len(model.packed)
    out.print(
        f"{model.model_type}: {packed if packed == model.layers else f'{packed} of {model.layers}'} layers, "
        f"{model.q_heads} query and {model.kv_heads} KV heads of "
        f"{model.key_dim}; RoPE on {artifact.metadata.rope.rotary_dim} of them ({artifact.metadata.rope.layout})\n"
        f"model hash {model.sha256}\n"
        f"calibrated on {made.tokens:,} tokens in passages of {made.context:,}"
        + (f", drawn with seed {made.seed}" if made.seed is not None else "")
        + f" ({', '.join(f'{name} {version}' for name, version in made.versions.items())})",
        highlight=False,
        markup=False,
    )
    for name in artifact.metadata.recipes:
        own = [row for row in rows if row["recipe"] == name]
        columns = [column for column in own[0] if column != "recipe"]
        headings = [column.replace(" ", "\n", 1) for column in columns]
        out.print(table(name, headings, [[str(row[column]) for column in columns] for row in own]))
    for name, result in checks.items():
        out.print(check_table(f"{name}, checked", result))
