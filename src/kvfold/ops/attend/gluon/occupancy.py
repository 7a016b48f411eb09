"""How many CTAs of the decode kernels an SM takes.

Every SM has four schedulers and 65,536 registers. Shared memory differs. docs/gpus.md lists what follows from that for
each GPU.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.ops.attend.gluon.decode_tiles import TILE
from kvfold.ops.cards import OWN

WARPS = 8  # CTAs per SM, at most: two per scheduler
STAGES = gl.constexpr(2)  # what is in shared memory: one is read while the other is copied


@gluon.constexpr_function
def ctas(words, shared):
    """How many CTAs an SM takes, if a stage has `words` words per token: as many as fit, at most WARPS.

    From four on, each of its four schedulers gets as many as the others. They share the work equally, so they would
    wait for a scheduler that has more.
    """
    fit = min(WARPS, shared // (4 * TILE * STAGES.value * words + OWN))
    return fit // 4 * 4 or fit


@gluon.constexpr_function
def meta_stages(segments, others, shared):
    """How many stages of key metadata a CTA allocates. Per token, a stage has `segments` words of key metadata and
    `others` words of the rest.

    The CTA uses STAGES of them. The rest is padding. Without it, the first SM to become free would take more CTAs than
    its share.
    """
    least = shared // (ctas(segments + others, shared) + 1) - OWN + 1
    return max(STAGES.value, -((4 * TILE * STAGES.value * others - least) // (4 * TILE * segments)))


@gluon.constexpr_function
def tiles_at_once(words, value_segments, heads, shared):
    """How many tiles a CTA reads at once, with `words` words per token in shared memory: two, if as many CTAs fit then.
    What it does once per loop then counts half. But with two segments of values, two tiles take longer; and with eight
    heads they would take nearly all registers."""
    return 2 if value_segments == 1 and heads == 4 and ctas(2 * words, shared) == ctas(words, shared) else 1
