"""The card of an artifact, its README.md: what it holds, what was measured, and how to serve it."""

import hashlib
import shlex
from pathlib import Path

from kvfold.artifact import Artifact, CheckResult, Measure
from kvfold.artifact.artifact import HUB_ID
from kvfold.fitted import Fitted
from kvfold.geometry import listed
from kvfold.recipes import parse

MEANS_ALONE = "Means alone. They serve every recipe that learns nothing else, as `int4` and `saw-int4`."
UNCHECKED = "not checked"


MARK = "\n<!-- written by kvfold: {sha256} -->\n"  # the end of every card, with a hash of what stands before it


def card(artifact: Artifact, where: str, model: str | None) -> str:
    """In Markdown. `where` it is published, and `model`, its Hub id or its folder here, of which the name is shown."""
    text = _text(artifact, where, model)
    return text + _mark(text.encode()).decode()


def is_card(content: bytes) -> bool:
    """Whether kvfold wrote this README.md, and nobody has changed it since."""
    text, mark = content[: -len(_mark(b""))], content[-len(_mark(b"")) :]
    return mark == _mark(text)


def _mark(text: bytes) -> bytes:
    return MARK.format(sha256=hashlib.sha256(text).hexdigest()).encode()


def _text(artifact: Artifact, where: str, model: str | None) -> str:
    on_hub = model is not None and not Path(model).expanduser().exists() and HUB_ID.fullmatch(model)
    model = model if on_hub or model is None else Path(model).name
    shape, made = artifact.metadata.model, artifact.metadata.calibration
    checks = {name: found for name in artifact.metadata.checks if (found := artifact.check_result(parse(name)))}
    recipes = list(dict.fromkeys((*checks, *artifact.metadata.recipes)))
    ranks = {"passed": 0, "not decided": 1, UNCHECKED: 2, "failed": 3}
    served, *_ = sorted(recipes, key=lambda name: ranks[_verdict(name, checks)]) or ["int4"]
    named = shlex.quote(model) if model else "MODEL"
    serve = f"kvfold serve {named} --recipe {served} --artifact fits"
    return "\n".join(
        (
            "---",
            "library_name: kvfold",
            "tags: [kvfold, kv-cache, quantization]",
            *([f"base_model: {model}"] if on_hub else []),
            "---",
            "",
            f"# A smaller KV cache for {model or shape.model_type}",
            "",
            f"With this artifact, kvfold keeps the KV cache of {model or 'its model'} in fewer bits, inside vLLM, "
            "SGLang and transformers. The model is not in here, and stays as it is.",
            "",
            "## How to serve it",
            "",
            "```sh",
            f"kvfold pull {shlex.quote(where)} --out fits",
            serve,
            "```",
            "",
            "## What it costs",
            "",
            *(_table(artifact, recipes, checks) if recipes else [MEANS_ALONE]),
            "",
            "- Bits are those of each cached number at 2,048 and 131,072 tokens, metadata and the open block included.",
            *(
                ["- KL is in nats. One token in a thousand exceeds its tail. Shares are beside those of 16 bits."]
                * bool(checks)
            ),
            *(
                f"- `{name}` was checked on {found.date} at {found.context:,} tokens, with {_spelled(found.versions)}."
                for name, found in checks.items()
            ),
            f"- To check it yourself: `kvfold check {named} --recipe RECIPE --artifact fits`.",
            "",
            "## What it was made from",
            "",
            f"- Model: {shape.model_type}, {shape.layers} layers (packed: {listed(shape.packed)}), "
            f"{shape.q_heads} query and {shape.kv_heads} KV heads of {shape.key_dim}.",
            f"- Hash of the model: `{shape.sha256}`. kvfold refuses a model of another shape or with other weights.",
            f"- Text: {made.tokens:,} tokens in passages of {made.context:,}, hash `{made.tokens_sha256}`.",
            f"- Made with {_spelled(made.versions)}.",
            "",
        )
    )


def _table(artifact: Artifact, recipes: list[str], checks: dict[str, CheckResult]) -> list[str]:
    """A row per recipe, in Markdown."""
    measures = list(dict.fromkeys(measure.name for found in checks.values() for measure in found.measures))
    lines = [["recipe", "bits at 2k", "at 128k", *measures, "check"], ["---", *["---:"] * (2 + len(measures)), "---"]]
    for name in recipes:
        fitted = Fitted.of(parse(name), artifact.metadata.model.geometry, artifact)
        bits = (f"{fitted.bits_per_element(tokens):.2f}" for tokens in (2048, 131072))
        found = {measure.name: _cell(measure) for measure in checks[name].measures} if name in checks else {}
        lines.append([f"`{name}`", *bits, *(found.get(measure, "–") for measure in measures), _verdict(name, checks)])
    return [f"| {' | '.join(line)} |" for line in lines]


def _verdict(recipe: str, checks: dict[str, CheckResult]) -> str:
    return checks[recipe].verdict if recipe in checks else UNCHECKED


def _cell(measure: Measure) -> str:
    if measure.unit == "nats":
        return f"{measure.value:.4f}"
    return f"{100 * measure.value:.1f} of {100 * measure.reference:.1f} %"


def _spelled(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
