"""Draws the report's bar charts: a column for each of a few things, of one or several parts on each other."""

import math
from collections.abc import Callable, Sequence

import numpy as np

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
    open_svg,
    value_axis,
    values_table,
)

MOST_BARS = 64
WIDEST = 64.0
LETTER = 8.0  # pixels of a label's character, at its largest (on a phone)


def bar_chart(
    title: str,
    names: Sequence[str],
    parts: Sequence[tuple[str, Sequence[float]]],
    *,
    name: str,
    unit: str,
    text: Callable[[float], str],
    scale: float = 1.0,
    describe: str = "",
    note: str = "",
) -> str:
    """A column for each of `names`; `parts`: (label, a value for each name). The legend has the medians.

    `name`: what a column is; the axis is in `unit`, values over `scale`; `text` writes a value with its unit.
    """
    totals = np.sum([values for _, values in parts], axis=0)
    y = Axis(0.0, (float(totals.max()) / scale or 1.0) * 1.04, HEIGHT - BOTTOM, TOP)
    slot = min(WIDEST, (WIDTH - RIGHT - LEFT) / len(names))
    wide = slot - (1 if slot < 12 else 3)
    drawn = []
    for i, who in enumerate(names):
        left, base, column = LEFT + slot * i, 0.0, []
        for color, (_, values) in enumerate(parts):
            top, bottom = y((base + values[i]) / scale), y(base / scale)
            place = f'x="{left:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{bottom - top:.1f}"'
            column.append(f'<rect class="bar c{color}" {place}/>')
            base += values[i]
        area = f'<rect class="area" x="{left:.1f}" y="{TOP}" width="{slot:.1f}" height="{HEIGHT - BOTTOM - TOP}"/>'
        told = "|".join(text(values[i]) for _, values in parts)
        drawn.append(
            f'<g data-name="{escape(f"{name} {who}")}" data-values="{escape(told)}">{"".join(column)}{area}</g>'
        )
    legend = []
    for color, (label, values) in enumerate(parts):
        median = f'<b data-line="{color}">{escape(text(float(np.median(values))))}</b>'
        legend.append(f'<li><i class="key dots c{color}"></i>{escape(label)} {median}</li>')
    svg = (
        open_svg(title, describe, HEIGHT, 'data-bars="1"')
        + value_axis(y, LEFT, WIDTH - RIGHT, unit)
        + f"{''.join(drawn)}{_labels(names, name, slot)}</svg>"
    )
    rows = [[str(who), *(text(values[i]) for _, values in parts)] for i, who in enumerate(names)]
    table = values_table([name, *(label for label, _ in parts)], rows)
    return figure(title, f'<ul class="legend">{"".join(legend)}</ul>', svg, note, table=table)


def grouped(count: int, most: int = MOST_BARS) -> tuple[list[int], list[str]]:
    """(where groups of equal size begin, their names) so that there are at most `most` of `count` things."""
    size = math.ceil(count / most)
    starts = list(range(0, count, size))
    if size == 1:
        return starts, [str(s) for s in starts]
    ends = [min(s + size, count) - 1 for s in starts]
    return starts, [f"{s}–{end}" if end > s else str(s) for s, end in zip(starts, ends, strict=True)]


def _labels(names: Sequence[str], name: str, slot: float) -> str:
    """Names below the columns, as many as there is room for."""
    stride = math.ceil((max(map(len, names)) * LETTER + 8) / slot)
    bottom = HEIGHT - BOTTOM
    parts = [
        f'<path class="axis" d="M{LEFT} {bottom}H{WIDTH - RIGHT}"/>',
        f'<text x="{LEFT - 6}" y="{bottom + 18}" text-anchor="end">{escape(name)}</text>',
    ]
    for i in range(0, len(names), stride):
        middle = max(LEFT + slot * (i + 0.5), LEFT + len(names[i]) * LETTER / 2)
        if middle + len(names[i]) * LETTER / 2 <= WIDTH:
            parts.append(
                f'<text x="{middle:.1f}" y="{bottom + 18}" text-anchor="middle">{escape(names[i])}</text>'
            )
    return "".join(parts)
