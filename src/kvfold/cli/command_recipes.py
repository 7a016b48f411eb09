"""`kvfold recipes`: the recipes and what they occupy."""

from typing import Annotated, Any

import typer
from rich.text import Text

from kvfold.cli.inputs import check_files, fitting_recipes
from kvfold.cli.options import JsonFile
from kvfold.cli.output import out, table, write_json
from kvfold.geometry import Geometry


def recipes(
    head_dim: Annotated[int, typer.Option(help="The head dimension of the model.", min=1)] = 128,
    json_file: JsonFile = None,
) -> None:
    """List the recipes with what they occupy.

    Example: `kvfold recipes --head-dim 64`
    """
    from kvfold.fitted import Fitted

    check_files(json_file)
    geometry = Geometry.uniform("any", layers=1, q_heads=1, kv_heads=1, head_dim=head_dim)
    fitting, others = fitting_recipes(geometry)
    rows: list[dict[str, Any]] = []
    for name, recipe in fitting.items():
        fitted = Fitted(recipe, geometry)
        layout = fitted.page_layouts()[0]
        rows.append(
            {
                "recipe": name,
                "bits_per_element_2k": fitted.bits_per_element(2048),
                "bits_per_element_128k": fitted.bits_per_element(131072),
                "key_slot_bytes": layout.key.slot_bytes,
                "value_slot_bytes": layout.value.slot_bytes,
                "needs": "calibration" if recipe.learns else "means" if recipe.centre else "nothing",
                "for_evaluation": fitted.for_evaluation,
                "options": list(recipe.options),
                "summary": recipe.summary,
            }
        )
    if write_json(json_file, rows):
        return
    sizes = [
        (
            row["recipe"],
            f"{row['bits_per_element_2k']:.4g}",
            f"{row['bits_per_element_128k']:.4g}",
            f"{row['key_slot_bytes']} + {row['value_slot_bytes']}",
            row["needs"],
        )
        for row in rows
    ]
    columns = ("recipe", "bits at 2k", "at 128k", "slot bytes", "needs")
    out.print(table(f"Recipes at head dimension {head_dim}", columns, sizes), "")
    about = [
        (
            row["recipe"],
            Text.assemble(
                row["summary"],
                (", for evaluation" if row["for_evaluation"] else "", "yellow"),
                ("".join(["\n", ", ".join(row["options"])] if row["options"] else []), "dim"),
            ),
        )
        for row in rows
    ]
    out.print(table("", ("recipe", "what it is"), about))
    for line in others:
        out.print(line, highlight=False)
    out.print(
        "Bits are those allocated for each number, metadata and open block included; gtq-kXvY and tq-kXvY take any "
        "widths from 1 to 8. No kernel stores recipes for evaluation: vLLM and SGLang refuse them. Means and short "
        "calibrations are made on the fly; `kvfold calibrate` makes better ones, once."
    )
