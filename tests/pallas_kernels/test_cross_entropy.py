"""The chunked cross entropy against a plain one: biases, masks, z-loss, chunks that do not divide,
gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rows import slow

from pallas_kernels import chip
from pallas_kernels.cross_entropy import chunk_rows, cross_entropy, reference
from pallas_kernels.cross_entropy.xla import even_chunk

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


def test_large_logits_do_not_overflow(arrays):
    hidden, embedding, bias, targets, weights = arrays
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


@pytest.mark.parametrize("unit", [1, 8, 128])
def test_chunks_are_even_aligned_and_within_the_limit(unit):
    random = np.random.default_rng(0)
    limits = [1, 63, 127, 128, 129, 1023, 1024, 1025, *random.integers(1, 8192, 20)]
    nums = [
        1,
        127,
        128,
        129,
        1023,
        1024,
        1025,
        4095,
        4096,
        4097,
        16_384,
        *random.integers(1, 1 << 17, 200),
    ]
    for limit in limits:
        for num in nums:
            chunk = even_chunk(num, limit, unit)
            pieces = -(-num // chunk)
            assert chunk == num if num < unit else chunk % unit == 0
            assert 0 < chunk <= max(limit, unit)
            assert pieces * chunk - num < unit * pieces
            # No fewer of whole units would do.
            assert (pieces - 1) * max(limit // unit * unit, unit) < num


@pytest.mark.parametrize(
    ("kind", "num", "vocab", "rows", "pieces"),
    [
        ("NVIDIA H200", 4096, 262_272, 2048, 2),
        ("NVIDIA H200", 16_384, 262_272, 2048, 8),
        ("gfx942", 4096, 262_272, 4096, 1),
        ("gfx942", 16_384, 262_272, 4096, 4),
        ("NVIDIA H200", 5000, 262_272, 1792, 3),
        ("cpu", 4096, 262_272, 64, 64),
        ("cpu", 4096, 8192, 256, 16),
    ],
)
def test_default_chunks(kind, num, vocab, rows, pieces):
    with chip.making(chip.Chip("cpu" if kind == "cpu" else "gpu", kind)):
        assert chunk_rows(num, vocab) == rows and -(-num // rows) == pieces
    if kind != "cpu":
        assert rows * vocab * 4 <= (4608 if kind == "gfx942" else 2304) << 20
