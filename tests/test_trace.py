"""What a trace shows of a model: attention, router and experts, by their definitions."""

import dataclasses

import numpy as np
import pytest
import small_models
from test_library import KINDS

import zaya_jax as zj


@pytest.fixture(scope="module")
def model():
    """Fresh weights on one device."""
    return zj.create(small_models.settings(**KINDS))


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(0).integers(0, 264, (2, 7))


@pytest.fixture(scope="module")
def segments():
    """Documents that end anywhere, and padding."""
    return np.asarray([[1] * 7, [1, 1, 1, 2, 2, 0, 0]])


def test_attention_is_what_the_tokens_see_of_each_other(model, ids, segments):
    seen = model.trace(ids, segments=segments, attention=True)
    sliding, full = seen.attention
    see = np.tril(np.ones((7, 7), bool)) & (segments[:, :, None] == segments[:, None, :])
    see = np.broadcast_to(see[:, None], full.shape)
    near = see & np.triu(np.ones((7, 7), bool), -2)  # a sliding layer does not look farther back
    for weights, visible in ((full, see), (sliding, near)):
        assert (weights[visible] > 0).all() and (weights[~visible] == 0).all()
    np.testing.assert_allclose(seen.attention.sum(-1), 1, rtol=1e-6)
    scores = (
        np.einsum("lbqkgc,lbjkc->lbkgqj", seen.queries.reshape(2, 2, 7, 2, 2, 8), seen.keys)
        / 8**0.5
    )
    scores = scores.reshape(seen.attention.shape)[..., 1, :2]  # the second token's, which sees both
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(weights, seen.attention[..., 1, :2], rtol=1e-4)
    assert seen.values.shape == seen.keys.shape == (2, 2, 7, 2, 8)
    plain = model.trace(ids, segments=segments)
    biased = plain.router_probs + np.asarray(model.balance)[:, None, None]
    np.testing.assert_array_equal(plain.choices, biased.argmax(-1))
    assert plain.attention is None and len(np.unique(plain.choices)) > 1
    np.testing.assert_array_equal(seen.logits, plain.logits)
    np.testing.assert_array_equal(seen.hidden_states, plain.hidden_states)


def test_the_experts_outputs_are_what_joins_the_stream_times_p(model, ids):
    """With twice the last weights the stream gains the same once more: fresh weights scale
    nothing."""
    model = dataclasses.replace(model, balance=0 * model.balance)  # some tokens skip
    layers = model.params["layers"]
    doubled = {**layers["experts"], "down": 2 * layers["experts"]["down"]}
    other = dataclasses.replace(
        model, params={**model.params, "layers": {**layers, "experts": doubled}}
    )
    one, two = model.trace(ids), other.trace(ids)
    skips, p = (
        one.choices[0] == 2,
        np.take_along_axis(one.router_probs[0], one.choices[0][..., None], -1),
    )
    assert skips.any() and not skips.all() and (one.expert_outputs[0][skips] == 0).all()
    gained = two.hidden_states[0] - one.hidden_states[0]
    np.testing.assert_allclose(p * one.expert_outputs[0], gained, rtol=1e-3, atol=1e-7)
    assert np.abs(gained[~skips]).min(-1).all()
