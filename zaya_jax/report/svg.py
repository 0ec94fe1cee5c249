"""Draws curves and heat maps as inline SVG; also the axes and captions that all pictures share.

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
from zaya_jax.report.text import escape, exponent, number

WIDTH, HEIGHT = 460, 230
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 14, 28
FLOOR = HEIGHT - BOTTOM  # where the axis below a picture lies
MOST_LABELS = 7  # of one curve
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
    dash: int = 0  # for more curves than there are colours

    @property
    def classes(self) -> str:
        """How it looks."""
        return self.look + (f" dash{self.dash}" if self.dash else "") + f" c{self.color}"

    @property
    def swatch(self) -> str:
        """Its key in a legend."""
        return f'<i class="key {self.classes}"></i>'


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers between low and high, at most `most` of them."""
    if not high > low:
        return [low]
    raw = (high - low) / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    for factor in (1, 2, 2.5, 5, 10, 20):
        step = factor * power
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 <= most:
            return [i * step for i in range(first, last + 1)]
    return [low, high]


def _tick_labels(values: Sequence[float]) -> list[str]:
    if 0 < max((abs(v) for v in values), default=0.0) < 0.005:
        return [exponent(f"{v:.2e}") if v else "0" for v in values]
    labels = [number(v, 6) for v in values]
    if not any("e" in label or label[-1:].isalpha() for label in labels):
        places = max((len(label.partition(".")[2]) for label in labels), default=0)
        labels = [f"{v:.{places}f}".replace("-", "−") for v in values]
    return labels


