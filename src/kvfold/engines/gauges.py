"""kvfold's own gauges in Prometheus, beside those of the engine.

Engines pack in other processes than answer /metrics. With PROMETHEUS_MULTIPROC_DIR set, the latter sees the former's.
"""

from prometheus_client import Gauge

from kvfold.engines.serving import Late, Plan
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


class Gauges:
    def __init__(self, plan: Plan, shadows: int) -> None:
        _token_bytes.set(plan.token_bytes)
        _compression.set(plan.wide_token_bytes / plan.token_bytes)
        _shadows.set(shadows)
        self.steps = 0
        self.used = Late(plan.device)

    def step(self, table: ShadowTable) -> None:
        """Show how many shadows were in use a few steps ago."""
        if self.steps % EVERY == 0:
            _shadows_used.set(self.used.read(table.used))
        self.steps += 1
