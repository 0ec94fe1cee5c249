"""Draws curves and heat maps as inline SVG, and the axes and captions that all pictures share.

Colours are CSS classes (see `style`), so that a picture follows the reader's light or dark scheme.
A picture is an HTML figure: caption, legend with the last values, and the SVG with a description
for screen readers. Nothing needs a script.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from zaya_jax.report.style import LEVELS, style_sheet
from zaya_jax.report.text import escape, exponent, number, wrapped

WIDTH, HEIGHT = 460, 230
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 14, 28
FLOOR = HEIGHT - BOTTOM  # where the axis below a picture lies
MOST_TICKS = 5  # of an axis
MOST_NAMED = 6  # ticks with names
MOST_LABELS = 7  # of one curve
LABEL_ROOM = (46, 15)  # pixels between two labels, to the side and up
FAR = 9000.0  # pixels: where values far outside the picture are put
CELLS, MOST_COLUMNS, MOST_ROWS = 6_000, 120, 64  # of a heat map


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
    def finite(self) -> list[float]:
        """The values that can be drawn."""
        return [value for _, value in self.points if math.isfinite(value)]

    @property
    def drawn(self) -> list[tuple[float, float]]:
        """All finite points, those of the band's edges too."""
        points = [*self.points]
        for step, low, high in self.band:
            points += [(step, low), (step, high)]
        return [point for point in points if math.isfinite(point[1])]

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
    if not high > low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / (MOST_TICKS - 1)))
    for factor in (1, 2, 2.5, 5, 10, 20):
        step = factor * power
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 <= MOST_TICKS:
            return [i * step for i in range(first, last + 1)]
    return [low, high]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten between low and high; within a decade also their doubles and fives."""
    first = math.ceil(math.log10(low) - 1e-9)
    last = math.floor(math.log10(high) + 1e-9)
    powers = [10.0**i for i in range(first, last + 1, 1 + max(0, last - first) // 5)]
    if len(powers) > 1:
        return powers
    finer = [factor * 10.0**i for i in range(first - 1, last + 1) for factor in (1, 2, 5)]
    return [tick for tick in finer if low <= tick * 1.000001 and tick <= high * 1.000001]


def _tick_labels(values: Sequence[float]) -> list[str]:
    if 0 < max((abs(value) for value in values), default=0.0) < 0.005:
        return [exponent(f"{value:.2e}") if value else "0" for value in values]
    labels = [number(value, 6) for value in values]
    if any("e" in label or label[-1:].isalpha() for label in labels):
        return labels
    # The same number of digits behind the point for all.
    places = max((len(label.partition(".")[2]) for label in labels), default=0)
    return [f"{value:.{places}f}".replace("-", "−") for value in values]


class Axis:
    """Values to pixels and the ticks between; `log` where all of it is positive."""

    def __init__(self, low: float, high: float, start: float, end: float, log: bool = False):
        if not high - low > 1e-300:  # a single value: a little room around it
            if log:
                low, high = low / 1.5, low * 1.5
            else:
                room = abs(low) * 0.1 or 1.0
                low, high = low - room, high + room
        self.low, self.high, self.start, self.end, self.log = low, high, start, end, log
        self.ticks = log_ticks(low, high) if log else ticks(low, high)

    def __call__(self, value: float) -> float:
        low = self._scaled(self.low)
        part = (self._scaled(value) - low) / (self._scaled(self.high) - low)
        return min(FAR, max(-FAR, self.start + part * (self.end - self.start)))

    def _scaled(self, value: float) -> float:
        if not self.log:
            return value
        return math.log10(value) if value > 0 else -400.0


def value_axis(y: Axis, unit: str, width: float = WIDTH) -> str:
    """The vertical axis: values and grid lines."""
    parts = []
    for tick, label in zip(y.ticks, _tick_labels(y.ticks), strict=True):
        parts.append(f'<path class="grid" d="M{LEFT} {y(tick):.1f}H{width - RIGHT:g}"/>')
        place = f'x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end"'
        parts.append(f"<text {place}>{label}{unit}</text>")
    return "".join(parts)


def lower_axis(x: Axis, bottom: float, name: str, named: Sequence[tuple[float, str]] = ()) -> str:
    """The axis below a picture, with these ticks, otherwise with whole numbers."""
    if not named:
        # Further to the left a tick would run into the axis' name.
        whole = [tick for tick in x.ticks if tick == int(tick) >= 0 and x(tick) > x.start + 16]
        whole = whole or [x.low]
        named = list(zip(whole, _tick_labels(whole), strict=True))
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
    describe: str,
    note: str,
    width: float = WIDTH,
) -> str:
    """A picture with its caption, the entries of its legend and a sentence below."""
    label = escape(f"{title}. {describe}")
    svg = f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{label}">{drawn}</svg>'
    caption = f"<figcaption>{escape(title)}</figcaption>"
    entries = wrapped('<ul class="legend">', legend, "</ul>")
    below = wrapped('<p class="note">', escape(note), "</p>")
    return f"<figure>{caption}{entries}{svg}{below}</figure>\n"


def standalone(drawn: str) -> str:
    """The picture of a figure as a file of its own: light or dark as the reader has it."""
    svg = drawn[drawn.index("<svg") : drawn.rindex("</svg>")]
    head, rest = svg.split(">", 1)
    head = head.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    look = 'style="font-family: system-ui, sans-serif; background: var(--card)"'
    return f"{head} {look}><style>{style_sheet()}</style>{rest}</svg>\n"


def _unbroken(points: Sequence[tuple[float, ...]]) -> list[list[tuple[float, ...]]]:
    """The stretches between points that are not finite."""
    stretches: list[list[tuple[float, ...]]] = [[]]
    for point in points:
        if all(map(math.isfinite, point)):
            stretches[-1].append(point)
        elif stretches[-1]:
            stretches.append([])
    return [stretch for stretch in stretches if stretch]


def draw(line: Curve, x: Axis, y: Axis) -> str:
    """One curve, with its band."""
    parts = []
    for stretch in _unbroken(line.band):
        if len(stretch) > 1:
            edge = [f"{x(step):.1f},{y(high):.1f}" for step, _, high in stretch]
            edge += [f"{x(step):.1f},{y(low):.1f}" for step, low, _ in reversed(stretch)]
            parts.append(f'<polygon class="band c{line.color}" points="{" ".join(edge)}"/>')
    for stretch in _unbroken(line.points):
        if len(stretch) == 1 and line.look != "dots":
            place = f'cx="{x(stretch[0][0]):.1f}" cy="{y(stretch[0][1]):.1f}"'
            parts.append(f'<circle class="alone c{line.color}" {place} r="2"/>')
        else:
            joined = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in stretch)
            parts.append(f'<polyline class="{line.classes}" points="{joined}"/>')
        if line.look == "dots" and len(stretch) <= 64:
            for step, value in stretch:
                about = f"{escape(line.label)} at step {number(round(step))}: {number(value)}"
                place = f'cx="{x(step):.1f}" cy="{y(value):.1f}" r="3.2"'
                circle = f'<circle class="dot c{line.color}" {place}>'
                parts.append(f"{circle}<title>{about}</title></circle>")
    return "".join(parts)


def _point_labels(line: Curve, x: Axis, y: Axis) -> str:
    """Values next to points: the last, the lowest, and others if there is room."""
    shown = [point for point in line.points if y.low <= point[1] <= y.high]
    if not shown:
        return ""
    wide, high = LABEL_ROOM
    taken: list[tuple[float, float]] = []
    parts = []
    for step, value in [shown[-1], min(shown, key=lambda point: point[1]), *reversed(shown)]:
        px, py = min(max(x(step), LEFT + 26.0), WIDTH - RIGHT - 16.0), y(value)
        py += -8 if py > TOP + 14 else 16  # above the point, near the picture's top below it
        free = all(abs(px - qx) >= wide or abs(py - qy) >= high for qx, qy in taken)
        if free and len(taken) < MOST_LABELS:
            taken.append((px, py))
            place = f'x="{px:.1f}" y="{py:.1f}" text-anchor="middle"'
            parts.append(f'<text class="value" {place}>{number(value)}</text>')
    return "".join(parts)


@dataclasses.dataclass
class Chart:
    """Curves over steps, or over the axis that `over` names."""

    title: str
    lines: Sequence[Curve]
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    log: bool = False
    log_x: bool = False
    unit: str = ""
    over: str = "step"
    # ticks of the lower axis, where they are not round numbers
    named: Sequence[tuple[float, str]] = ()
    bad_steps: Sequence[float] = ()  # marked along the top
    bad: str = "not finite"
    note: str = ""

    def draw(self) -> str:
        """The figure."""
        x = Axis(*self.x_range, LEFT, WIDTH - RIGHT, self.log_x)
        y = Axis(*self.y_range, FLOOR, TOP, self.log)
        labels, dotted = "", [line for line in self.lines if line.look == "dots"]
        if len(dotted) == 1:  # labels of several dotted curves would overlap
            labels = _point_labels(dotted[0], x, y)
        # Curves are cut off at the edges of the picture, axes and labels are not.
        left, top, wide, high = LEFT, TOP - 4, WIDTH - RIGHT - LEFT + 8, FLOOR - TOP + 5
        place = f'x="{left}" y="{top}" width="{wide}" height="{high}"'
        window = f'<svg {place} viewBox="{left} {top} {wide} {high}">'
        curves = "".join(draw(line, x, y) for line in self.lines)
        marks = "".join(_bad_mark(x(step), step, self.bad) for step in self.bad_steps)
        axes = value_axis(y, self.unit)
        axes += lower_axis(x, FLOOR, self.over, thinned(self.named, MOST_NAMED))
        legend = "".join(map(self._legend, self.lines))
        if self.bad_steps:
            legend += f'<li><i class="key bad">✕</i>{escape(self.bad)}</li>'
        return figure(
            self.title,
            legend,
            f"{axes}{window}{curves}</svg>{labels}{marks}",
            describe=" ".join(map(self._words, self.lines)),
            note=f"{self.note} {self._beyond(y)}".strip(),
        )

    def _legend(self, line: Curve) -> str:
        last = f"{number(line.finite[-1])}{self.unit}" if line.finite else "–"
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

    def _words(self, line: Curve) -> str:
        """A curve for those who do not see it."""
        values = line.finite
        if not values:
            return f"{line.label}: no finite value."
        low, high, last = (
            f"{number(value)}{self.unit}" for value in (min(values), max(values), values[-1])
        )
        return f"{line.label}: last {last}, between {low} and {high}."


def _bad_mark(px: float, step: float, what: str) -> str:
    note = f"<title>{escape(what)} at step {number(round(step))}</title>"
    return (
        f'<g class="bad">{note}<path class="rule" d="M{px:.1f} {TOP - 2}V{FLOOR}"/>'
        f'<path d="M{px - 4:.1f} {TOP - 10}l8 8m0 -8l-8 8"/></g>'
    )


@dataclasses.dataclass
class Scale:
    """The colours: the values at their ends; `log` for ratios."""

    low: float
    high: float
    name: str = "s"  # s: sequential, r: the same reversed, d: diverging
    log: bool = False

    def color(self, value: float) -> str:
        """The colour's class; "" where there is no value."""
        if not math.isfinite(value):
            return ""
        low, high, part = self.low, self.high, 0.5
        if self.log:
            value, low, high = math.log2(max(value, 1e-9)), math.log2(low), math.log2(high)
        if high > low:
            part = (value - low) / (high - low)
        return f"{self.name}{min(LEVELS - 1, max(0, int(part * LEVELS)))}"

    @classmethod
    def between(cls, values: Iterable[float]) -> "Scale":
        """From the least value to the greatest; one value alone lies on a scale from zero, zero on
        one up to 1."""
        finite = [value for value in values if math.isfinite(value)] or [0.0]
        low, high = min(finite), max(finite)
        if low == high:
            low, high = min(low, 0.0), max(high, 0.0)
        return cls(low, high if high > low else 1.0)


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

    Neighbouring cells of one colour are one rectangle and all rectangles of a colour one path:
    forty layers stay small.
    """

    title: str
    steps: Sequence[float]
    cells: np.ndarray
    scale: Scale
    x_range: tuple[float, float]
    row_name: str
    ends: tuple[str, str]
    note: str = ""
    names: Sequence[str] = ()
    column_name: str = "step"

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
        drawn += lower_axis(x, bottom, self.column_name)
        swatches = "".join(f'<i class="{self.scale.name}{level}"></i>' for level in range(LEVELS))
        low, high = self.ends
        ramp = f'<span class="ramp">{swatches}</span>'
        return figure(
            self.title,
            f"<li>{escape(low)}{ramp}{escape(high)}</li>",
            drawn,
            bottom + BOTTOM,
            describe=f"Colours by {self.row_name} and {self.column_name}, from {low} to {high}.",
            note=self.note,
        )

    def _rectangles(self, edges: Sequence[float], tops: Sequence[float], size: float) -> str:
        """Neighbouring cells of one colour; NaN leaves a hole."""
        paths: dict[str, str] = {}
        height = f"{size - 1 if size > 8 else size:.4g}"  # high rows have a gap between them
        for row, top in zip(self.cells.tolist(), tops, strict=True):
            cells = zip(map(self.scale.color, row), edges[:-1], edges[1:], strict=True)
            for color, neighbours in itertools.groupby(cells, lambda cell: cell[0]):
                if color:
                    spans = list(neighbours)
                    left, right = spans[0][1], spans[-1][2]
                    wide = f"{right - left:.4g}"
                    rectangle = f"M{left:g} {top:.4g}h{wide}v{height}h-{wide}z"
                    paths[color] = paths.get(color, "") + rectangle
        return "".join(f'<path class="{color}" d="{d}"/>' for color, d in sorted(paths.items()))
