"""Numbers as text, axes, curves and heat maps."""

import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from zaya_jax.report import heat, style, svg
from zaya_jax.report.heat import LEVELS, Scale, heat_map
from zaya_jax.report.svg import Axis, Line, line_chart, number, ticks


def parsed(figure):
    return ElementTree.fromstring(figure)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1.63499, "1.635"),
        (-2.5, "−2.5"),
        (4096, "4096"),
        (9999.9, "10k"),
        (12_345, "12.35k"),
        (1_638_400, "1.638M"),
        (8_840_488_784, "8.84B"),
        (1e-5, "1e−5"),
        (2.33e-7, "2.33e−7"),
        (1e200, "1e+200"),
        (math.nan, "NaN"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
    ],
)
def test_number(value, text):
    assert number(value) == text


def test_number_keeps_whole_thousands_at_few_digits():
    assert number(9799.6, 3) == "9800"


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (1.5, 6.1), (-3, 7), (1, 400), (0, 3e-9), (1e8, 1e8 + 1), (0, 1e299)]
)
def test_ticks_are_few_round_and_inside(low, high):
    found = ticks(low, high)
    assert 2 <= len(found) <= 5
    room = (high - low) * 1e-6
    assert all(low - room <= t <= high + room for t in found)


@pytest.mark.parametrize("span", [(0.0, 0.0), (5.0, 5.0), (0.0, 5e-324), (-1e300, 1e300), (1.0, 2.0**53)])
@pytest.mark.parametrize("log", [False, True])
def test_axes_survive_any_span(span, log):
    if log and span[0] <= 0:
        span = (1e-320, 1e300)
    axis = Axis(*span, 0.0, 100.0, log)
    assert math.isfinite(axis(span[0]))
    assert math.isfinite(axis(span[1]))
    assert all(math.isfinite(t) for t in axis.ticks)


def test_escape_shows_control_characters_and_quotes_markup():
    assert svg.escape('<a href="x">&\'\x00\x1b[0m\x85\n\t') == (
        "&lt;a href=&quot;x&quot;&gt;&amp;&#x27;␀␛[0m\ufffd\n\t"
    )


def test_line_chart_is_well_formed_and_can_be_announced():
    figure = parsed(
        line_chart(
            "A <b>", [Line("x & y", [(1, 2.0), (2, 3.0)])], x_range=(1, 2), y_range=(2, 3), describe="d"
        )
    )
    picture = figure.find("svg")
    title, description = picture.find("title"), picture.find("desc")
    assert picture.get("aria-labelledby").split() == [title.get("id"), description.get("id")]
    assert (title.text, description.text) == ("A <b>", "d")


def test_nan_breaks_a_curve_and_a_lone_point_is_still_seen():
    points = [(1, 1.0), (2, 2.0), (3, math.nan), (4, 2.0), (5, math.nan), (6, 1.0), (7, 1.0)]
    figure = parsed(line_chart("t", [Line("l", points)], x_range=(1, 7), y_range=(1, 2), bad_steps=[3, 5]))
    assert len(figure.findall(".//polyline")) == 2
    assert len(figure.findall(".//circle[@class='alone c0']")) == 1
    marks = [t.text for t in figure.findall(".//g[@class='bad']/title")]
    assert marks == ["not finite at step 3", "not finite at step 5"]


def test_drawn_points_read_back_to_their_values():
    values = [(1, 5.4321), (50, 1.2345), (100, 1.6543)]
    figure = parsed(line_chart("t", [Line("l", values)], x_range=(1, 100), y_range=(1, 6)))
    picture = figure.find("svg")
    first, last, left, right = map(float, picture.get("data-x").split()[:4])
    low, high, bottom, top = map(float, picture.get("data-y").split()[:4])
    pairs = [map(float, p.split(",")) for p in figure.find(".//polyline").get("points").split()]
    for (px, py), (step, value) in zip(pairs, values, strict=True):
        assert first + (px - left) / (right - left) * (last - first) == pytest.approx(step, abs=0.02)
        assert low + (py - bottom) / (top - bottom) * (high - low) == pytest.approx(value, abs=2e-4)


