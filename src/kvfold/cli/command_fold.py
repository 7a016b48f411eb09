"""`kvfold fold`: a model with a recipe's rotation in its weights."""

import shlex
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.markup import escape

import kvfold
from kvfold.cli.inputs import calibrated_folder, carried_folder, check, load
from kvfold.cli.options import ArtifactFolder, Model, recipe_option
from kvfold.cli.output import out
from kvfold.files import check_folder
from kvfold.models import CARRIED, load_config, save_model


def fold(
    model: Model,
    recipe: Annotated[str, recipe_option("A recipe that rotates values: `oscar-int2`, or `fold2` to `fold4`.")],
    folder: Annotated[Path, typer.Option("--out", help="The folder to write: a new or an empty one.")],
    artifact: ArtifactFolder = None,
) -> None:
    """Fold a recipe's rotation of values into the weights, which leaves less to do for every token.

    Writes a model that computes the same, in the same dtype. Its artifact is in the subfolder `kvfold`, where other
    commands find it. Without an artifact, the recipe is calibrated first, as `serve` does.

    Example: `kvfold fold embedded -r oscar-int2 --out folded`, then `kvfold serve folded -r oscar-int2`
    """
    from kvfold.folding import check_foldable, fold_values
    from kvfold.recipes import parse

    parsed = parse(recipe)
    there = artifact or carried_folder(model, [recipe])
    fits = kvfold.Artifact.load(there) if there else None
    check_folder(folder)
    check(model, [parsed], artifact=fits)
    check_foldable(parsed, load_config(model))
    if folder.is_symlink() or folder.is_mount() or (folder.exists() and (folder.is_file() or any(folder.iterdir()))):
        raise FileExistsError(
            f"cannot write {folder}: it is there already, and no plain, empty folder; name a new one with --out"
        )
    fits = fits or kvfold.Artifact.load(calibrated_folder(model, parsed))
    with TemporaryDirectory(dir=folder.parent) as scratch:
        network, tokenizer = load(model, dtype="auto", device="cpu")
        folded, whole = fold_values(network, parsed, fits), Path(scratch) / "whole"
        save_model(network, tokenizer, whole)
        folded.save(whole / CARRIED)
        whole.rename(folder)
    out.print(f"Wrote {escape(str(folder))}, with its artifact in it. Serve it:", soft_wrap=True, highlight=False)
    command = shlex.join(["kvfold", "serve", str(folder), "--recipe", str(parsed)])
    out.print(escape(command), soft_wrap=True, highlight=False)
