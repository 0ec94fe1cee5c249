"""Draws curves and heat maps as inline SVG, and the axes and captions that all pictures share.

Colours are CSS classes (see `page.css`), so that a picture follows the reader's light or dark
scheme; the cells of a heat map are more or less of one. A picture is an HTML figure: caption,
legend with the last values, and the SVG. Nothing needs a script.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from zaya_jax.report.document import FOLDER
from zaya_jax.report.text import escape, number, wrapped

WIDTH, HEIGHT = 460, 230
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 14, 28
FLOOR = HEIGHT - BOTTOM  # where the axis below a picture lies
MOST_TICKS = 5  # of an axis
MOST_NAMED = 6  # ticks with names
MOST_DOTS = 64  # of a stretch of a curve
FAR = 9000.0  # pixels: where values far outside the picture are put
BAD_MARKS = 40
LOG_ABOVE = 40  # positive values whose extremes lie further apart get a logarithmic axis
CELLS, MOST_COLUMNS, MOST_ROWS = 6_000, 120, 64  # of a heat map
SHADES = 12  # of a colour in a heat map


@dataclasses.dataclass
class Curve:
    """One curve: its points as (step, value), NaN breaking it; `look` is line, raw or dots."""

    label: str
    points: Sequence[tuple[float, float]]
    color: int = 0
    look: str = "line"
    band: Sequence[tuple[float, float, float]] = ()  # (step, low, high)
    dashed: bool = False  # for more curves than there are colours

    @property
    def drawn(self) -> list[tuple[float, float]]:
        """All finite points, those of the band's edges too."""
        points = [*self.points]
        for step, low, high in self.band:
            points += [(step, low), (step, high)]
        return [point for point in points if all(map(math.isfinite, point))]

    def after(self, step: float) -> "Curve":
        """The curve from a step on."""
        points = [point for point in self.points if point[0] >= step]
        band = [point for point in self.band if point[0] >= step]
        return dataclasses.replace(self, points=points, band=band)

    @property
    def classes(self) -> str:
        """Its CSS classes."""
        dash = " dash1" if self.dashed else ""
        return f"{self.look}{dash} c{self.color}"

    @property
    def swatch(self) -> str:
        """Its key in a legend."""
        return f'<i class="key {self.classes}"></i>'


def thinned[T](items: Sequence[T], most: int) -> Sequence[T]:
    """At most `most` of them, evenly spaced, with the first."""
    return items[:: max(1, math.ceil(len(items) / most))]