@pytest.mark.parametrize("last", [400, 3_000, 9_600, 200_000, 5_000_000])
def test_steps_read_back_are_the_steps_however_long_the_run(last):
    """A tenth of a pixel is 51 of 200,000 steps: the held-out loss of step 25,000 stood at 24,975."""
    steps = [1, 7, last // 8, last // 3, last - 1, last]
    (line,) = re.findall(r'<polyline[^>]*points="(.*?)"', svg.draw(
        Line("l", [(s, 1.0) for s in steps], look="dots"), x := Axis(1, last, 54, 448), Axis(0, 2, 204, 14)
    ))  # fmt: skip
    low, high, left, right, _ = map(float, x.data().split())
    read = [low + (float(pair.split(",")[0]) - left) / (right - left) * (high - low) for pair in line.split()]
    assert list(map(round, read)) == steps


def test_held_out_labels_do_not_overlap():
    points = [(s, 2 - s / 1000) for s in range(0, 501, 10)]
    figure = parsed(line_chart("t", [Line("l", points, 1, "dots")], x_range=(0, 500), y_range=(1.4, 2.1)))
    labels = [(float(t.get("x")), float(t.get("y"))) for t in figure.findall(".//text[@class='value']")]
    assert 2 <= len(labels) <= svg.MOST_LABELS
    for i, (x, y) in enumerate(labels):
        assert all(abs(x - u) >= 46 or abs(y - v) >= 15 for u, v in labels[:i])


def test_scale_puts_the_middle_of_a_ratio_in_the_neutral_colour():
    scale = Scale(0.25, 4.0, "d", log=True)
    assert [scale.level(v) for v in (0.0, 0.25, 1.0, 4.0, 99.0)] == [
        0,
        0,
        LEVELS // 2,
        LEVELS - 1,
        LEVELS - 1,
    ]
    assert Scale(1.0, 1.0).level(1.0) == LEVELS // 2


def decoded(picture):
    rows, columns = picture.get("data-rows").split("|"), picture.get("data-steps").split()
    low, high = float(picture.get("data-low")), float(picture.get("data-high"))
    codes = re.findall("..", picture.get("data-cells"))
    values = [math.nan if c == "--" else low + (high - low) * int(c, 36) / 1295 for c in codes]
    assert len(values) == len(rows) * len(columns)
    return [values[r * len(columns) : (r + 1) * len(columns)] for r in range(len(rows))]


def test_heat_map_covers_its_cells_and_carries_their_values():
    cells = [[0.0, 0.0, 1.0], [0.5, math.nan, 0.5]]
    figure = parsed(
        heat_map(
            "t", ["0", "1"], [1, 2, 3], cells, Scale(0, 1), x_range=(1, 3), row_name="layer", ends=("0", "1")
        )
    )
    paths = {p.get("class"): p.get("d") for p in figure.findall(".//g[@class='cells']/path")}
    assert set(paths) == {"s0", f"s{LEVELS // 2}", f"s{LEVELS - 1}"}
    assert paths["s0"].count("M") == 1  # two equal neighbours are one rectangle
    assert paths[f"s{LEVELS // 2}"].count("M") == 2  # the hole stays open
    for row, expected in zip(decoded(figure.find("svg")), cells, strict=True):
        assert row == pytest.approx(expected, abs=1e-3, nan_ok=True)


def test_heat_map_of_one_step_and_no_finite_value():
    figure = parsed(
        heat_map(
            "t", ["0"], [7], [[math.nan]], Scale(0, 1), x_range=(7, 7), row_name="layer", ends=("0", "1")
        )
    )
    assert figure.findall(".//g[@class='cells']/path") == []
    assert decoded(figure.find("svg")) == [[pytest.approx(math.nan, nan_ok=True)]]


@pytest.mark.parametrize(
    ("values", "low", "high", "levels"),
    [
        ([0.0, 0.0], 0.0, 1.0, [0, 0]),
        ([3.0, 3.0], 0.0, 3.0, [LEVELS - 1] * 2),
        ([-2.0], -2.0, 0.0, [0]),
        ([5e-324], 0.0, 5e-324, [LEVELS - 1]),
        ([1.0, math.nan, 3.0], 1.0, 3.0, [0, LEVELS - 1]),
        ([math.nan], 0.0, 1.0, []),
    ],
)
def test_a_scale_without_width_begins_at_zero(values, low, high, levels):
    scale = Scale.between(values)
    assert (scale.low, scale.high) == (low, high)
    assert [scale.level(v) for v in values if math.isfinite(v)] == levels


def test_last_row_may_have_its_own_scale():
    figure = parsed(
        heat_map(
            "t", ["0", "skip"], [1, 2], [[1.0, 1.0], [0.1, 0.2]], Scale(0.25, 4, "d", log=True), x_range=(1, 2),
            row_name="expert", ends=("¼", "4"), last=Scale(0.0, 0.2),
        )
    )  # fmt: skip
    assert {p.get("class")[0] for p in figure.findall(".//g[@class='cells']/path")} == {"d", "s"}


def test_columns_of_a_heat_map_shrink_with_its_rows():
    assert heat.columns(6) == heat.MOST_COLUMNS
    assert heat.columns(257) == heat.CELLS // 257
    assert heat.columns(10**6) == 4


def test_text_on_every_heat_colour_is_legible():
    rules = re.findall(
        r"\.([sd])(\d+)(?:,\.r\d+)?\{fill:(#\w+);background:#\w+;color:(#\w+)\}", style.style_sheet()
    )
    assert len(rules) == 4 * LEVELS

    def light(color):
        return style._luminance(color if len(color) == 7 else "#" + "".join(2 * c for c in color[1:]))

    for *_, background, text in rules:
        low, high = sorted((light(background), light(text)))
        assert (high + 0.05) / (low + 0.05) >= 4.5
