"""Every operator where its formulas have a root, a quotient or a logarithm at their edge: values
and all gradients are finite and those of the definition, with each kind of chip's implementation.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rows import fast_alone

from pallas_kernels import chip, grouped_mlp, residual_norm
from pallas_kernels.attention import attention
from pallas_kernels.attention.reference import attention as reference_attention
from pallas_kernels.cca_mix import mix
from pallas_kernels.cross_entropy import cross_entropy
from pallas_kernels.cross_entropy import reference as reference_entropy
from pallas_kernels.grouped_mlp import reference as mlp_definition
from pallas_kernels.linear_attention import linear_attention
from pallas_kernels.linear_attention.reference import linear_attention as reference_linear
from pallas_kernels.newton_schulz import orthogonalize
from pallas_kernels.residual_norm import Joining
from pallas_kernels.residual_norm import reference as norm_definition

CHIPS = {
    "cpu": chip.Chip("cpu", "cpu"),
    "xla": chip.Chip("gpu", "gfx942", ()),
    "kernels": chip.Chip("cpu", "gfx942"),
}
SHAPE = 1, 64, 2, 32  # batch, tokens, heads, channels


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


@pytest.fixture(params=CHIPS.values(), ids=CHIPS)
def target(request):
    with chip.making(request.param):
        yield request.param


@functools.partial(jax.jit, static_argnames="function")
def results(function, arrays, given=(), weights=None):
    """What comes out, and the gradients of its sum with these weights, or of some of our own;
    `given` has none."""

    def objective(*arrays):
        out = jax.tree.leaves(function(*arrays, *given))
        by = weights or [normal(*x.shape, seed=i) for i, x in enumerate(out)]
        return sum(jnp.sum(x.astype(jnp.float32) * w) for x, w in zip(out, by, strict=True)), out

    numbers = tuple(range(len(arrays)))
    return jax.value_and_grad(objective, argnums=numbers, has_aux=True)(*arrays)


def expected(function, arrays, given=()):
    """The definition's, by one program for all chips."""
    with chip.making(CHIPS["cpu"]):
        return results(function, arrays, given)


def assert_equal(ours, theirs, tolerance=2e-5):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.isfinite(a).all() and np.isfinite(b).all()
        np.testing.assert_allclose(
            a, b, rtol=tolerance, atol=tolerance * max(np.abs(b).max(initial=0), 1)
        )


EQUAL = {
    "zeros": lambda *shape: jnp.zeros(shape),
    "all equal": lambda *shape: jnp.full(shape, 0.5, jnp.float32),
    "large": lambda *shape: jnp.full(shape, 8.0, jnp.float32),
}


@pytest.mark.parametrize("numbers", EQUAL.values(), ids=EQUAL)
def test_attention(target, numbers):
    """Equal scores, and queries whose segment no key has."""
    arrays = numbers(*SHAPE), numbers(*SHAPE), normal(*SHAPE)
    segments = jnp.ones(SHAPE[:2], jnp.int32)
    for keys in (segments, segments.at[:, :9].set(2)):
        ours = results(softmax, arrays, (segments, keys))
        assert_equal(ours, expected(reference_softmax, arrays, (segments, keys)))


def softmax(*args):
    return attention(*args, scale=0.1)[0]


def reference_softmax(*args):
    return reference_attention(*args, scale=0.1)[0]


@pytest.mark.parametrize("numbers", EQUAL.values(), ids=EQUAL)
def test_linear_attention(target, numbers):
    arrays = numbers(*SHAPE), numbers(*SHAPE), normal(*SHAPE)
    segments = jnp.asarray(np.repeat([[1, 2, 0]], [20, 30, 14], axis=1), jnp.int32)
    assert_equal(
        results(in_chunks, arrays, (segments,)), expected(reference_linear, arrays, (segments,))
    )


def in_chunks(*args):
    return linear_attention(*args, chunk=16)


