"""The drawings of the HTML page, as SVG without scripts. Their colours are classes of the page's style.

They are drawn for a phone: letters of 11 pixels in 360. Wider screens enlarge them.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise, product
from typing import NamedTuple

from kvfold.evaluate.report import LayerBits, spell_kl
from kvfold.fitting_table import broken_name

WIDTH, LINE, LETTER = 360, 13, 6.3  # pixels: of a drawing, of a line of text, and of a letter
LEFT, RIGHT, TOP, BOTTOM = 42, 352, 26, 276  # the frame of the Pareto plot
COLUMNS, SHAPES = (216, 284, RIGHT), ("mean", "most", "tail")  # of the tails
BIT_TICKS = (1, 2, 3, 4, 6, 8, 12, 16)

# Where a label may stand, as distances from its point; near ones first.
PLACES = [
    (distance * math.cos(math.radians(angle)), distance * math.sin(math.radians(angle)))
    for distance, angle in product(
        (9, 18, 28, 42, 60, 84, 112), (0, 180, -25, -155, 25, 155, -50, -130, 50, 130, -75, -105, 75, 105)
    )
]


@dataclass(frozen=True)
class Point:
    """A recipe in the Pareto plot. A KL of 0 stands at the foot, one that is not finite at the top."""

    name: str
    bits: float
    kl: float
    reference: bool = False
    bad_example: bool = False


class Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: "Box") -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


def frontier(points: Sequence[Point]) -> list[Point]:
    """Points that no other beats in both bits and KL, from few bits to many. A bad example is none of them."""
    best = math.inf
    kept = []
    finite = [point for point in points if math.isfinite(point.kl) and not point.bad_example]
    for point in sorted(finite, key=lambda point: (point.bits, point.kl)):
        if point.kl < best:
            kept.append(point)
            best = point.kl
    return kept


def fits_in(points: Sequence[Point], kl: float) -> bool:
    """Whether a line at this KL would not squeeze the points together."""
    return kl > min((point.kl for point in points if point.kl > 0), default=0.0) / 1000


def pareto(points: Sequence[Point], line: tuple[str, float] | None, counted_at: str) -> str:
    """KL against bits, both logarithmic. `line` is the name and the KL of a dashed line, if there is one."""
    measured = [point.kl for point in points if 0 < point.kl < math.inf]
    lowest = min(measured, default=1e-3)
    numbers = [*measured, line[1]] if line else measured or [lowest]
    y = _Scale(min(numbers) / (3 if line else 10), 2 * max(numbers), BOTTOM, TOP)
    x = _Scale(min(point.bits for point in points) / 1.25, max(point.bits for point in points) * 1.2, LEFT, RIGHT)
    at = [
        (x(point.bits), TOP if not math.isfinite(point.kl) else y(point.kl) if point.kl > 0 else BOTTOM)
        for point in points
    ]
    parts = [f'<path class="grid" d="M{LEFT} {y(tick):.1f}H{RIGHT}"/>' for tick in y.ticks]
    parts += [_text(LEFT - 6, y(tick) + 4, _tick(tick), "end") for tick in y.ticks]
    shown = [tick for tick in BIT_TICKS if LEFT <= x(tick) <= RIGHT]
    parts += [f'<path class="grid" d="M{x(tick):.1f} {TOP}V{BOTTOM}"/>' for tick in shown]
    parts += [_text(x(tick), BOTTOM + 16, str(tick), "middle") for tick in shown]
    parts.append(_text((LEFT + RIGHT) / 2, BOTTOM + 33, f"bits per number at {counted_at} tokens", "middle"))
    axis = "KL divergence from the 16-bit cache"
    parts.append(_text(4, TOP - 14, axis))
    parts.append(
        f'<rect id="frame" class="frame" x="{LEFT}" y="{TOP}" width="{RIGHT - LEFT}" height="{BOTTOM - TOP}"/>'
    )
    taken = [Box(px - 6, py - 6, px + 6, py + 6) for px, py in at]
    taken.append(Box(4, 0, 4 + LETTER * len(axis), TOP - 10))
    if line:
        name, height = line[0], y(line[1])
        parts.append(f'<path class="line" d="M{LEFT} {height:.1f}H{RIGHT}"/>')
        # below all points there is room at the left, above them at the right
        side, anchor = (LEFT + 4, "start") if line[1] < lowest else (RIGHT - 4, "end")
        parts.append(_text(side, height - 5, name, anchor))
        left = side if anchor == "start" else side - LETTER * len(name)
        taken += [Box(left, height - 16, left + LETTER * len(name), height), Box(LEFT, height, RIGHT, height + 1)]
    best = frontier(points)
    steps = [at[points.index(point)] for point in best]
    for (left, top), (right, bottom) in pairwise(steps):
        parts.append(f'<path class="frontier" d="M{left:.1f} {top:.1f}H{right:.1f}V{bottom:.1f}"/>')
        taken += [Box(left, top - 1, right, top + 1), Box(right - 1, top, right + 1, bottom)]
    for i, (point, place) in enumerate(zip(points, at, strict=True)):
        parts.append(_marker(i, point, place, point in best))
        label = point.name if math.isfinite(point.kl) else f"{point.name} ({point.kl})"
        parts += _label(i, broken_name(label).splitlines(), place, taken)
    label = "KL divergence of every recipe against its bits per number; the table below has the numbers"
    return _svg("pareto", label, BOTTOM + 40, parts)


def tails(recipes: Sequence[tuple[str, tuple[float, float, float]]]) -> str:
    """Per recipe a line from the mean KL over the 99th to the 99.9th percentile. KL that is not finite stands right."""
    numbers = [number for _, three in recipes for number in three if 0 < number < math.inf]
    x = _Scale(min(numbers, default=1e-3) / 1.5, max(numbers, default=1.0) * 1.5, 8, RIGHT)
    height, rows = 36.0, []
    for column, shape, name in zip(COLUMNS, SHAPES, ("mean", "99 %", "99.9 %"), strict=True):
        rows += [_shape(shape, column - 7 * len(name) - 12, 6), _text(column, 10, name, "end")]
    for i, (name, three) in enumerate(recipes):
        lines = broken_name(name).splitlines()
        rows += [_text(8, height + LINE * n, line, colour="ink") for n, line in enumerate(lines)]
        rows += [_text(column, height, spell_kl(kl), "end", "ink") for column, kl in zip(COLUMNS, three, strict=True)]
        height += LINE * (len(lines) - 1) + 14
        places = [x(kl) if 0 < kl < math.inf else x.begin if kl <= 0 else x.end for kl in three]
        span = f'<path class="span" d="M{places[0]:.1f} {height}H{places[-1]:.1f}"/>'
        marks = "".join(_shape(shape, place, height) for shape, place in zip(SHAPES, places, strict=True))
        rows.append(f'<g id="tail-{i}">{span}{marks}</g>')
        height += 28
    height -= 10
    grid = [f'<path class="grid" d="M{x(tick):.1f} 20V{height}"/>' for tick in x.ticks]
    grid += [_text(x(tick), height + 14, _tick(tick), "middle") for tick in x.ticks if 24 < x(tick) < RIGHT - 16]
    return _svg("tails", "Mean KL, and its 99th and 99.9th percentile", height + 20, [*grid, *rows])


def layer_bits(layers: Sequence[LayerBits], most: int) -> str:
    """A bar per layer: bits of keys upwards, of values downwards. `most` bits fill the height."""
    middle, high, left = 46.0, 40.0, 24.0
    width = (RIGHT - left) / len(layers)
    gap = min(2.0, width / 5)
    bars = []
    for i, layer in enumerate(layers):
        place = f'x="{left + i * width:.2f}" width="{width - gap:.2f}"'
        up, down = (high * bits / most for bits in (layer.keys, layer.values))
        bars.append(
            f"<g><title>layer {layer.layer}: keys {layer.keys:.2f}, values {layer.values:.2f} bits</title>"
            f'<rect class="keys" {place} y="{middle - 1 - up:.2f}" height="{up:.2f}"/>'
            f'<rect class="values" {place} y="{middle + 1:.2f}" height="{down:.2f}"/></g>'
        )
    ends = [_text(left - 5, middle + sign * high + 4, str(most), "end") for sign in (-1, 1)]
    ends += [
        _text(left + width / 2, 104, str(layers[0].layer), "middle"),
        _text(RIGHT - width / 2, 104, str(layers[-1].layer), "middle") if len(layers) > 1 else "",
        _text((left + RIGHT) / 2, 104, "layer", "middle") if len(layers) > 4 else "",
        f'<path class="grid" d="M{left} {middle - high}H{RIGHT}M{left} {middle + high}H{RIGHT}"/>',
    ]
    return _svg(None, "Bits of keys and of values per layer", 108, [*ends, *bars])


class _Scale(NamedTuple):
    """A logarithmic scale from pixel `begin` to pixel `end`."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, number: float) -> float:
        share = math.log(number / self.low) / math.log(self.high / self.low) if number > 0 else -1.0
        return self.begin + share * (self.end - self.begin)

    @property
    def ticks(self) -> list[float]:
        """Powers of ten: three times these as well on short scales, and only some of them on long ones."""
        low, high = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        powers = range(low, high + 1, 1 + (high - low) // 9)
        steps = (1, 3) if high - low < 5 else (1,)
        ticks = [float(f"{step}e{power}") for power in powers for step in steps]
        return [tick for tick in ticks if self.low <= tick <= self.high]


def _tick(number: float) -> str:
    return f"{number:g}" if number >= 0.001 else f"{number:.0e}".replace("e-0", "e-")


def _marker(i: int, point: Point, place: tuple[float, float], best: bool) -> str:
    """A diamond for the reference, a triangle for what is not finite, a full circle on the frontier, else a ring."""
    x, y = place
    if point.reference:
        shape = f'class="ring" d="M{x:.1f} {y - 6:.1f}l6 6l-6 6l-6 -6z"'
    elif not math.isfinite(point.kl):
        shape = f'class="full" d="M{x:.1f} {y - 4:.1f}l5.5 10h-11z"'
    else:
        circle = f"M{x - 4.5:.1f} {y:.1f}a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0z"
        shape = f'class="{"full" if best else "ring"}" d="{circle}"'
    return f'<path id="point-{i}" {shape}/>'


def _label(i: int, lines: list[str], place: tuple[float, float], taken: list[Box]) -> Iterator[str]:
    """Lines of text at the nearest place where they cover nothing, with a line to the point if that is far."""
    (x, y), width, height = place, LETTER * max(map(len, lines)), LINE * len(lines)

    def box(distance: tuple[float, float]) -> Box:
        dx, dy = distance
        left = x + dx - (width if dx < 0 else 0)
        top = y + dy - height * (0.5 if abs(dy) < 1 else float(dy < 0))
        return Box(left, top, left + width, top + height)

    def faults(distance: tuple[float, float]) -> tuple[bool, int]:
        there = box(distance)
        outside = there.left < LEFT or there.right > RIGHT or there.top < 0 or there.bottom > BOTTOM
        return outside, sum(map(there.meets, taken))

    dx, dy = best = min(PLACES, key=faults)
    there = box(best)
    taken.append(there)
    if math.hypot(dx, dy) > 20:
        yield f'<path class="leader" d="M{x:.1f} {y:.1f}l{dx:.1f} {dy:.1f}"/>'
    anchor, side = ("end", there.right) if dx < 0 else ("start", there.left)
    texts = "".join(_text(side, there.top + 10 + LINE * n, line, anchor, "ink") for n, line in enumerate(lines))
    yield f'<g id="label-{i}">{texts}</g>'


def _shape(shape: str, x: float, y: float) -> str:
    if shape == "mean":
        return f'<circle class="ring" cx="{x:.1f}" cy="{y}" r="4"/>'
    if shape == "most":
        return f'<path class="full" d="M{x:.1f} {y - 5}l5 5l-5 5l-5 -5z"/>'
    return f'<circle class="full" cx="{x:.1f}" cy="{y}" r="4.5"/>'


def _text(x: float, y: float, words: str, anchor: str = "start", colour: str = "muted") -> str:
    return f'<text class="{colour}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _svg(name: str | None, label: str, height: float, parts: Sequence[str]) -> str:
    named = f' id="{name}"' if name else ""
    body = "\n".join(parts)
    return f'<svg{named} viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{label}">\n{body}\n</svg>'
