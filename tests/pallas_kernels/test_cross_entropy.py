"""The chunked cross entropy against a plain one: biases, masks, z-loss, chunks that do not divide,
gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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
    hidden, embedding, bias, targets, weights = arrays
    bias = bias if with_bias else None

    def run(function):
        # Scaled after the fact, as a mean over the whole batch is.
        def objective(h, e, b):
            return (lambda loss, z: (0.3 * loss, z))(*function(h, e, b, targets, weights))

        return jax.jit(jax.value_and_grad(objective, argnums=(0, 1, 2), has_aux=True))(
            hidden, embedding, bias
        )

    with jax.default_matmul_precision("highest"):
        ours = run(lambda *a: cross_entropy(*a, dtype=jnp.float32, z_weight=z_weight, chunk=chunk))
        theirs = run(lambda *a: reference.cross_entropy(*a, z_weight=z_weight))
    assert len(jax.tree.leaves(ours)) == len(jax.tree.leaves(theirs)) == 4 + with_bias
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4, rtol=1e-5)


def test_masked_targets_teach_nothing(arrays):
    hidden, embedding, bias, targets, weights = arrays
    ignored = jnp.where(weights > 0, targets, -100)
    value, grad = jax.value_and_grad(
        lambda h: cross_entropy(h, embedding, bias, ignored, weights, dtype=jnp.float32)[0]
    )(hidden)
    wanted = reference.cross_entropy(hidden, embedding, bias, targets, weights)[0]
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    np.testing.assert_array_equal(grad[weights == 0], 0)
    assert (np.abs(grad[weights > 0]).sum(-1) > 0).all()


def test_without_any_real_target_the_sums_are_zero(arrays):
    hidden, embedding, bias, targets, _ = arrays
    loss, z = cross_entropy(
        hidden, embedding, bias, targets, jnp.zeros(N), dtype=jnp.float32, z_weight=0.1
    )
    assert loss == 0 and z == 0


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
