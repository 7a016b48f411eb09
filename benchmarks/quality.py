"""The quality panel: every recipe as published and as used here, on one model.

    kvfold calibrate MODEL --out fits --text calibration.txt $(python benchmarks/quality.py --flags)
    python benchmarks/quality.py MODEL --artifact fits --out results --text wiki.test.raw \\
        --context 4096 32768 --tokens 24576 98304 --needle 4096 16384 32768 --tool-calls 16384 \\
        --haystack novel.txt wiki.test.raw --tasks gsm8k --recipes bf16 saw-int4 gtq-k3v3
    python benchmarks/summary.py results

writes results/quality.csv, needle.csv, tool-calls.csv, tasks.csv and, with --layers, layers.csv. The last line prints
them as tables with intervals. Recipes run in the order given. All measurements of a recipe are made before those of the
next one, and rows are written as soon as they are measured. So a run that is cut short leaves whole recipes.
"""

import argparse
import platform
from collections.abc import Iterator
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
from kvfold.evaluate.layer_attention import diagnose
from kvfold.evaluate.logits import LONG as FAR
from kvfold.evaluate.logits import Scores, compare
from kvfold.evaluate.needle import DEPTHS, TRIALS, needle_suite
from kvfold.evaluate.tasks import check_tasks, lm_eval_tasks
from kvfold.evaluate.tool_calls import TRIALS as TOOL_TRIALS
from kvfold.evaluate.tool_calls import tool_calls
from kvfold.files import append_rows
from kvfold.fitted import Fitted
from kvfold.models import load_model
from kvfold.recipes import parse
from kvfold.text import haystack_texts, read_text, tokenize, with_openings

# As published: without centring, with an open block if the paper has windows.
PUBLISHED = [
    "int4:centre=false",
    "saw-int4:centre=false",
    "kmeans-int4:centre=false",
    "kmeans-saw-int4:centre=false",
    "hessian-int4:centre=false",
    "kivi-2",
    "kivi-4",
    "kitty-2",
    "quarot-int2:block=256,centre=false",
    "oscar-int2:centre=false",
    "oscar-int2:centre=false,group=WHOLE",
    *(f"tq-k{bits}v{bits}:centre=false" for bits in (2, 3, 4)),
    *(f"gtq-k{bits}v{bits}:centre=false,score=mean,widths=all" for bits in (2, 3, 4)),
    "gtq-k3v3:centre=false,score=mean,widths=all,per_head=true",
]
# Our defaults, and what an open block adds.
OURS = [
    "int8",
    "int4",
    "int4:block=64",
    "saw-int4",
    "saw-int4:block=64",
    "kmeans-int4",
    "kmeans-saw-int4",
    "hessian-int4",
    "kivi-2:centre=true",
    "kivi-4:centre=true",
    "kitty-2:centre=true",
    "quarot-int2:block=256",
    "oscar-int2",
    "oscar-int2:group=WHOLE",
    "oscar-int2:per_head=true",
    *(f"tq-k{key}v{value}" for key, value in ((2, 2), (3, 3), (4, 4))),
    *(f"tq-k{key}v{value}:block=64" for key, value in ((2, 2), (3, 2), (3, 3), (4, 3), (4, 4))),
    *(f"gtq-k{bits}v{bits}" for bits in (2, 3, 4)),
    *(f"gtq-k{bits}v{bits}:widths=all" for bits in (2, 3, 4)),
    *(f"{family}-k2v2:block=256" for family in ("tq", "gtq")),
    "gtq-k2v2:block=256,widths=all",
]
# OSCAR without one of its parts.
ABLATIONS = [
    f"oscar-int2:{without}" for without in ("eigen=false", "hadamard=false", "permute=false", "clip=false")
] + ["oscar-int2:block=0"]
# Long contexts and generation take minutes, so these are fewer: every method in few forms, and as published.
LONG = [
    "saw-int4:block=64",
    "oscar-int2:group=WHOLE",
    "gtq-k2v2:block=256",
    "gtq-k3v3",
    "kitty-2:centre=true",
    "kmeans-saw-int4",
    "int4:block=64",
    "int4",
    "saw-int4",
    "oscar-int2",
    "kivi-2:centre=true",
    "kivi-4:centre=true",
    "hessian-int4",
    "kmeans-int4",
    "int8",
    "quarot-int2:block=256",
    *(f"tq-k{bits}v{bits}" for bits in (2, 3, 4)),
    *(f"gtq-k{bits}v{bits}" for bits in (2, 4)),
    "tq-k2v2:block=256",
    *(name for name in PUBLISHED if "per_head" not in name),
]
FILES = ("quality", "layers", "needle", "tool-calls", "tasks")


