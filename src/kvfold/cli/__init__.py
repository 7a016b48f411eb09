"""The `kvfold` command. `kvfold NAME` is in `command_NAME.py`, `kvfold bench NAME` in `bench_NAME.py`.

Commands import what they work with when they run. So `kvfold --help` loads neither pydantic nor torch, and `kvfold
recipes` and `kvfold plan` load no torch.
"""

from typing import Annotated, NoReturn

import typer
from rich.markup import escape
from safetensors import SafetensorError

from kvfold.cli.bench_kernels import kernels
from kvfold.cli.bench_soak import soak
from kvfold.cli.command_calibrate import calibrate
from kvfold.cli.command_check import check
from kvfold.cli.command_demo import demo
from kvfold.cli.command_doctor import doctor
from kvfold.cli.command_eval import eval_
from kvfold.cli.command_fold import fold
from kvfold.cli.command_generate import generate
from kvfold.cli.command_inspect import inspect
from kvfold.cli.command_plan import plan
from kvfold.cli.command_pull import pull
from kvfold.cli.command_push import push
from kvfold.cli.command_recipes import recipes
from kvfold.cli.command_selftest import selftest
from kvfold.cli.command_serve import serve
from kvfold.cli.command_tune import tune
from kvfold.cli.output import err, out
from kvfold.printable import printable
from kvfold.version import __version__

START = """\
[bold]kvfold {version}[/]: the KV cache of language models, 3.6 to 6.8 times smaller

  kvfold doctor                        what this machine can do
  kvfold demo                          what 4, 3 and 2 bits gain and cost
  kvfold plan Qwen3-8B --memory 80GiB  how many tokens and requests fit
  kvfold check Qwen/Qwen3-8B           whether the model loses too much
  kvfold serve Qwen/Qwen3-8B           the OpenAI API, with a 4-bit cache

All commands: [bold]kvfold --help[/]. One of them: [bold]kvfold serve --help[/].
They complete in your shell after [bold]kvfold --install-completion[/]."""
UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[1]  # of typer's click, which has no public name

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode="markdown")
bench = typer.Typer(help="Benchmarks of kernels and servers.\n\nExample: `kvfold bench kernels --explain`")
app.add_typer(bench, name="bench")


def main() -> None:
    """Mistakes of the user are one line, which ends with what to do."""
    try:
        raise SystemExit(app(standalone_mode=False))
    except UsageError as error:
        said, command = error.format_message(), error.ctx.command_path if error.ctx else "kvfold"
        stop = "" if said.endswith((".", "?")) else "."
        _fail(f"{said[:1].lower()}{said[1:]}{stop} Run `{command} --help`", code=2)
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        _fail(str(error))
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # of torch, which may not be loaded
            raise
        _fail(f"the GPU's memory is full: give a shorter --context or fewer --tokens ({str(error).splitlines()[0]})")


def _fail(line: str, code: int = 1) -> NoReturn:
    err.print(f"[bold red]error:[/] {escape(printable(line, most=4000))}", soft_wrap=True, highlight=False)
    raise SystemExit(code) from None


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """kvfold makes the KV cache of a language model 3.6 to 6.8 times smaller.

    Try: `kvfold recipes`, `kvfold plan Qwen3-8B --memory 80GiB`, `kvfold eval embedded -r fold4 -r fold2`.
    """
    if version:
        out.print(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        out.print(START.format(version=__version__), highlight=False)


# `kvfold --help` lists commands in this order
app.command()(doctor)
app.command()(recipes)
app.command()(plan)
app.command()(calibrate)
app.command()(tune)
app.command()(fold)
app.command()(inspect)
app.command()(push)
app.command()(pull)
app.command("eval")(eval_)
app.command()(check)
app.command()(generate)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve)
app.command()(demo)
app.command()(selftest)
bench.command()(kernels)
bench.command()(soak)
