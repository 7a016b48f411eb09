"""`kvfold pull`: an artifact from the Hugging Face Hub, or from a folder."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from kvfold.cli.output import out


def pull(
    where: Annotated[str, typer.Argument(help="Its id on the Hub, as `me/qwen3-8b-kvfold`, or its folder.")],
    folder: Annotated[Path, typer.Option("--out", help="The folder to write.")],
) -> None:
    """Download an artifact that was published with `kvfold push`, with its card.

    `--artifact` takes a Hub id too. A folder of your own stays as it is, and `kvfold check` can keep its result there.

    Example: `kvfold pull me/qwen3-8b-kvfold --out fits`, then `kvfold serve Qwen/Qwen3-8B --artifact fits`
    """
    from kvfold.publish.transfer import pull as download

    artifact = download(where, folder)
    found = ", ".join(("means", *artifact.metadata.recipes))
    out.print(f"Wrote {escape(str(folder))}: {found}", highlight=False, soft_wrap=True)
    for name in artifact.metadata.checks:
        out.print(f"`kvfold inspect {escape(str(folder))}` shows the check of {name}", highlight=False, soft_wrap=True)
