"""Draws heat maps as inline SVG: layers, experts or processes over steps.

Neighbouring cells of one colour are one rectangle and all rectangles of a colour one path: forty layers stay small.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from zaya_jax.report.style import LEVELS
from zaya_jax.report.svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, figure, lower_axis
from zaya_jax.report.text import escape

CELLS = 6_000
MOST_COLUMNS = 120
MOST_ROWS = 64


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


def grouped(count: int, most: int = MOST_ROWS) -> tuple[list[int], list[str]]:
    """(where groups of equal size begin, their names) so that there are at most `most` of `count` things."""
    size = math.ceil(count / most)
    starts = list(range(0, count, size))
    ends = [min(s + size, count) - 1 for s in starts]
    return starts, [f"{s}–{end}" if end > s else str(s) for s, end in zip(starts, ends, strict=True)]


@dataclasses.dataclass
class HeatMap:
    """Cells [row, column], each reaching half-way to the next; rows without names have their numbers."""

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
            f'<text x="{LEFT - 6}" y="{tops[r] + size / 2 + 4:.1f}" text-anchor="end">{escape(name)}</text>'
            for r, name in enumerate(names)
            if r % stride == 0
        )
        cells = f'<g class="cells">{self._rectangles(edges, tops, size)}</g>'
        swatches = "".join(f'<i class="{self.scale.name}{level}"></i>' for level in range(LEVELS))
        legend = f'<li>{escape(self.ends[0])}<span class="ramp">{swatches}</span>{escape(self.ends[1])}</li>'
        drawn = cells + labels + lower_axis(x, bottom, self.column_name)
        words = f"Colours by {self.row_name} and {self.column_name}, from {self.ends[0]} to {self.ends[1]}."
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
        return "".join(f'<path class="{name}" d="{"".join(d)}"/>' for name, d in sorted(paths.items()))
