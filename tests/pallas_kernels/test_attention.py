"""Blockwise attention against its definition: windows, segments, offsets, odd lengths, both outputs, all gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_helpers import documents

from pallas_kernels import chip
from pallas_kernels.attention import attention, attention_gradients, decode_attention
from pallas_kernels.attention.reference import attention as reference_attention

B, H, K, C = 2, 4, 2, 8


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


def inputs(q_len, k_len, heads=H, kv_heads=K, seed=0):
    rng = np.random.default_rng(seed)  # on the host: a program for each shape would take longer to compile
    shapes = (q_len, heads, C), (k_len, kv_heads, C), (k_len, kv_heads, C), (q_len, heads, C), (q_len, heads)
    return tuple(jnp.asarray(rng.standard_normal((B, *shape), np.float32)) for shape in shapes)


def assert_equal_to_the_reference(q, k, v, d_out, d_lse, *args, block=16, tolerance=2e-5):
    scale = C**-0.5

    def objective(function, **options):
        def run(q, k, v):
            out, lse = function(q, k, v, *args, scale=scale, **options)
            seen = lse > -1e29  # a query without a key has no gradient and a constant log-sum-exp
            return jnp.sum(out * d_out) + jnp.sum(jnp.where(seen, lse, 0) * d_lse), (out, lse)

        (_, outputs), grads = jax.value_and_grad(run, argnums=(0, 1, 2), has_aux=True)(q, k, v)
        return (*outputs, *grads)

    ours = jax.jit(lambda: objective(attention, block=block))()
    theirs = jax.jit(lambda: objective(reference_attention))()
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance, err_msg=name)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("length", [1, slow(7), 16, 33, slow(50), 80])
def test_odd_lengths(length):
    """On a CPU four blocks of 16 are written out, and five are a loop."""
    assert_equal_to_the_reference(*inputs(length, length))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 3), (3, 1)])
def test_groups_of_heads(heads, kv_heads):
    assert_equal_to_the_reference(*inputs(35, 35, heads, kv_heads))


@pytest.mark.parametrize("window", [1, slow(5), slow(16), 17, slow(40), 1000])
def test_windows(window):
    assert_equal_to_the_reference(*inputs(41, 41), None, None, window)


def test_a_window_that_is_data():
    q, k, v, _, _ = inputs(41, 41)
    both = jax.jit(lambda window: attention(q, k, v, window=window, scale=0.3, block=16))
    for window in (3, 20):
        ours, theirs = both(jnp.int32(window)), reference_attention(q, k, v, window=window, scale=0.3)
        np.testing.assert_allclose(ours[0], theirs[0], atol=1e-5)
        np.testing.assert_allclose(ours[1], theirs[1], atol=1e-5)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("length", [33, 50])
def test_documents_of_a_packed_row(length, window):
    segments = documents(np.random.default_rng(length), B, length, 0.15)
    assert_equal_to_the_reference(*inputs(length, length), segments, segments, window)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("offset", [slow(0), 5, slow(24), -7])
def test_queries_that_begin_elsewhere_than_keys(offset, window):
    """A chunk of a longer sequence; with a negative offset the first queries see no key at all."""
    assert_equal_to_the_reference(*inputs(19, 43), None, None, window, offset)


def test_a_query_without_a_key_gives_nothing():
    q, k, v, _, _ = inputs(8, 8)
    out, lse = attention(q, k, v, offset=-3, scale=1.0)
    np.testing.assert_array_equal(out[:, :3], 0)
    np.testing.assert_array_equal(lse[:, :3], np.float32(-1e30))


@pytest.mark.usefixtures("implementation")
def test_parts_join_by_their_log_sum_exp():
    """What context parallelism and tree decoding rest on, gradients included."""
    q, k, v, d_out, _ = inputs(24, 48)

    def joined(q, k, v):
        parts = [
            attention(q, k[:, s], v[:, s], offset=24 - s.start, scale=0.3, block=8)
            for s in (slice(0, 20), slice(20, 48))
        ]
        top = jnp.maximum(parts[0][1], parts[1][1])
        weights = [jnp.exp(lse - top)[..., None] for _, lse in parts]
        return sum(w * out for w, (out, _) in zip(weights, parts, strict=True)) / sum(weights)

    def whole(q, k, v):
        return reference_attention(q, k, v, offset=24, scale=0.3)[0]

    for a, b in zip(jax.vjp(joined, q, k, v)[1](d_out), jax.vjp(whole, q, k, v)[1](d_out), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("window", [None, 9])
def test_gradients_of_parts_add_up(window):
    """Each part of the keys gives its share, from the output and the log-sum-exp of all: what a ring rests on."""
    q, k, v, d_out, _ = inputs(19, 43)
    segments = documents(np.random.default_rng(1), B, 43, 0.15)
    own = segments[:, 24:]
    (out, lse), pull = jax.vjp(
        lambda *qkv: reference_attention(*qkv, own, segments, window, 24, scale=0.3), q, k, v
    )
    parts = [
        attention_gradients(
            (q, k[:, s], v[:, s]), (out, lse, d_out), own, segments[:, s], window, 24 - s.start, scale=0.3, block=8
        )
        for s in (slice(0, 20), slice(20, 43))
    ]  # fmt: skip
    dq = parts[0][0] + parts[1][0]
    dk, dv = (jnp.concatenate([part[i] for part in parts], axis=1) for i in (1, 2))
    for ours, theirs in zip((dq, dk, dv), pull((d_out, jnp.zeros_like(lse))), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.usefixtures("implementation")
def test_bfloat16_accumulates_in_float32():
    q, k, v, _, _ = inputs(50, 50)
    low = attention(*(x.astype(jnp.bfloat16) for x in (q, k, v)), scale=0.3, block=16)
    exact = reference_attention(q, k, v, scale=0.3)
    assert low[0].dtype == jnp.bfloat16 and low[1].dtype == jnp.float32
    np.testing.assert_allclose(low[0].astype(jnp.float32), exact[0], atol=0.04)
    np.testing.assert_allclose(low[1], exact[1], atol=0.04)


def test_one_new_query_against_a_cache():
    q, k, v, _, _ = inputs(20, 20)
    valid = jnp.arange(20) < jnp.asarray([[13], [20]])
    out = decode_attention(q[:, -1:], k, v, valid, scale=0.3)
    for row, length in enumerate((13, 20)):
        one = reference_attention(
            q[row : row + 1, -1:],
            k[row : row + 1, :length],
            v[row : row + 1, :length],
            offset=length - 1,
            scale=0.3,
        )
        np.testing.assert_allclose(out[row], one[0][0], atol=1e-5)


@pytest.mark.parametrize("window", [None, 4096])
def test_no_square_array_at_32k_tokens(window):
    """A [S, S] array of one head would be 4 GiB in float32; the compiled programs need a hundredth of the eight."""
    length, heads, kv_heads, channels = 32768, 8, 2, 64
    shapes = [
        jax.ShapeDtypeStruct((1, length, n, channels), jnp.bfloat16) for n in (heads, kv_heads, kv_heads)
    ]

    def loss(q, k, v):
        out, lse = attention(q, k, v, window=window, scale=0.1)
        return jnp.sum(out.astype(jnp.float32)) + jnp.sum(lse)

    square = length * length * 4
    for program in (loss, jax.grad(loss, argnums=(0, 1, 2))):
        compiled = jax.jit(program).lower(*shapes).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < heads * square / 100
        assert f"{length},{length}" not in compiled.as_text()


@pytest.mark.parametrize("kind", ["cpu", "gfx942"])
def test_a_window_as_wide_as_a_number_may_be_is_none(kind):
    """A position is added to it in int32: 2^31 - 1 and one more would look at no key at all, in the gradients alone."""
    q, k, v, d_out, d_lse = inputs(40, 40)
    for target in (chip.Chip("cpu", kind), chip.Chip("cpu", kind, ())):
        with chip.making(target):
            assert_equal_to_the_reference(q, k, v, d_out, d_lse, None, None, 2**31 - 1)
