"""A model with linear attention among its layers: packed rows, decoding, parameters, the scan,
refusals."""

import functools

import jax
import jax.numpy as jnp
import model_helpers
import numpy as np
import pytest
from rows import slow

from zaya_jax import config
from zaya_jax.hardware import chips
from zaya_jax.model import zaya
from zaya_jax.model.placement import TokenRows

EXACT = model_helpers.EXACT
FULL, SLIDING, LINEAR = config.LAYER_KINDS


def mixed(*kinds, **changes):
    kinds = kinds or (LINEAR, FULL, LINEAR, SLIDING)
    return model_helpers.small(layer_types=kinds, num_hidden_layers=len(kinds), **changes)


def test_a_linear_layer_has_the_weights_of_the_others():
    shapes = zaya.abstract(mixed(FULL, FULL, FULL, FULL))
    assert jax.tree.map(lambda x: x.shape, zaya.abstract(mixed())) == jax.tree.map(
        lambda x: x.shape, shapes
    )
    assert zaya.param_counts(mixed()) == zaya.param_counts(mixed(FULL, FULL, FULL, FULL))


def test_traces_are_those_of_each_layer_in_turn():
    """The stretches' outputs come back in the order of the layers."""
    model = mixed()
    params, bias = model_helpers.weights(model)
    ids = np.arange(6)[None]
    run = jax.jit(functools.partial(zaya.apply, precision=EXACT, trace=True), static_argnums=0)
    out = run(model, params, bias, TokenRows(ids))
    assert out.counts.shape == (4, 4)
    below = params | {"layers": jax.tree.map(lambda x: x[:3], params["layers"])}
    part = run(mixed(*model.kinds[:3]), below, bias[:3], TokenRows(ids))
    np.testing.assert_allclose(part.hidden_states, out.hidden_states[:3], atol=1e-5)
    np.testing.assert_array_equal(part.counts, out.counts[:3])


def test_a_stretch_is_traced_whatever_the_number_of_layers():
    def loops(repeats):
        model = mixed(*(LINEAR, FULL) * repeats)
        args = zaya.abstract(model), jnp.zeros((2 * repeats, 4)), jnp.zeros((1, 8), jnp.int32)
        apply = jax.jit(
            lambda p, b, i: zaya.apply(model, p, b, TokenRows(i), precision=EXACT).hidden
        )
        return apply.lower(*args).compile().as_text().count(" while(")

    assert loops(2) == loops(5)


def test_flops_of_linear_attention_do_not_grow_with_the_sequence():
    linear, full = mixed(LINEAR, LINEAR), mixed(FULL, FULL)
    assert chips.model_flops(linear, 1 << 20) == chips.model_flops(linear, 64)
    assert chips.model_flops(full, 1 << 20) > 100 * chips.model_flops(linear, 1 << 20)


@pytest.mark.parametrize("remat", ["none", slow("attention")])
def test_no_second_copy_of_the_weights_is_kept(remat):
    """The gradient's memory besides weights and gradients is less than a copy: on few tokens these
    dominate."""
    model = mixed(*(LINEAR, FULL) * 4, moe_intermediate_size=512, num_experts=8)
    like = zaya.abstract(model, config.Precision())
    bias = jax.ShapeDtypeStruct((8, 9), jnp.float32)

    def total(params, bias):
        return zaya.apply(
            model, params, bias, TokenRows(jnp.zeros((1, 8), jnp.int32)), remat=remat
        ).hidden.sum()

    taken = jax.jit(jax.grad(total)).lower(like, bias).compile().memory_analysis()
    weights = 4 * sum(x.size for x in jax.tree.leaves(like))
    # A stretch of two layers at a time: their weights to compute with, and their gradients.
    assert taken.temp_size_in_bytes < 0.6 * weights
