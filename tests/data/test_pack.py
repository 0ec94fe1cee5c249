"""Packing: every token once, documents whole where they fit, rows well filled."""

import itertools

import numpy as np
import pytest

from zaya_jax.data import pack


@pytest.mark.parametrize("packing", ["first_fit", "best_fit"])
def test_plans_hold_every_token_once_within_the_row(packing):
    lengths = np.random.default_rng(0).integers(1, 150, 60)
    rows = pack.plan(lengths, 64, packing)
    assert all(sum(stop - start for start, stop in row) <= 64 for row in rows)
    spans = sorted(span for row in rows for span in row)
    assert spans[0][0] == 0 and spans[-1][1] == lengths.sum()
    assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
    edges = np.cumsum(lengths) - lengths
    short = {(int(e), int(e + s)) for e, s in zip(edges, lengths, strict=True) if s <= 64}
    assert short <= set(spans)  # what fits is not cut


def test_order_and_fill_are_those_of_the_named_rule():
    lengths = np.array([5, 4, 5, 6])
    assert pack.plan(lengths, 10, "first_fit") == [[(0, 5), (5, 9)], [(9, 14)], [(14, 20)]]
    assert pack.plan(lengths, 10, "best_fit") == [[(14, 20), (5, 9)], [(0, 5), (9, 14)]]


def test_best_fit_fills_rows_better_than_first_fit():
    rng = np.random.default_rng(1)
    lengths = np.minimum(rng.lognormal(5, 1, 2000).astype(int) + 2, 1024)
    share = {p: lengths.sum() / 1024 / len(pack.plan(lengths, 1024, p)) for p in ("first_fit", "best_fit")}
    assert share["best_fit"] >= share["first_fit"] > 0.95
    assert share["best_fit"] > 0.99
