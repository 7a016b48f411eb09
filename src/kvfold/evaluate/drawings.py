"""The plots of the HTML page, as SVG in the colours of the page.

They are drawn for a phone: letters of 11 pixels in 360. Wider screens enlarge them.
"""

import cmath
import math
import re
import textwrap
from io import StringIO
from itertools import pairwise
from typing import Any

from kvfold.evaluate.report import Report, Row, spell_kl

try:
    from matplotlib import style
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, LogLocator
    from matplotlib.transforms import Bbox, IdentityTransform
except ImportError:
    raise ImportError("the HTML page needs matplotlib: pip install 'kvfold[report]'") from None

WIDTH, LINE, NAME = 360, 13, 24  # pixels of a plot and of a line of text, and letters of a name in one line
STYLE = ["default", "kvfold.evaluate.plots"]
COLOURS = {f"#fade0{i}": f"var(--{name})" for i, name in enumerate(("ink", "muted", "line", "accent", "paper"))}
_, MUTED, _, _, PAPER = COLOURS
Look = dict[str, Any]
RING: Look = {"markerfacecolor": PAPER}
FULL: Look = {"markeredgecolor": PAPER, "markeredgewidth": 1, "markersize": 9}
MARKS = (("mean", "o", RING, 0.6), ("99 %", "D", FULL | {"markersize": 7}, 0.8), ("99.9 %", "o", FULL, 1))  # of tails
PIXELS: Look = {"transform": IdentityTransform(), "clip_on": False}

# Where a label may stand, as distances from its point; near ones first.
ANGLES = (0, 180, -25, -155, 25, 155, -50, -130, 50, 130, -75, -105, 75, 105)
PLACES = [cmath.rect(far, math.radians(angle)) for far in (9, 18, 28, 42, 60, 84, 112) for angle in ANGLES]


def frontier(report: Report) -> list[Row]:
    """Rows that no other beats in both bits and KL, from few bits to many. A bad example is none of them."""
    kept: list[Row] = []
    finite = [row for row in report.ordered if math.isfinite(row.kl) and not row.bad_example]
    for row in sorted(finite, key=lambda row: (report.bits(row), row.kl)):
        if not kept or row.kl < kept[-1].kl:
            kept.append(row)
    return kept


@style.context(STYLE)
def pareto(report: Report, line: tuple[str, float] | None) -> str:
    """KL against bits. `line` is the name and the KL of a dashed line, if there is one.

    The reference is a diamond. Others are full circles on the frontier, and rings elsewhere. A KL of 0 stands at the
    foot, one that is not finite is a triangle at the top.
    """
    rows, best = report.ordered, frontier(report)
    bits = [report.bits(row) for row in rows]
    measured = [row.kl for row in rows if 0 < row.kl < math.inf] or [1e-3]
    shown = [*measured, line[1]] if line else measured
    low, high, left, right = min(shown) / (3 if line else 10), 2 * max(shown), min(bits) / 1.25, max(bits) * 1.2
    figure, axes = _plot(316, 42, 40, yscale="log", xlim=(left, right), ylim=(low, high))
    axes.set(title="KL divergence from the 16-bit cache", xlabel=f"bits per number at {report.counted_at} tokens")
    axes.xaxis.set_major_locator(FixedLocator((1, 2, 3, 4, 6, 8, 12, 16)))
    axes.yaxis.set(major_locator=LogLocator(subs=(1, 3) if high / low < 1e5 else (1,)), major_formatter="{x:g}")
    kls = [max(row.kl, low) if math.isfinite(row.kl) else high for row in rows]
    at = axes.transData.transform([*zip(bits, kls, strict=True)])
    taken = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in at]
    if line:
        name, kl = line
        axes.axhline(kl, color=MUTED, linewidth=1, dashes=(4, 3))
        # below all points there is room at the left, above them at the right
        end, side, dx = (0, "left", 4) if kl < min(measured) else (1, "right", -4)
        text = _note(axes, name, end, kl, (dx, 4), ha=side, color=MUTED)
        taken += [text.get_window_extent(), Bbox(axes.transData.transform([(left, kl), (right, kl)]))]
    for (x, y), (further, lower) in pairwise(at[rows.index(row)] for row in best):
        axes.plot((x, further, further), (y, y, lower), alpha=0.45, **PIXELS)
        taken += [Bbox([(x, y), (further, y)]), Bbox([(further, y), (further, lower)])]
    for i, (row, (x, y)) in enumerate(zip(rows, at, strict=True)):
        finite = math.isfinite(row.kl)
        look = RING if row is rows[0] or (finite and row not in best) else FULL
        axes.plot(x, y, "D" if row is rows[0] else "o" if finite else "^", gid=f"point-{i}", **look, **PIXELS)
        _label(axes, f"label-{i}", row.recipe if finite else f"{row.recipe} ({row.kl})", complex(x, y), taken)
    return _svg(figure, "KL divergence of every recipe against its bits per number; the table below has the numbers")


