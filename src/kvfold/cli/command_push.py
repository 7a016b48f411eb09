"""`kvfold push`: an artifact to the Hugging Face Hub, or to a folder that others read."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from kvfold.cli.output import out


def push(
    folder: Annotated[Path, typer.Argument(help="A folder written by `kvfold calibrate`.")],
    where: Annotated[str, typer.Argument(help="Its id on the Hub, as `me/qwen3-8b-kvfold`, or a folder, as `./fits`.")],
    model: Annotated[
        str | None, typer.Option(help="The model's Hub id, for the card. The artifact must belong to it.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make the repository private.")] = False,
) -> None:
    """Publish an artifact with a model card: bits, KL, needles, what its checks found, how to serve it.

    Example: `kvfold push fits me/qwen3-8b-kvfold --model Qwen/Qwen3-8B`, or `kvfold push fits ./shared/qwen3-8b`
    """
    from kvfold.publish.transfer import push as publish

    out.print(escape(publish(folder, where, model, private)), highlight=False, soft_wrap=True)
