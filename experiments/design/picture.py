"""Draws training throughput against the time of a token, for `experiments.design`."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from zaya_jax.report import svg

WIDTH, HEIGHT = 900, 500
TOP, BOTTOM = 58, HEIGHT - 50
KEY = 50  # pixels of an entry of the legend
COLORS = 7  # of lines; the eighth is the front's
ROOM = 74  # pixels between two labels
NOTE = (
    "A line joins the shapes of one number of experts; all have equal budgets. Hollow: a rule is"
    " strained. The band joins those of the front that train fastest at their depth or deeper."
    " Labels: experts x their width, layers."
)
Row = dict[str, Any]
Place = tuple[float, float]


def draw(result: dict[str, Any]) -> str:
    """Shapes as points, those of one number of experts joined; the front; ZAYA1-base."""
    shapes = sorted(result["shapes"], key=lambda row: row["token_ms"][0])
    across = {row["number"]: row["token_ms"][0][0] for row in shapes}
    up = {row["number"]: row["tokens_per_second"][0] for row in shapes}
    x = svg.Axis(*_with_room(across.values()), svg.LEFT, WIDTH - svg.RIGHT)
    y = svg.Axis(*_with_room(up.values()), BOTTOM, TOP)
    place = {number: (x(across[number]), y(up[number])) for number in up}
    front = [row for row in shapes if row["front"]]
    best = [
        row
        for row in front
        if up[row["number"]] >= max(up[r["number"]] for r in front if r["layers"] >= row["layers"])
    ]
    drawn = [
        svg.value_axis(y, "", WIDTH),
        svg.lower_axis(x, BOTTOM, "", [(tick, f"{tick:g}") for tick in x.ticks]),
        f'<text x="{svg.LEFT}" y="12">training tokens per second of a device</text>',
        f'<text x="{svg.LEFT}" y="34">experts:</text>',
        f'<text x="{WIDTH - svg.RIGHT}" y="{BOTTOM + 42}" text-anchor="end">milliseconds from one'
        " token to the next, one text</text>",
        _line("band c7", best, place),
    ]
    for index, number in enumerate(sorted({row["experts"] for row in shapes})):
        color, dash = f"c{index % COLORS}", "dash1" if index >= COLORS else ""
        line = [row for row in shapes if row["experts"] == number]
        drawn += [_line(f"dots {color} {dash}", line, place), *_points(line, place, color)]
        left = svg.LEFT + 58 + KEY * index
        drawn.append(f'<polyline class="line {color} {dash}" points="{left},30 {left + 18},30"/>')
        drawn.append(f'<text x="{left + 22}" y="34">{number}</text>')
    labelled: list[float] = []
    for row in sorted(best, key=lambda row: not row["zaya1_base"]):
        px, py = place[row["number"]]
        if all(abs(px - other) > ROOM for other in labelled):
            labelled.append(px)
            words = [f"{row['layers']} layers", row["name"], *["ZAYA1-base"] * row["zaya1_base"]]
            drawn += [
                f'<text class="value" x="{px:.1f}" y="{py - 14 * line:.1f}"'
                f' text-anchor="middle">{word}</text>'
                for line, word in enumerate(words, 1)
            ]
    return svg.figure(
        f"Training against answering, {result['devices']:,} {result['chip']}",
        "",
        "".join(drawn),
        HEIGHT,
        note=NOTE,
        width=WIDTH,
    )


def _with_room(values: Collection[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return low - (high - low) / 16, high + (high - low) / 10


def _line(look: str, rows: Sequence[Row], place: Mapping[int, Place]) -> str:
    points = " ".join("{:.1f},{:.1f}".format(*place[row["number"]]) for row in rows)
    return f'<polyline class="{look}" points="{points}"/>'


def _points(rows: Sequence[Row], place: Mapping[int, Place], color: str) -> Iterator[str]:
    for row in rows:
        about = f"shape {row['number']}: {row['name']} experts, {row['layers']} layers"
        look, size = "hollow" if row["strains"] else "dot", 7 if row["zaya1_base"] else 4
        centre = 'cx="{:.1f}" cy="{:.1f}"'.format(*place[row["number"]])
        yield f'<circle class="{look} {color}" {centre} r="{size}"><title>{about}</title></circle>'
