"""The order of rows: each once an epoch, none twice in a batch, for any number of rows; and read
once. Mixtures: shares, balance of every batch, and counts that agree with counting."""

import itertools

import numpy as np
import pytest
from data_helpers import in_memory
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import check_refused

from zaya_jax.data import layout as layouts
from zaya_jax.data import mix, order, shuffle
from zaya_jax.data.mix import Mixture, Stretch
from zaya_jax.data.order import RowOrder


@settings(max_examples=300, deadline=None)
@given(
    num_rows=st.integers(1, 3000),
    batch=st.integers(1, 300),
    block_rows=st.integers(0, 40),
    key=st.integers(0, 2**64 - 1),
    rounds=st.integers(1, 8),
)
def test_each_row_once_an_epoch_and_never_twice_in_a_batch(
    num_rows, batch, block_rows, key, rounds
):
    made = RowOrder(num_rows, batch, batch, block_rows, key, rounds)
    epochs = made.rows(np.arange(3 * num_rows)).reshape(3, num_rows)
    assert (np.sort(epochs, axis=1) == np.arange(num_rows)).all()
    assert made.rows(np.array([2 * num_rows, num_rows - 1])).tolist() == [
        *epochs[2, :1],
        epochs[0, -1],
    ]
    if num_rows > max(30, 2 * batch):  # otherwise two may be alike
        other = RowOrder(num_rows, batch, batch, block_rows, key ^ 1, rounds)
        assert (epochs[0] != epochs[1]).any()
        assert (epochs[0] != other.rows(np.arange(num_rows))).any()
    # The places of each row, epoch by epoch: no batch can hold two of them, wherever batches begin.
    places = np.argsort(epochs, axis=1) + num_rows * np.arange(3)[:, None]
    assert (np.diff(places, axis=0) >= min(batch, num_rows)).all()


@pytest.mark.parametrize(
    ("num_rows", "batch"), [(50_003, 16), (99_991, 7), (4099 * 64, 64), (32_768, 8)]
)
def test_a_batch_has_one_row_of_a_block_and_a_slot_its_blocks(num_rows, batch):
    """A block's rows come some steps apart, one in a batch, at the same place of it; few rows
    belong to none."""
    made = RowOrder(num_rows, batch, batch, 64, key=3)
    assert made.block_rows > 8 and num_rows % made.block_rows < 0.01 * num_rows
    numbers = np.arange(num_rows)
    rows, slots = made.rows(numbers), made.slots(numbers)
    blocks, steps = rows // made.block_rows, numbers // batch
    last, held = {}, {}
    for b, slot, step in zip(blocks.tolist(), slots.tolist(), steps.tolist(), strict=True):
        if b < made.num_blocks:
            assert step - last.get(b, -99) >= order.VISIT_STEPS - 1
            assert held.setdefault(b, slot) == slot
            last[b] = step
    loose = np.flatnonzero(blocks >= made.num_blocks)
    if len(loose) > 1:  # what fills no block is spread, too
        assert np.diff(loose).min() > 0.5 * num_rows / len(loose)


def store_of(lengths, shards=1):
    """Documents in memory; cut in shards, as prepared ones are."""
    made = in_memory(lengths)
    parts = np.array_split(np.asarray(lengths), shards)
    made.num_shards = shards
    made.first_token = np.append(0, np.cumsum([p.sum() for p in parts]))
    made.lengths = lambda shard: parts[shard]
    return made


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=120),
    seq_len=st.integers(2, 64),
    packing=st.sampled_from(["concat", "best_fit"]),
    shards=st.integers(1, 4),
)
def test_layouts_hold_every_token_once(lengths, seq_len, packing, shards):
    lengths = np.array(lengths)
    shards = min(shards, len(lengths))
    layout = layouts.layout_of(store_of(lengths, shards), seq_len, packing)
    rows = [layout.spans(r) for r in range(layout.num_rows)]
    assert all(0 < sum(b - a for a, b in row) <= seq_len for row in rows)
    spans = sorted(span for row in rows for span in row)
    assert spans[0][0] == 0 and spans[-1][1] == lengths.sum()
    assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
    if packing != "concat":  # what fits is not cut
        edges = np.cumsum(lengths) - lengths
        short = {(int(e), int(e + n)) for e, n in zip(edges, lengths, strict=True) if n <= seq_len}
        assert short <= set(spans)


@pytest.mark.parametrize("size", [5, 33])
def test_small_permutations_are_even(size):
    """With four rounds one value was last in 1.3 times as many of them as another."""
    orders = np.array(
        [shuffle.permute(np.arange(size), size, shuffle.key(9, k)) for k in range(4000)]
    )
    counts = np.array([np.bincount(orders[:, place], minlength=size) for place in range(size)])
    spread = np.sqrt(4000 / size * (1 - 1 / size))
    assert np.abs(counts - 4000 / size).max() < 5 * spread


def test_values_never_change():
    """A resumed run depends on these numbers staying as they are."""
    assert shuffle.permute(np.arange(8), 10, shuffle.key(42, 3)).tolist() == [
        6,
        8,
        0,
        2,
        1,
        4,
        5,
        7,
    ]
    np.testing.assert_array_equal(shuffle.keys((42,), np.array([3])), [shuffle.key(42, 3)])


def stretch(first_step, batch, weights):
    return Stretch(first_step, batch, weights, seq_len=64, packing="concat")


STRETCHES = [
    stretch(0, 4, (0.7, 0.2, 0.1)),
    stretch(13, 8, (0.7, 0.2, 0.1)),
    stretch(40, 16, (0.1, 0.0, 0.9)),
]


def test_shares_follow_the_weights_in_every_batch_and_over_all():
    mixture = Mixture([stretch(0, 20, (0.5, 0.3, 0.2))])
    counts = np.array([np.bincount(mixture.sources(t), minlength=3) for t in range(300)])
    assert (np.abs(counts - [10, 6, 4]) <= 1).all()
    np.testing.assert_allclose(counts.mean(0) / 20, [0.5, 0.3, 0.2], atol=1e-3)


@pytest.mark.parametrize(
    ("mixture", "steps"),
    [
        (Mixture(STRETCHES), 6000),
        *(
            (Mixture([stretch(0, rounds * mix.TABLE_SIZE + 1, (0.9, 0.1, 0))]), 5)
            for rounds in (1, 3)
        ),
    ],
)
def test_rows_are_numbered_and_counted_as_they_come(mixture, steps):
    seen, most = np.zeros(3, int), np.zeros(3, int)
    for step in range(steps):
        sources = mixture.sources(step)
        for k, count in enumerate(np.bincount(sources, minlength=3)):
            numbers = mixture.row_numbers(step, k)[sources == k]
            np.testing.assert_array_equal(numbers, seen[k] + np.arange(count))
            seen[k] += count
            most[k] = max(most[k], count)
    for k in range(3):
        highest, usual = mixture.batch_row_counts(k)
        assert abs(highest - most[k]) <= (steps < 6000) and abs(usual - most[k]) <= 1


def test_bad_mixtures_are_one_clear_line():
    assert mix.parse_mixture(("/a=b=0.5", "c=2")) == {"/a=b": 0.5, "c": 2.0}
    for bad in (("a",), ("=1",), ("a=x",), ("a=-1",), ("a=1", "a=2"), ("a=inf",)):
        check_refused("path=weight", mix.parse_mixture, bad)
    check_refused("any weight", mix.parse_mixture, ("a=0",))
    check_refused("resolution", lambda: Mixture([stretch(0, 4, (1.0, 1e-6))]))
