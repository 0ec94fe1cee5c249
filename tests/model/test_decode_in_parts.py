"""Decoding over a cache that lies on several devices is that of one device, token for token."""

import functools

import jax
import jax.numpy as jnp
import model_helpers
import numpy as np
import pytest
from jax.sharding import AxisType

from zaya_jax.config import LAYER_KINDS
from zaya_jax.hardware import hlo
from zaya_jax.model import decode
from zaya_jax.parallel.tree import InParts

FULL, SLIDING, LINEAR = LAYER_KINDS
EXACT = model_helpers.EXACT


def mesh_of(size):
    return jax.make_mesh((size,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size])


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 8])
def test_greedy_decoding_is_that_of_one_device(size):
    """Full, sliding and linear layers; rows of unequal length; a prompt that does not divide over the devices."""
    model = model_helpers.small(layer_types=(FULL, LINEAR, SLIDING, LINEAR), num_hidden_layers=4)
    params, bias = model_helpers.weights(model)
    ids = jax.random.randint(jax.random.key(2), (2, 7), 0, model.vocab_size)
    mask = jnp.asarray([[0, 0, 0, 1, 1, 1, 1], [1] * 7])
    run = functools.partial(decode.generate, model, params, bias, ids, 14, EXACT, mask=mask)
    np.testing.assert_array_equal(run(devices=InParts(mesh_of(size))), run())


def test_the_stream_too():
    model = model_helpers.small()
    params, bias = model_helpers.weights(model)
    ids = jnp.asarray([[3, 1, 4]], jnp.int32)
    run = functools.partial(
        decode.stream, model, params, bias, ids, 9, EXACT, piece=4, temperature=0.8, key=jax.random.key(3)
    )
    pieces = list(run(devices=InParts(mesh_of(4))))
    assert [p.shape[1] for p in pieces] == [1, 4, 4]
    np.testing.assert_array_equal(np.concatenate(pieces, 1), np.concatenate(list(run()), 1))


def test_a_step_of_the_model_sends_nothing_else():
    """Three arrays are reduced a layer and step, and a device's cache has its part of the columns."""
    model = model_helpers.small()
    params, bias = model_helpers.weights(model)
    ids, keys = jnp.zeros((1, 20), jnp.int32), jax.random.split(jax.random.key(0), 5)
    compiled = decode._generate.lower(
        params, bias, ids, None, keys, model, EXACT, 0.0, InParts(mesh_of(8))
    ).compile()
    found = hlo.collectives(compiled)
    assert {(c.kind, c.times) for c in found} == {("all-reduce", 4 * model.num_hidden_layers)}
    reduced = [a.shape for c in found for a in c.operands]
    heads, channels = model.num_attention_heads, model.head_dim
    assert sorted(reduced) == [(1, heads), (1, heads), (1, heads, channels)]
    assert "f32[2,1,4,2,8]" in compiled.as_text()
    assert "f32[2,1,25,2,8]" not in compiled.as_text()
