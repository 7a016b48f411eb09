"""Recipe: how keys and values are stored, how large the open block is, and which layers are stored raw."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from kvfold.format.layout import SlotLayout

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvfold.calibration.statistics import LayerStatistics
    from kvfold.format.codec import Codec
    from kvfold.rope import Rope
    from kvfold.transforms import Rotation

PAGE_SIZE = 16  # tokens per page, unless the engine or the method decides
LONGEST = 4096  # characters of a recipe with its options

Number = Annotated[int, Field(ge=0, lt=2**31)]  # of tokens, of a layer, or a seed

Fit = Mapping[str, "Tensor"]  # what calibration found for one layer, by name; first dimension: KV heads, or 1 for all
Means = tuple["Tensor | None", "Tensor | None"]  # of keys and values, float64[kv_heads, d]; None without centring
Rotations = tuple["Rotation | None", "Rotation | None"]  # of centred keys and of centred values


class Recipe(BaseModel):
    """What every recipe has. A method is a subclass: it adds options and defines `layouts`. It may define `rotations`,
    and `fit` if it learns from calibration."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    options: ClassVar[tuple[str, ...]] = ("block", "centre", "skip")
    page_size: ClassVar[int] = PAGE_SIZE
    folds: ClassVar[bool] = False  # whether the rotation of values can be folded into the weights

    name: str
    summary: str = Field(repr=False)
    block: Number = 0  # tokens of the open block, which is read raw; 0: none
    centre: bool = True  # subtract the mean key and value of calibration text
    skip: tuple[Number, ...] = ()  # layers stored raw

    def layouts(self, key_dim: int, value_dim: int, fit: Fit) -> tuple[SlotLayout, SlotLayout]:
        """The slots of keys of `key_dim` and of values of `value_dim` coordinates. Without a fit, they have the
        expected size."""
        raise NotImplementedError

    def rotations(self, key_dim: int, value_dim: int, fit: Fit) -> Rotations:
        """The linear maps of centred keys and of centred values, for one layer."""
        return None, None

    def fit(self, layer: "LayerStatistics", rope: "Rope", means: Means) -> Fit:
        """What the method learns from a layer's statistics: tensors by name. `fit_tensors` lists all names.

        The clip and the centroids of a side go to its codec. The method itself reads every other name.
        """
        return {}

    @property
    def learns(self) -> bool:
        """Whether calibration learns more than the means."""
        return type(self).fit is not Recipe.fit

    @property
    def fitted_as(self) -> str:
        """The recipe without its open block and skipped layers. Fits do not depend on these, and are stored by this
        name."""
        return str(self.model_copy(update={name: type(self).model_fields[name].default for name in _NOT_FITTED}))

    @property
    def fitted_by(self) -> str:
        """The command that fits this recipe to a model."""
        return f"kvfold calibrate MODEL --recipe {self.fitted_as} --out DIR"

    def codecs(
        self, key_dim: int, value_dim: int, fit: Fit, raw_dtype: "torch.dtype | None" = None
    ) -> tuple["Codec", "Codec"]:
        """The key and value codec of a layer that is not skipped. Raw segments are bfloat16, unless another type is
        given."""
        from torch import bfloat16

        from kvfold.format.codec import Codec
        from kvfold.transforms import Transform

        codecs = []
        for side, layout, rotation in zip(
            ("key", "value"),
            self.layouts(key_dim, value_dim, fit),
            self.rotations(key_dim, value_dim, fit),
            strict=True,
        ):
            transform = Transform(fit.get(f"{side}_mean") if self.centre else None, rotation)
            first = fit.get(f"{side}_first") if self.centre and not layout.per_page else None
            codec = Codec(
                layout,
                transform,
                raw_dtype or bfloat16,
                float(fit[f"{side}_clip"]) if f"{side}_clip" in fit else None,
                fit.get(f"{side}_centroids"),
                None if first is None else transform.forward(first),
            )
            codecs.append(codec)
        return codecs[0], codecs[1]

    def with_options(self, options: dict[str, Any]) -> Self:
        """This recipe with other options. Values may be text: {"order": "64", "centre": "false", "skip": "0+29"}."""
        if unknown := [option for option in options if option not in self.options]:
            if unknown[0] in ("sink", "recent") and "block" in self.options:
                raise ValueError(
                    f"{self.name}: {unknown[0]}= is gone: the tokens of the open block are read raw, so write block=64"
                )
            takes = ", ".join(sorted(self.options)) or "none"
            raise ValueError(f"{self.name} has no option {unknown[0]!r}; it takes {takes}")
        try:
            return type(self).model_validate({**dict(self), **options})
        except ValidationError as error:
            details = error.errors()[0]
            option = details["loc"][0] if details["loc"] else "options"
            raise ValueError(f"{self.name}: {option}={details['input']!r}: {details['msg']}") from None

    def __str__(self) -> str:
        """The name, and every option that differs from the method's default. `recipes.parse` reads it back."""
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


_NOT_FITTED = ("block", "skip")


def _spell(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)
