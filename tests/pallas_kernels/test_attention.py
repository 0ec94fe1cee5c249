"""Attention by each implementation against its definition: windows, segments, offsets, odd lengths,
all gradients."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_helpers import CPU, documents, normal
from rows import fast_alone, slow

from pallas_kernels import chip
from pallas_kernels.attention import attention, attention_gradients, decode_attention
from pallas_kernels.attention.reference import attention as reference_attention

B, H, K, C = 2, 4, 2, 16
EACH = pytest.mark.parametrize("implementation", ["cpu", "xla", "triton"], indirect=True)


def inputs(q_len, k_len, heads=H, kv_heads=K, seed=0):
    """q, k, v, and the gradients of both outputs."""
    rng = np.random.default_rng(seed)
    shapes = (
        (q_len, heads, C),
        (k_len, kv_heads, C),
        (k_len, kv_heads, C),
        (q_len, heads, C),
        (q_len, heads),
    )
    return tuple(normal(rng, B, *shape) for shape in shapes)


@functools.partial(jax.jit, static_argnames=("function", "block"))
def run(function, arrays, where, block=None):
    """Both outputs and all gradients; where = (segments of queries and of keys, window, offset) are
    data, if given."""
    q, k, v, d_out, d_lse = arrays
    options = {"block": block} if block else {}
    *masks, offset = where

    def objective(q, k, v):
        out, lse = function(
            q, k, v, *masks, 0 if offset is None else offset, scale=C**-0.5, **options
        )
        seen = lse > -1e29  # a query without a key has no gradient and a constant log-sum-exp
        return jnp.sum(out * d_out) + jnp.sum(jnp.where(seen, lse, 0) * d_lse), (out, lse)

    (_, outputs), grads = jax.value_and_grad(objective, argnums=(0, 1, 2), has_aux=True)(q, k, v)
    return (*outputs, *grads)


def assert_equal_to_the_reference(
    arrays, q_segments=None, k_segments=None, window=None, offset=None
):
    where = q_segments, k_segments, window, offset
    ours = run(attention, arrays, where, block=16)
    with chip.making(CPU):  # one program of the definition for all chips
        theirs = run(reference_attention, arrays, where)
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5, err_msg=name)


LENGTHS = itertools.product([1, 7, 16, 33, 50, 80], ["cpu", "xla", "triton"])
FAST = {(33, "cpu"), (33, "xla"), (33, "triton"), (80, "cpu")}


@pytest.mark.parametrize(
    ("length", "implementation"), fast_alone(FAST, LENGTHS), indirect=["implementation"]
)
def test_odd_lengths(length, implementation):
    """On a CPU four blocks of 16 are written out, and five are a loop."""
    assert_equal_to_the_reference(inputs(length, length))


@pytest.mark.parametrize(("heads", "kv_heads"), [slow(1, 1), (6, 3), slow(3, 1)])
def test_groups_of_heads(heads, kv_heads):
    assert_equal_to_the_reference(inputs(35, 35, heads, kv_heads))


def test_windows():
    for window in (1, 5, 16, 17, 40, 1000):
        assert_equal_to_the_reference(inputs(41, 41), window=window)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("length", [33, slow(50)])
def test_documents_of_a_packed_row(length):
    segments = documents(np.random.default_rng(length), B, length, 0.15)
    for window in (None, 6):
        assert_equal_to_the_reference(inputs(length, length), segments, segments, window)


@pytest.mark.parametrize("window", [slow(None), 9])
def test_queries_that_begin_elsewhere_than_keys(window):
    """A chunk of a longer sequence; with a negative offset the first queries see no key at all."""
    for offset in (0, 5, 24, -7):
        assert_equal_to_the_reference(inputs(19, 43), window=window, offset=offset)


@EACH
@pytest.mark.parametrize("window", [None, slow(9)])
def test_gradients_of_parts_add_up(window, implementation):
    """Each part of the keys gives its share, from the output and the log-sum-exp of all: the basis
    of a ring."""
    q, k, v, d_out, _ = inputs(19, 43)
    segments = documents(np.random.default_rng(1), B, 43, 0.15)
    own = segments[:, 24:]

    @jax.jit
    def expected(*qkv):
        outputs, pull = jax.vjp(
            lambda *qkv: reference_attention(*qkv, own, segments, window, 24, scale=0.3), *qkv
        )
        return outputs, pull((d_out, jnp.zeros_like(outputs[1])))

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def part(start, stop, out, lse):
        s = slice(start, stop)
        return attention_gradients(
            (q, k[:, s], v[:, s]),
            (out, lse, d_out),
            own,
            segments[:, s],
            window,
            24 - start,
            scale=0.3,
            block=16,
        )

    outputs, theirs = expected(q, k, v)
    parts = [part(0, 20, *outputs), part(20, 43, *outputs)]
    assert all(x.dtype == jnp.float32 for part in parts for x in part)
    dq = parts[0][0] + parts[1][0]
    dk, dv = (jnp.concatenate([part[i] for part in parts], axis=1) for i in (1, 2))
    for a, b in zip((dq, dk, dv), theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@EACH
def test_bfloat16_accumulates_in_float32(implementation):
    q, k, v, _, _ = inputs(50, 50)
    low = jax.jit(functools.partial(attention, scale=0.3, block=16))(
        *(x.astype(jnp.bfloat16) for x in (q, k, v))
    )
    exact = jax.jit(functools.partial(reference_attention, scale=0.3))(q, k, v)
    assert low[0].dtype == jnp.bfloat16 and low[1].dtype == jnp.float32
    np.testing.assert_allclose(low[0].astype(jnp.float32), exact[0], atol=0.04)
    np.testing.assert_allclose(low[1], exact[1], atol=0.04)


def test_one_new_query_against_a_cache():
    q, k, v, _, _ = inputs(20, 20)
    valid = jnp.arange(20) < jnp.asarray([[13], [20]])
    out = decode_attention(q[:, -1:], k, v, valid, scale=0.3)
    for row, length in enumerate((13, 20)):
        own = slice(row, row + 1)
        one = reference_attention(
            q[own, -1:], k[own, :length], v[own, :length], offset=length - 1, scale=0.3
        )
        np.testing.assert_allclose(out[row], one[0][0], atol=1e-5)


@EACH
def test_a_window_as_wide_as_a_number_may_be_is_none(implementation):
    """A position is added to it in int32: 2^31 - 1 and one more would look at no key at all, in the
    gradients alone."""
    widest = functools.partial(attention, window=2**31 - 1, scale=C**-0.5, block=16)
    none = functools.partial(reference_attention, scale=C**-0.5)
    *qkv, d_out, d_lse = inputs(40, 40)
    ours, theirs = (
        jax.jit(lambda *x, f=f: jax.vjp(f, *x)[1]((d_out, d_lse)))(*qkv) for f in (widest, none)
    )
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5)
