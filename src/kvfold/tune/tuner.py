"""Tuner: the curves of a model, the choices that spend a budget best, and what these cost with all layers packed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvfold.artifact import Artifact
from kvfold.format.codec import Codec, sixteen_bit
from kvfold.geometry import Geometry
from kvfold.kept_parts import NOTHING_KEPT, Name, Parts
from kvfold.recipes import TUNED
from kvfold.tune.choices import CHOICES, EQUAL, OPTIONS, Choice, layer_fit, sizes
from kvfold.tune.curves import Packed, divergences
from kvfold.tune.solve import solve, weigh

STEPS = 32  # budgets from the least to the most bytes, for `cheapest`

Choices = tuple[Choice, ...]  # one per packed layer
Advance = Callable[[float], None]


class Point(NamedTuple):
    """Choices for all layers, what they take and what they cost."""

    recipe: str
    bits: float  # per cached number, the open block included
    sequence_bytes: int
    kl: float  # per token of text
    copy_kl: float  # per copied token
    choices: Choices

    def row(self) -> dict[str, Any]:
        """As a row, with the widths of quarters per layer."""
        widths = {
            f"{side} widths": [options[choice[i]].quarters for choice in self.choices]
            for i, (side, options) in enumerate(OPTIONS.items())
        }
        return {name: value for name, value in self._asdict().items() if name != "choices"} | widths


@dataclass(frozen=True)
class Tuner:
    """The artifact has means and the fits of fold2, fold3 and fold4. Sizes are those of a sequence of `context`
    tokens."""

    model: PreTrainedModel
    artifact: Artifact
    pairs: Tensor  # from `curves.passages`
    context: int
    parts: Parts = NOTHING_KEPT

    @cached_property
    def geometry(self) -> Geometry:
        return Geometry.from_config(self.model.config.to_dict())

    @cached_property
    def sizes(self) -> list[int]:
        return sizes(self.geometry, self.context)

    def curves(self, advance: Advance = lambda share: None) -> dict[str, Tensor]:
        """Per side, float64[packed layers, options, tests]: the KL if one side of one layer is packed, and nothing
        else."""
        changes: dict[Name, Packed] = {}
        for layer in self.geometry.packed:
            for i in range(len(OPTIONS["key"])):
                changes["key", layer, i] = {layer: (self._codecs(layer, (i, 0))[0], None)}
            for i in range(len(OPTIONS["value"])):
                changes["value", layer, i] = {layer: (None, self._codecs(layer, (0, i))[1])}
        costs = divergences(self.model, self.pairs, changes, advance, self.parts)
        found = torch.stack(list(costs.values())).unflatten(0, (len(self.geometry.packed), -1))
        return dict(zip(OPTIONS, found.split([len(options) for options in OPTIONS.values()], dim=1), strict=True))

    def allocate(self, curves: dict[str, Tensor], budget: int) -> Choices:
        """The best choices whose sizes sum up to at most `budget` bytes, if costs of layers and sides add up.

        Text and copies count alike: each in units of what fold2 costs there.
        """
        key, value = (curves[side].numpy() for side in OPTIONS)
        at = EQUAL["fold2"]
        fold2 = (key[:, at[0]] + value[:, at[1]]).sum(axis=0)
        costs = weigh(key, value, np.maximum(fold2, np.finfo(np.float64).tiny))
        return tuple(CHOICES[number] for number in solve(costs, self.sizes, budget))

    def budgets(self) -> list[int]:
        """From the least to the most bytes."""
        least, most = (len(self.geometry.packed) * size for size in (min(self.sizes), max(self.sizes)))
        return [least + i * (most - least) // STEPS for i in range(STEPS + 1)]

    def cheapest(self, curves: dict[str, Tensor], kl: float, advance: Advance = lambda share: None) -> Choices:
        """The choices for the least of `budgets` whose KL on text is at most `kl`, all layers packed."""
        budgets, tries = self.budgets(), 1 + STEPS.bit_length()
        choices = self.allocate(curves, budgets[-1])
        best = self.measure([(TUNED.name, choices)])[0]
        advance(1 / tries)
        if best.kl > kl:
            raise ValueError(
                f"--quality {kl:g}: the least KL is {best.kl:.2g}, with {best.bits:.3g} bits; ask for more"
            )
        low, high = 0, STEPS
        while low < high:
            middle = (low + high) // 2
            tried = self.allocate(curves, budgets[middle])
            if self.measure([(TUNED.name, tried)])[0].kl <= kl:
                high, choices = middle, tried
            else:
                low = middle + 1
            advance(1 / tries)
        return choices

    def measure(self, named: Sequence[tuple[str, Choices]], advance: Advance = lambda share: None) -> list[Point]:
        """What choices cost, each with its name."""
        packed: dict[Name, Packed] = {
            choices: {
                layer: self._codecs(layer, choice) for layer, choice in zip(self.geometry.packed, choices, strict=True)
            }
            for _, choices in named
        }
        points = []
        costs = divergences(self.model, self.pairs, packed, advance, self.parts)
        for name, choices in named:
            kl, copy_kl = costs[choices].tolist()
            size = sum(self.sizes[CHOICES.index(choice)] for choice in choices)
            bits = 8 * size / (self.geometry.elements_per_token * self.context)
            points.append(Point(name, bits, size, kl, copy_kl, choices))
        return points

    def _codecs(self, layer: int, choice: Choice) -> tuple[Codec, Codec]:
        fit = layer_fit(self.artifact, self.geometry, layer, choice)
        dims = self.geometry.key_dim, self.geometry.value_dim
        key, value = TUNED.codecs(*dims, fit, sixteen_bit(self.model.dtype))
        return key.to(self.model.device), value.to(self.model.device)
