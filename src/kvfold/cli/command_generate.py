"""`kvfold generate`: text from a packed cache."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

import kvfold
from kvfold.cli.inputs import check, choose_recipes, find_artifact, load, needed_artifact
from kvfold.cli.options import DEFAULT, ArtifactFolder, Model, recipe_option
from kvfold.cli.output import err

if TYPE_CHECKING:
    from kvfold.recipe import Recipe

LONG = 32768  # tokens, beside which a short cache is explained


def generate(
    model: Model,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="What to answer or continue.")],
    recipe: Annotated[
        str | None, recipe_option("A recipe, e.g. `fold2`. Default: the artifact's first, or fold4.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate, at most.", min=1)] = 256,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    artifact: ArtifactFolder = None,
) -> None:
    """Generate text from a packed cache.

    Example: `kvfold generate embedded -r fold2 -p "Why is the sky blue?"`
    """
    names = [recipe] if recipe else None
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise ValueError("the prompt is not UTF-8: write --prompt in UTF-8") from None
    means = find_artifact(artifact, model, names)
    parsed = choose_recipes(names, means, DEFAULT)[0]
    check(model, [parsed], artifact=means)
    loaded = load(model)
    stream_answer(*loaded, parsed, prompt, max_tokens, raw, needed_artifact(means, model, loaded, [parsed]))


def stream_answer(
    network: Any,
    tokenizer: Any,
    recipe: "Recipe",
    prompt: str,
    max_tokens: int,
    raw: bool,
    artifact: "kvfold.Artifact | None",
) -> None:
    """Stream the answer to the terminal. Tokens, bytes and seconds go to the error stream."""
    from transformers import TextStreamer

    from kvfold.evaluate.answers import prompt_inputs
    from kvfold.fitted import Fitted
    from kvfold.recipes import parse

    packed = kvfold.cache(network, recipe, artifact)
    inputs = prompt_inputs(tokenizer, prompt, raw)
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
    wide, fitted = Fitted(parse("bf16"), packed.geometry), Fitted.of(recipe, packed.geometry, artifact)
    raw_bytes, smaller = wide.sequence_bytes(tokens), wide.sequence_bytes(LONG) / fitted.sequence_bytes(LONG)
    err.print(
        f"{tokens} tokens in {packed.allocated_bytes / 2**10:,.0f} KiB of cache ({raw_bytes / 2**10:,.0f} in 16 bits), "
        f"{seconds:.1f} s",
        style="dim",
        highlight=False,
    )
    if packed.allocated_bytes > raw_bytes and smaller > 1:
        err.print(
            "So few tokens take more than in 16 bits: the open block keeps them in 16 bits too, and pages are whole. "
            f"{LONG:,} tokens take {smaller:.1f} times less.",
            style="dim",
            highlight=False,
        )