def test_ccas_mixing_of_tokens_that_are_zero(target):
    """A row of the embedding that is zero, with biases of zero: queries and keys without a
    direction.

    Their gradients are infinite where someone asks for them. A batch's padding does not.
    """
    columns = normal(1, 20, 3 * 32).at[:, 12:].set(0)
    weights = normal(2, 3, 32), normal(2, 3, 32, 32) / 6, jnp.zeros((3, 32)), jnp.ones(1)
    segments = jnp.asarray([[-1, -1, *[1] * 12, *[0] * 8]])

    def mixed(columns, *weights):
        q, k, _ = mix(columns, None, *weights, [], segments, None, jnp.float32)
        return q[:, :12], k[:, :12]

    whole = results(mixed, (columns, *weights))
    alone = results(
        lambda columns, *weights: mix(
            columns, None, *weights, [], segments[:, :14], None, jnp.float32
        )[:2],
        (columns[:, :12], *weights),
    )
    (_, out), (d_columns, *others) = whole
    np.testing.assert_array_equal(d_columns[:, 12:], 0)
    assert_equal(((_, out), (d_columns[:, :12], *others)), alone)


@pytest.mark.parametrize(
    ("offset", "tokens"),
    fast_alone(
        {(-np.inf, 128), (-1e30, 100)}, itertools.product((-np.inf, -1e30, 0.0), (100, 128))
    ),
)
def test_a_bias_that_takes_the_word_of_masked_places_away(target, offset, tokens):
    """Masked places, and those that fill up a chunk, have 0 as their target."""
    hidden, table = normal(tokens, 64) / 8, normal(300, 64, seed=1)
    bias, places = jnp.zeros(300).at[0].set(offset), jnp.arange(tokens)
    targets = jnp.where(places % 3 == 0, 0, 1 + places % 7)
    weights = (places % 3 > 0).astype(jnp.float32)

    def loss(function, **options):
        return lambda h, e: function(h, e, bias, targets, weights, z_weight=0.1, **options)[0]

    ours = results(
        loss(cross_entropy, dtype=jnp.float32, chunk=64 if tokens == 100 else 128), (hidden, table)
    )
    known = bias.at[0].set(max(offset, -1e4))  # the definition knows no place that does not count
    theirs = results(
        lambda h, e: reference_entropy.cross_entropy(h, e, known, targets, weights, z_weight=0.1)[
            0
        ],
        (hidden, table),
    )
    assert_equal(ours, theirs, 2e-4)


@pytest.mark.parametrize("numbers", EQUAL.values(), ids=EQUAL)
def test_residual_norm(target, numbers):
    how = Joining(*(numbers(48) for _ in range(4)))
    arrays = numbers(5, 48), numbers(5, 48), normal(48), normal(48, 4)
    ours, theirs = results(stream, arrays, (how,)), expected(reference_stream, arrays, (how,))
    assert_equal(ours, theirs, 1e-4)


def stream(y, h, scale, kernel, how, of=residual_norm):
    x, h = of.read(h, scale, 1e-5, jnp.float32)
    return x, of.join_and_read(y, h, how, scale, kernel, 1e-5, jnp.float32, jnp.float32)


reference_stream = functools.partial(stream, of=norm_definition)


@pytest.mark.parametrize("numbers", EQUAL.values(), ids=EQUAL)
def test_grouped_mlp(target, numbers):
    arrays = numbers(40, 32), numbers(3, 32, 48) / 8, numbers(3, 24, 32) / 8
    sizes = jnp.asarray([0, 30, 10], jnp.int32)
    assert_equal(results(mlp, arrays, (sizes,)), expected(reference_mlp, arrays, (sizes,)), 1e-4)


def mlp(rows, gate_up, down, sizes, of=grouped_mlp):
    return of.grouped_mlp(rows, sizes, gate_up, down)


reference_mlp = functools.partial(mlp, of=mlp_definition)


@pytest.mark.parametrize("numbers", EQUAL.values(), ids=EQUAL)
def test_newton_schulz(target, numbers):
    """Of matrices of rank 0 and 1; there is no gradient."""
    found = orthogonalize(numbers(2, 64, 128), ((3.4445, -4.7750, 2.0315),) * 5, jnp.float32)
    assert np.isfinite(found).all() and np.linalg.norm(found, ord=2, axis=(1, 2)).max() < 1.3
