"""Programmatic dependent launch (PDL): kernels that begin before the kernel before them on the stream has ended.

- *Release*: once all CTAs of a kernel have released or exited, the next kernel on the stream may begin.
- *Wait*: a CTA goes on when all kernels before its own have ended, and sees all that they wrote. For this to hold for
  all of them, every kernel with PDL waits before it ends: else the next one would not wait for the kernel before it.

Compute capability 9.0 and later have PDL. Without it a kernel gets `ALONE`, and no instruction of this file is in it.
"""

from typing import Literal, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# "start": before a kernel reads what the kernel before may write; "end": after its last store
Place = Literal["start", "end", "never"]


class Overlap(NamedTuple):
    """Where a kernel waits, and where it releases the next one."""

    wait: Place
    release: Place

    @property
    def launch(self) -> dict[str, bool]:
        """The keyword argument with which Triton launches such a kernel."""
        return {"launch_pdl": True} if self.wait != "never" else {}


ALONE = Overlap("never", "never")  # begins when the kernel before has ended
AFTER = Overlap("start", "start")  # reads what the kernel before writes
LAST = Overlap("start", "never")  # the same, as the last kernel of a step
BESIDE = Overlap("end", "start")  # reads nothing that the kernel before writes
BESIDE_TO_END = Overlap("end", "end")  # the same; the next kernel would only take SMs from it


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
