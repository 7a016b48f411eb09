"""Arguments and options that several commands take."""

from pathlib import Path
from typing import Annotated, Any

import typer

DEFAULT = "fold4"  # the recipe, if the user names none


def recipe_names() -> list[str]:
    """For completion in a shell."""
    from kvfold.recipes import RECIPES, TUNED, load_methods

    load_methods()
    return [*RECIPES, TUNED.name]


def recipe_option(help: str) -> Any:
    return typer.Option("--recipe", "-r", help=help, autocompletion=recipe_names)


Model = Annotated[str, typer.Argument(help="`embedded`, a model folder, a .gguf file or a Hugging Face Hub id.")]
JsonFile = Annotated[str | None, typer.Option("--json", help="Write rows as JSON to this file; `-` for the terminal.")]
CsvFile = Annotated[Path | None, typer.Option("--csv", help="Write tidy rows to this CSV file.")]
GrowingCsvFile = Annotated[Path | None, typer.Option("--csv", help="Add tidy rows to this CSV file.")]
Target = Annotated[
    str | None,
    typer.Option(help="Build the kernels of another GPU, as in `sm_80`, and run them on this one. Default: this GPU."),
]
TextFile = Annotated[
    Path | None, typer.Option("--text", help="A UTF-8 text file instead of Python's own documentation.")
]
ArtifactFolder = Annotated[
    str | None,
    typer.Option(
        "--artifact",
        help="A folder written by `kvfold calibrate`, or its Hub id. Default: MODEL/kvfold, if it is there.",
    ),
]
