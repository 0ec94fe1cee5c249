"""Draws the report's curves as inline SVG, and holds what every picture shares: numbers as text, axes,
figures.

Colours are CSS classes (see `style`), so that a picture follows the reader's light or dark scheme. Each
picture is an HTML figure: caption, legend with the last values, the SVG with a title and a description for
those who do not see it, and some of its values as a table. The page's script reads values back from the drawn
points, with the scales written in data attributes; nothing depends on it.
"""

import bisect
import dataclasses
import html
import math
import zlib
from collections.abc import Sequence

WIDTH, HEIGHT = 460, 230
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 14, 26
MOST_LABELS = 7  # of one curve
COUNTS = ("step", "tokens", "place")  # axes of whole numbers
TABLE_ROWS = 12  # of a picture's values as a table
FAR = 9000.0  # pixels: where values far outside the picture are put


@dataclasses.dataclass
class Line:
    """One curve: its points as (step, value), NaN breaking it; `look` is line, raw or dots."""

    label: str
    points: Sequence[tuple[float, float]]
    color: int = 0
    look: str = "line"
    band: Sequence[tuple[float, float, float]] = ()  # (step, low, high)
    dash: int = 0  # for more curves than there are colours


def escape(text: object) -> str:
    """Text made safe for HTML, with control characters shown as their symbols."""
    plain = "".join(
        chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else "\ufffd" if 0x7F <= ord(c) < 0xA0 else c
        for c in str(text)
    )
    return html.escape(plain, quote=True)


