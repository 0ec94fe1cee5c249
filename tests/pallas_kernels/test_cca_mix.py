"""CCA's two convolutions against their definition, token by token; gradients against JAX's own of
that definition."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rows import fast_alone, slow

from pallas_kernels.cca_mix import convolve, queries_and_keys, reference

G, B, S, C = 3, 2, 12, 4


def normals():
    """Numbers of any shape, made on the host: a program for each shape would take longer to
    compile."""
    rng = np.random.default_rng(0)
    return lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32))


def inputs(taps, given):
    normal = normals()
    before = normal(G, B, sum(taps) - 2, C) if given else None
    by_channel, by_head = normal(taps[0], G, C), normal(taps[1], G, C, C)
    return normal(G, B, S, C), before, by_channel, by_head, normal(G, B, S, C)


CASES = itertools.product([(2, 2), (1, 1), (3, 2), (1, 3), (4, 1)], [False, True], [False, True])
FAST = {((2, 2), False, True), ((3, 2), True, True), ((1, 1), True, False)}


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(("taps", "given", "cut"), fast_alone(FAST, CASES))
def test_both_convolutions_and_all_gradients(taps, given, cut):
    x, before, by_channel, by_head, d_out = inputs(taps, given)
    segments = None
    if cut:  # the first document goes on from before where there is something before
        own = np.cumsum(np.random.default_rng(1).random((B, S)) < 0.3, axis=1) + 1
        own[:, 0] = 1
        segments = jnp.concatenate([np.full((B, sum(taps) - 2), 1 if given else -1), own], axis=1)

    def gradients(function):
        arguments = (0, 1, 2, 3) if given else (0, 2, 3)
        return jax.jit(
            jax.value_and_grad(lambda *a: jnp.sum(function(*a) * d_out), argnums=arguments)
        )

    ours = gradients(lambda *a: convolve(*a, segments, jnp.float32))(x, before, by_channel, by_head)
    theirs = gradients(lambda *a: reference.convolve(*a, segments))(x, before, by_channel, by_head)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_the_backward_pass_stores_no_neighbours():
    """It keeps the input, not the taps side by side."""
    x, _, by_channel, by_head, _ = inputs((2, 2), False)
    _, pull = jax.vjp(lambda x: convolve(x, None, by_channel, by_head, None, jnp.float32), x)
    kept = sum(leaf.size for leaf in jax.tree.leaves(pull))
    assert kept <= x.size + by_channel.size + by_head.size


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(("heads", "num_kv"), [slow(2, 2), (6, 2), slow(4, 1)])
def test_means_norm_and_temperature(heads, num_kv):
    normal, shape = normals(), (heads + num_kv, B, S, C)
    args = normal(*shape), normal(*shape), normal(*shape[::3]), normal(num_kv)
    d_q, d_k = normal(B, S, heads, C), normal(B, S, num_kv, C)

    def gradients(function):
        def objective(*args):
            q, k = function(*args)
            return jnp.sum(q * d_q) + jnp.sum(k * d_k), (q, k)

        return jax.jit(jax.value_and_grad(objective, argnums=(0, 1, 2, 3), has_aux=True))(*args)

    ours = gradients(lambda *a: queries_and_keys(*a, [], num_kv, None))
    theirs = gradients(lambda *a: reference.queries_and_keys(*a, num_kv))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
