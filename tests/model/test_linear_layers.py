"""A model with linear attention among its layers: packed rows, decoding, parameters, the scan, what is refused."""

import functools

import jax
import jax.numpy as jnp
import model_helpers
import numpy as np
import pytest

from zaya_jax import config
from zaya_jax.config import UserError
from zaya_jax.hardware import chips, hlo
from zaya_jax.model import decode, stack, zaya
from zaya_jax.model.cca import empty_cache

EXACT = model_helpers.EXACT
FULL, SLIDING, LINEAR = config.LAYER_KINDS


def mixed(*kinds, **changes):
    kinds = kinds or (LINEAR, FULL, LINEAR, SLIDING)
    return model_helpers.small(layer_types=kinds, num_hidden_layers=len(kinds), **changes)


def test_the_shortest_pattern_that_repeats():
    def pattern(*kinds):
        return stack.linear_pattern(mixed(*kinds))

    assert pattern(FULL, SLIDING, FULL) == (False,)
    assert pattern(LINEAR, LINEAR) == (True,)
    assert pattern(LINEAR, FULL, LINEAR, SLIDING) == (True, False)
    assert pattern(*(LINEAR, LINEAR, LINEAR, FULL) * 2) == (True, True, True, False)
    assert pattern(LINEAR, FULL, LINEAR) == (True, False, True)


@pytest.mark.parametrize(
    "kinds", [(LINEAR, FULL, LINEAR, SLIDING), pytest.param((LINEAR, LINEAR), marks=pytest.mark.slow)]
)
def test_packed_documents_equal_lone_ones(kinds):
    model = mixed(*kinds)
    params, bias = model_helpers.weights(model)
    lengths = (7, 1, 9)
    ids = np.random.default_rng(0).integers(0, model.vocab_size, (1, sum(lengths)))
    segments = np.repeat([1, 2, 3], lengths)[None]
    positions = np.concatenate([np.arange(n) for n in lengths])[None]
    run = jax.jit(functools.partial(zaya.apply, model, params, bias, precision=EXACT))
    packed = run(ids, segments=segments, positions=positions).hidden
    for document, start in enumerate(np.cumsum([0, *lengths[:-1]])):
        one = slice(start, start + lengths[document])
        np.testing.assert_allclose(packed[:, one], run(ids[:, one]).hidden, atol=2e-5)
    whole = run(ids).hidden
    assert np.abs(packed[:, 7:] - whole[:, 7:]).max() > 1e-3


@pytest.mark.parametrize(
    "kinds", [(LINEAR, FULL, LINEAR, SLIDING), pytest.param((LINEAR, LINEAR), marks=pytest.mark.slow)]
)
def test_every_step_with_the_cache_equals_the_whole_pass(kinds):
    model = mixed(*kinds)
    params, bias = model_helpers.weights(model)
    length, prompt = 12, 5
    ids = np.random.default_rng(1).integers(0, model.vocab_size, (2, length)).astype(np.int32)
    mask = np.ones_like(ids)
    mask[1, :3] = 0
    positions = np.maximum(np.cumsum(mask, 1) - 1, 0)
    run = jax.jit(functools.partial(zaya.apply, model, params, bias, precision=EXACT))
    whole = run(ids, mask=mask, positions=positions).hidden
    out = run(
        ids[:, :prompt], mask=mask[:, :prompt], positions=positions[:, :prompt],
        cache=empty_cache(model, EXACT, 2, length), cache_index=jnp.int32(0),
    )  # fmt: skip
    hidden = [out.hidden]
    for i in range(prompt, length):
        out = run(
            ids[:, i : i + 1], positions=positions[:, i : i + 1], cache=out.cache, cache_index=jnp.int32(i),
            cache_valid=(np.arange(length) <= i) & (mask > 0),
        )  # fmt: skip
        hidden.append(out.hidden)
    real = mask > 0
    np.testing.assert_allclose(jnp.concatenate(hidden, 1)[real], whole[real], atol=2e-5)


def test_greedy_decoding_equals_the_whole_pass():
    model = mixed()
    params, bias = model_helpers.weights(model)
    ids = jnp.asarray([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]], jnp.int32)
    new = jnp.asarray(decode.generate(model, params, bias, ids, 8, EXACT))
    whole = jnp.concatenate([ids, new], 1)
    hidden = zaya.apply(model, params, bias, whole, precision=EXACT).hidden
    logits = zaya.logits(model, params, hidden, EXACT)
    np.testing.assert_array_equal(logits[:, 4:-1].argmax(-1), new)