def number(value: float, digits: int = 4) -> str:
    """A value as people read it: four significant digits, k, M, B, T for large ones."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    size = abs(value)
    if value == int(value) and size < 10_000:
        return f"{int(value)}".replace("-", "−")
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if max(limit * 0.99995, 9999.5) <= size < 1e15:
            return f"{value / limit:.{digits}g}".replace("-", "−") + suffix
    if size >= 1000:
        return f"{float(f'{value:.{digits}g}'):g}".replace("-", "−")
    if not size or size >= 1e-4:
        return f"{value:.{digits}g}".replace("-", "−")
    return _exponent(f"{value:.{max(1, digits - 2)}e}")


def _exponent(text: str) -> str:
    """A number in exponent form without the zeros that it does not need."""
    mantissa, exponent = text.split("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return f"{mantissa}e{int(exponent)}".replace("-", "−")


def percent(value: float) -> str:
    """A share as people read it."""
    return f"{number(100 * value, 3)} %"


def section(title: str, text: str, pictures: str) -> str:
    """A part of the page with its pictures, or nothing where there are none."""
    if not pictures:
        return ""
    intro = f"<p>{escape(text)}</p>" if text else ""
    return f'<section><h2>{escape(title)}</h2>{intro}<div class="grid2">{pictures}</div></section>\n'


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
        return [_exponent(f"{v:.2e}") if v else "0" for v in values]
    labels = [number(v, 6) for v in values]
    if not any("e" in label or label[-1:].isalpha() for label in labels):
        places = max((len(label.partition(".")[2]) for label in labels), default=0)
        labels = [f"{v:.{places}f}".replace("-", "−") for v in values]
    return labels


class Axis:
    """Values to pixels and the ticks between; `log` where all of it is positive."""

    def __init__(self, low: float, high: float, start: float, end: float, log: bool = False, most: int = 5):
        if not high - low > 1e-300:  # a single value: a little room around it
            room = abs(low) * 0.1 or 1.0
            low, high = (low / 1.5, low * 1.5) if log else (low - room, high + room)
        self.low, self.high, self.start, self.end, self.log = low, high, start, end, log
        self._low, self._high = (math.log10(low), math.log10(high)) if log else (low, high)
        if log:
            first, last = math.ceil(self._low - 1e-9), math.floor(self._high + 1e-9)
            stride = max(1, 1 + (last - first) // most)
            self.ticks = [10.0**i for i in range(first, last + 1, stride)]
            if len(self.ticks) < 2:
                self.ticks = [m * 10.0**i for i in range(first - 1, last + 1) for m in (1, 2, 5)]
                self.ticks = [t for t in self.ticks if low <= t * 1.000001 and t <= high * 1.000001]
        else:
            self.ticks = ticks(low, high, most)

    def __call__(self, value: float) -> float:
        if self.log:
            value = math.log10(value) if value > 0 else -400.0
        part = (value - self._low) / (self._high - self._low)
        return min(FAR, max(-FAR, self.start + part * (self.end - self.start)))

    @property
    def places(self) -> int:
        """Decimals of a pixel by which the script reads whole numbers back: of 200,000 steps a tenth of one is 51."""
        if self.log:
            return 4
        each = abs(self.end - self.start) / (self.high - self.low)
        return min(5, max(1, math.ceil(-math.log10(max(each / 2, 1e-9)))))

    def data(self) -> str:
        """For the script: value at both ends, pixel at both ends, whether logarithmic."""
        return f"{self.low:.9g} {self.high:.9g} {self.start:g} {self.end:g} {int(self.log)}"


def _short(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _runs(points: Sequence[tuple[float, ...]]) -> list[list[tuple[float, ...]]]:
    runs: list[list[tuple[float, ...]]] = [[]]
    for point in points:
        if all(math.isfinite(v) for v in point):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def draw(line: Line, x: Axis, y: Axis) -> str:
    """One curve, with its band."""
    parts, look = [], line.look + (f" dash{line.dash}" if line.dash else "")
    for run in _runs(line.band):
        if len(run) > 1:
            edge = [f"{x(s):.1f},{y(high):.1f}" for s, _, high in run]
            edge += [f"{x(s):.1f},{y(low):.1f}" for s, low, _ in reversed(run)]
            parts.append(f'<polygon class="band c{line.color}" points="{" ".join(edge)}"/>')
    for run in _runs(line.points):
        if len(run) == 1 and line.look != "dots":
            parts.append(
                f'<circle class="alone c{line.color}" cx="{x(run[0][0]):.{x.places}f}" cy="{y(run[0][1]):.2f}" r="2"/>'
            )
        else:
            joined = " ".join(f"{x(s):.{x.places}f},{_short(y(v))}" for s, v in run)
            parts.append(f'<polyline class="{look} c{line.color}" points="{joined}"/>')
        if line.look == "dots" and len(run) <= 64:
            for s, v in run:
                note = f"<title>{escape(line.label)} at step {number(round(s))}: {number(v)}</title>"
                place = f'cx="{x(s):.1f}" cy="{y(v):.1f}"'
                parts.append(f'<circle class="dot c{line.color}" {place} r="3.2">{note}</circle>')
    return "".join(parts)


def _point_labels(line: Line, x: Axis, y: Axis) -> str:
    """Values beside a dotted line: the last, the lowest, and others as far as there is room."""
    good = [(s, v) for s, v in line.points if math.isfinite(v) and y.low <= v <= y.high]
    if not good:
        return ""
    order = [good[-1], min(good, key=lambda p: p[1]), *reversed(good)]
    taken: list[tuple[float, float]] = []
    parts = []
    for s, v in order:
        px, py = min(max(x(s), LEFT + 16.0), WIDTH - RIGHT - 16.0), y(v)
        py += -8 if py > TOP + 14 else 16
        if len(taken) < MOST_LABELS and all(abs(px - qx) >= 46 or abs(py - qy) >= 15 for qx, qy in taken):
            taken.append((px, py))
            parts.append(f'<text class="value" x="{px:.1f}" y="{py:.1f}" text-anchor="middle">{v:.4g}</text>')
    return "".join(parts)


def value_axis(y: Axis, left: float, right: float, unit: str) -> str:
    """The values beside a picture, with a line through it at each."""
    parts = []
    for tick, label in zip(y.ticks, _tick_labels(y.ticks), strict=True):
        py = y(tick)
        parts.append(f'<path class="grid" d="M{left} {py:.1f}H{right}"/>')
        parts.append(f'<text x="{left - 6}" y="{py + 4:.1f}" text-anchor="end">{label}{unit}</text>')
    return "".join(parts)


def step_axis(x: Axis, bottom: float, name: str = "step") -> str:
    """The axis below a picture, with whole numbers as ticks."""
    parts = [
        f'<path class="axis" d="M{x.start} {bottom}H{x.end}"/>',
        f'<text x="{x.start - 6}" y="{bottom + 18}" text-anchor="end">{name}</text>',
    ]
    shown = [t for t in x.ticks if t == int(t) and t >= 0 and x(t) > x.start + 16] or [x.low]
    for tick, label in zip(shown, _tick_labels(shown), strict=True):
        px = x(tick)
        anchor = "end" if px > x.end - 14 else "middle"
        parts.append(f'<path class="axis" d="M{px:.1f} {bottom}v4"/>')
        parts.append(f'<text x="{px:.1f}" y="{bottom + 18}" text-anchor="{anchor}">{label}</text>')
    return "".join(parts)


def picture_id(title: str) -> str:
    """A picture's id: titles are unique on a page, and the same run gives the same page."""
    return f"p{zlib.crc32(title.encode(errors='replace')):08x}"


def figure(
    title: str, legend: str, svg: str, note: str, kind: str = "", *, table: str = "", name: str = ""
) -> str:
    """A picture with its caption, its legend, a sentence below and its values as a table; `name` is its id."""
    caption = f'<figcaption>{escape(title)}<span class="at"></span></figcaption>'
    below = (f'<p class="note">{escape(note)}</p>' if note else "") + table
    return f'<figure id="{name or picture_id(title)}" class="{kind}">{caption}{legend}{svg}{below}</figure>\n'


def open_svg(title: str, description: str, height: float, data: str, name: str = "") -> str:
    """The opening of a picture that screen readers can announce; `data` is for the page's script."""
    name = name or picture_id(title)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-labelledby="{name}t {name}d" {data}>'
        f'<title id="{name}t">{escape(title)}</title><desc id="{name}d">{escape(description)}</desc>'
    )


