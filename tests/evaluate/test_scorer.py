"""Log-probabilities of rows equal those of `loss` and the public implementation, next to any other
rows."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

import zaya_jax as zj
from zaya_jax.evaluate import scorer
from zaya_jax.evaluate.scorer import Scorer, TokenRow

CLOSE = dict(rtol=0, atol=2e-5)


def some_rows(count, seed=0, longest=60):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, longest, count)
    return [TokenRow(rng.integers(0, 256, n).tolist(), int(rng.integers(1, n))) for n in lengths]


def test_a_row_s_mean_is_its_loss(model):
    rng = np.random.default_rng(0)
    for row in [TokenRow(rng.integers(0, 256, 24).tolist(), first) for first in (1, 23)]:
        ((log_probs, likeliest),) = Scorer(model)([row])
        ids = np.array([row.ids])
        labels = np.where(np.arange(len(row.ids)) >= row.first, ids, -100)
        assert -log_probs.mean() == pytest.approx(model.loss(ids, labels), abs=1e-5)
        logits = model.logits(ids)[0, row.first - 1 : -1]
        np.testing.assert_array_equal(likeliest, logits.argmax(-1) == row.ids[row.first :])
        assert len(log_probs) == len(likeliest) == len(row.ids) - row.first


@pytest.mark.parametrize("case", ["base", pytest.param("mixed", marks=pytest.mark.slow)])
def test_rows_are_scored_as_the_public_implementation_does(case, golden_dir):
    """Of its logits."""
    expected = load_file(golden_dir / case / "expected.safetensors")
    ids, logits = expected["input_ids"], expected["logits"].astype(np.float64)
    found = Scorer(zj.load(golden_dir / case))(
        [TokenRow(own.tolist(), first) for own, first in zip(ids, (1, 7), strict=True)]
    )
    for own, first, theirs, (log_probs, likeliest) in zip(ids, (1, 7), logits, found, strict=True):
        theirs = theirs[first - 1 : -1]
        wanted = theirs - np.log(np.exp(theirs).sum(-1, keepdims=True))
        np.testing.assert_allclose(
            log_probs, wanted[np.arange(len(wanted)), own[first:]], rtol=0, atol=1e-4
        )
        np.testing.assert_array_equal(likeliest, wanted.argmax(-1) == own[first:])


def test_batch_and_order_change_nothing(model):
    rows = some_rows(12, longest=24)
    found = Scorer(model)(rows)
    alone = [Scorer(model)([row])[0] for row in rows[:3]]
    for (a, x), (b, y) in zip(found, alone, strict=False):
        np.testing.assert_allclose(a, b, **CLOSE)
        np.testing.assert_array_equal(x, y)
    order = np.random.default_rng(1).permutation(len(rows))
    again = Scorer(model, tokens=128)([rows[i] for i in order])
    for i, (log_probs, _) in zip(order, again, strict=True):
        np.testing.assert_allclose(log_probs, found[i][0], **CLOSE)


@pytest.mark.parametrize(
    "mesh",
    [pytest.param({"data": 8}, marks=pytest.mark.slow), {"data": 2, "expert": 2, "context": 2}],
    ids=["data", "mixed"],
)
def test_a_mesh_of_eight_gives_what_one_device_does(model, folder, mesh):
    assert jax.device_count() == 8
    rows = some_rows(9, longest=16)
    for (a, _), (b, _) in zip(
        Scorer(zj.load(folder, mesh=mesh))(rows), Scorer(model)(rows), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=0, atol=5e-5)


@given(
    st.lists(st.integers(1, 3000), max_size=60),
    st.integers(1, 4096),
    st.sampled_from([None, 3000, 3001, 4096]),
)
def test_each_row_is_in_one_batch_with_room(lengths, tokens, longest):
    found = list(scorer.batches(lengths, tokens, longest))
    assert sorted(number for numbers, _ in found for number in numbers) == list(range(len(lengths)))
    for numbers, length in found:
        assert max(lengths[n] for n in numbers) <= length <= (longest or 4096)
        assert len(numbers) == 1 or scorer.power_of_two(len(numbers)) * length <= tokens
    assert [length for _, length in found] == sorted((length for _, length in found), reverse=True)
