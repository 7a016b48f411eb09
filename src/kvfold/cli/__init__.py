"""The `kvfold` command. `kvfold NAME` is in `command_NAME.py`, `kvfold bench NAME` in `bench_NAME.py`."""

from typing import Annotated

import typer
from rich.markup import escape
from safetensors import SafetensorError

from kvfold.cli.bench_decode import decode
from kvfold.cli.bench_kernels import kernels
from kvfold.cli.bench_serving import serving
from kvfold.cli.bench_soak import soak
from kvfold.cli.bench_step import step
from kvfold.cli.command_calibrate import calibrate
from kvfold.cli.command_check import check
from kvfold.cli.command_demo import demo
from kvfold.cli.command_eval import eval_
from kvfold.cli.command_fold import fold
from kvfold.cli.command_generate import generate
from kvfold.cli.command_inspect import inspect
from kvfold.cli.command_plan import plan
from kvfold.cli.command_push import push
from kvfold.cli.command_recipes import recipes
from kvfold.cli.command_selftest import selftest
from kvfold.cli.command_serve import serve
from kvfold.cli.command_tune import tune
from kvfold.cli.output import err, out
from kvfold.version import __version__

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown", add_completion=False
)
bench = typer.Typer(no_args_is_help=True, help="Benchmarks: speeds as ratios, measured in one run.")
app.add_typer(bench, name="bench")


def main() -> None:
    try:
        app()
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        err.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        raise SystemExit(1) from None


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """kvfold makes the KV cache of a language model 3.8 to 7 times smaller.

    Try: `kvfold recipes`, `kvfold plan Qwen3-8B --memory 80GiB`, `kvfold eval embedded -r fold4 -r fold2`.
    """
    if version:
        out.print(__version__)
        raise typer.Exit


# `kvfold --help` lists commands in this order
app.command()(recipes)
app.command()(plan)
app.command()(calibrate)
app.command()(tune)
app.command()(fold)
app.command()(inspect)
app.command()(push)
app.command("eval")(eval_)
app.command()(check)
app.command()(generate)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve)
app.command()(demo)
app.command()(selftest)
bench.command()(decode)
bench.command()(kernels)
bench.command()(step)
bench.command()(serving)
bench.command()(soak)
