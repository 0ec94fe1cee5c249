"""Chunked linear attention against its definition: documents, odd lengths, groups of heads,
gradients, memory."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compared import assert_all_close, values_and_gradients
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_helpers import CPU, H200, MI300X, documents, normal
from rows import fast_alone, slow

from pallas_kernels import chip
from pallas_kernels.linear_attention import finish, heads_first, linear_attention, sums, triton
from pallas_kernels.linear_attention.reference import linear_attention as reference_linear_attention


def arrays(batch, length, heads, kv_heads, channels, packed, dtype=jnp.float32, seed=0):
    """q, k, v, and segments: documents of uneven lengths, padding (0) at the end."""
    rng = np.random.default_rng(seed)
    qkv = [
        normal(rng, batch, length, n, channels, dtype=dtype) for n in (heads, kv_heads, kv_heads)
    ]
    return qkv, documents(rng, batch, length, 0.05) if packed else None


def by_parts(q, k, v, segments, chunk):
    """What devices do that hold pieces of a sequence: quotient apart from the sums."""
    return finish(*sums(*heads_first(q, k, v), segments, chunk), v.dtype)


def compare(*shape, chunk=16, parts=False, made_for=MI300X, **options):
    qkv, segments = arrays(*shape, **options)
    function = functools.partial(by_parts if parts else linear_attention, chunk=chunk)
    with chip.making(made_for):
        assert triton.suits(*qkv) or made_for is CPU
        out, gradients = values_and_gradients(function, qkv, (segments,))
    wide = [x.astype(jnp.float32) for x in qkv]
    with chip.making(CPU):
        theirs = values_and_gradients(reference_linear_attention, wide, (segments,))
    assert {x.dtype for x in (out, *gradients)} == {qkv[0].dtype}
    if out.dtype == jnp.float32:
        assert_all_close((out, gradients), theirs, atol=1e-5, rtol=1e-5)
    else:
        for a, b in zip((out, *gradients), jax.tree.leaves(theirs), strict=True):
            far = np.linalg.norm(a.astype(jnp.float32) - b)
            assert far < 0.015 * max(np.linalg.norm(b), 1)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("length", "chunk"), [(1, 8), slow(7, 8), slow(40, 8), (43, 8), slow(43, 5), (43, None)]
)
def test_equal_to_the_definition(length, chunk, packed):
    compare(2, length, 4, 2, 8, packed, chunk=chunk, made_for=CPU)


def test_gradients_in_bfloat16():
    compare(2, 200, 4, 2, 8, True, dtype=jnp.bfloat16, chunk=None, made_for=CPU)


def test_bfloat16_is_as_exact_as_its_operands():
    """Long enough that a state rounded to bfloat16 would stop growing: 1/256 of it is more than a
    token adds."""
    (q, k, v), _ = arrays(2, 2000, 4, 2, 8, False)
    v = v.at[:, 1000:].add(1)
    low = linear_attention(*(x.astype(jnp.bfloat16) for x in (q, k, v)))
    assert low.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        low.astype(jnp.float32), reference_linear_attention(q, k, v), atol=0.02
    )


def test_no_square_array_at_32k_tokens():
    length = 32768
    shapes = [jax.ShapeDtypeStruct((1, length, n, 64), jnp.bfloat16) for n in (8, 2, 2)]

    def loss(q, k, v):
        return jnp.sum(linear_attention(q, k, v).astype(jnp.float32))

    for program in (loss, jax.grad(loss, argnums=(0, 1, 2))):
        compiled = jax.jit(program).lower(*shapes).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < length * length * 4 / 10
        assert f"{length},{length}" not in compiled.as_text()


# ################################################################################################
# Kernels for GPUs, interpreted
# ##################################################################################################


CASES = {
    "several chunks, a tail, documents": ((1, 43, 2, 1, 16, True), {}),
    "sums alone, a group of three heads, odd channels": (
        (1, 70, 6, 2, 20, True),
        {"parts": True, "chunk": 32},
    ),
    "no documents, heads of 5 channels": ((1, 37, 2, 1, 5, False), {}),
    "shorter than a chunk": ((1, 7, 3, 1, 48, True), {"chunk": None}),
    "one token": ((2, 1, 1, 1, 16, True), {"chunk": None}),
    "a group's heads over several rows of a tile, bfloat16": (
        (1, 150, 4, 1, 32, True),
        {"chunk": 64, "dtype": jnp.bfloat16, "made_for": H200},
    ),
    # Whole slices of a state's channels, but no power of two; and one more and one less.
    "heads of 96 channels": ((1, 37, 2, 1, 96, True), {}),
    "heads of 95 channels": ((1, 37, 2, 1, 95, True), {}),
    "heads of 97 channels": ((1, 37, 2, 1, 97, True), {}),
    "heads of 160 channels, bfloat16": (
        (1, 37, 2, 1, 160, True),
        {"dtype": jnp.bfloat16, "made_for": H200},
    ),
    "heads of 192 channels, bfloat16": ((1, 37, 2, 1, 192, True), {"dtype": jnp.bfloat16}),
    "heads of 191 channels, bfloat16": ((1, 37, 2, 1, 191, True), {"dtype": jnp.bfloat16}),
    "heads of 193 channels, bfloat16": ((1, 37, 2, 1, 193, True), {"dtype": jnp.bfloat16}),
    "heads of 224 channels, bfloat16": ((1, 37, 2, 1, 224, False), {"dtype": jnp.bfloat16}),
}
CASES |= {
    "sums alone, " + name: (shape, options | {"parts": True})
    for name, (shape, options) in CASES.items()
    if "alone" not in name
}
FAST = {
    "several chunks, a tail, documents",
    "sums alone, a group of three heads, odd channels",
    "one token",
    "sums alone, heads of 160 channels, bfloat16",
}


@pytest.mark.parametrize("case", fast_alone(FAST, CASES))
def test_values_and_gradients(case):
    shape, options = CASES[case]
    compare(*shape, **options)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_any_shape(data):
    draw = data.draw
    kv_heads, low = draw(st.integers(1, 3)), draw(st.booleans())
    compare(
        draw(st.integers(1, 2)),
        draw(st.integers(1, 150)),
        kv_heads * draw(st.integers(1, 5)),
        kv_heads,
        draw(st.sampled_from([1, 8, 16, 24, 31, 32, 33, 80, 95, 96, 97, 112])),
        draw(st.booleans()),
        chunk=draw(st.sampled_from([5, 16, 32, 64, None])),
        parts=draw(st.booleans()),
        dtype=jnp.bfloat16 if low else jnp.float32,
        seed=draw(st.integers(0, 9)),
        made_for=draw(st.sampled_from([MI300X, H200])) if low else MI300X,
    )


def test_what_the_kernels_do_not_take_is_left_to_xla():
    """Heads that are too wide, formats that differ, no token, and float32 on NVIDIA's chips."""

    def like(channels, dtype=jnp.bfloat16, length=4):
        return jnp.zeros((1, length, 1, channels), dtype)

    for made_for, taken in ((MI300X, True), (H200, False)):
        with chip.making(made_for):
            assert triton.suits(*3 * [like(8, jnp.float32)]) is taken
            assert triton.suits(*3 * [like(256)])
            assert not triton.suits(*3 * [like(257)])
            assert not triton.suits(*3 * [like(8, length=0)])
            assert not triton.suits(like(8), like(8), like(8, jnp.float32))
    assert not kernels_of(like(129, jnp.float32)) and kernels_of(like(128, jnp.float32))


def kernels_of(q, made_for=MI300X, **options):
    """The kernels of a program, forward and backward, in turn."""
    with chip.making(made_for):
        program = jax.make_jaxpr(jax.grad(lambda q: jnp.sum(linear_attention(q, q, q, **options))))
        return re.findall(r"name=linear_(\w+)", str(program(q)))


def test_the_kernels_are_what_runs():
    """Forward three, or one where there is one chunk; backward four more, or two; none where they
    are turned off."""
    q = jnp.zeros((1, 40, 2, 16))
    own = ["states", "carry", "outputs", "d_queries", "states", "carry", "d_keys"]
    assert kernels_of(q, chunk=16) == own
    assert kernels_of(q, chunk=64) == ["outputs", "d_queries", "d_keys"]
    assert kernels_of(q, MI300X._replace(kernels=()), chunk=16) == []
