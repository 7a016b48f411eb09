"""Recipe: how keys and values are stored, which tokens stay in 16 bits, which layers are left alone."""

from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, field_validator
from torch import Tensor

from kvfold.codec import Codec
from kvfold.geometry import Geometry
from kvfold.layout import PageLayout, raw_slot
from kvfold.windows import Windows

PAGE_SIZE = 16  # tokens of a page, where no engine decides


class Recipe(BaseModel):
    """What every recipe has. A method is a subclass that adds its own options and says what its codecs are."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    options: ClassVar[tuple[str, ...]] = ("sink", "recent", "centre", "skip")

    name: str
    summary: str = Field(repr=False)
    sink: NonNegativeInt = 0  # the first tokens, kept in 16 bits
    recent: NonNegativeInt = 0  # the last tokens, kept in 16 bits
    centre: bool = True  # subtract the mean key and value of calibration text
    skip: tuple[NonNegativeInt, ...] = ()  # layers stored in 16 bits

    def codecs(self, head_dim: int, key_mean: Tensor | None, value_mean: Tensor | None) -> tuple[Codec, Codec]:
        """The key and value codec of one layer; means are [kv_heads, head_dim], None where nothing is centred."""
        raise NotImplementedError

    @property
    def windows(self) -> Windows:
        return Windows(self.sink, self.recent)

    def layer_codecs(
        self,
        layer: int,
        head_dim: int,
        wide: torch.dtype = torch.bfloat16,
        means: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> tuple[Codec, Codec]:
        """The codecs of one layer: 16 bits where it is skipped, else the method's own."""
        if layer in self.skip:
            raw = Codec(raw_slot(head_dim), wide=wide)
            return raw, raw
        key, value = self.codecs(head_dim, *(means if self.centre else (None, None)))
        return replace(key, wide=wide), replace(value, wide=wide)

    def page_layout(self, layer: int, head_dim: int, page_size: int = PAGE_SIZE) -> PageLayout:
        key, value = self.layer_codecs(layer, head_dim)
        return PageLayout(key.layout, value.layout, page_size)

    def page_layouts(self, geometry: Geometry, page_size: int = PAGE_SIZE) -> list[PageLayout]:
        """The layouts of all layers."""
        if self.skip and max(self.skip) >= geometry.layers:
            raise ValueError(f"{self}: the model has layers 0 to {geometry.layers - 1}")
        return [self.page_layout(layer, geometry.head_dim, page_size) for layer in range(geometry.layers)]

    def check(self, geometry: Geometry) -> None:
        """Refuse a model that this recipe does not fit."""
        self.page_layouts(geometry)

    def sequence_bytes(self, geometry: Geometry, context: int, page_size: int = PAGE_SIZE) -> int:
        """Bytes that one sequence of `context` tokens occupies: its pages, and the shadow pages of its windows."""
        pages, shadows = -(-context // page_size), len(self.windows.pages(0, context, page_size))
        raw = PageLayout(raw_slot(geometry.head_dim), raw_slot(geometry.head_dim), page_size)
        return geometry.kv_heads * sum(
            pages * layout.page_bytes + (0 if layout.is_raw else shadows * raw.page_bytes)
            for layout in self.page_layouts(geometry, page_size)
        )

    def bits_per_element(self, geometry: Geometry, context: int, page_size: int = PAGE_SIZE) -> float:
        """Allocated bits for each number that a sequence of `context` tokens caches."""
        return 8 * self.sequence_bytes(geometry, context, page_size) / (geometry.elements_per_token * context)

    def with_options(self, options: dict[str, Any]) -> Self:
        """This recipe with other options, which may be text: {"order": "64", "centre": "false", "skip": "0+29"}."""
        if unknown := [option for option in options if option not in self.options]:
            takes = ", ".join(sorted(self.options)) or "none"
            raise ValueError(f"{self.name} has no option {unknown[0]!r}; it takes {takes}")
        try:
            return type(self).model_validate({**dict(self), **options})
        except ValidationError as error:
            details = error.errors()[0]
            option = details["loc"][0] if details["loc"] else "options"
            raise ValueError(f"{self.name}: {option}={details['input']!r}: {details['msg']}") from None

    def __str__(self) -> str:
        """The name with every option that differs from the method's own default; `recipes.parse` reads it back."""
        changed = {
            option: getattr(self, option)
            for option in self.options
            if getattr(self, option) != type(self).model_fields[option].default
        }
        spelled = ",".join(f"{option}={_spell(value)}" for option, value in changed.items())
        return f"{self.name}:{spelled}" if spelled else self.name

    @field_validator("skip", mode="before")
    @classmethod
    def _split_layers(cls, value: Any) -> Any:
        return value.split("+") if isinstance(value, str) else value


def _spell(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)
