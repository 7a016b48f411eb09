"""The tables of the documents that come from rows in `results/` or from the code. `make documents` writes them.

    python benchmarks/documents.py            # write
    python benchmarks/documents.py --check    # say which are out of date; exit code 1 if some are

A table follows `<!-- table: NAME -->` in its document. All that follows `<!-- rest: NAME -->` is written too.
Of what was measured more than once, the last row counts. Ratios of servers are those of two last rows with the same
engine and load.
"""

import argparse
import csv
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path

import typer

from kvfold.cli import app
from kvfold.evaluate.intervals import by_haystack, difference, interval
from kvfold.fitted import Fitted
from kvfold.geometry import Geometry
from kvfold.recipe import Recipe
from kvfold.recipes import RECIPES

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
QWEN = "qwen2.5-coder-1.5b"
SMALL = "smollm2-135m"
OURS = ("fold4", "fold3", "fold2")
OTHERS = ("saw-int4", "oscar-int2:group=128", *(f"gtq-k{bits}v{bits}:sink=64,recent=256" for bits in (2, 3, 4)))
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n)(\n(\|.*\n)+)?")
REST = re.compile(r"(<!-- rest: ([\w-]+) -->\n).*", re.DOTALL)
NOT_MEASURED = ""
Row = dict[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a table is out of date")
    check = parser.parse_args().check
    old = [file for file in documents() if (text := file.read_text()) != with_tables(text)]
    for file in old:
        print(f"{file.relative_to(ROOT)}: {'out of date' if check else 'written'}")
        if not check:
            file.write_text(with_tables(file.read_text()))
    if check and old:
        sys.exit("run `make documents`")


def documents() -> list[Path]:
    return [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def with_tables(text: str) -> str:
    """A document with every marked table made anew."""
    for marked in (MARKED, REST):
        text = marked.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n", text)
    return text


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (columns, *rows)]
    return "\n".join([lines[0], "|---" * len(columns) + "|", *lines[1:]])


@cache
def read(name: str) -> tuple[Row, ...]:
    with (RESULTS / name).open(newline="") as lines:
        return tuple(csv.DictReader(lines))


def last(name: str, key: Callable[[Row], object] = lambda row: row["recipe"], **wanted: str) -> dict:
    """The last row of each key, of those that have the wanted values."""
    return {key(row): row for row in read(name) if wanted.items() <= row.items()}


def code(name: str) -> str:
    return f"`{name}`"


# Quality


def change(row: Row) -> str:
    """Of perplexity, in percent of that of 16 bits; the number itself where the model is broken."""
    percent = float(row["increase_percent"])
    return f"{float(row['perplexity']):,.0f}" if percent > 1000 else f"{percent:+.1f} %"


@cache
def needles(folder: str, length: str) -> dict[str, tuple[str, str]]:
    """Of each recipe, the share of needles found with its interval, and the difference to 16 bits."""
    found: dict[str, dict] = {}
    for recipe in dict.fromkeys(row["recipe"] for row in read(f"{folder}/needle.csv")):
        scores = by_haystack(
            ((row["text"], row["depth"], row["trial"]), float(row["score"]))
            for row in read(f"{folder}/needle.csv")
            if (row["recipe"], row["length"]) == (recipe, length)
        )
        if scores:
            found[recipe] = scores
    texts = {}
    for recipe, scores in found.items():
        mean = interval(scores)
        share = f"{100 * mean.mean:.1f} % ({100 * mean.low:.0f} to {100 * mean.high:.0f})"
        less = difference(scores, found["bf16"]) if scores.keys() == found["bf16"].keys() else None
        points = f"{100 * less.mean:+.1f} ({100 * less.low:+.1f} to {100 * less.high:+.1f})" if less else NOT_MEASURED
        texts[recipe] = (share, "" if recipe == "bf16" else points)
    return texts


def gsm8k(file: str) -> dict[str, str]:
    return {row["recipe"]: f"{100 * float(row['exact_match']):.1f} %" for row in read(file)}


def quality_of_qwen(*shown: str) -> str:
    """Of these recipes, or of all that were measured."""
    near, far = (last(f"{QWEN}/quality.csv", context=context) for context in ("4096", "32768"))
    found, solved = needles(QWEN, "32000"), gsm8k(f"{QWEN}/gsm8k.csv")
    rows = []
    for recipe, row in sorted(near.items(), key=lambda each: -float(each[1]["bits_per_element_128k"])):
        if shown and recipe not in shown:
            continue
        rows.append(
            [
                code(recipe),
                f"{float(row['bits_per_element_128k']):.2f}",
                row["perplexity"] if recipe == "bf16" else change(row),
                f"{float(row['kl']):.4f}",
                f"{float(row['kl_tail']):.3g}",
                f"{float(far[recipe]['kl_beyond_16k']):.4f}" if recipe in far else NOT_MEASURED,
                *found.get(recipe, (NOT_MEASURED, NOT_MEASURED)),
                solved.get(recipe, NOT_MEASURED),
            ]
        )
    columns = ["recipe", "bits", "perplexity", "KL", "KL 99.9 %", "KL beyond 16k", "needles at 32k", "against 16 bits"]
    return table([*columns, "GSM8K"], rows)


def quality_of_the_small_model() -> str:
    near, found = last(f"{SMALL}/quality.csv", context="2048"), needles(SMALL, "4096")
    rows = [
        [
            code(recipe),
            f"{float(row['bits_per_element_128k']):.2f}",
            row["perplexity"] if recipe == "bf16" else change(row),
            f"{float(row['kl']):.4f}",
            *found[recipe],
        ]
        for recipe, row in near.items()
        if recipe in found
    ]
    return table(["recipe", "bits", "perplexity", "KL", "needles at 4k", "against 16 bits"], rows)


def published() -> str:
    """4-bit caches with and without centring, on keys with a large mean."""
    names = {
        "plain integers": "int4",
        "SAW-INT4": "saw-int4",
        "TurboQuant, 4 bits": "tq-k4v4",
        "SAW-INT4's Hessian rotation": "hessian-int4",
    }
    rows = last(f"quality-{QWEN}.csv", calibration="wiki.utf8 8192 tokens at 2048")  # the run of both columns
    solved = gsm8k(f"gsm8k-{QWEN}.csv")
    cells = []
    for name, recipe in names.items():
        before = f"{recipe}:centre=false"
        cells.append([name, code(recipe), change(rows[before]), solved[before], change(rows[recipe]), solved[recipe]])
    ours, ours_solved = last(f"{QWEN}/quality.csv", context="4096"), gsm8k(f"{QWEN}/gsm8k.csv")
    cells.append(["**kvfold**", "`fold4`", "", "", change(ours["fold4"]), ours_solved["fold4"]])
    columns = ["4-bit cache", "recipe", "as published: perplexity", "GSM8K", "centred: perplexity", "GSM8K"]
    return table(columns, cells)


def which_recipe() -> str:
    advice = {
        "fold4": ("safe", "you begin: it loses least of the three"),
        "fold3": ("balanced", "memory is what limits your users"),
        "fold2": ("smallest", "contexts are long, and `kvfold check` passes on your model"),
    }
    near, found, speeds = last(f"{QWEN}/quality.csv", context="4096"), needles(QWEN, "32000"), decode_kernels()
    shape = Geometry.uniform("any", layers=1, q_heads=1, kv_heads=1, head_dim=128)
    rows = []
    for name, (title, when) in advice.items():
        bits = Fitted(RECIPES[name], shape).bits_per_element(131072)
        speed = speeds.get((name, "32", "8192"))
        rows.append(
            [
                title,
                code(name),
                f"{bits:.1f}",
                f"{16 / bits:.1f} times",
                f"{float(near[name]['kl']):.4f}",
                found[name][0].partition(" (")[0],
                f"{speed:.1f} times" if speed else NOT_MEASURED,
                when,
            ]
        )
    # what is measured is of 0.3, whose recipes of these names had windows and other widths
    measured = ["KL in 0.3", "needles at 32k in 0.3", "decode kernel in 0.3, 32 × 8k"]
    return table(["", "recipe", "bits per number", "smaller by", *measured, "take it if"], rows)


# Speed


def decode_kernels() -> dict[tuple[str, str, str], float]:
    """By recipe, batch and context: the speed over the fastest 16-bit attention, with the heads of Qwen3-8B."""
    shape = {"op": "decode", "page": "64", "head_dim": "128", "q_heads": "32", "kv_heads": "8"}
    rows = last("kernels-h200.csv", lambda row: (row["recipe"], row["batch"], row["context"]), **shape)
    return {key: float(row["speedup"]) for key, row in rows.items()}


KERNEL_ROWS = {  # as rows name them: they are from before 0.4, when recipes had windows
    **{f"`{name}` with its windows": name for name in OURS},
    **{f"`{name}`, no windows": f"{name}:sink=0,recent=0" for name in OURS},
    "`saw-int4`": "saw-int4",
    "`oscar-int2`, group 128, no windows": "oscar-int2:sink=0,recent=0,group=128",
    "`gtq-k3v3`, no windows": "gtq-k3v3:sink=0",
}
KERNEL_CASES = {
    "32 × 8k": ("32", "8192"),
    "32 × 16k": ("32", "16384"),
    "1 × 128k": ("1", "131072"),
    "1 × 32k": ("1", "32768"),
}


def kernels() -> str:
    speeds = decode_kernels()
    rows = []
    for name, recipe in KERNEL_ROWS.items():
        cells = [speeds.get((recipe, *case)) for case in KERNEL_CASES.values()]
        rows.append([name, *(f"{cell:.2f}×" if cell else NOT_MEASURED for cell in cells)])
    return table(["decode", *KERNEL_CASES], rows)


PROMPT_CASES = {  # op, sequences, tokens of a sequence, new ones of these, and what it is compared with
    "first 8k, cuDNN": ("extend", "1", "8192", "8192", "cuDNN"),
    "first 8k, FA3": ("extend", "1", "8192", "8192", "FlashAttention 3"),
    "next 8k, cuDNN": ("extend", "1", "16384", "8192", "cuDNN"),
    "next 8k, FA3": ("extend", "1", "16384", "8192", "FlashAttention 3"),
    "512 after 32k, cuDNN": ("extend", "1", "33280", "512", "cuDNN"),
    "512 after 32k, FA3": ("extend", "1", "33280", "512", "FlashAttention 3"),
    "store 8k": ("store", "1", "8192", "8192", "int4:centre=false"),
    "store 32 × 1": ("store", "32", "1", "1", "int4:centre=false"),
}


def prompts() -> str:
    """Reading prompts, over 16-bit attention, and storing tokens, in µs; with the heads of Qwen3-8B."""
    shape = {"page": "64", "head_dim": "128", "q_heads": "32", "kv_heads": "8"}
    names = ("recipe", "op", "batch", "context", "new", "baseline")
    rows = last("kernels-h200.csv", lambda row: tuple(row[name] for name in names), **shape)
    lines = []
    for name, recipe in {**KERNEL_ROWS, "`oscar-int2`, group 128, with its windows": "oscar-int2:group=128"}.items():
        found = [rows.get((recipe, *case)) for case in PROMPT_CASES.values()]
        cells = [prompt_cell(row) if row else NOT_MEASURED for row in found]
        if any(cells):
            lines.append([name, *cells])
    return table(["", *PROMPT_CASES], lines)


def prompt_cell(row: Row) -> str:
    return f"{float(row['speedup']):.2f}×" if row["op"] == "extend" else f"{float(row['us']):.1f} µs"


CACHES = {  # of servers, as rows call them
    "16 bits": ("bf16", "fp16", "auto"),
    "FP8": ("fp8", "fp8_e4m3"),
    **{code(name): (name,) for name in (*OURS, "saw-int4")},
    "`oscar-int2`": ("oscar-int2:group=128",),
    "`gtq-k3v3`": ("gtq-k3v3",),
    "`int4_per_token_head`": ("int4_per_token_head",),
    "`turboquant_4bit_nc`": ("turboquant_4bit_nc",),
}


def cache_of(row: Row) -> str:
    return next((name for name, names in CACHES.items() if row["recipe"] in names), "")


def serving(engine: str) -> str:
    """Tokens per second by load and cache, over those of 16 bits."""
    wanted = {"engine": engine, "model": "Qwen3-8B", "prefix_hit": "0", "output": "1024"}
    rows = last("serving-h200.csv", lambda r: (int(r["input"]), int(r["concurrency"]), cache_of(r)), **wanted)
    speeds = {key: float(row["system_tps"]) for key, row in rows.items()}
    loads = sorted(key[:2] for key in speeds if key[2] == "16 bits")
    shown = [name for name in CACHES if any((*load, name) in speeds for load in loads)]
    lines = []
    for load in loads:
        dense = speeds[(*load, "16 bits")]
        cells = [f"{load[0]:,}, {load[1]}", f"{dense:,.0f}"]
        for name in shown[1:]:
            speed = speeds.get((*load, name))
            cells.append(f"{speed:,.0f} ({speed / dense:.2f}×)" if speed else NOT_MEASURED)
        lines.append(cells)
    return table(["tokens in, users", *shown], lines)


def sglang_decode() -> str:
    """Decoding of Qwen3-8B: each row over the last 16-bit row above it, which is of the same run."""
    cases = {
        "32 × 8k": ("32", "8192"),
        "32 × 16k": ("32", "16384"),
        "8 × 256": ("8", "256"),
        "1 × 8k": ("1", "8192"),
        "1 × 16k": ("1", "16384"),
        "1 × 100k": ("1", "100000"),
    }
    dense: dict[tuple[str, str], float] = {}
    cells: dict[str, dict[tuple[str, str], str]] = {}
    for row in read("sglang-decode-h200.csv"):
        if row["model"] != "Qwen3-8B" or not (name := cache_of(row)):
            continue
        case, speed = (row["batch"], row["input"]), float(row["decode_tps"])
        if name == "16 bits":
            dense[case] = speed
        cells.setdefault(name, {})[case] = f"{speed:,.0f} ({speed / dense[case]:.2f}×)"
    order = [name for name in CACHES if name in cells]
    rows = [[name, *(cells[name].get(case, NOT_MEASURED) for case in cases.values())] for name in order]
    return table(["tokens per second", *cases], rows)


def drafts() -> str:
    """Speculative decoding in SGLang; each row beside the 16-bit cache with as many users and tokens."""
    rows = [row for row in read("drafts-h200.csv") if row["engine"] == "SGLang"]
    dense = {(row["input"], row["users"]): row for row in rows if row["recipe"] == "auto"}
    lines = []
    for row in sorted(rows, key=lambda row: (int(row["input"]), int(row["users"]))):
        speed = float(row["decode_tps"]) / float(dense[row["input"], row["users"]]["decode_tps"])
        share, per_step = f"{100 * float(row['acceptance']):.1f} %", f"{float(row['tokens_per_step']):.2f}"
        load = [f"{int(row['input']):,}", row["users"], cache_of(row)]
        lines.append([*load, f"{float(row['decode_tps']):,.0f} ({speed:.2f}×)", share, per_step])
    return table(["tokens in", "users", "cache", "tokens per second", "drafts accepted", "tokens per step"], lines)


def steps() -> str:
    """Whole decode steps of transformers, with 0.3; rows of the redesign are newer than those of step-h200.csv."""
    cases = [(32, 16384), (32, 8192), (8, 100000), (8, 32768), (8, 8192), (1, 100000), (1, 32768), (1, 8192)]
    speeds: dict[tuple[str, int, int], str] = {}
    for name in ("step-h200.csv", "redesign-step-h200.csv"):
        for row in read(name):
            if row.get("code", "after") == "after" and row["speedup"]:
                speeds[row["recipe"], int(row["batch"]), int(row["context"])] = f"{float(row['speedup']):.2f}×"
    recipes = [recipe for recipe in dict.fromkeys(key[0] for key in speeds) if recipe not in ("dense", "bf16")]
    rows = [[code(name), *(speeds.get((name, *case), NOT_MEASURED) for case in cases)] for name in recipes]
    return table(["", *(f"{batch} × {context // 1000}k" for batch, context in cases)], rows)


def capacity() -> str:
    rows = read("capacity-h200.csv")
    dense = int(rows[0]["tokens"])
    lines = [[code(r["cache"]), f"{int(r['tokens']):,}", f"{int(r['tokens']) / dense:.2f}×"] for r in rows]
    return table(["cache in vLLM", "tokens that fit", "against 16 bits"], lines)


# From the code

MEANINGS = {
    "block": "tokens of the open block B: a query at position t reads raw the tokens from ⌊t/B⌋·B on, and packed all "
    "before. 0: none",
    "centre": "subtract mean keys and values; the papers do not",
    "skip": "layers that are stored in 16 bits: `skip=0+27`",
    "group": "how many numbers share a scale and an offset. By shape: the head dimension d; `oscar` d/2; "
    "`kivi` gcd(d, 32), for values only",
    "order": "order of the Hadamard matrix. By shape: the largest power of two that divides d, at most 128",
    "values": "rotate values too",
    "centroids": "number of centroids",
    "seed": "seed of the random rotation, or of the first centroids",
    "boost": "share of key channels with twice the bits",
    "per_head": "each KV head has its own rotation (`oscar`) or its own bit widths (`gtq`)",
    "score": "how RoPE blocks are ranked: `product`, or `mean` as in the paper",
    "widths": "bit widths of key blocks around their average b: `two` (b + 1, b − 1), `three` (b + 2, b, b − 1), "
    "`all` (any, per layer, as in the paper). By shape: `two`, and `three` from d = 128 on",
    "eigen": "a part of OSCAR that can be left out",
    "hadamard": "a part of OSCAR that can be left out",
    "permute": "a part of OSCAR that can be left out",
    "clip": "a part of OSCAR that can be left out",
}


NOT_RUN = {  # examples that the tests of the documents do not run: what they need
    "push": "needs an account at the Hub",
    "pull": "needs the Hub",
    "check": "needs a quarter of an hour",
    "serve": "needs an engine",
    "demo": "needs some minutes",
    "selftest": "needs some minutes",
    "bench kernels": "needs a GPU",
    "bench soak": "needs a server",
}


def needs(recipe: Recipe) -> str:
    return "calibration" if recipe.learns else "means" if recipe.centre else "nothing"


def recipes() -> str:
    wide, narrow = (Geometry.uniform("any", layers=1, q_heads=1, kv_heads=1, head_dim=dim) for dim in (128, 64))
    rows = []
    for name, recipe in RECIPES.items():
        fitted = Fitted(recipe, wide)
        rows.append(
            [
                code(name),
                f"{fitted.bits_per_element(131072):.4g}",
                f"{fitted.bits_per_element(2048):.4g}",
                f"{Fitted(recipe, narrow).bits_per_element(131072):.4g}",
                needs(recipe),
                "no" if fitted.for_evaluation else "yes",
                recipe.summary,
            ]
        )
    return table(["recipe", "bits", "at 2k", "d = 64", "needs", "served", "what it is"], rows)


def options() -> str:
    """One row per option: the default of each method that has it, the commonest first. Recipes are named one by one
    where those of a method differ."""
    methods = {type(recipe).__name__: recipe for recipe in RECIPES.values() if recipe.options}
    rows = []
    for option, meaning in MEANINGS.items():
        takers = [recipe for recipe in methods.values() if option in recipe.options]
        found = {
            taker: {r.name: spelled(getattr(r, option)) for r in RECIPES.values() if type(r) is type(taker)}
            for taker in takers
        }
        defaults = sorted(
            (
                (default, name if len(set(own.values())) > 1 else family(taker))
                for taker, own in found.items()
                for name, default in (own.items() if len(set(own.values())) > 1 else [*own.items()][-1:])
            ),
            key=lambda d: d[0],
        )
        grouped = {default: [name for _, name in some] for default, some in groupby(defaults, lambda d: d[0])}
        by_size = sorted(grouped.items(), key=lambda each: -len(each[1]))
        (commonest, _), *others = by_size
        shown = "; ".join([commonest, *(f"{', '.join(map(code, names))} {default}" for default, names in others)])
        of = "all" if len(takers) == len(methods) else ", ".join(code(family(taker)) for taker in takers)
        rows.append([code(option), shown, of, meaning])
    unknown = {option for recipe in RECIPES.values() for option in recipe.options} - MEANINGS.keys()
    if unknown:
        raise ValueError(f"benchmarks/documents.py does not say what {', '.join(sorted(unknown))} means")
    return table(["option", "default", "recipes", "meaning"], rows)


def family(recipe: Recipe) -> str:
    """The name of a recipe without its widths."""
    return re.sub(r"(-k\dv\d|-int\d|-\d|\d)$", "", recipe.name)


def spelled(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "by shape" if value is None else "none" if value == () else str(value)


def commands() -> str:
    """Every command with what it does, an example and its options, as `--help` has them."""
    root = typer.main.get_command(app)
    parts = []
    for name, command in walk(root):
        text = (command.help or "").split("Example:")
        example = re.search(r"`([^`]+)`", text[1]) if len(text) > 1 else None
        parts += [f"## kvfold {name}", " ".join(text[0].split())]
        if example:
            title = f' title="{NOT_RUN[name]}"' if name in NOT_RUN else ""
            parts.append(f"```sh{title}\n{example[1]}\n```")
        rows = []
        for parameter in command.params:
            if parameter.name == "help":
                continue
            flags = ", ".join(code(each) for each in parameter.opts) if parameter.param_type_name == "option" else None
            default = parameter.default
            shown = "" if callable(default) or default in (None, (), [], False, "") else code(str(default))
            help_text = " ".join((getattr(parameter, "help", None) or "").split()).replace("|", "\\|")
            rows.append([flags or code(parameter.name.upper()), shown, help_text])
        if rows:
            parts.append(table(["argument or option", "default", "meaning"], rows))
    return "\n\n".join(parts)


def walk(command: typer.core.TyperGroup, prefix: str = "") -> Iterable[tuple[str, typer.core.TyperCommand]]:
    for name, each in command.commands.items():
        if hasattr(each, "commands"):
            yield from walk(each, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", each


TABLES: dict[str, Callable[[], str]] = {
    "which-recipe": which_recipe,
    "published": published,
    "quality-qwen": lambda: quality_of_qwen("bf16", *OURS, *OTHERS),
    "quality-qwen-all": quality_of_qwen,
    "quality-small": quality_of_the_small_model,
    "kernels": kernels,
    "prompts": prompts,
    "serving-vllm": lambda: serving("vllm"),
    "serving-sglang": lambda: serving("sglang"),
    "sglang-decode": sglang_decode,
    "drafts": drafts,
    "steps": steps,
    "capacity": capacity,
    "recipes": recipes,
    "options": options,
    "commands": commands,
}

if __name__ == "__main__":
    main()
