"""Draws curves as inline SVG; also the axes and captions that all pictures share.

Colours are CSS classes (see `style`), so that a picture follows the reader's light or dark scheme. A picture is an HTML
figure: caption, legend with the last values, and the SVG with a description for screen readers. Nothing needs a script.
"""

import dataclasses
import math
from collections.abc import Sequence

from zaya_jax.report.text import escape, exponent, number

WIDTH, HEIGHT = 460, 230
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 14, 26
FLOOR = HEIGHT - BOTTOM  # where the axis below a picture lies
MOST_LABELS = 7  # of one curve
FAR = 9000.0  # pixels: where values far outside the picture are put


@dataclasses.dataclass
class Curve:
    """One curve: its points as (step, value), NaN breaking it; `look` is line, raw or dots."""

    label: str
    points: Sequence[tuple[float, float]]
    color: int = 0
    look: str = "line"
    band: Sequence[tuple[float, float, float]] = ()  # (step, low, high)
    dash: int = 0  # for more curves than there are colours


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


def value_axis(y: Axis, unit: str) -> str:
    """The vertical axis: values and grid lines."""
    return "".join(
        f'<path class="grid" d="M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}"/>'
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
        f'<text x="{x.start - 6}" y="{bottom + 18}" text-anchor="end">{escape(name)}</text>',
    ]
    for tick, label in named:
        anchor = "end" if x(tick) > x.end - 14 else "middle"
        parts.append(f'<path class="axis" d="M{x(tick):.1f} {bottom}v4"/>')
        place = f'x="{x(tick):.1f}" y="{bottom + 18}" text-anchor="{anchor}"'
        parts.append(f"<text {place}>{escape(label)}</text>")
    return "".join(parts)


def figure(title: str, legend: str, drawn: str, height: float = HEIGHT, *, describe: str, note: str) -> str:
    """A picture with its caption, the entries of its legend and a sentence below."""
    label = escape(f"{title}. {describe}")
    svg = f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{label}">{drawn}</svg>'
    note = f'<p class="note">{escape(note)}</p>' if note else ""
    legend = f'<ul class="legend">{legend}</ul>'
    return f"<figure><figcaption>{escape(title)}</figcaption>{legend}{svg}{note}</figure>\n"


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
    parts, look = [], line.look + (f" dash{line.dash}" if line.dash else "")
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
            parts.append(f'<polyline class="{look} c{line.color}" points="{joined}"/>')
        if line.look == "dots" and len(run) <= 64:
            for s, v in run:
                note = f"<title>{escape(line.label)} at step {number(round(s))}: {number(v)}</title>"
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
        px, py = min(max(x(s), LEFT + 16.0), WIDTH - RIGHT - 16.0), y(v)
        py += -8 if py > TOP + 14 else 16
        if len(taken) < MOST_LABELS and all(abs(px - qx) >= 46 or abs(py - qy) >= 15 for qx, qy in taken):
            taken.append((px, py))
            parts.append(f'<text class="value" x="{px:.1f}" y="{py:.1f}" text-anchor="middle">{v:.4g}</text>')
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
    named: Sequence[tuple[float, str]] = ()  # ticks of the lower axis, where they are not round numbers
    bad_steps: Sequence[float] = ()  # marked along the top: steps without a finite value
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
        svg = (
            value_axis(y, self.unit)
            + lower_axis(x, FLOOR, self.over, self.named[:: -(-len(self.named) // 6) or 1])
            + f'<svg {at} viewBox="{box}">{drawn}</svg>{labels}'
            + "".join(_bad_mark(x(step), step) for step in self.bad_steps)
        )
        legend = "".join(map(self._legend, self.lines))
        legend += '<li><i class="key bad">✕</i>not finite</li>' if self.bad_steps else ""
        return figure(self.title, legend, svg, describe=" ".join(map(self._words, self.lines)), note=self.note)

    def _legend(self, line: Curve) -> str:
        last = next((v for _, v in reversed(line.points) if math.isfinite(v)), math.nan)
        text = number(last) + self.unit if math.isfinite(last) else "–"
        dash = f" dash{line.dash}" if line.dash else ""
        key = f'<i class="key {line.look}{dash} c{line.color}"></i>'
        return f"<li>{key}{escape(line.label)} <b>{text}</b></li>"

    def _words(self, line: Curve) -> str:
        """A curve for those who do not see it."""
        values = [v for _, v in line.points if math.isfinite(v)]
        if not values:
            return f"{line.label}: no finite value."
        low, high, last = (f"{number(v)}{self.unit}" for v in (min(values), max(values), values[-1]))
        return f"{line.label}: last {last}, between {low} and {high}."


def _bad_mark(px: float, step: float) -> str:
    note = f"<title>not finite at step {number(round(step))}</title>"
    return (
        f'<g class="bad">{note}<path class="rule" d="M{px:.1f} {TOP - 2}V{FLOOR}"/>'
        f'<path d="M{px - 4:.1f} {TOP - 10}l8 8m0 -8l-8 8"/></g>'
    )
