"""Packing: every token once, documents whole where they fit, rows well filled."""

import itertools
import types

import numpy as np
import pytest

from zaya_jax.data import pack


def test_order_and_fill_are_those_of_the_named_rule():
    assert pack.pack_documents(np.array([5, 4, 5, 6]), 10) == [
        [(14, 20), (5, 9)],
        [(0, 5), (9, 14)],
    ]


@pytest.mark.parametrize("cross_documents", [False, True])
def test_a_segment_ends_at_what_could_not_be_read(cross_documents):
    """A segment's tokens lie together: linear attention's states count on it."""
    rows = pack.BatchBuilder(2, 8, pad_id=9)
    tokens = np.arange(8, dtype=np.int32)
    piece = types.SimpleNamespace(
        real=True, tokens=tokens, targets=tokens, starts=tokens == 0, learn=tokens >= 0
    )
    hole = types.SimpleNamespace(real=False)
    rows.append_span(0, [(piece, 0, 3), (hole, 3, 5), (piece, 5, 8)])
    rows.append_span(1, [(hole, 0, 2), (piece, 2, 4), (hole, 4, 5), (piece, 5, 6)])
    batch = rows.build(cross_documents)
    for ids in batch["segment_ids"]:
        runs = [key for key, _ in itertools.groupby(ids.tolist()) if key > 0]
        assert len(runs) == len(set(runs)) == 2
    np.testing.assert_array_equal(
        batch["segment_ids"] > 0, [[1, 1, 1, 0, 0, 1, 1, 1], [0, 0, 1, 1, 0, 1, 0, 0]]
    )