def test_only_softmax_layers_keep_keys_and_values():
    cache = empty_cache(mixed(), EXACT, 2, 100)
    assert cache["k"].shape == cache["v"].shape == (2, 2, 100, 2, 8)
    assert cache["state"].shape == (2, 2, 2, 8, 9)
    assert cache["columns"].shape[0] == cache["value"].shape[0] == 4
    assert "k" not in empty_cache(mixed(LINEAR, LINEAR), EXACT, 2, 100)
    assert "state" not in empty_cache(mixed(FULL, FULL), EXACT, 2, 100)


def test_a_linear_layer_has_the_weights_of_the_others():
    shapes = zaya.abstract(mixed(FULL, FULL, FULL, FULL))
    assert jax.tree.map(lambda x: x.shape, zaya.abstract(mixed())) == jax.tree.map(lambda x: x.shape, shapes)
    assert zaya.param_counts(mixed()) == zaya.param_counts(mixed(FULL, FULL, FULL, FULL))


@pytest.mark.slow
def test_recomputing_changes_no_gradient():
    model = mixed(LINEAR, FULL)
    params, bias = model_helpers.weights(model)
    ids = np.arange(10)[None]

    def grads(remat):
        def objective(p):
            return jnp.sum(zaya.apply(model, p, bias, ids, precision=EXACT, remat=remat).hidden ** 2)

        return jax.jit(jax.grad(objective))(params)

    for a, b in zip(jax.tree.leaves(grads("none")), jax.tree.leaves(grads("attention")), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3, rtol=1e-4)


def test_traces_are_those_of_each_layer_in_turn():
    """The stretches' outputs come back in the order of the layers."""
    model = mixed()
    params, bias = model_helpers.weights(model)
    ids = np.arange(6)[None]
    run = jax.jit(functools.partial(zaya.apply, precision=EXACT, trace=True), static_argnums=0)
    out = run(model, params, bias, ids)
    assert out.counts.shape == (4, 4)
    below = params | {"layers": jax.tree.map(lambda x: x[:3], params["layers"])}
    part = run(mixed(*model.kinds[:3]), below, bias[:3], ids)
    np.testing.assert_allclose(part.hidden_states, out.hidden_states[:3], atol=1e-5)
    np.testing.assert_array_equal(part.counts, out.counts[:3])


def test_a_stretch_is_traced_whatever_the_number_of_layers():
    def loops(repeats):
        model = mixed(*(LINEAR, FULL) * repeats)
        args = zaya.abstract(model), jnp.zeros((2 * repeats, 4)), jnp.zeros((1, 8), jnp.int32)
        return hlo.loop_bodies(
            jax.jit(lambda p, b, i: zaya.apply(model, p, b, i, precision=EXACT).hidden).lower(*args).compile()
        )

    assert loops(2) == loops(5)


def test_flops_of_linear_attention_do_not_grow_with_the_sequence():
    linear, full = mixed(LINEAR, LINEAR), mixed(FULL, FULL)
    assert chips.model_flops(linear, 1 << 20) == chips.model_flops(linear, 64)
    assert chips.model_flops(full, 1 << 20) > 100 * chips.model_flops(linear, 1 << 20)


def test_a_misspelt_kind_names_the_nearest():
    given = {"num_hidden_layers": 2, "layer_types": ("hybrid", "hybrid_linaer")}
    with pytest.raises(UserError, match=r"'hybrid_linaer' is not one of .* did you mean hybrid_linear\?"):
        config.check_model(given)


@pytest.mark.parametrize("remat", ["none", "attention"])
def test_no_second_copy_of_the_weights_is_kept(remat):
    """All that the gradient takes besides weights and gradients is less than a copy: on few tokens they are most."""
    model = mixed(*(LINEAR, FULL) * 4, moe_intermediate_size=512, num_experts=8)
    like = zaya.abstract(model, config.Precision())
    bias = jax.ShapeDtypeStruct((8, 9), jnp.float32)

    def total(params, bias):
        return zaya.apply(model, params, bias, jnp.zeros((1, 8), jnp.int32), remat=remat).hidden.sum()

    taken = jax.jit(jax.grad(total)).lower(like, bias).compile().memory_analysis()
    weights = 4 * sum(x.size for x in jax.tree.leaves(like))
    # A stretch of two layers at a time: their weights to compute with, and their gradients.
    assert taken.temp_size_in_bytes < 0.6 * weights
