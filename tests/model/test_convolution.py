"""CCA's two convolutions against their definition, token by token; gradients against JAX's own of that definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zaya_jax.model.convolution import convolve

G, B, S, C = 3, 2, 12, 4


def definition(x, before, by_channel, by_head, segments):
    """Each token from those at most `reach` before it that are of its segment."""
    reach = by_channel.shape[0] + by_head.shape[0] - 2
    x = jnp.concatenate([jnp.zeros((G, B, reach, C)) if before is None else before, x], axis=2)
    if segments is None:
        segments = jnp.ones((B, reach + S), jnp.int32)
    out = []
    for n in range(reach, reach + S):
        total = jnp.zeros((G, B, C))
        for i in range(by_head.shape[0]):
            for j in range(by_channel.shape[0]):
                back = n - (by_head.shape[0] - 1 - i) - (by_channel.shape[0] - 1 - j)
                own = (segments[:, back] == segments[:, n])[None, :, None]
                taken = jnp.where(own, x[:, :, back], 0) * by_channel[j][:, None]
                total += jnp.einsum("gbi,gio->gbo", taken, by_head[i])
        out.append(total)
    return jnp.stack(out, axis=2)


def inputs(taps, given):
    keys = jax.random.split(jax.random.key(0), 5)
    before = jax.random.normal(keys[1], (G, B, sum(taps) - 2, C)) if given else None
    by_channel = jax.random.normal(keys[2], (taps[0], G, C))
    by_head = jax.random.normal(keys[3], (taps[1], G, C, C))
    return jax.random.normal(keys[0], (G, B, S, C)), before, by_channel, by_head, keys[4]


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("given", [False, True], ids=["from nothing", "going on"])
@pytest.mark.parametrize("taps", [(2, 2), (1, 1), (3, 2), (1, 3), (4, 1)], ids=str)
def test_both_convolutions_and_all_gradients(taps, given, cut):
    x, before, by_channel, by_head, key = inputs(taps, given)
    segments = None
    if cut:  # the first document goes on from before where there is something before
        own = np.cumsum(np.random.default_rng(1).random((B, S)) < 0.3, axis=1) + 1
        own[:, 0] = 1
        segments = jnp.concatenate([np.full((B, sum(taps) - 2), 1 if given else -1), own], axis=1)
    d_out = jax.random.normal(key, (G, B, S, C))

    def gradients(function):
        arguments = (0, 1, 2, 3) if given else (0, 2, 3)
        return jax.jit(jax.value_and_grad(lambda *a: jnp.sum(function(*a) * d_out), argnums=arguments))

    ours = gradients(lambda *a: convolve(*a, segments, jnp.float32))(x, before, by_channel, by_head)
    theirs = gradients(lambda *a: definition(*a, segments))(x, before, by_channel, by_head)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_the_backward_pass_stores_no_neighbours():
    """What is kept for it is the input, not the taps side by side."""
    x, _, by_channel, by_head, _ = inputs((2, 2), False)
    _, pull = jax.vjp(lambda x: convolve(x, None, by_channel, by_head, None, jnp.float32), x)
    kept = sum(leaf.size for leaf in jax.tree.leaves(pull))
    assert kept <= x.size + by_channel.size + by_head.size
