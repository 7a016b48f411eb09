"""CheckResult: what `kvfold check` measured of a recipe, and its verdict. An artifact keeps one per recipe."""

import datetime
from collections.abc import Iterator
from typing import Any, Literal

from kvfold.artifact.fingerprint import Count, Sha256, Strict, Word

Verdict = Literal["passed", "failed", "not decided"]


class Measure(Strict):
    """One measure of a recipe, beside the 16-bit cache of the same model. The interval of its loss gives the verdict.

    Units are nats, or shares of what there was to find.
    """

    name: Word
    unit: Literal["nats", "share"]
    value: float
    reference: float  # of the 16-bit cache
    loss: float  # how much worse than the 16-bit cache
    low: float  # the interval of the loss
    high: float
    allowed: float

    @property
    def verdict(self) -> Verdict:
        if self.blind:
            return "passed"
        if self.low <= self.allowed < self.high:
            return "not decided"
        return "passed" if self.high <= self.allowed else "failed"

    @property
    def blind(self) -> bool:
        """Whether the 16-bit cache itself finds so little that no loss could exceed the allowed."""
        return self.unit == "share" and self.reference <= self.allowed

    def __str__(self) -> str:
        if self.unit == "nats":
            return f"{self.name} {self.value:.4f}"
        return f"{self.name} {100 * self.value:.1f} of {100 * self.reference:.1f} %"

    @property
    def lost(self) -> str:
        """What is lost, and what is allowed."""
        if self.unit == "nats":
            return f"{self.name} is {self.value:.4f}{self._interval('{:.4f}', 1)}, and {self.allowed:g} is allowed"
        points = f"{100 * self.loss:.1f} points{self._interval('{:.1f}', 100)}"
        return f"{self.name} lose {points}, and {100 * self.allowed:g} are allowed"

    def _interval(self, spell: str, times: int) -> str:
        return f" ({spell.format(times * self.low)} to {spell.format(times * self.high)})"


class CheckResult(Strict):
    context: Count  # tokens that the model saw at a time
    date: datetime.date
    versions: dict[Word, Word]
    fit_sha256: Sha256  # `Artifact.fit_sha256` of the recipe: with other means or fits, the result says nothing
    measures: tuple[Measure, ...]

    @property
    def verdict(self) -> Verdict:
        """Failed if a measure failed, else not decided if one is not decided."""
        found = {measure.verdict for measure in self.measures}
        if "failed" in found:
            return "failed"
        return "not decided" if "not decided" in found else "passed"

    def __str__(self) -> str:
        measured = ", ".join(map(str, self.measures))
        return f"checked on {self.date} at {self.context:,} tokens: {self.verdict} ({measured})"

    @property
    def reasons(self) -> str:
        """What is lost by the measures that have the verdict of all."""
        return "; ".join(measure.lost for measure in self.measures if measure.verdict == self.verdict)

    def rows(self, recipe: str) -> Iterator[dict[str, Any]]:
        """A row per measure."""
        for measure in self.measures:
            yield {
                "recipe": recipe,
                "context": self.context,
                "date": str(self.date),
                "measure": measure.name,
                **measure.model_dump(exclude={"name"}),
                "verdict": measure.verdict,
            }
