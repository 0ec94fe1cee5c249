"""Decoding over a cache split over several devices equals one device's, token for token."""

import jax
import model_helpers
import pytest
from jax.sharding import AxisType, NamedSharding

from zaya_jax import config
from zaya_jax.compiled import hlo
from zaya_jax.config import LAYER_KINDS
from zaya_jax.model import decode
from zaya_jax.model.sampling import Sampling
from zaya_jax.parallel import sharding
from zaya_jax.parallel.mesh import make_mesh
from zaya_jax.parallel.spread import spread_of
from zaya_jax.parallel.tree import DecodeDevices, cache_over

FULL, SLIDING, LINEAR = LAYER_KINDS
EXACT = model_helpers.EXACT


def mesh_of(size):
    return jax.make_mesh(
        (size,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size]
    )


@pytest.mark.slow
def test_a_cache_that_no_device_could_hold_alone():
    """Weights as training has them on a mesh, experts cut; each device has a quarter of all keys
    and values."""
    model = model_helpers.small(num_experts=4)
    params, bias = model_helpers.weights(model)
    mesh = make_mesh(config.Mesh(expert=2, context=4), jax.devices()[:8])
    spread = spread_of(config.Mesh(expert=2, context=4), mesh.shape)
    specs = sharding.param_specs(model, EXACT, spread)
    placed = jax.device_put(params, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
    prompt = [[(7 * i) % 32 for i in range(60)]]
    ours = decode.Continuation(
        decode.Decoder(model, placed, bias, EXACT, cache_over(mesh)), prompt, 8
    )
    theirs = decode.Continuation(decode.Decoder(model, params, bias, EXACT), prompt, 8)
    whole = decode.cache_bytes(model, EXACT, 1, theirs.cache_length).total
    assert (
        decode.cache_bytes(model, EXACT, 1, ours.cache_length, cache_over(mesh)).total < whole / 3
    )
    for name in ("k", "v"):
        assert {x.data.nbytes for x in ours._cache[name].addressable_shards} == {
            theirs._cache[name].nbytes // 4
        }
    while not theirs.ended:
        assert ours.more() == theirs.more()
    assert cache_over(None) is cache_over(make_mesh(config.Mesh(data=8))) is decode.ONE_DEVICE


@pytest.mark.slow  # test_rows.py has pieces on one device, the next two tests one piece on several
@pytest.mark.parametrize("size", [2, 3, 8])
def test_prompts_in_pieces_are_continued_as_on_one_device(size, monkeypatch):
    """All kinds of layers; pieces that no power of two divides, rows that end in each of them,
    windows over their borders."""
    model = model_helpers.small(layer_types=(FULL, LINEAR, SLIDING, LINEAR), num_hidden_layers=4)
    params, bias = model_helpers.weights(model)
    prompts = [[(7 * i + n) % 32 for i in range(n)] for n in (50, 1, 20)]
    ours = decode.Decoder(model, params, bias, EXACT, DecodeDevices(mesh_of(size)))
    theirs = ours._replace(devices=decode.ONE_DEVICE)
    options = {"ends": [3], "sampling": Sampling(0.8, top_p=0.9), "seeds": 3}
    whole = decode.generate(theirs, prompts, 8, **options)
    monkeypatch.setattr(decode, "PIECE", 16)
    assert decode.generate(ours, prompts, 8, **options) == whole


def test_a_step_of_the_model_sends_nothing_else():
    """Three arrays are reduced a layer and step, and a device's cache has its part of the
    columns."""
    model = model_helpers.small()
    params, bias = model_helpers.weights(model)
    rows = decode.Continuation(
        decode.Decoder(model, params, bias, EXACT, DecodeDevices(mesh_of(8))), [[0] * 20], 5
    )
    sizes = decode.cache_bytes(model, EXACT, 1, rows.cache_length, DecodeDevices(mesh_of(8)))
    assert model_helpers.cache_bytes(rows) == 8 * sizes.total
    rows.more()
    program = decode._next_tokens.lower(*rows.arguments(1))
    assert program.as_text().count("stablehlo.all_reduce") == 3
    compiled = program.compile()
    found = hlo.collectives(compiled)
    assert {c.kind for c in found} == {"all-reduce"}
    reduced = [a.shape for c in found for a in c.operands]
    heads, channels = model.num_attention_heads, model.head_dim
    assert sorted(reduced) == [(1, heads), (1, heads), (1, heads, channels)]
    assert f"f32[2,1,{rows.cache_length // 8},2,8]" in compiled.as_text()
    assert f"f32[2,1,{rows.cache_length},2,8]" not in compiled.as_text()
