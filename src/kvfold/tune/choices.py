"""What can be chosen for a layer: widths of its keys and of its values. And the artifact that holds what was chosen."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.artifact import MEANS, TEXT, Artifact
from kvfold.calibration.text_overlap import text_hashes
from kvfold.fitted import Fitted
from kvfold.geometry import Geometry
from kvfold.methods.fold import Quarters, widths_of
from kvfold.recipe import Fit
from kvfold.recipes import TUNED, parse


class Option(NamedTuple):
    """Widths of one side. All else of its fit is that of a named recipe."""

    quarters: Quarters
    like: str

    def fit(self, side: str, dims: int) -> dict[str, Tensor]:
        """The widths, as a tensor of a fit."""
        return {f"{side}_widths": torch.tensor([widths_of(self.quarters, dims)], dtype=torch.uint8)}


# From few bits to many. The fast decode kernel reads all of them; of values, it reads no segments with 1 bit.
OPTIONS = {
    "key": (
        Option((2, 2, 1, 1), "fold2"),
        Option((4, 4, 1, 1), "fold2"),
        Option((4, 4, 2, 2), "fold3"),
        Option((8, 4, 4, 2), "fold4"),
    ),
    "value": (
        Option((2, 2, 2, 2), "fold2"),
        Option((4, 4, 2, 2), "fold3"),
        Option((4, 4, 4, 4), "fold4"),
    ),
}

Choice = tuple[int, int]  # for one layer: the number of an option for its keys, and of one for its values
CHOICES: list[Choice] = [(key, value) for key in range(len(OPTIONS["key"])) for value in range(len(OPTIONS["value"]))]
EQUAL: dict[str, Choice] = {"fold2": (1, 0), "fold3": (2, 1), "fold4": (3, 2)}  # named recipes: one choice for all


def sizes(geometry: Geometry, context: int) -> list[int]:
    """Bytes that a sequence of `context` tokens occupies in one layer, per choice of `CHOICES`."""
    return [
        Fitted(TUNED, geometry, {layer: _widths(geometry, choice) for layer in geometry.packed}).sequence_bytes(context)
        // len(geometry.packed)
        for choice in CHOICES
    ]


def _widths(geometry: Geometry, choice: Choice) -> Fit:
    fit: dict[str, Tensor] = {}
    for (side, options), number, dims in zip(
        OPTIONS.items(), choice, (geometry.key_dim, geometry.value_dim), strict=True
    ):
        fit |= options[number].fit(side, dims)
    return fit


def layer_fit(artifact: Artifact, geometry: Geometry, layer: int, choice: Choice) -> Fit:
    """The means and the fit of `fold` for one layer. The artifact has the fits of the named recipes."""
    fit = dict(_widths(geometry, choice))
    for (side, options), number in zip(OPTIONS.items(), choice, strict=True):
        fitted = artifact.fit(parse(options[number].like), layer)
        fit |= {name: tensor for name, tensor in fitted.items() if name.startswith(f"{side}_")}
    return fit


def with_choices(artifact: Artifact, geometry: Geometry, chosen: Sequence[Choice], tokens: Tensor) -> Artifact:
    """The artifact with the fits of `fold`: a choice per packed layer. `tokens` (1-D) are the text that it was chosen
    on, which evaluation has to refuse too."""
    fits = [layer_fit(artifact, geometry, *each) for each in zip(geometry.packed, chosen, strict=True)]
    learned = [name for name in fits[0] if name not in MEANS]
    tensors = {f"{TUNED.name}/{name}": torch.stack([fit[name] for fit in fits]) for name in learned}
    seen = torch.cat((artifact.tensors[TEXT], text_hashes(tokens))).unique()
    recipes = tuple(dict.fromkeys((*artifact.metadata.recipes, TUNED.name)))
    metadata = artifact.metadata.model_copy(update={"recipes": recipes})
    return replace(artifact, metadata=metadata, tensors={**artifact.tensors, **tensors, TEXT: seen})
