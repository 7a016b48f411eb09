"""Limits: what a recipe may lose in `kvfold check`, and how much it reads at most, unless the user says otherwise."""

from dataclasses import dataclass

MOST_TRIALS = 4  # with two texts 240 tool calls and 40 haystacks of needles: a quarter of an hour on two cores


@dataclass(frozen=True)
class Limits:
    kl: float = 0.03  # nats. Perplexity then rises by 2 to 3 %, as measured on SmolLM2-135M and Qwen2.5-Coder-1.5B.
    tail: float = 1.0  # nats. A token that was certain keeps 37 % of its probability.
    share: float = 0.03  # of needles and of tool calls
