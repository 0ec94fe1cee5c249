"""Axes, curves and heat maps."""

import math
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from zaya_jax.report import svg
from zaya_jax.report.style import LEVELS
from zaya_jax.report.svg import Chart, Curve, HeatMap, Scale


def parsed(picture):
    return ElementTree.fromstring(picture.draw())


def test_nan_breaks_a_curve_and_a_lone_point_is_still_seen():
    points = [(1, 1.0), (2, 2.0), (3, math.nan), (4, 2.0), (5, math.nan), (6, 1.0), (7, 1.0)]
    figure = parsed(Chart("t", [Curve("l", points)], (1, 7), (1, 2), bad_steps=[3, 5]))
    assert len(figure.findall(".//polyline")) == 2
    assert len(figure.findall(".//circle[@class='alone c0']")) == 1
    marks = [t.text for t in figure.findall(".//g[@class='bad']/title")]
    assert marks == ["not finite at step 3", "not finite at step 5"]


def test_points_lie_at_their_values():
    values = [(1, 5.4321), (50, 1.2345), (100, 1.6543)]
    figure = parsed(Chart("t", [Curve("l", values)], (1, 100), (1, 6)))
    pairs = [map(float, p.split(",")) for p in figure.find(".//polyline").get("points").split()]
    for (px, py), (step, value) in zip(pairs, values, strict=True):
        assert px == pytest.approx(
            svg.LEFT + (step - 1) / 99 * (svg.WIDTH - svg.RIGHT - svg.LEFT), abs=0.06
        )
        assert py == pytest.approx(svg.FLOOR + (value - 1) / 5 * (svg.TOP - svg.FLOOR), abs=0.06)


def rectangles(figure):
    """{colour: how many}"""
    return {
        p.get("class"): p.get("d").count("M") for p in figure.findall(".//g[@class='cells']/path")
    }


def test_a_heat_map_covers_its_cells():
    cells = np.array([[0.0, 0.0, 1.0], [0.5, math.nan, 0.5]])
    figure = parsed(HeatMap("t", [1, 2, 3], cells, Scale(0, 1), (1, 3), "layer", ("0", "1")))
    # Two equal neighbours are one rectangle; the hole stays open.
    assert rectangles(figure) == {"s0": 1, f"s{LEVELS // 2}": 2, f"s{LEVELS - 1}": 1}
    empty = parsed(
        HeatMap("t", [7], np.array([[math.nan]]), Scale(0, 1), (7, 7), "layer", ("0", "1"))
    )
    assert rectangles(empty) == {}
