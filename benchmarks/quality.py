"""The quality panel: every recipe as published and as used here, on one model.

    kvfold calibrate MODEL --out fits --text calibration.txt $(python benchmarks/quality.py --flags)
    python benchmarks/quality.py MODEL --artifact fits --text wiki.test.raw --context 2048 --tokens 8192 --out results

writes results/quality.csv. --layers, --needle LENGTH … and --gsm8k FILE write layers.csv, needle.csv and gsm8k.csv.
There is one row per measurement. It is written as soon as it is measured.
"""

import argparse
import platform
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.progress import Progress
from transformers import DynamicCache

import kvfold
from kvfold.artifact import TEXT, Artifact
from kvfold.calibration.text_overlap import check_disjoint
from kvfold.engines.transformers import PackedCache
from kvfold.evaluate.gsm8k import gsm8k, read_problems
from kvfold.evaluate.layer_attention import diagnose
from kvfold.evaluate.logits import compare
from kvfold.evaluate.needle import needle_suite
from kvfold.files import append_rows
from kvfold.fitted import Fitted
from kvfold.models import load_model
from kvfold.recipes import parse
from kvfold.text import tokenize, with_openings

# As published: without centring, with windows if the paper has them.
PUBLISHED = [
    "int4:centre=false",
    "saw-int4:centre=false",
    "kmeans-int4:centre=false",
    "kmeans-saw-int4:centre=false",
    "hessian-int4:centre=false",
    "kivi-2",
    "kivi-4",
    "kitty-2",
    "quarot-int2:sink=64,recent=256,centre=false",
    "oscar-int2:centre=false",
    "oscar-int2:centre=false,group=WHOLE",
    *(f"tq-k{bits}v{bits}:centre=false" for bits in (2, 3, 4)),
    *(f"gtq-k{bits}v{bits}:sink=0,centre=false,score=mean,widths=all" for bits in (2, 3, 4)),
    "gtq-k3v3:sink=0,centre=false,score=mean,widths=all,per_head=true",
]
# Our defaults, and what windows add.
OURS = [
    "int8",
    "int4",
    "int4:sink=4",
    "saw-int4",
    "saw-int4:sink=4",
    "kmeans-int4",
    "kmeans-saw-int4",
    "hessian-int4",
    "kivi-2:centre=true",
    "kivi-4:centre=true",
    "kitty-2:centre=true",
    "quarot-int2:sink=64,recent=256",
    "oscar-int2",
    "oscar-int2:group=WHOLE",
    "oscar-int2:per_head=true",
    *(f"tq-k{key}v{value}" for key, value in ((2, 2), (3, 3), (4, 4))),
    *(f"tq-k{key}v{value}:sink=4" for key, value in ((2, 2), (3, 2), (3, 3), (4, 3), (4, 4))),
    *(f"gtq-k{bits}v{bits}" for bits in (2, 3, 4)),
    *(f"gtq-k{bits}v{bits}:widths=all" for bits in (2, 3, 4)),
    *(f"{family}-k2v2:sink=64,recent=256" for family in ("tq", "gtq")),
    "gtq-k2v2:sink=64,recent=256,widths=all",
]
# OSCAR without one of its parts.
ABLATIONS = [
    f"oscar-int2:{without}" for without in ("eigen=false", "hadamard=false", "permute=false", "clip=false")
] + ["oscar-int2:sink=0,recent=0"]
# Long contexts and generation take minutes, so these are fewer: every method in few forms, and as published.
LONG = [
    "saw-int4:sink=4",
    "oscar-int2:group=WHOLE",
    "gtq-k2v2:sink=64,recent=256",
    "gtq-k3v3",
    "kitty-2:centre=true",
    "kmeans-saw-int4",
    "int4:sink=4",
    "int4",
    "saw-int4",
    "oscar-int2",
    "kivi-2:centre=true",
    "kivi-4:centre=true",
    "hessian-int4",
    "kmeans-int4",
    "int8",
    "quarot-int2:sink=64,recent=256",
    *(f"tq-k{bits}v{bits}" for bits in (2, 3, 4)),
    *(f"gtq-k{bits}v{bits}" for bits in (2, 4)),
    "tq-k2v2:sink=64,recent=256",
    *(name for name in PUBLISHED if "per_head" not in name),
]
NEW_TOKENS = 320  # the most tokens of an answer
AT_ONCE = 8  # recipes per run of the 16-bit cache


