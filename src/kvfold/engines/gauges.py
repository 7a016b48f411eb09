"""kvfold's gauges in Prometheus, beside the engine's.

/metrics is answered by a process that does not pack. With PROMETHEUS_MULTIPROC_DIR set, it sees the gauges of the
processes that pack.
"""

from collections.abc import Sequence
from logging import Logger

from prometheus_client import Gauge

from kvfold.engines.faults import FaultLog, Faults

EVERY = 16  # steps between two updates

_token_bytes, _compression = (
    Gauge(f"kvfold:{name}", text, multiprocess_mode="mostrecent")
    for name, text in (
        ("bytes_per_token", "Bytes per token in the packed pages of a rank."),
        ("compression", "How many times smaller the cache is than in 16 bits, reserved open blocks included."),
    )
)
# Several ranks may count the same page or token, so a sum over processes would be too large.
_non_finite, _refused = (
    Gauge(f"kvfold:{name}", f"{text} The largest count of all ranks.", multiprocess_mode="max")
    for name, text in (
        (
            "non_finite_tokens",
            "Tokens that were refused and stored as zeros, because keys or values held NaN, Inf or numbers beyond the "
            "range of 16-bit floats, since the start.",
        ),
        ("refused_pages", "Stored pages that were refused because their bytes had changed, since the start."),
    )
)


def count_refused_page() -> None:
    """In whichever process reads stored pages."""
    _refused.inc()


class Gauges:
    """One set for all layers of a rank, however many page tables they have."""

    def __init__(self, token_bytes: float, logger: Logger) -> None:
        _token_bytes.set(token_bytes)
        self.steps = 0
        self.log = FaultLog(logger)

    def compressed(self, times: float) -> None:
        """How many times smaller the cache is, when it is known how many tokens fit."""
        _compression.set(times)

    def update(self, groups: Sequence[Faults]) -> None:
        """Before each step: show how many tokens could not be stored, as of a few steps ago. Each of `groups` has a
        page table of its own. The same token may count in several of them."""
        if self.steps % EVERY == 0:
            count = max(faults.count() for faults in groups)
            _non_finite.set(count)
            self.log.tell(count)
        self.steps += 1
