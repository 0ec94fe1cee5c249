"""Bar charts: what is drawn of which value, and labels as many as there is room for."""

import itertools
import re

import pytest

from zaya_jax.report.bars import bar_chart, grouped
from zaya_jax.report.svg import BOTTOM, HEIGHT


def chart(names, parts, **options):
    return bar_chart("Title", names, parts, name="process", unit=" s", text=lambda v: f"{v:g} s", **options)


def test_parts_lie_on_each_other():
    svg = chart(["0", "1"], [("read", [1.0, 2.0]), ("place", [0.5, 0.0])])
    bars = re.findall(r'class="bar c(\d)" x="\S+" y="(\S+)" width="\S+" height="(\S+)"', svg)
    assert [color for color, _, _ in bars] == ["0", "1", "0", "1"]
    (_, low, tall), (_, above, short), (_, _, double), (_, _, none) = bars
    assert float(low) + float(tall) == pytest.approx(HEIGHT - BOTTOM, abs=0.2)
    assert float(above) + float(short) == pytest.approx(float(low), abs=0.2)
    assert float(double) == pytest.approx(2 * float(tall), abs=0.2) and float(none) == 0
    assert 'data-name="process 1" data-values="2 s|0 s"' in svg
    assert '<b data-line="0">1.5 s</b>' in svg and '<b data-line="1">0.25 s</b>' in svg


def test_values_are_over_their_scale():
    svg = bar_chart("T", ["a"], [("x", [4e9])], name="n", unit=" GB", text=str, scale=1e9)
    assert ">4 GB</text>" in svg


def test_all_zero_and_unsafe_names():
    svg = chart(["<b>"], [("<i>", [0.0])])
    assert "<b>" not in svg.replace('<b data-line="0">', "") and "&lt;i&gt;" in svg and "nan" not in svg


@pytest.mark.parametrize("count", [1, 8, 64])
def test_labels_do_not_meet(count):
    names = [f"{1000 * i}" for i in range(count)]
    places = re.findall(
        r'<text x="(\S+)" y="\S+" text-anchor="middle">(\d+)<', chart(names, [("x", [1.0] * count)])
    )
    assert places and places[0][1] == "0"
    for (left, a), (right, b) in itertools.pairwise(places):
        assert float(right) - float(left) >= 6.6 * (len(a) + len(b)) / 2


def test_groups():
    assert grouped(1) == ([0], ["0"]) and grouped(3) == ([0, 1, 2], ["0", "1", "2"])
    starts, names = grouped(65)
    assert starts[:2] == [0, 2] and names[0] == "0–1" and names[-1] == "64" and len(names) == 33
    assert len(grouped(1024)[0]) == 64
