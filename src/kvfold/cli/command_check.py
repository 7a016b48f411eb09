"""`kvfold check`: a recipe against what it may lose, before it is served."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

import kvfold
from kvfold.cli.inputs import calibrated_folder, carried_folder, check_files, load
from kvfold.cli.inputs import check as check_fits
from kvfold.cli.options import DEFAULT, ArtifactFolder, JsonFile, Model, recipe_option
from kvfold.cli.output import check_table, err, out, progress, write_json
from kvfold.evaluate.limits import MOST_TRIALS, Limits
from kvfold.files import claimed
from kvfold.geometry import Geometry
from kvfold.models import load_config
from kvfold.text import haystack_texts, tokenize

NOT_DECIDED = 3  # the exit code; 1 is that of errors, and 2 that of a wrong command line


def check(
    model: Model,
    recipe: Annotated[str, recipe_option("A recipe with options, as it will be served.")] = DEFAULT,
    artifact: ArtifactFolder = None,
    context: Annotated[
        int | None,
        typer.Option(
            help="Tokens of the contexts that will be served. Default: as many as the model takes, at most 32,768 on "
            "a GPU and 2,048 on a CPU.",
            min=512,
        ),
    ] = None,
    max_kl: Annotated[float, typer.Option(help="The mean KL divergence that is allowed, in nats.", min=0)] = Limits.kl,
    max_tail: Annotated[
        float, typer.Option(help="The KL that one token in a thousand may exceed, in nats.", min=0)
    ] = Limits.tail,
    max_loss: Annotated[
        float, typer.Option(help="The points of needles, and of tool calls, that may be lost.", min=0, max=100)
    ] = 100 * Limits.share,
    max_trials: Annotated[
        int,
        typer.Option(
            help="Trials at most, until the intervals decide. Each has 30 calls and 5 haystacks of needles per text.",
            min=1,
        ),
    ] = MOST_TRIALS,
    haystack: Annotated[
        list[Path] | None,
        typer.Option(
            "--haystack",
            help="A UTF-8 text file to measure on; repeatable. Default: Python's documentation and its source code.",
        ),
    ] = None,
    json_file: JsonFile = None,
    html: Annotated[Path | None, typer.Option(help="Write a self-contained HTML page to this file.")] = None,
) -> None:
    """Check in minutes whether a recipe may be served: KL, needles and tool calls against the 16-bit cache.

    The exit code is 1 if more is lost than allowed, and 3 if the trials do not decide it. The result is kept in the
    artifact: `kvfold inspect` and the engine's report at start show it, and `kvfold serve --require-check` wants it.

    Example: `kvfold check embedded`, or
    `kvfold check Qwen/Qwen3-8B -r fold2 --artifact fits --context 131072 --max-loss 5 --haystack novel.txt`
    """
    from kvfold.evaluate.check import check as run
    from kvfold.evaluate.check import default_context
    from kvfold.recipes import parse

    if html:
        from kvfold.evaluate.page import write_html  # before the long work: matplotlib may be missing

    parsed, words = parse(recipe), haystack_texts(haystack or ())
    check_files(json_file, html)
    there = artifact or carried_folder(model, [recipe])
    if there is None:  # otherwise the layouts of a recipe may be in the artifact
        check_fits(model, [parsed])
    geometry = Geometry.from_config(load_config(model))
    if context and geometry.max_context and context > geometry.max_context:
        raise ValueError(f"the model takes {geometry.max_context:,} tokens at most: give a --context up to that")
    if artifact and not Path(artifact).is_dir():
        raise ValueError(
            f"{artifact} is no folder on this machine, where the result could be kept: run "
            f"`kvfold pull {artifact} --out fits`, then give --artifact fits"
        )
    network, tokenizer = loaded = load(model)
    context = context or default_context(geometry, network.device)
    texts = {name: tokenize(text, tokenizer, None) for name, text in words.items()}
    long = {name: tokens for name, tokens in texts.items() if len(tokens) >= context}
    if not long:
        raise ValueError(f"no text has {context:,} tokens: name a longer one with --haystack FILE")
    folder = Path(there or calibrated_folder(model, parsed, lambda _: loaded))
    limits = Limits(max_kl, max_tail, max_loss / 100)
    with claimed(folder):
        fits = kvfold.Artifact.load(folder)
        with progress(f"Checking {parsed}") as advance:
            result, report = run(
                network,
                tokenizer,
                parsed,
                fits,
                context,
                long,
                limits,
                max_trials,
                advance,
                model,
                answers=html is not None,
            )
        fits.with_check(parsed, result).save(folder)
    in_terminal = write_json(json_file, list(result.rows(str(parsed))))
    if html:
        write_html(report, html, artifact, result)
    if not in_terminal:
        out.print(check_table(f"{model}: {parsed}", result))
        for name in texts.keys() - long.keys():
            out.print(f"{escape(name)} has fewer than {context:,} tokens, and was left out", highlight=False)
        for measure in result.measures:
            if measure.blind:
                out.print(f"{measure.name}: 16 bits find too little here to tell what is lost", highlight=False)
        out.print(f"Kept in {escape(str(folder))}", highlight=False, soft_wrap=True)
    allow = "allow more with --max-kl, --max-tail and --max-loss"
    if result.verdict == "failed":
        raise ValueError(f"{parsed} failed: {result.reasons}. Take a recipe with more bits, or {allow}")
    if result.verdict == "not decided":
        line = f"{parsed} is not decided: {result.reasons}. Read more with --max-trials {2 * max_trials}, or {allow}"
        err.print(escape(line), soft_wrap=True, highlight=False)
        raise typer.Exit(NOT_DECIDED)
