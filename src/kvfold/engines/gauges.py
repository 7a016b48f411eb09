"""kvfold's own gauges in Prometheus, beside those of the engine.

Engines pack in other processes than answer /metrics. With PROMETHEUS_MULTIPROC_DIR set, the latter sees the former's.
"""

import torch
from prometheus_client import Gauge

from kvfold.engines.faults import Faults, Late
from kvfold.engines.shadow_table import ShadowTable

EVERY = 16  # steps

_token_bytes, _compression, _shadows, _shadows_used = (
    Gauge(f"kvfold:{name}", text, multiprocess_mode="mostrecent")
    for name, text in (
        ("bytes_per_token", "Bytes that a token takes in the packed pages of a rank."),
        ("compression", "How many times smaller that is than in 16 bits."),
        ("shadow_pages", "16-bit copies of pages that there is room for."),
        ("shadow_pages_used", "16-bit copies that belong to a page."),
    )
)
# A token shows in several ranks of one model: a sum over processes would count it several times.
_non_finite = Gauge(
    "kvfold:non_finite_tokens",
    "Tokens whose keys or values held NaN, Inf or numbers beyond the range of 16-bit floats, stored as zeros: of the "
    "rank that saw most.",
    multiprocess_mode="max",
)


class Gauges:
    def __init__(self, token_bytes: float, raw_token_bytes: int, shadow_pages: int, device: torch.device) -> None:
        _token_bytes.set(token_bytes)
        _compression.set(raw_token_bytes / token_bytes)
        _shadows.set(shadow_pages)
        self.steps = 0
        self.used = Late(device)

    def step(self, table: ShadowTable, faults: Faults) -> None:
        """Show how many shadows were in use a few steps ago, and what could not be stored up to then."""
        if self.steps % EVERY == 0:
            if table.windows:
                _shadows_used.set(self.used.read(table.used))
            _non_finite.set(faults.count())
        self.steps += 1