def main() -> None:
    options = arguments()
    names = options.recipes or {"all": [*PUBLISHED, *OURS, *ABLATIONS], "long": LONG}[options.panel]
    if options.flags:
        print(*(f"-r {name.replace('WHOLE', str(options.head_dim))}" for name in names))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    if old := [file for file in options.out.glob("*.csv") if file.stem in ("quality", "layers", "needle", "gsm8k")]:
        print(f"rows are added to {', '.join(map(str, old))}")
    problems = read_problems(options.gsm8k, options.problems) if options.gsm8k else None
    model, tokenizer = load_model(options.model, options.dtype)
    artifact = Artifact.load(options.artifact)
    panel = [parse(name.replace("WHOLE", str(artifact.metadata.model.key_dim))) for name in names]
    needed = max([options.tokens, options.context if options.layers else 0, *options.needle])
    tokens = tokenize(options.text.read_text(encoding="utf-8"), tokenizer, needed)
    check_disjoint(tokens, artifact.tensors[TEXT])
    reference = kvfold.cache(model, "bf16")
    caches = {"bf16": reference, **{str(recipe): kvfold.cache(model, recipe, artifact) for recipe in panel}}
    common = facts(options, model, artifact)
    with Progress() as progress:
        if options.tokens:
            scored = with_openings(tokens[: options.tokens], options.context, tokenizer)
            quality(model, scored, options.context, caches, artifact, options.out, common, progress)
        if options.layers:
            scored = with_openings(tokens[: options.context], options.context, tokenizer)
            layers(model, scored, caches, artifact, options.out, common)
        for name in progress.track(caches, description="needles, GSM8K") if options.needle or problems else ():
            if options.needle:
                found = needle_suite(
                    model, tokenizer, caches[name].empty, tokens, options.needle, options.depths, options.trials
                )
                append_rows(options.out / "needle.csv", [{"recipe": name, **asdict(row), **common} for row in found])
            if problems:
                score = gsm8k(model, tokenizer, caches[name].empty, problems, options.problems, NEW_TOKENS)
                row = {"recipe": name, "problems": score.problems, "exact_match": score.exact_match, **common}
                append_rows(options.out / "gsm8k.csv", [row])


def quality(
    model: Any,
    tokens: torch.Tensor,
    context: int,
    caches: dict[str, PackedCache],
    artifact: Artifact,
    out: Path,
    common: dict[str, Any],
    progress: Progress,
) -> None:
    names = [name for name in caches if name != "bf16"]
    task = progress.add_task("perplexity", total=len(names))
    for start in range(0, len(names), AT_ONCE):
        some = names[start : start + AT_ONCE]
        makes: dict[str, Any] = {name: caches[name].empty for name in some}
        if not start:
            makes["transformers"] = lambda: DynamicCache(config=model.config)
        own, scores = compare(model, tokens, context, caches["bf16"].empty, makes)
        for name in ["bf16", *makes] if not start else some:
            score = own if name == "bf16" else scores[name]
            bits: dict[str, Any] = {"bits_per_element_2k": 16.0, "bits_per_element_128k": 16.0}
            if name in caches:
                recipe = caches[name].recipe
                fitted = Fitted.of(recipe, caches[name].geometry, artifact if recipe.learns else None)
                for at, length in (("2k", 2048), ("128k", 131072)):
                    bits[f"bits_per_element_{at}"] = round(fitted.bits_per_element(length), 4)
            row = {
                "recipe": name,
                **bits,
                "perplexity": round(score.perplexity, 4),
                "increase_percent": round(100 * (score.perplexity / own.perplexity - 1), 3),
                "kl": round(score.kl, 6),
                "top1": round(score.top1, 5),
                "tokens": score.tokens,
                "context": context,
                **common,
            }
            append_rows(out / "quality.csv", [row])
        progress.advance(task, len(some))


def layers(
    model: Any,
    tokens: torch.Tensor,
    caches: dict[str, PackedCache],
    artifact: Artifact,
    out: Path,
    common: dict[str, Any],
) -> None:
    for name, rows in diagnose(model, tokens, caches, artifact.metadata.rope).items():
        append_rows(
            out / "layers.csv", [{"recipe": name, **asdict(row), "tokens": len(tokens), **common} for row in rows]
        )


def facts(options: argparse.Namespace, model: Any, artifact: Artifact) -> dict[str, Any]:
    """The columns of every row that say where it comes from."""
    cuda = model.device.type == "cuda"
    return {
        "model": options.name or options.model,
        "text": options.text.name,
        "calibration": f"{options.calibrated_on} {artifact.metadata.calibration.tokens} tokens",
        "device": torch.cuda.get_device_name()
        if cuda
        else f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)",
        "dtype": str(model.dtype).removeprefix("torch."),
        **{module.__name__: module.__version__ for module in (torch, transformers, kvfold)},
        "date": datetime.now(UTC).date().isoformat(),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="embedded")
    parser.add_argument("--name", help="what the rows call the model")
    parser.add_argument("--dtype")
    parser.add_argument(
        "--artifact", type=Path, default=Path("fits"), help="a folder of `kvfold calibrate`, with all of --flags"
    )
    parser.add_argument("--calibrated-on", default="", help="what the rows call its text")
    parser.add_argument(
        "--text", type=Path, default=Path("wiki.test.raw"), help="what is scored and what needles hide in"
    )
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=0, help="tokens to score; 0: none")
    parser.add_argument("--layers", action="store_true", help="diagnose the attention of every layer")
    parser.add_argument("--needle", type=int, nargs="*", default=[], help="lengths of the needle suite")
    parser.add_argument("--depths", type=float, nargs="*", default=[0.0, 0.5, 1.0])
    parser.add_argument("--trials", type=int, default=1)
    parser.add_argument("--gsm8k", type=Path, help="test.jsonl")
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--panel", choices=("all", "long"), default="all")
    parser.add_argument("--recipes", nargs="*", help="these instead of a panel; WHOLE stands for the head dimension")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument(
        "--flags", action="store_true", help="print the recipes as flags of `kvfold calibrate`, and end"
    )
    parser.add_argument("--head-dim", type=int, default=64, help="of the model, for --flags")
    return parser.parse_args()


if __name__ == "__main__":
    main()
