"""CheckResult: what `kvfold check` measured of a recipe, and its verdict. An artifact keeps one per recipe."""

import datetime
from collections.abc import Iterator
from typing import Any, Literal

from kvfold.artifact.fingerprint import Count, Sha256, Strict, Word


class Measure(Strict):
    """One measure of a recipe, beside the 16-bit cache of the same model. It passes if the loss is within the allowed.

    Units are nats, or shares of what there was to find. `low` and `high` are the 95 % interval of a share's loss.
    """

    name: Word
    unit: Literal["nats", "share"]
    value: float
    reference: float  # of the 16-bit cache
    loss: float  # how much worse than the 16-bit cache
    low: float | None = None
    high: float | None = None
    allowed: float

    @property
    def passed(self) -> bool:
        return self.loss <= self.allowed

    @property
    def undecided(self) -> bool:
        """Whether the interval of the loss reaches to both sides of what is allowed."""
        return self.low is not None and self.high is not None and self.low <= self.allowed < self.high

    @property
    def blind(self) -> bool:
        """Whether the 16-bit cache itself finds so little that no loss could exceed the allowed."""
        return self.unit == "share" and self.reference <= self.allowed

    def __str__(self) -> str:
        if self.unit == "nats":
            return f"{self.name} {self.value:.4f}"
        return f"{self.name} {100 * self.value:.1f} of {100 * self.reference:.1f} %"

    @property
    def fault(self) -> str:
        """What is wrong, if it did not pass."""
        if self.unit == "nats":
            return f"{self.name} is {self.value:.4f}, and {self.allowed:g} is allowed"
        return f"{self.name} lose {100 * self.loss:.1f} points, and {100 * self.allowed:g} are allowed"


class CheckResult(Strict):
    context: Count  # tokens that the model saw at a time
    date: datetime.date
    versions: dict[Word, Word]
    fit_sha256: Sha256  # `Artifact.fit_sha256` of the recipe: with other means or fits, the result says nothing
    measures: tuple[Measure, ...]

    @property
    def passed(self) -> bool:
        return all(measure.passed for measure in self.measures)

    def __str__(self) -> str:
        verdict = "passed" if self.passed else "FAILED"
        return f"checked on {self.date} at {self.context:,} tokens: {verdict} ({', '.join(map(str, self.measures))})"

    @property
    def faults(self) -> str:
        return "; ".join(measure.fault for measure in self.measures if not measure.passed)

    def rows(self, recipe: str) -> Iterator[dict[str, Any]]:
        """A row per measure."""
        for measure in self.measures:
            yield {
                "recipe": recipe,
                "context": self.context,
                "date": str(self.date),
                "measure": measure.name,
                **measure.model_dump(exclude={"name"}),
                "passed": measure.passed,
            }
