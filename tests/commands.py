"""`kvfold` commands as they are typed."""

from rich.text import Text
from typer.testing import CliRunner, Result

from kvfold.cli import app

FITTED = ("-r", "oscar-int2:block=48", "-r", "gtq-k3v3")  # two recipes that learn
LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 16  # of the small model


def run(*arguments: object) -> Result:
    """The command's result, which must be a success."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def plain(output: str) -> str:
    """Without colours, should the terminal have some."""
    return Text.from_ansi(output).plain
