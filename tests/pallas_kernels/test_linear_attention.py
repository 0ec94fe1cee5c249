"""Chunked linear attention against its definition: documents, odd lengths, groups of heads,
gradients, memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_helpers import documents, with_gradients
from rows import slow

from pallas_kernels.linear_attention import decode_linear_attention, linear_attention, prompt_state
from pallas_kernels.linear_attention.reference import linear_attention as reference_linear_attention

B, H, K, C = 2, 4, 2, 8


def inputs(length):
    keys = jax.random.split(jax.random.key(0), 4)
    q = jax.random.normal(keys[0], (B, length, H, C))
    k, v = (jax.random.normal(key, (B, length, K, C)) for key in keys[1:3])
    return q, k, v, jax.random.normal(keys[3], q.shape)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("length", "chunk"), [(1, 8), slow(7, 8), slow(40, 8), (43, 8), slow(43, 5), (43, None)]
)
def test_equal_to_the_definition(length, chunk, packed):
    *qkv, d_out = inputs(length)
    segments = documents(np.random.default_rng(0), B, length, 0.12) if packed else None
    ours = with_gradients(lambda *a: linear_attention(*a, segments, chunk=chunk), *qkv, d_out)
    theirs = with_gradients(lambda *a: reference_linear_attention(*a, segments), *qkv, d_out)
    for name, a, b in zip(("out", "dq", "dk", "dv"), ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5, err_msg=name)


def test_bfloat16_is_as_exact_as_its_operands():
    """Long enough that a state rounded to bfloat16 would stop growing: 1/256 of it is more than a
    token adds."""
    q, k, v, _ = inputs(2000)
    v = v.at[:, 1000:].add(1)
    low = linear_attention(*(x.astype(jnp.bfloat16) for x in (q, k, v)))
    assert low.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        low.astype(jnp.float32), reference_linear_attention(q, k, v), atol=0.02
    )


def test_gradients_in_bfloat16():
    *qkv, d_out = inputs(200)
    segments = documents(np.random.default_rng(0), B, 200, 0.12)
    low = with_gradients(
        lambda *a: linear_attention(*a, segments).astype(jnp.float32),
        *(x.astype(jnp.bfloat16) for x in qkv),
        d_out,
    )
    exact = with_gradients(lambda *a: reference_linear_attention(*a, segments), *qkv, d_out)
    for a, b in zip(low[1:], exact[1:], strict=True):
        assert a.dtype == jnp.bfloat16
        assert np.linalg.norm(a.astype(jnp.float32) - b) < 0.015 * np.linalg.norm(b)


def test_token_by_token():
    q, k, v, _ = inputs(12)
    visible = jnp.asarray([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    rest = jnp.ones((B, 7), jnp.int32)
    whole = reference_linear_attention(q, k, v, jnp.concatenate([visible, rest], 1))
    state = prompt_state(k[:, :5], v[:, :5], visible)
    for i in range(5, 12):
        out, state = decode_linear_attention(*(x[:, i : i + 1] for x in (q, k, v)), state)
        np.testing.assert_allclose(out[:, 0], whole[:, i], atol=1e-5)


def test_no_square_array_at_32k_tokens():
    length = 32768
    shapes = [jax.ShapeDtypeStruct((1, length, n, 64), jnp.bfloat16) for n in (8, 2, 2)]

    def loss(q, k, v):
        return jnp.sum(linear_attention(q, k, v).astype(jnp.float32))

    for program in (loss, jax.grad(loss, argnums=(0, 1, 2))):
        compiled = jax.jit(program).lower(*shapes).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < length * length * 4 / 10
        assert f"{length},{length}" not in compiled.as_text()
