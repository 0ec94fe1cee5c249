"""The chunked cross entropy against a plain one: biases, masks, z-loss, chunks that do not divide,
gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compared import assert_all_close, values_and_gradients
from rows import slow

from pallas_kernels.cross_entropy import cross_entropy, reference

N, D, V = 37, 10, 23


@pytest.fixture
def arrays():
    keys = jax.random.split(jax.random.key(0), 5)
    hidden, embedding = jax.random.normal(keys[0], (N, D)), jax.random.normal(keys[1], (V, D))
    weights = jax.random.bernoulli(keys[4], 0.7, (N,)).astype(jnp.float32)
    return (
        hidden,
        embedding,
        jax.random.normal(keys[2], (V,)),
        jax.random.randint(keys[3], (N,), 0, V),
        weights,
    )


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("chunk", [None, 1, 8, 36, 100])
@pytest.mark.parametrize(
    ("z_weight", "with_bias"), [(0.1, True), (0.0, False), slow(0.0, True), slow(0.1, False)]
)
def test_values_and_gradients(arrays, chunk, z_weight, with_bias):
    """Targets below 0, as of masked places, teach nothing."""
    hidden, embedding, bias, targets, weights = arrays
    bias = bias if with_bias else None

    def of(function, targets, **options):
        def run(*arrays):
            loss, z = function(*arrays, targets, weights, z_weight=z_weight, **options)
            return loss, jax.lax.stop_gradient(z)

        return values_and_gradients(run, (hidden, embedding, bias))

    ignored = jnp.where(weights > 0, targets, -100)
    with jax.default_matmul_precision("highest"):
        ours = of(cross_entropy, ignored, dtype=jnp.float32, chunk=chunk)
        theirs = of(reference.cross_entropy, targets)
    assert len(jax.tree.leaves(ours)) == 4 + with_bias
    assert_all_close(ours, theirs, atol=2e-4, rtol=1e-5)
    of_hidden = ours[1][0]
    np.testing.assert_array_equal(of_hidden[weights == 0], 0)
    assert (np.abs(of_hidden[weights > 0]).sum(-1) > 0).all()


@pytest.mark.usefixtures("implementation")
def test_large_logits_do_not_overflow(arrays):
    """Nor does a word that its bias takes away, where no token is to give it."""
    hidden, embedding, bias, targets, weights = arrays
    bias, weights = bias.at[0].set(-jnp.inf), weights * (targets != 0)
    loss, _ = cross_entropy(1e3 * hidden, embedding, bias, targets, weights, dtype=jnp.float32)
    assert np.isfinite(loss)


def test_logits_never_exist_in_full():
    """[N, V] in float32 would be 2 GiB; forward and backward need a twelfth of it."""
    n, d, v = 4096, 64, 131_072
    shapes = [
        jax.ShapeDtypeStruct(s, t)
        for s, t in (((n, d), jnp.float32), ((v, d), jnp.float32), ((n,), jnp.int32))
    ]
    step = jax.value_and_grad(
        lambda h, e, t: cross_entropy(h, e, None, t, jnp.ones(n), dtype=jnp.bfloat16)[0],
        argnums=(0, 1),
    )
    compiled = jax.jit(step).lower(*shapes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < n * v * 4 / 8
