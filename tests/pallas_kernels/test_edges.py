"""Every operator where its formulas have a root, a quotient or a logarithm at their edge: values
and all gradients are finite and those of the definition, with each kind of chip's implementation.
"""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from compared import assert_near, values_and_gradients
from kernel_helpers import CPU, EACH
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

SHAPE = 1, 64, 2, 32  # batch, tokens, heads, channels


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


pytestmark = [EACH, pytest.mark.usefixtures("implementation")]


EQUAL = {
    "zeros": lambda *shape: jnp.zeros(shape),
    "all equal": lambda *shape: jnp.full(shape, 0.5, jnp.float32),
    "large": lambda *shape: jnp.full(shape, 8.0, jnp.float32),
}


def qkv(numbers):
    return numbers(*SHAPE), numbers(*SHAPE), normal(*SHAPE)


def of_stream(numbers):
    how = Joining(*(numbers(48) for _ in range(4)))
    return numbers(5, 48), numbers(5, 48), normal(48), normal(48, 4), how


def of_experts(numbers):
    return numbers(40, 32), numbers(3, 32, 48) / 8, numbers(3, 24, 32) / 8


def stream(y, h, scale, kernel, how, of=residual_norm):
    x, h = of.read(h, scale, 1e-5, jnp.float32)
    return x, of.join_and_read(y, h, how, scale, kernel, 1e-5, jnp.float32, jnp.float32)


def mlp(rows, gate_up, down, sizes, of=grouped_mlp):
    return of.grouped_mlp(rows, sizes, gate_up, down)


SOFTMAX = [functools.partial(f, scale=0.1) for f in (attention, reference_attention)]
LINEAR = functools.partial(linear_attention, chunk=16), reference_linear
STREAM = stream, functools.partial(stream, of=norm_definition)
MLP = mlp, functools.partial(mlp, of=mlp_definition)
ALIKE = np.ones(SHAPE[:2], np.int32)
WITHOUT_KEYS = np.where(np.arange(64) < 9, 2, ALIKE)
DOCUMENTS = np.repeat(np.int32([[1, 2, 0]]), [20, 30, 14], axis=1)
CASES = {  # the operator and its definition, arrays, what has no gradient, the tolerance
    "attention": (SOFTMAX, qkv, (ALIKE, ALIKE), 2e-5),
    "attention without keys": (SOFTMAX, qkv, (ALIKE, WITHOUT_KEYS), 2e-5),
    "linear attention": (LINEAR, qkv, (DOCUMENTS,), 2e-5),
    "residual norm": (STREAM, of_stream, (), 1e-4),
    "grouped mlp": (MLP, of_experts, (np.int32([0, 30, 10]),), 1e-4),
}


@pytest.mark.parametrize("numbers", EQUAL.values(), ids=EQUAL)
@pytest.mark.parametrize("case", CASES)
def test_arrays_of_equal_numbers(case, numbers):
    """Equal scores, rows without a direction."""
    (ours, definition), make, given, tolerance = CASES[case]
    arrays = make(numbers)
    found = values_and_gradients(ours, arrays, given)
    with chip.making(CPU):  # one program of the definition for all chips
        expected = values_and_gradients(definition, arrays, given)
    assert_near(found, expected, tolerance)


def mixed(columns, weights, segments):
    return mix(columns, None, *weights, [], segments, None, jnp.float32)[:2]


def first_mixed(columns, weights, segments):
    return [x[:, :12] for x in mixed(columns, weights, segments)]


def test_ccas_mixing_of_tokens_that_are_zero():
    """A row of the embedding that is zero, with biases of zero: queries and keys without a
    direction.

    Their gradients are infinite where someone asks for them. A batch's padding does not.
    """
    columns = normal(1, 20, 3 * 32).at[:, 12:].set(0)
    weights = normal(2, 3, 32), normal(2, 3, 32, 32) / 6, jnp.zeros((3, 32)), jnp.ones(1)
    segments = jnp.asarray([[-1, -1, *[1] * 12, *[0] * 8]])
    out, (d_columns, d_weights) = values_and_gradients(first_mixed, (columns, weights), (segments,))
    np.testing.assert_array_equal(d_columns[:, 12:], 0)
    alone = values_and_gradients(mixed, (columns[:, :12], weights), (segments[:, :14],))
    assert_near((out, (d_columns[:, :12], d_weights)), alone)


@pytest.mark.parametrize(
    ("offset", "tokens"),
    fast_alone(
        {(-np.inf, 128), (-1e30, 100)}, itertools.product((-np.inf, -1e30, 0.0), (100, 128))
    ),
)
def test_a_bias_that_takes_the_word_of_masked_places_away(offset, tokens):
    """Masked places, and those that fill up a chunk, have 0 as their target."""
    arrays, places = (normal(tokens, 64) / 8, normal(300, 64, seed=1)), jnp.arange(tokens)
    bias, targets = jnp.zeros(300), jnp.where(places % 3 == 0, 0, 1 + places % 7)
    weights = (places % 3 > 0).astype(jnp.float32)

    def loss(function, offset, **options):
        rest = bias.at[0].set(offset), targets, weights
        return lambda h, e: function(h, e, *rest, z_weight=0.1, **options)[0]

    chunk = 64 if tokens == 100 else 128
    ours = loss(cross_entropy, offset, dtype=jnp.float32, chunk=chunk)
    # the definition knows no place that does not count
    theirs = loss(reference_entropy.cross_entropy, max(offset, -1e4))
    found, expected = (values_and_gradients(f, arrays) for f in (ours, theirs))
    assert_near(found, expected, 2e-4)


@pytest.mark.parametrize("numbers", EQUAL.values(), ids=EQUAL)
def test_newton_schulz(numbers):
    """Of matrices of rank 0 and 1; there is no gradient."""
    found = orthogonalize(numbers(2, 64, 128), ((3.4445, -4.7750, 2.0315),) * 5, jnp.float32)
    assert np.isfinite(found).all() and np.linalg.norm(found, ord=2, axis=(1, 2)).max() < 1.3