def main() -> None:
    options = arguments()
    panel = {"all": [*PUBLISHED, *OURS, *ABLATIONS], "long": LONG}[options.panel]
    names = options.recipes or (panel if options.flags else ["bf16", *panel])
    if options.flags:
        print(*(f"-r {name.replace('WHOLE', str(options.head_dim))}" for name in names if name != "bf16"))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    if old := [file for file in options.out.glob("*.csv") if file.stem in FILES]:
        print(f"rows are added to {', '.join(map(str, old))}")
    run = Run(options, names)
    with Progress() as progress:
        for name in progress.track(run.caches, description="recipes"):
            for file, rows in run.measure(name):
                append_rows(options.out / f"{file}.csv", [{"recipe": name, **row, **run.common} for row in rows])


class Run:
    """What all recipes share: model, texts, caches."""

    def __init__(self, options: argparse.Namespace, names: list[str]) -> None:
        self.options = options
        check_tasks(options.tasks)
        self.model, self.tokenizer = load_model(options.model, options.dtype)
        self.artifact = Artifact.load(options.artifact)
        whole = str(self.artifact.metadata.model.key_dim)
        recipes = [parse(name.replace("WHOLE", whole)) for name in names]
        self.caches = {str(recipe): kvfold.cache(self.model, recipe, self.artifact) for recipe in recipes}
        self.reference = kvfold.cache(self.model, "bf16")
        self.contexts = dict(zip(options.context, options.tokens, strict=True)) if options.tokens else {}
        self.scored, self.haystacks = torch.empty(0, dtype=torch.int64), {}
        if needed := max([*self.contexts.values(), max(options.context) if options.layers else 0]):
            self.scored = tokenize(read_text(options.text, "evaluation"), self.tokenizer, needed)
        if options.needle or options.tool_calls:
            texts = haystack_texts(options.haystack)
            self.haystacks = {name: tokenize(text, self.tokenizer, None) for name, text in texts.items()}
        for read in (self.scored, *self.haystacks.values()):
            check_disjoint(read, self.artifact.tensors[TEXT])
        self.common = facts(options, self.model, self.artifact)

    def measure(self, name: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        """The rows of one recipe, by the file they belong to, as soon as they are measured."""
        options, make = self.options, self.caches[name].empty
        for context, tokens in self.contexts.items():
            yield "quality", [self.quality(name, context, tokens)]
        if options.layers:
            passage = with_openings(self.scored[: options.context[0]], options.context[0], self.tokenizer)
            rows = diagnose(self.model, passage, {name: self.caches[name]}, self.artifact.metadata.rope)[name]
            yield "layers", [{**asdict(row), "tokens": len(passage)} for row in rows]
        for text, tokens in self.haystacks.items():
            of = self.model, self.tokenizer, make, {text: tokens}
            for length in options.needle:
                trials = options.trials or TRIALS
                yield "needle", [asdict(row) for row in needle_suite(*of, [length], options.depths, trials)]
            for length in options.tool_calls:
                yield "tool-calls", [asdict(row) for row in tool_calls(*of, [length], options.trials or TOOL_TRIALS)]
        if options.tasks:
            scores = lm_eval_tasks(self.model, self.tokenizer, make, options.tasks)
            yield "tasks", [{"task": task, "score": score} for task, score in scores.items()]

    def quality(self, name: str, context: int, tokens: int) -> dict[str, Any]:
        """Perplexity and KL. The row of the 16-bit cache has the noise floor: KL of transformers' own cache."""
        own = name == str(self.reference.recipe)
        make = (lambda: DynamicCache(config=self.model.config)) if own else self.caches[name].empty
        passages = with_openings(self.scored[:tokens], context, self.tokenizer)
        expected, scores = compare(self.model, passages, context, self.reference.empty, {name: make})
        score, recipe = expected if own else scores[name], self.caches[name].recipe
        fitted = Fitted.of(recipe, self.reference.geometry, self.artifact if recipe.learns else None)
        return {
            "bits_per_element_2k": round(fitted.bits_per_element(2048), 4),
            "bits_per_element_128k": round(fitted.bits_per_element(131072), 4),
            **numbers(score, expected),
            **{f"{key}_beyond_16k": number for key, number in numbers(score.beyond(FAR), expected.beyond(FAR)).items()},
            "noise_floor": round(scores[name].kl, 7) if own else None,
            "context": context,
            "text": self.options.text.name,
        }


def numbers(score: Scores | None, expected: Scores | None) -> dict[str, Any]:
    """What is stated of some tokens. None: there are none."""
    if score is None or expected is None:
        return dict.fromkeys(("perplexity", "increase_percent", "kl", "kl_tail", "top1", "tokens"))
    return {
        "perplexity": round(score.perplexity, 4),
        "increase_percent": round(100 * (score.perplexity / expected.perplexity - 1), 3),
        "kl": round(score.kl, 6),
        "kl_tail": round(score.kl_tail, 5),
        "top1": round(score.top1, 5),
        "tokens": score.tokens,
    }


def facts(options: argparse.Namespace, model: Any, artifact: Artifact) -> dict[str, Any]:
    """The columns of every row that say where it comes from."""
    cuda, fitted_on = model.device.type == "cuda", artifact.metadata.calibration
    return {
        "model": options.name or options.model,
        "calibration": f"{options.calibrated_on} {fitted_on.tokens} tokens at {fitted_on.context}",
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
    parser.add_argument("--text", type=Path, default=Path("wiki.test.raw"), help="what is scored")
    parser.add_argument("--context", type=int, nargs="+", default=[2048], help="tokens of a passage")
    parser.add_argument("--tokens", type=int, nargs="+", default=[], help="tokens to score, per context; default: none")
    parser.add_argument("--layers", action="store_true", help="diagnose the attention of every layer")
    parser.add_argument("--needle", type=int, nargs="*", default=[], help="lengths of the needle suite")
    parser.add_argument("--tool-calls", type=int, nargs="*", default=[], help="lengths of contexts before tool calls")
    parser.add_argument(
        "--haystack",
        type=Path,
        nargs="*",
        default=[],
        help="texts of both; default: documentation and source of Python",
    )
    parser.add_argument("--depths", type=float, nargs="*", default=DEPTHS)
    parser.add_argument(
        "--trials", type=int, help=f"haystacks per depth of needles ({TRIALS}) and of tool calls ({TOOL_TRIALS})"
    )
    parser.add_argument("--tasks", nargs="*", default=[], help="tasks of lm-eval, or YAML files that describe a task")
    parser.add_argument("--panel", choices=("all", "long"), default="all")
    parser.add_argument(
        "--recipes",
        nargs="*",
        help="these in this order, instead of bf16 and a panel; WHOLE stands for the head dimension",
    )
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument(
        "--flags", action="store_true", help="print the recipes as flags of `kvfold calibrate`, and end"
    )
    parser.add_argument("--head-dim", type=int, default=64, help="of the model, for --flags")
    options = parser.parse_args()
    if len(options.tokens) == 1:
        options.tokens *= len(options.context)
    if options.tokens and len(options.tokens) != len(options.context):
        parser.error("--tokens takes one number, or one for each --context")
    return options


if __name__ == "__main__":
    main()
