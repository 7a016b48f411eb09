"""`kvfold tune`: an artifact whose layers have bits where the model needs them."""

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

import kvfold
from kvfold.cli.inputs import bytes_in, check, load
from kvfold.cli.options import JsonFile, Model, TextFile
from kvfold.cli.output import out, progress, table, write_json
from kvfold.cli.unfinished import hash_of, unfinished
from kvfold.files import claimed
from kvfold.geometry import Geometry
from kvfold.text import read_text, tokenize, with_openings

CONTEXT = 131072
PASSAGE = 1024  # tokens, at most: as many for each test
TOKENS = {"cpu": 512, "cuda": 8192}  # a small model takes minutes on a CPU, one of 1.5B parameters one on a GPU


def tune(
    model: Model,
    folder: Annotated[Path, typer.Option("--out", help="The folder to write.")],
    bits: Annotated[float | None, typer.Option(help="The budget: bits per cached number, open block included.")] = None,
    memory: Annotated[str | None, typer.Option(help="Or the memory of all requests together, e.g. `20GiB`.")] = None,
    quality: Annotated[
        float | None, typer.Option(help="Or the KL per token that may be spent, in as few bits as possible.", min=0)
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens of a request, for which bytes are counted.", min=1)] = CONTEXT,
    requests: Annotated[int, typer.Option(help="Requests that share the memory.", min=1)] = 1,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens to measure on; default: 512 on a CPU, 8192 on a GPU.", min=64)
    ] = None,
    text: TextFile = None,
    artifact: Annotated[
        str | None, typer.Option(help="An artifact with the fits of fold2, fold3 and fold4: a folder, or its Hub id.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Split a budget over layers, keys and values, for the recipe `fold`.

    Measures what each width costs in each layer: the KL of predictions on text and on repeated random tokens. Then
    chooses the widths that cost least within the budget. Without an artifact, the model is calibrated first. A run that
    was interrupted goes on when the same command is run again.

    The small model takes 5 to 15 minutes on a CPU, one of 1.5B parameters about one on an H200. Fewer --tokens take
    less.

    Example: `kvfold tune embedded --bits 2.5 --out tuned`, then `kvfold serve embedded -r fold --artifact tuned`
    """
    from kvfold.artifact.artifact import check_place
    from kvfold.calibration.automatic import tokens_on, usual_context
    from kvfold.kept_parts import Parts
    from kvfold.recipes import TUNED, method_source, parse
    from kvfold.tune.choices import EQUAL, with_choices
    from kvfold.tune.curves import passages
    from kvfold.tune.tuner import Tuner

    if sum(budget is not None for budget in (bits, memory, quality)) != 1:
        raise ValueError("say what may be spent, with one of --bits, --memory and --quality")
    check_place(folder)
    if artifact and artifact != str(folder) and (folder / "kvfold.json").exists():
        raise FileExistsError(f"{folder} holds another artifact than {artifact}: write to another folder")
    equal, words = [parse(name) for name in EQUAL], read_text(text, "calibration")
    fits = kvfold.Artifact.load(artifact) if artifact else None
    geometry = check(model, equal, json_file, artifact=fits)
    budget = 0 if quality is not None else _budget(geometry, bits, memory, context, requests)
    # what calibration keeps is deleted only if it was made or read here
    checkpoint, measured = folder / "unfinished.safetensors", folder / "unfinished.jsonl"
    with claimed(folder), unfinished(*([] if fits else [checkpoint]), measured):
        there = kvfold.Artifact.load(folder) if (folder / "kvfold.json").exists() else None
        network, tokenizer = load(model)
        tokens = tokens or TOKENS.get(network.device.type, TOKENS["cuda"])
        length = min(PASSAGE, tokens // 2)
        read = fits.metadata.calibration.tokens if fits else tokens_on(network.device.type)  # the rest is measured on
        ids = tokenize(words, tokenizer, read + tokens // (2 * length) * length)
        if fits is None:
            most = usual_context(geometry, network.device.type)
            with progress("Calibrating") as advance:
                opened = with_openings(ids[:read], most, tokenizer)
                fits = kvfold.calibrate(
                    network, opened, most, equal, into=there, checkpoint=checkpoint, progress=advance
                )
        fits.metadata.model.check(network)
        pairs = passages(ids[read:], length, tokenizer)
        parts = Parts.load(measured, hash_of(model, network, method_source(TUNED), fits.tensors, pairs))
        tuner = Tuner(network, fits, pairs, context, parts)
        with progress(f"Measuring {len(geometry.packed)} layers") as advance:
            curves = tuner.curves(lambda share: advance(0.88 * share))
            if quality is not None:
                chosen = tuner.cheapest(curves, quality, lambda share: advance(0.05 * share))
            else:
                chosen = tuner.allocate(curves, budget)
            named = [(name, (choice,) * len(geometry.packed)) for name, choice in EQUAL.items()]
            named += [(TUNED.name, tuner.allocate(curves, each)) for each in tuner.budgets()[::4]]
            *points, best = tuner.measure([*named, (TUNED.name, chosen)], lambda share: advance(0.07 * share))
        rows = [{**point.row(), "chosen": point is best} for point in (*points, best)]
        with_choices(fits, geometry, chosen, ids[read:]).save(folder)
        in_terminal = write_json(json_file, rows)
    if in_terminal:
        return
    shown = [
        (p.recipe, f"{p.bits:.3g}", f"{p.sequence_bytes / context:,.0f}", f"{p.kl:.4f}", f"{p.copy_kl:.4f}")
        for p in (*points[: len(EQUAL)], best)
    ]
    title = f"{model}, {len(ids) - read:,} tokens of text"
    out.print(table(title, ("recipe", "bits", "bytes per token", "KL", "copying: KL"), shown))
    out.print("Bits and bytes include the open block. For KL it was at most a quarter of a passage.", highlight=False)
    out.print(f"Wrote {escape(str(folder))}. Serve it:", soft_wrap=True, highlight=False)
    command = shlex.join(["kvfold", "serve", model, "--recipe", TUNED.name, "--artifact", str(folder)])
    out.print(escape(command), soft_wrap=True, highlight=False)


def _budget(geometry: Geometry, bits: float | None, memory: str | None, context: int, requests: int) -> int:
    """Bytes that a sequence of `context` tokens may take in packed layers."""
    from kvfold.tune.choices import sizes

    numbers = geometry.elements_per_token * context
    each = sizes(geometry, context)
    least, most = len(geometry.packed) * min(each), len(geometry.packed) * max(each)
    if memory is not None:
        budget, asked = bytes_in(memory) // requests, f"--memory {memory}"
        span = f"{requests * least / 2**30:.3g} to {requests * most / 2**30:.3g} GiB"
    else:
        assert bits is not None
        budget, asked = round(bits * numbers / 8), f"--bits {bits:g}"
        span = f"{8 * least / numbers:.3g} to {8 * most / numbers:.3g} bits"
    if budget < least:
        raise ValueError(f"{asked} is too little: {requests} × {context:,} tokens take {span}")
    return budget