def ticks(low: float, high: float) -> list[float]:
    """A few round numbers between low and high."""
    power = 10.0 ** math.floor(math.log10((high - low) / (MOST_TICKS - 1)))
    for factor in (1, 2, 2.5, 5, 10):
        step = factor * power
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first < MOST_TICKS:
            break
    return [i * step for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten between low and high; within a decade also their doubles and fives."""
    first = math.ceil(math.log10(low) - 1e-9)
    last = math.floor(math.log10(high) + 1e-9)
    powers = [10.0**i for i in range(first, last + 1, 1 + max(0, last - first) // 5)]
    if len(powers) > 1:
        return powers
    finer = [factor * 10.0**i for i in range(first - 1, last + 1) for factor in (1, 2, 5)]
    return [tick for tick in finer if low <= tick * 1.000001 and tick <= high * 1.000001]


class Axis:
    """Values to pixels and the ticks between; `log` where all of it is positive."""

    def __init__(self, low: float, high: float, start: float, end: float, log: bool = False):
        if not high - low > 1e-300:  # a single value: a little room around it
            room = abs(low) * 0.1 or 1.0
            low, high = low - room, high + room
        self.low, self.high, self.start, self.end, self.log = low, high, start, end, log
        self.ticks = log_ticks(low, high) if log else ticks(low, high)

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log10(value), math.log10(low), math.log10(high)
        pixel = self.start + (value - low) / (high - low) * (self.end - self.start)
        return min(FAR, max(-FAR, pixel))


def value_axis(y: Axis, unit: str, width: float = WIDTH) -> str:
    """The vertical axis: values and grid lines."""
    parts = []
    for tick in y.ticks:
        parts.append(f'<path class="grid" d="M{LEFT} {y(tick):.1f}H{width - RIGHT:g}"/>')
        place = f'x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end"'
        parts.append(f"<text {place}>{number(tick, 6)}{unit}</text>")
    return "".join(parts)


def lower_axis(x: Axis, bottom: float, name: str, named: Sequence[tuple[float, str]] = ()) -> str:
    """The axis below a picture, with these ticks, otherwise with whole numbers."""
    if not named:
        # Further to the left a tick would run into the axis' name.
        whole = [tick for tick in x.ticks if tick == int(tick) >= 0 and x(tick) > x.start + 16]
        named = [(tick, number(tick, 6)) for tick in whole or [x.low]]
    parts = [
        f'<path class="axis" d="M{x.start} {bottom}H{x.end}"/>',
        f'<text x="{x.start - 6}" y="{bottom + 20}" text-anchor="end">{escape(name)}</text>',
    ]
    for tick, label in named:
        anchor = "end" if x(tick) > x.end - 14 else "middle"
        parts.append(f'<path class="axis" d="M{x(tick):.1f} {bottom}v4"/>')
        place = f'x="{x(tick):.1f}" y="{bottom + 20}" text-anchor="{anchor}"'
        parts.append(f"<text {place}>{escape(label)}</text>")
    return "".join(parts)


def figure(
    title: str,
    legend: str,
    drawn: str,
    height: float = HEIGHT,
    *,
    note: str = "",
    width: float = WIDTH,
) -> str:
    """A picture with its caption, the entries of its legend and a sentence below."""
    box = f'viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title)}"'
    caption = f"<figcaption>{escape(title)}</figcaption>"
    entries = wrapped('<ul class="legend">', legend, "</ul>")
    below = wrapped('<p class="note">', escape(note), "</p>")
    return f"<figure>{caption}{entries}<svg {box}>{drawn}</svg>{below}</figure>\n"


def standalone(drawn: str) -> str:
    """The picture of a figure as a file of its own: light or dark as the reader has it."""
    svg = drawn[drawn.index("<svg") : drawn.rindex("</svg>")]
    head, rest = svg.split(">", 1)
    head = head.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    look = 'style="font-family: system-ui, sans-serif; background: var(--card)"'
    sheet = (FOLDER / "page.css").read_text("utf-8")
    return f"{head} {look}><style>{sheet}</style>{rest}</svg>\n"


def _stretches(points: Sequence[tuple[float, ...]]) -> list[list[tuple[float, ...]]]:
    """The points between those that are not finite."""
    groups = itertools.groupby(points, lambda point: all(map(math.isfinite, point)))
    return [list(stretch) for finite, stretch in groups if finite]


def _curve(line: Curve, x: Axis, y: Axis) -> str:
    """One curve, with its band."""
    drawn = ""
    for stretch in _stretches(line.band):
        edge = [f"{x(step):.1f},{y(high):.1f}" for step, _, high in stretch]
        edge += [f"{x(step):.1f},{y(low):.1f}" for step, low, _ in reversed(stretch)]
        drawn += f'<polygon class="band c{line.color}" points="{" ".join(edge)}"/>'
    for stretch in _stretches(line.points):
        places = [f"{x(step):.1f},{y(value):.1f}" for step, value in stretch]
        # The first one twice: a line that goes nowhere is a dot.
        joined = " ".join([places[0], *places])
        drawn += f'<polyline class="{line.classes}" points="{joined}"/>'
        if line.look == "dots" and len(stretch) <= MOST_DOTS:
            for step, value in stretch:
                about = f"{escape(line.label)} at step {number(round(step))}: {number(value)}"
                place = f'cx="{x(step):.1f}" cy="{y(value):.1f}" r="3.2"'
                circle = f'<circle class="dot c{line.color}" {place}>'
                drawn += f"{circle}<title>{about}</title></circle>"
    return drawn


@dataclasses.dataclass
class Chart:
    """Curves over steps, or over the axis that `over` names.

    Values far from all others are left out and named below; positive ones whose extremes lie far
    apart get a logarithmic axis, unless it begins at zero.
    """

    title: str
    lines: Sequence[Curve]
    x_range: tuple[float, float] | None = None  # None: of the points
    zero: bool = False
    keep: Sequence[float] = ()  # values that are in the picture in any case
    log_x: bool = False
    unit: str = ""
    over: str = "step"
    # ticks of the lower axis, where they are not round numbers
    named: Sequence[tuple[float, str]] = ()
    bad_steps: Sequence[float] = ()  # some are marked along the top, with the first
    bad: str = "not finite"
    note: str = ""

    def draw(self) -> str:
        """The figure."""
        steps = [step for line in self.lines for step, _ in line.points if math.isfinite(step)]
        x_range = self.x_range or (min(steps, default=0.0), max(steps, default=0.0))
        x = Axis(*x_range, LEFT, WIDTH - RIGHT, self.log_x)
        low, high, log = self._range()
        y = Axis(low, high, FLOOR, TOP, log)
        # Curves are cut off at the edges of the picture, axes are not.
        left, top, wide, height = LEFT, TOP - 4, WIDTH - RIGHT - LEFT + 8, FLOOR - TOP + 5
        place = f'x="{left}" y="{top}" width="{wide}" height="{height}"'
        window = f'<svg {place} viewBox="{left} {top} {wide} {height}">'
        curves = "".join(_curve(line, x, y) for line in self.lines)
        bad_steps = thinned(self.bad_steps, BAD_MARKS)
        marks = "".join(_bad_mark(x(step), step, self.bad) for step in bad_steps)
        axes = value_axis(y, self.unit)
        axes += lower_axis(x, FLOOR, self.over, thinned(self.named, MOST_NAMED))
        legend = "".join(map(self._legend, self.lines))
        if self.bad_steps:
            legend += f'<li><i class="key bad">✕</i>{escape(self.bad)}</li>'
        note = f"{self.note} {self._beyond(y)}".strip()
        return figure(self.title, legend, f"{axes}{window}{curves}</svg>{marks}", note=note)

    def _range(self) -> tuple[float, float, bool]:
        """From where to where the values' axis goes, and whether it is logarithmic."""
        rising = sorted(value for line in self.lines for _, value in line.drawn)
        if not rising:
            return 0.0, 1.0, False
        low, high, ends = rising[0], rising[-1], len(rising) // 50
        if low > 0 and high > LOG_ABOVE * low and not self.zero and not self.keep:
            return low, high, True
        usual_low, usual_high = rising[ends], rising[-1 - ends]
        spread = max(usual_high - usual_low, 0.02 * max(abs(usual_low), abs(usual_high)))
        if high > usual_high + 2 * spread:
            high = usual_high + 0.5 * spread
        if low < usual_low - 2 * spread:
            low = usual_low - 0.5 * spread
        low, high = min([low, *self.keep]), max([high, *self.keep])
        room = 0.04 * (high - low)
        if self.zero and low >= 0:
            return 0.0, (high + room) or 1.0, False
        return low - room, high + room, False

    def _legend(self, line: Curve) -> str:
        last = "–"
        for _, value in line.points:
            if math.isfinite(value):
                last = f"{number(value)}{self.unit}"
        return f"<li>{line.swatch}{escape(line.label)} <b>{last}</b></li>"

    def _beyond(self, y: Axis) -> str:
        """Names the curves with values that the picture leaves out, each with the furthest."""
        curves = []
        for line in self.lines:
            outside = [point for point in line.drawn if not y.low <= point[1] <= y.high]
            if outside:
                step, value = max(outside, key=lambda point: abs(point[1]))
                place = f"{self.over} {number(round(step))}"
                curves.append(f"{line.label} ({number(value)}{self.unit} at {place})")
        return wrapped("Beyond the picture: ", ", ".join(curves), ".")


def _bad_mark(px: float, step: float, what: str) -> str:
    note = f"<title>{escape(what)} at step {number(round(step))}</title>"
    return (
        f'<g class="bad">{note}<path class="rule" d="M{px:.1f} {TOP - 2}V{FLOOR}"/>'
        f'<path d="M{px - 4:.1f} {TOP - 10}l8 8m0 -8l-8 8"/></g>'
    )


def columns(rows: int) -> int:
    """How many columns a picture of so many rows may have."""
    return max(4, min(MOST_COLUMNS, CELLS // rows))


def grouped(count: int) -> tuple[list[int], list[str]]:
    """(where groups of equal size begin, their names): as many as a picture may have rows."""
    size = math.ceil(count / MOST_ROWS)
    starts = list(range(0, count, size))
    names = []
    for start in starts:
        end = min(start + size, count) - 1
        names.append(f"{start}–{end}" if end > start else f"{start}")
    return starts, names


@dataclasses.dataclass
class HeatMap:
    """Cells [row, column], each reaching half-way to the next; rows without names have their
    numbers.

    A scale from below zero to above it has two colours, more of each away from zero; any other
    one, from its first value to its second. Neighbouring cells of one shade are one rectangle and
    all rectangles of a shade one path: forty layers stay small.
    """

    title: str
    steps: Sequence[float]
    cells: np.ndarray
    scale: tuple[float, float]
    x_range: tuple[float, float]
    ends: tuple[str, str]
    note: str = ""
    names: Sequence[str] = ()
    over: str = "step"

    def draw(self) -> str:
        """The figure."""
        names = self.names or [str(row) for row in range(len(self.cells))]
        size = min(24.0, max(4.0, (HEIGHT - BOTTOM - TOP) / len(names)))
        tops = [TOP + size * row for row in range(len(names))]
        bottom = tops[-1] + size
        x = Axis(*self.x_range, LEFT, WIDTH - RIGHT)
        middles = [(x(step) + x(after)) / 2 for step, after in itertools.pairwise(self.steps)]
        edges = [round(edge, 1) for edge in (x.start, *middles, x.end)]
        drawn = f'<g class="cells">{self._rectangles(edges, tops, size)}</g>'
        every = math.ceil(14 / size)  # low rows: not all names have room; a phone's are larger
        for name, top in list(zip(names, tops, strict=True))[::every]:
            place = f'x="{LEFT - 6}" y="{top + size / 2 + 4:.1f}" text-anchor="end"'
            drawn += f"<text {place}>{escape(name)}</text>"
        drawn += lower_axis(x, bottom, self.over)
        low, high = map(escape, self.ends)
        ramp = '<i class="ramp c3"></i>'
        if self.signed:
            ramp = '<i class="ramp below c0"></i><i class="ramp c1"></i>'
        legend = f"<li>{low} {ramp} {high}</li>"
        return figure(self.title, legend, drawn, bottom + BOTTOM, note=self.note)

    @property
    def signed(self) -> bool:
        """Whether the scale goes from below zero to above it."""
        return self.scale[0] < 0 < self.scale[1]

    def _shades(self) -> np.ndarray:
        """Each cell's whole number, from -SHADES on a signed scale, otherwise from 0, to SHADES."""
        low, high = self.scale
        if self.signed:
            part = np.clip(self.cells / max(-low, high), -1, 1)
        else:
            part = np.clip((self.cells - low) / ((high - low) or 1.0), 0, 1)
        return np.rint(SHADES * part)

    def _rectangles(self, edges: Sequence[float], tops: Sequence[float], size: float) -> str:
        """Neighbouring cells of one shade; NaN leaves a hole."""
        paths: dict[float, str] = {}
        height = f"{size - 1 if size > 8 else size:.4g}"  # high rows have a gap between them
        for row, top in zip(self._shades().tolist(), tops, strict=True):
            cells = zip(row, edges[:-1], edges[1:], strict=True)
            for shade, neighbours in itertools.groupby(cells, lambda cell: cell[0]):
                if math.isfinite(shade):
                    spans = list(neighbours)
                    left, right = spans[0][1], spans[-1][2]
                    wide = f"{right - left:.4g}"
                    rectangle = f"M{left:g} {top:.4g}h{wide}v{height}h-{wide}z"
                    paths[shade] = paths.get(shade, "") + rectangle
        drawn = ""
        for shade, path in sorted(paths.items()):
            color = 3
            if self.signed:
                color = {-1: 0, 0: 7, 1: 1}[int(np.sign(shade))]  # grey where neither
            opacity = 0.06 + 0.94 * abs(shade) / SHADES
            drawn += f'<path class="c{color}" opacity="{opacity:.2f}" d="{path}"/>'
        return drawn
