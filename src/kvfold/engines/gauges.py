"""kvfold's gauges in Prometheus, beside the engine's.

/metrics is answered by a process that does not pack. With PROMETHEUS_MULTIPROC_DIR set, it sees the gauges of the
processes that pack.
"""

from collections.abc import Sequence
from logging import Logger

import torch
from prometheus_client import Gauge

from kvfold.engines.faults import FaultLog, Faults, Late
from kvfold.engines.shadow_table import ShadowTable

EVERY = 16  # steps between two updates

_token_bytes, _compression, _shadows, _shadows_used = (
    Gauge(f"kvfold:{name}", text, multiprocess_mode="mostrecent")
    for name, text in (
        ("bytes_per_token", "Bytes per token in the packed pages of a rank."),
        ("compression", "How many times smaller the cache is than in 16 bits, shadow pages included."),
        ("shadow_pages", "Shadow pages that there is room for: 16-bit keys and values of windows."),
        ("shadow_pages_used", "Shadow pages that belong to a page."),
    )
)
# Several ranks may count the same page or token, so a sum over processes would be too large.
_restored, _non_finite, _refused = (
    Gauge(f"kvfold:{name}", f"{text} The largest count of all ranks.", multiprocess_mode="max")
    for name, text in (
        ("restored_pages", "Pages whose shadow pages were restored from packed tokens, since the start."),
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

    def __init__(self, token_bytes: float, device: torch.device, logger: Logger) -> None:
        _token_bytes.set(token_bytes)
        self.steps = 0
        self.used, self.restored = Late(device), Late(device)
        self.log = FaultLog(logger)

    def compressed(self, times: float) -> None:
        """How many times smaller the cache is, when it is known how many tokens fit."""
        _compression.set(times)

    def update(self, groups: Sequence[tuple[ShadowTable, Faults]]) -> None:
        """Before each step: show how many shadows are in use, how many were restored and how many tokens could not be
        stored, as of a few steps ago. Each of `groups` has a page table of its own. The same token may count in several
        of them."""
        if self.steps % EVERY == 0:
            tables = [table for table, _ in groups]
            _shadows.set(sum(len(table.owner) - 1 for table in tables))
            if tables[0].windows:
                _shadows_used.set(self.used.read(torch.stack([table.used for table in tables]).sum()))
                _restored.set(self.restored.read(torch.stack([table.restored for table in tables]).sum()))
            count = max(faults.count() for _, faults in groups)
            _non_finite.set(count)
            self.log.tell(count)
        self.steps += 1
