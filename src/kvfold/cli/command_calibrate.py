"""`kvfold calibrate`: an artifact from one run of a text through a model."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

import kvfold
from kvfold.cli.inputs import check, load
from kvfold.cli.options import Model, TextFile, recipe_option
from kvfold.cli.output import err, out, progress
from kvfold.files import claimed
from kvfold.models import default_device
from kvfold.text import draw, read_text, tokenize, with_openings


def calibrate(
    model: Model,
    folder: Annotated[Path, typer.Option("--out", help="The folder to write.")],
    recipe: Annotated[list[str] | None, recipe_option("A recipe to fit, e.g. `oscar-int2`; repeatable.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to calibrate on.", min=8)] = 8192,
    context: Annotated[
        int | None, typer.Option(help="Tokens the model sees at a time; default: 2048 on a CPU, 8192 on a GPU.", min=8)
    ] = None,
    text: TextFile = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Draw passages from random places of the text instead of its beginning.", min=0, max=2**63 - 1
        ),
    ] = None,
) -> None:
    """Run a text through a model once and write what recipes learn from it as an artifact.

    The artifact always holds means for centring. Recipes are added to what the folder holds for the same model and
    text. A run that was interrupted, by Ctrl-C or otherwise, continues from its last checkpoint when the same command
    is run again.

    Example: `kvfold calibrate embedded -r oscar-int2 -r gtq-k3v3 --out fits`, then
    `kvfold eval embedded -r oscar-int2 --artifact fits`
    """
    from kvfold.artifact.artifact import check_place
    from kvfold.calibration.automatic import usual_context
    from kvfold.recipes import parse

    check_place(folder)
    panel, words = [parse(name) for name in recipe or ()], read_text(text, "calibration")
    geometry = check(model, panel)
    context = context or usual_context(geometry, default_device())
    checkpoint = folder / "unfinished.safetensors"
    try:
        with claimed(folder):
            there = kvfold.Artifact.load(folder) if (folder / "kvfold.json").exists() else None
            network, tokenizer = load(model)
            if seed is None:
                ids = tokenize(words, tokenizer, tokens)
            else:
                ids = draw(tokenize(words, tokenizer, None), tokens, context, seed)
            with progress("Calibrating") as advance:
                artifact = kvfold.calibrate(
                    network,
                    with_openings(ids, context, tokenizer),
                    context,
                    panel,
                    seed=seed,
                    into=there,
                    checkpoint=checkpoint,
                    progress=advance,
                )
            artifact.save(folder)
            checkpoint.unlink()
    except KeyboardInterrupt:
        from kvfold.calibration.capture import left_by

        err.print(escape(f"Stopped. {left_by(checkpoint, tokens, context)}"), soft_wrap=True, highlight=False)
        raise typer.Exit(130) from None
    found = ", ".join(("means", *artifact.metadata.recipes))
    out.print(f"Wrote {escape(str(folder))}: {found}", highlight=False)
