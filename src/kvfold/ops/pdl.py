"""Programmatic dependent launch (PDL): a kernel begins before the previous kernel on the stream has ended.

- *Release*: once all CTAs of a kernel have released or exited, the next kernel on the stream may begin.
- *Wait*: a CTA stops until the previous kernel has ended, and then sees all that it wrote. Every kernel with PDL waits
  before it ends. So all earlier kernels have ended, too.

GPUs since Hopper have PDL (see cards.py). Without PDL a kernel gets `ALONE` and contains neither instruction.
"""

from typing import Literal, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# "start": before a kernel reads what the previous kernel may write
# "end": after its last store; in kernels that decode: before they store their packed part
Place = Literal["start", "end", "never"]


class Overlap(NamedTuple):
    """Where a kernel waits, and where it releases the next one."""

    wait: Place
    release: Place

    @property
    def launch(self) -> dict[str, bool]:
        """Triton's launch option for PDL, if the kernel uses PDL."""
        return {"launch_pdl": True} if self.wait != "never" else {}


ALONE = Overlap("never", "never")  # begins when the previous kernel has ended
AFTER = Overlap("start", "start")  # reads what the previous kernel writes
LAST = Overlap("start", "never")  # the same, for the last kernel of a layer's decode step
BESIDE = Overlap("end", "start")  # reads nothing that the previous kernel writes


@triton.jit
def wait(OVERLAP: tl.constexpr, PLACE: tl.constexpr):
    """Wait here, if this is the place for it."""
    if OVERLAP.wait == PLACE:
        gdc_wait()


@triton.jit
def release(OVERLAP: tl.constexpr, PLACE: tl.constexpr):
    """Release the next kernel here, if this is the place for it."""
    if OVERLAP.release == PLACE:
        gdc_launch_dependents()
