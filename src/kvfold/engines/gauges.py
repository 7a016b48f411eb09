"""kvfold's gauges in Prometheus, beside the engine's.

/metrics is answered by a process that does not pack. With PROMETHEUS_MULTIPROC_DIR set, it sees the gauges of the
processes that pack.
"""

import torch
from prometheus_client import Gauge

from kvfold.engines.faults import Faults, Late
from kvfold.engines.shadow_table import ShadowTable

EVERY = 16  # steps between two updates

_token_bytes, _compression, _shadows, _shadows_used = (
    Gauge(f"kvfold:{name}", text, multiprocess_mode="mostrecent")
    for name, text in (
        ("bytes_per_token", "Bytes per token in the packed pages of a rank."),
        ("compression", "How many times smaller that is than in 16 bits."),
        ("shadow_pages", "Shadow pages that there is room for: 16-bit keys and values of windows."),
        ("shadow_pages_used", "Shadow pages that belong to a page."),
    )
)
# Several ranks may count the same token, so a sum over processes would be too large.
_non_finite = Gauge(
    "kvfold:non_finite_tokens",
    "Tokens stored as zeros, because keys or values held NaN, Inf or numbers beyond the range of 16-bit floats. The "
    "largest count of all ranks.",
    multiprocess_mode="max",
)


class Gauges:
    def __init__(self, token_bytes: float, raw_token_bytes: int, shadow_pages: int, device: torch.device) -> None:
        _token_bytes.set(token_bytes)
        _compression.set(raw_token_bytes / token_bytes)
        _shadows.set(shadow_pages)
        self.steps = 0
        self.used = Late(device)

    def update(self, table: ShadowTable, faults: Faults) -> None:
        """Show how many shadows are in use and how many tokens could not be stored, as of a few steps ago."""
        if self.steps % EVERY == 0:
            if table.windows:
                _shadows_used.set(self.used.read(table.used))
            _non_finite.set(faults.count())
        self.steps += 1