class Axis:
    """Values to pixels and the ticks between; `log` where all of it is positive."""

    def __init__(self, low: float, high: float, start: float, end: float, log: bool = False):
        if not high - low > 1e-300:  # a single value: a little room around it
            room = abs(low) * 0.1 or 1.0
            low, high = (low / 1.5, low * 1.5) if log else (low - room, high + room)
        self.low, self.high, self.start, self.end, self.log = low, high, start, end, log
        self._low, self._high = (math.log10(low), math.log10(high)) if log else (low, high)
        if log:
            first, last = math.ceil(self._low - 1e-9), math.floor(self._high + 1e-9)
            self.ticks = [10.0**i for i in range(first, last + 1, max(1, 1 + (last - first) // 5))]
            if len(self.ticks) < 2:
                self.ticks = [m * 10.0**i for i in range(first - 1, last + 1) for m in (1, 2, 5)]
                self.ticks = [t for t in self.ticks if low <= t * 1.000001 and t <= high * 1.000001]
        else:
            self.ticks = ticks(low, high)

    def __call__(self, value: float) -> float:
        if self.log:
            value = math.log10(value) if value > 0 else -400.0
        part = (value - self._low) / (self._high - self._low)
        return min(FAR, max(-FAR, self.start + part * (self.end - self.start)))


def value_axis(y: Axis, unit: str, width: float = WIDTH) -> str:
    """The vertical axis: values and grid lines."""
    return "".join(
        f'<path class="grid" d="M{LEFT} {y(tick):.1f}H{width - RIGHT:g}"/>'
        f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{label}{unit}</text>'
        for tick, label in zip(y.ticks, _tick_labels(y.ticks), strict=True)
    )


def lower_axis(x: Axis, bottom: float, name: str, named: Sequence[tuple[float, str]] = ()) -> str:
    """The axis below a picture, with these ticks, otherwise with whole numbers."""
    if not named:
        shown = [t for t in x.ticks if t == int(t) and t >= 0 and x(t) > x.start + 16] or [x.low]
        named = list(zip(shown, _tick_labels(shown), strict=True))
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
    note = f'<p class="note">{escape(note)}</p>' if note else ""
    legend = f'<ul class="legend">{legend}</ul>' if legend else ""
    return f"<figure><figcaption>{escape(title)}</figcaption>{legend}{svg}{note}</figure>\n"


def standalone(drawn: str) -> str:
    """The picture of a figure as a file of its own: light or dark as the reader has it."""
    svg = drawn[drawn.index("<svg") : drawn.rindex("</svg>")]
    head, rest = svg.split(">", 1)
    head = head.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    look = 'style="font-family: system-ui, sans-serif; background: var(--card)"'
    return f"{head} {look}><style>{style_sheet()}</style>{rest}</svg>\n"


def _unbroken(points: Sequence[tuple[float, ...]]) -> list[list[tuple[float, ...]]]:
    """The stretches between points that are not finite."""
    runs: list[list[tuple[float, ...]]] = [[]]
    for point in points:
        if all(math.isfinite(v) for v in point):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def draw(line: Curve, x: Axis, y: Axis) -> str:
    """One curve, with its band."""
    parts = []
    for run in _unbroken(line.band):
        if len(run) > 1:
            edge = [f"{x(s):.1f},{y(high):.1f}" for s, _, high in run]
            edge += [f"{x(s):.1f},{y(low):.1f}" for s, low, _ in reversed(run)]
            parts.append(f'<polygon class="band c{line.color}" points="{" ".join(edge)}"/>')
    for run in _unbroken(line.points):
        if len(run) == 1 and line.look != "dots":
            place = f'cx="{x(run[0][0]):.1f}" cy="{y(run[0][1]):.1f}"'
            parts.append(f'<circle class="alone c{line.color}" {place} r="2"/>')
        else:
            joined = " ".join(f"{x(s):.1f},{y(v):.1f}" for s, v in run)
            parts.append(f'<polyline class="{line.classes}" points="{joined}"/>')
        if line.look == "dots" and len(run) <= 64:
            for s, v in run:
                note = (
                    f"<title>{escape(line.label)} at step {number(round(s))}: {number(v)}</title>"
                )
                place = f'cx="{x(s):.1f}" cy="{y(v):.1f}"'
                parts.append(f'<circle class="dot c{line.color}" {place} r="3.2">{note}</circle>')
    return "".join(parts)


def _point_labels(line: Curve, x: Axis, y: Axis) -> str:
    """Values next to points: the last, the lowest, and others if there is room."""
    good = [(s, v) for s, v in line.points if math.isfinite(v) and y.low <= v <= y.high]
    if not good:
        return ""
    taken: list[tuple[float, float]] = []
    parts = []
    for s, v in [good[-1], min(good, key=lambda p: p[1]), *reversed(good)]:
        px, py = min(max(x(s), LEFT + 26.0), WIDTH - RIGHT - 16.0), y(v)
        py += -8 if py > TOP + 14 else 16
        if len(taken) < MOST_LABELS and all(
            abs(px - qx) >= 46 or abs(py - qy) >= 15 for qx, qy in taken
        ):
            taken.append((px, py))
            parts.append(
                f'<text class="value" x="{px:.1f}" y="{py:.1f}" text-anchor="middle">{number(v)}</text>'
            )
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
        drawn = "".join(draw(line, x, y) for line in self.lines)
        dotted = [line for line in self.lines if line.look == "dots"]
        # Labels of several dotted curves would overlap.
        labels = _point_labels(dotted[0], x, y) if len(dotted) == 1 else ""
        box = f"{LEFT} {TOP - 4} {WIDTH - RIGHT - LEFT + 8} {FLOOR - TOP + 5}"
        at = 'x="{}" y="{}" width="{}" height="{}"'.format(*box.split())
        note = " ".join(filter(None, (self.note, self._beyond(y))))
        svg = (
            value_axis(y, self.unit)
            + lower_axis(x, FLOOR, self.over, self.named[:: -(-len(self.named) // 6) or 1])
            + f'<svg {at} viewBox="{box}">{drawn}</svg>{labels}'
            + "".join(_bad_mark(x(step), step, self.bad) for step in self.bad_steps)
        )
        legend = "".join(map(self._legend, self.lines))
        legend += f'<li><i class="key bad">✕</i>{escape(self.bad)}</li>' if self.bad_steps else ""
        return figure(
            self.title, legend, svg, describe=" ".join(map(self._words, self.lines)), note=note
        )

    def _legend(self, line: Curve) -> str:
        last = next((v for _, v in reversed(line.points) if math.isfinite(v)), math.nan)
        text = number(last) + self.unit if math.isfinite(last) else "–"
        return f"<li>{line.swatch}{escape(line.label)} <b>{text}</b></li>"

    def _beyond(self, y: Axis) -> str:
        """Names the curves with values that the picture leaves out, each with the furthest."""
        found = []
        for line in self.lines:
            points = [*line.points, *((step, v) for step, *ends in line.band for v in ends)]
            if out := [
                (step, v) for step, v in points if math.isfinite(v) and not y.low <= v <= y.high
            ]:
                step, value = max(out, key=lambda point: abs(point[1]))
                found.append(
                    f"{line.label} ({number(value)}{self.unit} at {self.over}"
                    f" {number(round(step))})"
                )
        return f"Beyond the picture: {', '.join(found)}." if found else ""

    def _words(self, line: Curve) -> str:
        """A curve for those who do not see it."""
        values = [v for _, v in line.points if math.isfinite(v)]
        if not values:
            return f"{line.label}: no finite value."
        low, high, last = (
            f"{number(v)}{self.unit}" for v in (min(values), max(values), values[-1])
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

    def level(self, value: float) -> int:
        """The colour class of a value."""
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log2(max(value, 1e-9)), math.log2(low), math.log2(high)
        part = (value - low) / (high - low) if high > low else 0.5
        return min(LEVELS - 1, max(0, int(part * LEVELS)))

    @classmethod
    def between(cls, values: Iterable[float]) -> "Scale":
        """From the least value to the greatest; one value alone lies on a scale from zero, zero on
        one up to 1."""
        good = [v for v in values if math.isfinite(v)] or [0.0]
        low, high = min(good), max(good)
        if low == high:
            low, high = min(low, 0.0), max(high, 0.0)
        return cls(low, high if high > low else 1.0)


def columns(rows: int) -> int:
    """How many columns a picture of so many rows may have."""
    return max(4, min(MOST_COLUMNS, CELLS // rows))


def grouped(count: int, most: int = MOST_ROWS) -> tuple[list[int], list[str]]:
    """(where groups of equal size begin, their names) so that there are at most `most` of `count`
    things."""
    size = math.ceil(count / most)
    starts = list(range(0, count, size))
    ends = [min(s + size, count) - 1 for s in starts]
    return starts, [
        f"{s}–{end}" if end > s else str(s) for s, end in zip(starts, ends, strict=True)
    ]


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
        tops = [TOP + size * r for r in range(len(names))]
        bottom = tops[-1] + size
        x = Axis(*self.x_range, LEFT, WIDTH - RIGHT)
        middles = [(x(a) + x(b)) / 2 for a, b in itertools.pairwise(self.steps)]
        edges = [round(v, 1) for v in (x.start, *middles, x.end)]
        stride = math.ceil(14 / size)  # a phone has larger letters
        labels = "".join(
            f'<text x="{LEFT - 6}" y="{tops[r] + size / 2 + 4:.1f}"'
            f' text-anchor="end">{escape(name)}</text>'
            for r, name in enumerate(names)
            if r % stride == 0
        )
        cells = f'<g class="cells">{self._rectangles(edges, tops, size)}</g>'
        swatches = "".join(f'<i class="{self.scale.name}{level}"></i>' for level in range(LEVELS))
        legend = (
            f"<li>{escape(self.ends[0])}<span"
            f' class="ramp">{swatches}</span>{escape(self.ends[1])}</li>'
        )
        drawn = cells + labels + lower_axis(x, bottom, self.column_name)
        words = (
            f"Colours by {self.row_name} and {self.column_name}, from {self.ends[0]} to"
            f" {self.ends[1]}."
        )
        return figure(self.title, legend, drawn, bottom + BOTTOM, describe=words, note=self.note)

    def _rectangles(self, edges: Sequence[float], tops: Sequence[float], size: float) -> str:
        """Neighbouring cells of one colour; NaN leaves a hole."""
        paths: dict[str, list[str]] = {}
        tall = f"{size - 1 if size > 8 else size:.4g}"
        for row, top in zip(self.cells.tolist(), tops, strict=True):
            levels = (self.scale.level(value) if math.isfinite(value) else None for value in row)
            cells = zip(levels, edges[:-1], edges[1:], strict=True)
            for level, group in itertools.groupby(cells, lambda cell: cell[0]):
                spans = list(group)
                if level is not None:
                    start, wide = spans[0][1], f"{spans[-1][2] - spans[0][1]:.4g}"
                    path = f"M{start:g} {top:.4g}h{wide}v{tall}h-{wide}z"
                    paths.setdefault(f"{self.scale.name}{level}", []).append(path)
        return "".join(
            f'<path class="{name}" d="{"".join(d)}"/>' for name, d in sorted(paths.items())
        )
