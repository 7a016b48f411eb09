"""`kvfold push`: an artifact to the Hugging Face Hub."""

from pathlib import Path
from typing import Annotated

import typer

from kvfold.cli.output import out


def push(
    folder: Annotated[Path, typer.Argument(help="A folder written by `kvfold calibrate`.")],
    hub_id: Annotated[str, typer.Argument(help="Where to on the Hugging Face Hub, e.g. `me/qwen3-8b-kvfold`.")],
    private: Annotated[bool, typer.Option("--private", help="Make the repository private.")] = False,
) -> None:
    """Upload an artifact to the Hub; `--artifact` takes its id from there.

    Example: `kvfold push fits me/smollm2-kvfold`
    """
    from kvfold.artifact import push as upload

    out.print(upload(folder, hub_id, private), highlight=False)
