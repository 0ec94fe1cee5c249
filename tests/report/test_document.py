"""Tables, sections and documents: one content as text, as Markdown and as a page; values as people
read them; axes, curves and heat maps."""

import math
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from made_run import checked

from zaya_jax.config import UserError
from zaya_jax.report import svg
from zaya_jax.report.document import Page, Section, Table, write_page
from zaya_jax.report.svg import Chart, Curve, HeatMap
from zaya_jax.report.text import Markup, byte_size, duration, escape, number, percent


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (number(0), "0"),
        (number(1.63499), "1.635"),
        (number(-2.5), "−2.5"),
        (number(4096), "4096"),
        (number(9999.9), "10k"),
        (number(12_345), "12.35k"),
        (number(1_638_400), "1.638M"),
        (number(8_840_488_784), "8.84B"),
        (number(1e-5), "1e−5"),
        (number(2.33e-7), "2.33e−7"),
        (number(1e200), "1e+200"),
        (number(math.nan), "NaN"),
        (number(math.inf), "∞"),
        (number(-math.inf), "−∞"),
        (number(9799.6, 3), "9800"),
        (duration(0), "0 s"),
        (duration(2e-5), "20 µs"),
        (duration(0.0123), "12.3 ms"),
        (duration(4.25), "4.25 s"),
        (duration(125), "2 min 5 s"),
        (duration(3600), "1 h"),
        (duration(90061), "1 d 1 h"),
        (duration(math.nan), "–"),
        (percent(0.1234), "12.3 %"),
        (percent(math.nan), "–"),
        (byte_size(12), "12 B"),
        (byte_size(34_000), "34 kB"),
        (byte_size(181.3e9), "181.3 GB"),
        (byte_size(1.25e12), "1.25 TB"),
    ],
)
def test_numbers_durations_shares_and_sizes(text, expected):
    assert text == expected


def test_escape_shows_control_characters_and_quotes_markup():
    assert (
        escape('<a href="x">&\'\x00\x1b[0m\x85\n\t')
        == "&lt;a href=&quot;x&quot;&gt;&amp;&#x27;␀␛[0m\ufffd\n\t"
    )
    assert escape(escape("<")) == "&lt;" and escape(Markup("<b>x</b>")) == "<b>x</b>"


TABLE = Table(
    "T <1>", ["name", "value"], [["a|b\nc", "1"], ["\x1b[2J", "23"], [Markup("<b>x</b>"), "<i>"]]
)


def test_a_table_is_markdown_and_html():
    title, _, *lines = TABLE.markdown().splitlines()
    assert title == "### T <1>"
    assert lines[:3] == ["| name     | value |", "| -------- | ----: |", r"| a\|b c   |     1 |"]
    assert len({len(line) for line in lines}) == 1 and "\x1b" not in lines[3] and "[2J" in lines[3]
    folded = Table("f", ["k"], [["v"]], folded=False)
    page = Page("D", sections=[Section("S", tables=[TABLE, folded])]).html()
    assert "<h3>T &lt;1&gt;</h3>" in page and "<b>x</b></th><td>&lt;i&gt;</td>" in page
    assert '<details open=""><summary>f (1)</summary>' in page


def test_a_document_leaves_out_sections_without_content():
    full = Section("S", "words", [TABLE], ["note"], pictures="<figure></figure>")
    whole = Page(
        "D",
        "kind",
        "about <x>",
        [Section("empty"), full],
        [("tile", "1", "of 2")],
        ["careful"],
        "foot",
    )
    text = checked(whole.html())
    for words in ("D kind", "about <x>", "S", "words", "note", "tile1of 2", "careful", "foot"):
        assert words in text, words
    assert "empty" not in text and "empty" not in whole.markdown()
    assert "## S\n\nwords\n\n### T <1>" in whole.markdown() and "- note" in whole.markdown()
    assert "figure" not in whole.markdown()


def test_a_page_is_written_whole_or_not_at_all(tmp_path):
    target = write_page(tmp_path / "a.html", lambda: "new \ud800")
    assert target.read_bytes() == b"new ?"
    with pytest.raises(RuntimeError):
        write_page(target, lambda: (_ for _ in ()).throw(RuntimeError()))
    assert target.read_bytes() == b"new ?"
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(UserError, match=r"no report: .*folder\.html.* replaceable"):
        write_page(tmp_path / "folder.html", lambda: "")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.html", "folder.html"]


def parsed(picture):
    return ElementTree.fromstring(picture.draw())


def test_nan_breaks_a_curve_and_a_lone_point_is_still_seen():
    points = [(1, 1.0), (2, 2.0), (3, math.nan), (4, 2.0), (5, math.nan), (6, 1.0), (7, 1.0)]
    figure = parsed(Chart("t", [Curve("l", points)], bad_steps=[3, 5]))
    lines = [line.get("points").split() for line in figure.findall(".//polyline")]
    # Each begins with its first point twice, so that a line of one point is a dot.
    assert [len(line) - 1 for line in lines] == [2, 1, 2] and lines[1][0] == lines[1][1]
    marks = [t.text for t in figure.findall(".//g[@class='bad']/title")]
    assert marks == ["not finite at step 3", "not finite at step 5"]


def test_points_lie_at_their_values():
    values = [(1, 5.4321), (50, 1.2345), (100, 1.6543)]
    figure = parsed(Chart("t", [Curve("l", values)]))
    _, *pairs = figure.find(".//polyline").get("points").split()
    across, up = zip(*(map(float, pair.split(",")) for pair in pairs), strict=True)
    width = svg.WIDTH - svg.RIGHT - svg.LEFT
    assert across == pytest.approx([svg.LEFT + (s - 1) / 99 * width for s, _ in values], abs=0.06)
    part = (values[2][1] - values[1][1]) / (values[0][1] - values[1][1])
    assert svg.TOP < up[0] < up[2] < up[1] < svg.FLOOR
    assert (up[1] - up[2]) / (up[1] - up[0]) == pytest.approx(part, abs=0.001)


def rectangles(cells, scale):
    """{colour and opacity: how many}"""
    heat_map = HeatMap("t", [1, 2, 3], np.array(cells), scale, (1, 3), ("0", "1"))
    return {
        (path.get("class"), path.get("opacity")): path.get("d").count("M")
        for path in parsed(heat_map).findall(".//g[@class='cells']/path")
    }


def test_a_heat_map_covers_its_cells():
    cells = [[0.0, 0.0, 1.0], [0.5, math.nan, 0.5]]
    # Two equal neighbours are one rectangle; the hole stays open.
    assert rectangles(cells, (0, 1)) == {("c3", "0.06"): 1, ("c3", "0.53"): 2, ("c3", "1.00"): 1}
    assert rectangles([[math.nan] * 3], (0, 1)) == {}
    # Away from zero two colours, grey at zero; beyond the ends the darkest.
    signed = rectangles([[-9.0, 1.0, 0.0]], (-2, 2))
    assert signed == {("c0", "1.00"): 1, ("c1", "0.53"): 1, ("c7", "0.06"): 1}
    assert rectangles([[-4.0, 1.0, 1.0]], (-4, 1)) == {("c0", "1.00"): 1, ("c1", "0.29"): 1}
