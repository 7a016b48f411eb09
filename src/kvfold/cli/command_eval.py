"""`kvfold eval`: recipes beside the 16-bit cache."""

from pathlib import Path
from typing import Annotated

import typer

from kvfold.cli.inputs import check, choose_recipes, find_artifact, load, needed_artifact
from kvfold.cli.options import ArtifactFolder, CsvFile, JsonFile, Model, TextFile, recipe_option
from kvfold.cli.output import out, progress, report_tables, write_csv, write_json
from kvfold.cli.unfinished import hash_of, parts_in_cache, unfinished
from kvfold.text import DOCUMENTATION, haystack_texts, read_text, tokenize


def eval_(
    model: Model,
    recipe: Annotated[
        list[str] | None, recipe_option("A recipe with options; repeatable. Default: those of the artifact.")
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens of a passage; each begins with an empty cache.", min=2)] = 2048,
    tokens: Annotated[int, typer.Option(help="Tokens to score.", min=2)] = 8192,
    text: TextFile = None,
    artifact: ArtifactFolder = None,
    json_file: JsonFile = None,
    csv_file: CsvFile = None,
    html: Annotated[Path | None, typer.Option(help="Write a self-contained HTML page to this file.")] = None,
    layers: Annotated[
        bool, typer.Option("--layers", help="Also measure what quantized keys do to the attention of every layer.")
    ] = False,
    needle: Annotated[
        list[int] | None,
        typer.Option("--needle", help="Tokens of the haystacks of the needle suite, e.g. 4096; repeatable.", min=512),
    ] = None,
    tool_calls: Annotated[
        list[int] | None,
        typer.Option(
            "--tool-calls", help="Tokens of context before tool calls in JSON, e.g. 4096; repeatable.", min=512
        ),
    ] = None,
    haystack: Annotated[
        list[Path] | None,
        typer.Option(
            "--haystack",
            help="A UTF-8 text file for haystacks; repeatable. Default: Python's documentation and its source code.",
        ),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(help="Haystacks per text and length: of tool calls (5), and of each needle depth (3).", min=1),
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option("--tasks", help="A task of lm-eval whose data is on this machine, or its YAML file; repeatable."),
    ] = None,
) -> None:
    """Compare recipes with the 16-bit cache of the same model: perplexity, KL, top-1, copying, needles, bits.

    A run that was interrupted goes on when the same command is run again.

    Example: `kvfold eval embedded -r int4 -r saw-int4:block=64 --tokens 4096 --html report.html`, or
    `kvfold eval Qwen/Qwen3-8B -r oscar-int2 --artifact fits --needle 4096 --needle 32768 --tasks gsm8k`, or
    `kvfold eval Qwen/Qwen3-8B -r saw-int4 --tool-calls 16384 --haystack novel.txt --haystack code.txt --trials 10`
    """
    from kvfold.evaluate.report import Report, rows
    from kvfold.evaluate.run import Haystacks, evaluate
    from kvfold.recipes import method_source

    if html:
        from kvfold.evaluate.page import write_html  # before the long work: matplotlib may be missing

    means, words = find_artifact(artifact, model, recipe), read_text(text, "evaluation")
    hay = haystack_texts(haystack or ()) if needle or tool_calls else {}
    panel = choose_recipes(recipe, means)
    check(model, panel, json_file, csv_file, html, artifact=means)
    network, tokenizer = load(model)
    ids = tokenize(words, tokenizer, tokens)
    texts = {name: tokenize(part, tokenizer, None) for name, part in hay.items()}
    means = needed_artifact(means, model, (network, tokenizer), panel)
    haystacks = Haystacks(texts, needle or (), tool_calls or (), trials)
    methods = [(str(each), method_source(each)) for each in panel]
    learned = (means.tensors, means.metadata.rope) if means else None
    defined = [Path(task).read_text() if Path(task).is_file() else task for task in tasks or ()]
    parts = parts_in_cache(hash_of(model, network, methods, learned, ids, context, haystacks, defined))

    def save(report: Report) -> None:
        write_csv(csv_file, rows(report))
        if json_file != "-":
            write_json(json_file, rows(report))

    with unfinished(parts.file):
        with progress(f"Evaluating {len(panel)} recipes") as advance:
            report = evaluate(
                network,
                tokenizer,
                panel,
                ids,
                context,
                artifact=means,
                names=(model, text.name if text else DOCUMENTATION),
                haystacks=haystacks,
                tasks=tasks or (),
                layers=layers,
                answers=html is not None,
                advance=advance,
                parts=parts,
                finished=save,
            )
        if html:
            write_html(report, html, artifact)
    if not (json_file == "-" and write_json(json_file, rows(report))):
        out.print(report_tables(report))
