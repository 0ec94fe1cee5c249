"""Decoding over a cache that lies on several devices is that of one device, token for token."""

import functools

import jax
import jax.numpy as jnp
import model_helpers
import pytest
from jax.sharding import AxisType

from zaya_jax.config import LAYER_KINDS, UserError
from zaya_jax.hardware import hlo
from zaya_jax.model import decode
from zaya_jax.model.sampling import Sampling
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
    assert run(devices=InParts(mesh_of(size))) == run()


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_prompts_in_pieces_too(size):
    """Pieces that no power of two divides, rows that end in each of them, windows over their borders."""
    model = model_helpers.small(layer_types=(SLIDING, LINEAR))
    params, bias = model_helpers.weights(model)
    prompts = [[(7 * i + n) % 32 for i in range(n)] for n in (50, 1, 20)]
    run = functools.partial(decode.generate, model, params, bias, prompts, 8, EXACT, ends=[3])
    assert run(devices=InParts(mesh_of(size)), piece=16) == run()


def test_the_stream_too():
    model = model_helpers.small()
    params, bias = model_helpers.weights(model)
    ids = jnp.asarray([[3, 1, 4]], jnp.int32)
    run = functools.partial(
        decode.stream, model, params, bias, ids, 19, EXACT, sampling=Sampling(0.8, top_p=0.9), seeds=3
    )
    pieces = list(run(devices=InParts(mesh_of(4))))
    assert [len(p[0]) for p in pieces] == [1, 16, 2]
    assert pieces == list(run())


def test_a_step_of_the_model_sends_nothing_else():
    """Three arrays are reduced a layer and step, and a device's cache has its part of the columns."""
    model = model_helpers.small()
    params, bias = model_helpers.weights(model)
    rows = decode.Generation(model, params, bias, [[0] * 20], 5, EXACT, devices=InParts(mesh_of(8)), seeds=0)
    said = decode.cache_bytes(model, EXACT, 1, rows.columns, InParts(mesh_of(8)))
    assert rows.cache_bytes == 8 * said.total
    rows.more()
    program = rows.lowered()
    assert program.as_text().count("stablehlo.all_reduce") == 3
    compiled = program.compile()
    found = hlo.collectives(compiled)
    assert {c.kind for c in found} == {"all-reduce"}
    reduced = [a.shape for c in found for a in c.operands]
    heads, channels = model.num_attention_heads, model.head_dim
    assert sorted(reduced) == [(1, heads), (1, heads), (1, heads, channels)]
    assert "f32[2,1,4,2,8]" in compiled.as_text()
    assert "f32[2,1,32,2,8]" not in compiled.as_text()


def test_a_mesh_without_the_axis_is_one_line():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    with pytest.raises(UserError, match="the mesh has the axes data; the cache's parts lie over context"):
        InParts(mesh)