def values_table(head: Sequence[str], rows: Sequence[Sequence[str]], whole: int = 0) -> str:
    """A picture's values for those who do not see it, folded; `whole`: how many rows there are, if more than these."""
    if not rows:
        return ""
    some = f" <span>({len(rows)} of {whole:,})</span>" if whole > len(rows) else ""
    columns = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    return (
        f'<details class="values"><summary>Values{some}</summary><div class="scroll"><table class="num">'
        f"<thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table></div></details>"
    )


def spread(count: int, most: int) -> list[int]:
    """At most `most` of `count` places, evenly, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def _lines_table(lines: Sequence[Line], over: str, unit: str, log_x: bool = False) -> str:
    """Some points of the longest curve, beside them the others' nearest values; a dash where another has none near."""
    finite = [[p for p in line.points if math.isfinite(p[0]) and math.isfinite(p[1])] for line in lines]
    places = max(([s for s, _ in points] for points in finite), key=len, default=[])
    ends = [p for points in finite for p in (points[:1] + points[-1:])]
    places = sorted({*places, *(s for s, _ in ends)})
    chosen = [places[i] for i in spread(len(places), TABLE_ROWS)]
    reach = (chosen[-1] - chosen[0]) / max(1, len(chosen) - 1) / 2 if chosen else 0.0
    rows = []
    for step in chosen:
        cells = []
        for points in finite:
            at = bisect.bisect_left(points, (step, -math.inf))
            near = min(points[max(0, at - 1) : at + 1], key=lambda p: abs(p[0] - step), default=None)
            far = step / 4 if log_x else reach
            cells.append(number(near[1]) + unit if near and abs(near[0] - step) <= far else "–")
        rows.append([f"{round(step):,}" if over in COUNTS else number(step, 3), *cells])
    return values_table([over, *(line.label for line in lines)], rows, len(places))


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    log: bool = False,
    log_x: bool = False,
    bad_steps: Sequence[float] = (),
    describe: str = "",
    note: str = "",
    unit: str = "",
    over: str = "step",
) -> str:
    """Curves over steps, or what `over` names; `bad_steps` are marked along the top as steps without a finite value."""
    x = Axis(*x_range, LEFT, WIDTH - RIGHT, log_x)
    y = Axis(*y_range, HEIGHT - BOTTOM, TOP, log)
    legend = []
    for index, line in enumerate(lines):
        last = next((v for _, v in reversed(line.points) if math.isfinite(v)), math.nan)
        text = number(last) + unit if math.isfinite(last) else "–"
        dash = f" dash{line.dash}" if line.dash else ""
        key = f'<i class="key {line.look}{dash} c{line.color}"></i>{escape(line.label)}'
        legend.append(f'<li>{key} <b data-line="{index}">{text}</b></li>')
    if bad_steps:
        legend.append('<li><i class="key bad">✕</i>not finite</li>')
    name = picture_id(title if over == "step" else f"{title} over {over}")
    wide = WIDTH - RIGHT - LEFT
    box = f'x="{LEFT}" y="{TOP - 4}" width="{wide + 8}" height="{HEIGHT - BOTTOM - TOP + 5}"'
    drawn = "".join(f'<g data-line="{i}">{draw(line, x, y)}</g>' for i, line in enumerate(lines))
    dotted = [line for line in lines if line.look == "dots"]
    labels = (
        _point_labels(dotted[0], x, y) if len(dotted) == 1 else ""
    )  # of several they would lie on each other
    marks = "".join(_bad_mark(x(step), step) for step in bad_steps)
    data = f'data-x="{x.data()}" data-y="{y.data()}" data-unit="{unit}" data-over="{escape(over)}"'
    svg = (
        open_svg(title, describe, HEIGHT, data, name)
        + f'<clipPath id="{name}c"><rect {box}/></clipPath>'
        + f'<g class="ys">{value_axis(y, x.start, x.end, unit)}</g>'
        + f'<g class="xs">{step_axis(x, HEIGHT - BOTTOM, over)}</g>'
        + f'<rect class="select" x="0" y="{TOP}" width="0" height="{HEIGHT - BOTTOM - TOP}"/>'
        + f'<g clip-path="url(#{name}c)">{drawn}</g><g class="labels">{labels}</g>{marks}'
        + f'<path class="cursor" d="M0 {TOP}V{HEIGHT - BOTTOM}"/></svg>'
    )
    keys = f'<ul class="legend">{"".join(legend)}</ul>'
    return figure(title, keys, svg, note, table=_lines_table(lines, over, unit, log_x), name=name)


def _bad_mark(px: float, step: float) -> str:
    note = f"<title>not finite at step {number(round(step))}</title>"
    return (
        f'<g class="bad">{note}<path class="rule" d="M{px:.1f} {TOP - 2}V{HEIGHT - BOTTOM}"/>'
        f'<path d="M{px - 4:.1f} {TOP - 10}l8 8m0 -8l-8 8"/></g>'
    )
