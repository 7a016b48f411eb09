"""`kvfold serve`: an OpenAI server of vLLM or SGLang with a packed cache."""

import os
from importlib import import_module
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

import typer

import kvfold
from kvfold import hub
from kvfold.cli.inputs import calibrated_folder, carried_folder, check, check_passed, install_command
from kvfold.cli.options import DEFAULT, ArtifactFolder, Model, recipe_option
from kvfold.models import EMBEDDED, embedded_folder


def serve(
    context: typer.Context,
    model: Model,
    recipe: Annotated[str, recipe_option("A recipe with options, e.g. `fold2` or `saw-int4:block=64`.")] = DEFAULT,
    artifact: ArtifactFolder = None,
    require_check: Annotated[
        bool,
        typer.Option(
            "--require-check", help="Refuse a recipe that failed `kvfold check`, was not decided or not checked."
        ),
    ] = False,
    engine: Annotated[Literal["vllm", "sglang"], typer.Option(help="The engine that serves.")] = "vllm",
) -> None:
    """Serve a model over the OpenAI API with a packed cache. Every other flag goes to the engine as it is.

    Without an artifact, a recipe that needs one is calibrated first, once per model.

    Example: `kvfold serve embedded`, or `kvfold serve Qwen/Qwen3-8B -r fold2 --port 8000 --max-model-len 32768`, or
    `kvfold check embedded`, then `kvfold serve embedded --require-check`
    """
    from kvfold.engines.serving import Config
    from kvfold.recipes import parse

    parsed = parse(recipe)
    given, artifact = artifact, artifact or carried_folder(model, [recipe])
    check(model, [parsed], artifact=kvfold.Artifact.load(artifact) if artifact else None, served=True)
    with TemporaryDirectory(prefix="kvfold-metrics-") as metrics:
        # Every process writes its counts here, and /metrics reads all of them. prometheus_client reads the variable on
        # import.
        os.environ.setdefault("PROMETHEUS_MULTIPROC_DIR", metrics)
        try:
            server = import_module(f"kvfold.engines.{engine}.serve_{engine}")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"serving needs {engine}: {install_command(engine)} ({error})") from error
        if artifact is None and (parsed.centre or parsed.learns or require_check):
            artifact = calibrated_folder(model, parsed)
        if require_check and artifact:
            check_passed(model, parsed, artifact, given)
        folder = str(embedded_folder()) if model == EMBEDDED else model
        hub.tell_engine(folder)
        server.serve(folder, model, Config(parsed, artifact), context.args)
