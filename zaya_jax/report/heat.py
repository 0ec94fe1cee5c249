"""Draws the report's heat maps as inline SVG: layers or experts over steps.

Neighbouring cells of one colour are one rectangle and all rectangles of a colour one path, which keeps
forty layers small. The values go beside the picture in two base-36 digits each, for the page's script to
read out.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from zaya_jax.report.svg import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    escape,
    figure,
    number,
    open_svg,
    percent,
    spread,
    step_axis,
    values_table,
)

LEVELS = 13  # colours; odd, so that a diverging scale has a neutral middle
CELLS = 6_000
MOST_COLUMNS = 120
TABLE_COLUMNS, TABLE_ROWS = 5, 24  # of the values as a table
APART = 6.0  # pixels between the rows and one that has its own scale


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
        """From the least value to the greatest; one value alone lies on a scale from zero, zero on one up to 1."""
        good = [v for v in values if math.isfinite(v)] or [0.0]
        low, high = min(good), max(good)
        if low == high:
            low, high = min(low, 0.0), max(high, 0.0)
        return cls(low, high if high > low else 1.0)


def columns(rows: int) -> int:
    """How many columns a picture of so many rows may have."""
    return max(4, min(MOST_COLUMNS, CELLS // rows))


def heat_map(
    title: str,
    rows: Sequence[str],
    steps: Sequence[float],
    cells: Sequence[Sequence[float]],
    scale: Scale,
    *,
    x_range: tuple[float, float],
    row_name: str,
    ends: tuple[str, str],
    describe: str = "",
    note: str = "",
    last: Scale | None = None,
    in_percent: bool = False,
    column_name: str = "step",
    unit: str = "",
) -> str:
    """Cells [row][column], each reaching half-way to the next; `last`: the last row's own scale (a share)."""
    size = min(24.0, max(4.0, (HEIGHT - BOTTOM - TOP) / len(rows)))
    tops = [TOP + size * r for r in range(len(rows))]
    if last:
        tops[-1] += APART
    bottom = tops[-1] + size
    x = Axis(*x_range, LEFT, WIDTH - RIGHT)
    middles = [(x(a) + x(b)) / 2 for a, b in itertools.pairwise(steps)]
    edges = [round(v, 1) for v in (x.start, *middles, x.end)]
    scales = [scale] * (len(rows) - 1) + [last or scale]
    stride = math.ceil(14 / size)  # a phone has larger letters
    labels = "".join(
        f'<text x="{LEFT - 6}" y="{tops[r] + size / 2 + 4:.1f}" text-anchor="end">{escape(name)}</text>'
        for r, name in enumerate(rows)
        if (r == len(rows) - 1 if last and r > len(rows) - 1 - stride else r % stride == 0)
    )
    names = f'data-heat="{row_name}" data-column="{column_name}" data-rows="{escape("|".join(rows))}"'
    shares = "all" if in_percent else "last" if last else ""
    data = f'{names} data-percent="{shares}" data-unit="{unit}" {_places(steps, edges, tops, size)} {_values(cells)}'
    svg = (
        open_svg(title, describe, bottom + BOTTOM, data)
        + f'<g class="cells">{_rectangles(cells, scales, edges, tops, size)}</g>{labels}'
        + f"{step_axis(x, bottom, column_name)}</svg>"
    )
    swatches = "".join(f'<i class="{scale.name}{level}"></i>' for level in range(LEVELS))
    ramp = f'<li>{escape(ends[0])}<span class="ramp">{swatches}</span>{escape(ends[1])}</li>'
    table = _table(rows, steps, cells, row_name, column_name, shares, unit)
    return figure(title, f'<ul class="legend">{ramp}</ul>', svg, note, "heat", table=table)


def _table(
    rows: Sequence[str],
    steps: Sequence[float],
    cells: Sequence[Sequence[float]],
    row_name: str,
    column_name: str,
    shares: str,
    unit: str,
) -> str:
    """Some of the rows and columns as text."""
    columns, told = spread(len(steps), TABLE_COLUMNS), []
    for r in spread(len(rows), TABLE_ROWS):
        in_percent = shares == "all" or (shares == "last" and r == len(rows) - 1)
        values = [cells[r][c] for c in columns]
        texts = [percent(v) if in_percent else number(v, 3) + unit for v in values]
        told.append([rows[r], *("–" if math.isnan(v) else t for v, t in zip(values, texts, strict=True))])
    head = [row_name, *(f"{column_name} {round(steps[c]):,}" for c in columns)]
    return values_table(head, told, len(rows))


def _rectangles(
    cells: Sequence[Sequence[float]],
    scales: Sequence[Scale],
    edges: Sequence[float],
    tops: Sequence[float],
    size: float,
) -> str:
    paths: dict[str, list[str]] = {}
    tall = f"{size - 1 if size > 8 else size:.4g}"
    for row, scale, top in zip(cells, scales, tops, strict=True):
        for level, start, end in _level_runs(row, scale):
            wide = f"{edges[end] - edges[start]:.4g}"
            path = f"M{edges[start]:g} {top:.4g}h{wide}v{tall}h-{wide}z"
            paths.setdefault(f"{scale.name}{level}", []).append(path)
    return "".join(f'<path class="{name}" d="{"".join(d)}"/>' for name, d in sorted(paths.items()))


def _level_runs(row: Sequence[float], scale: Scale) -> Iterator[tuple[int, int, int]]:
    """(level, first column, column after the last) of neighbouring cells of one colour; NaN leaves a hole."""
    start = 0
    for level, group in itertools.groupby(row, lambda v: scale.level(v) if math.isfinite(v) else None):
        end = start + sum(1 for _ in group)
        if level is not None:
            yield level, start, end
        start = end


def _places(steps: Sequence[float], edges: Sequence[float], tops: Sequence[float], size: float) -> str:
    def joined(values: Iterable[float]) -> str:
        return " ".join(f"{v:.12g}" for v in values)

    return (
        f'data-edges="{joined(edges)}" data-steps="{joined(round(s) for s in steps)}" '
        f'data-tops="{joined(tops)}" data-size="{size:g}"'
    )


def _values(cells: Sequence[Sequence[float]]) -> str:
    """The values between their own extremes, in 36² steps."""
    good = [v for row in cells for v in row if math.isfinite(v)]
    low, high = (min(good), max(good)) if good else (0.0, 1.0)
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"

    def code(v: float) -> str:
        if not math.isfinite(v):
            return "--"
        n = round((v - low) / (high - low) * 1295) if high > low else 0
        return digits[n // 36] + digits[n % 36]

    codes = "".join(code(v) for row in cells for v in row)
    return f'data-low="{low:.6g}" data-high="{high:.6g}" data-cells="{codes}"'