def _label(axes: Axes, gid: str, name: str, point: complex, taken: list[Bbox]) -> None:
    """Write a name where it covers least, with a line to its point if that is far."""
    label = axes.text(0, 0, _folded(name), gid=gid, **PIXELS)

    def faults(place: complex) -> tuple[bool, int]:
        end, up = point + place, place.imag
        label.set_position((end.real, end.imag))
        label.set_horizontalalignment("right" if place.real < 0 else "left")
        label.set_verticalalignment("center" if abs(up) < 1 else "bottom" if up > 0 else "top")
        box = label.get_window_extent()
        return not all(axes.bbox.contains(*corner) for corner in box.corners()), box.count_overlaps(taken)

    best = min(PLACES, key=faults)
    faults(best)  # which puts it there
    taken.append(label.get_window_extent().padded(2))
    if abs(best) > 20:
        end = point + best
        axes.plot((point.real, end.real), (point.imag, end.imag), color=MUTED, linewidth=0.6, zorder=1, **PIXELS)


@style.context(STYLE)
def tails(rows: list[Row]) -> str:
    """Per recipe a line from the mean KL over the 99th to the 99.9th percentile. KL that is not finite stands right."""
    names, numbers = [_folded(row.recipe) for row in rows], [(row.kl, row.kl_99, row.kl_tail) for row in rows]
    measured = [kl for three in numbers for kl in three if 0 < kl < math.inf] or [1e-3, 1]
    low, high = min(measured) / 1.5, 1.5 * max(measured)
    each = 32 + LINE * max(name.count("\n") for name in names)
    figure, axes = _plot(each * len(rows) + 46, 18, 22, xlim=(low, high), ylim=(len(rows) - 0.7, -1), yticks=[])
    axes.spines[:].set_visible(False)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 3) if high / low < 1e3 else (1,)))
    for i, (name, three) in enumerate(zip(names, numbers, strict=True)):
        places = [max(kl, low) if math.isfinite(kl) else high for kl in three]
        axes.plot(places, [i] * 3, linewidth=2, alpha=0.45)
        _note(axes, name, 0, i, (0, 8))
        for kl, place, (mark, marker, look, column) in zip(three, places, MARKS, strict=True):
            axes.plot(place, i, marker, label=None if i else mark, clip_on=False, **look)
            _note(axes, spell_kl(kl), column, i, (0, 8), ha="right")
    axes.legend(ncols=3, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0)
    return _svg(figure, "Mean KL, and its 99th and 99.9th percentile")


def _plot(height: float, left: float, bottom: float, **settings: Any) -> tuple[Figure, Axes]:
    """A plot over bits or KL, with margins in pixels."""
    figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72)
    frame = (left / WIDTH, bottom / height, 1 - (left + 12) / WIDTH, 1 - (bottom + 24) / height)
    axes = figure.add_axes(frame, xscale="log", **settings)
    axes.minorticks_off()
    axes.xaxis.set_major_formatter("{x:g}")
    return figure, axes


def _note(axes: Axes, text: str, x: float, y: float, distance: tuple[float, float], **look: Any) -> Any:
    """Text near a place: `x` is a share of the width, `y` a number of the axis."""
    return axes.annotate(text, (x, y), distance, axes.get_yaxis_transform(), "offset points", **look)


def _folded(name: str) -> str:
    """Lines of at most 24 characters. They break after a colon or a comma if there is one."""
    lines = textwrap.fill(re.sub("([:,])", r"\1 ", name), NAME, break_on_hyphens=False)
    return re.sub("([:,]) ", r"\1", lines)


def _svg(figure: Figure, label: str) -> str:
    stream, nothing = StringIO(), dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(stream, format="svg", transparent=True, metadata=nothing)
    svg = re.sub(r' id="[\w.]+_\d+"', "", stream.getvalue())  # matplotlib's names of parts, alike in every plot
    for colour, variable in COLOURS.items():
        svg = svg.replace(colour, variable)
    return svg[svg.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
