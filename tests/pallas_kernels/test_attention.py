"""Attention by each implementation against its definition: windows, segments, offsets, odd lengths,
all gradients."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compared import assert_all_close, values_and_gradients
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_helpers import CPU, EACH, H200, MI300X, documents, normal
from rows import fast_alone, slow

from pallas_kernels import chip
from pallas_kernels.attention import attention, attention_gradients, triton
from pallas_kernels.attention.reference import attention as reference_attention

B, H, K, C = 2, 4, 2, 16


def inputs(q_len, k_len, heads=H, kv_heads=K, channels=C, batch=B, dtype=jnp.float32, seed=0):
    """q, k and v."""
    rng = np.random.default_rng(seed)
    shapes = (q_len, heads, channels), (k_len, kv_heads, channels), (k_len, kv_heads, channels)
    return [normal(rng, batch, *shape, dtype=dtype) for shape in shapes]


@functools.cache
def both(function, block=None):
    """The output and the log-sum-exps by a function; a query without a key has no gradient."""
    options = {"block": block} if block else {}

    def run(q, k, v, *masks):
        out, lse = function(q, k, v, *masks, scale=q.shape[-1] ** -0.5, **options)
        return out, jnp.where(lse > -1e29, lse, 0), jax.lax.stop_gradient(lse)

    return run


def compare(
    q_len,
    k_len,
    *shape,
    window=None,
    offset=None,
    packed=False,
    block=16,
    tolerance=2e-5,
    made_for=None,
    **options,
):
    """With the definition: both outputs and all gradients, by the present chip's implementation."""
    arrays = inputs(q_len, k_len, *shape, **options)
    segments, begin = (None, None), max(offset or 0, 0)
    if packed:
        ids = documents(np.random.default_rng(0), len(arrays[0]), max(k_len, q_len + begin))
        segments = ids[:, begin : begin + q_len], ids[:, :k_len]
    masks = (*segments, window) if offset is None else (*segments, window, offset)
    with chip.making(made_for or chip.current()):
        (out, *lses), gradients = values_and_gradients(both(attention, block), arrays, masks)
    with chip.making(CPU):  # one program of the definition for all chips
        exact = tuple(x.astype(jnp.float32) for x in arrays)
        theirs = values_and_gradients(both(reference_attention), exact, masks)
    assert {x.dtype for x in (out, *gradients)} == {arrays[0].dtype}
    assert {x.dtype for x in lses} == {np.dtype("float32")}
    assert_all_close((out, lses, gradients), theirs, atol=tolerance, rtol=tolerance)


LENGTHS = itertools.product([1, 7, 16, 33, 50, 80], ["cpu", "xla", "triton"])
FAST = {(33, "cpu"), (33, "xla"), (33, "triton"), (80, "cpu")}


@pytest.mark.parametrize(
    ("length", "implementation"), fast_alone(FAST, LENGTHS), indirect=["implementation"]
)
def test_odd_lengths(length, implementation):
    """On a CPU four blocks of 16 are written out, and five are a loop."""
    compare(length, length)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("length", [33, slow(50)])
def test_documents_of_a_packed_row(length):
    for window in (None, 6):
        compare(length, length, window=window, packed=True)


OFFSETS = 5, 24, -7


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        slow((35, 35, 1, 1), {}),
        ((35, 35, 6, 3), {}),
        slow((35, 35, 3, 1), {}),
        *(((41, 41), {"window": window}) for window in (1, 5, 16, 17, 40, 1000)),
        *(((19, 43), {"window": 9, "offset": offset}) for offset in (0, *OFFSETS)),
        *(slow((19, 43), {"offset": offset}) for offset in (0, *OFFSETS)),
    ],
)
def test_groups_of_heads_windows_and_queries_that_begin_elsewhere_than_keys(shape, options):
    """A chunk of a longer sequence; with a negative offset the first queries see no key at all."""
    compare(*shape, **options)


@EACH
@pytest.mark.parametrize("window", [None, slow(9)])
def test_gradients_of_parts_add_up(window, implementation):
    """Each part of the keys gives its share, from the output and the log-sum-exp of all: the basis
    of a ring."""
    q, k, v = inputs(19, 43)
    d_out = normal(np.random.default_rng(1), *q.shape)
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
        arrays, masks = (q, k[:, s], v[:, s]), (own, segments[:, s], window, 24 - start)
        return attention_gradients(arrays, (out, lse, d_out), *masks, scale=0.3, block=16)

    outputs, theirs = expected(q, k, v)
    first, second = part(0, 20, *outputs), part(20, 43, *outputs)
    assert {x.dtype for x in (*first, *second)} == {np.dtype("float32")}
    of_keys = (jnp.concatenate(both, axis=1) for both in zip(first[1:], second[1:], strict=True))
    assert_all_close((first[0] + second[0], *of_keys), theirs, atol=1e-5)


@EACH
def test_bfloat16_accumulates_in_float32(implementation):
    compare(50, 50, dtype=jnp.bfloat16, tolerance=0.01)


@EACH
def test_a_window_as_wide_as_a_number_may_be_is_none(implementation):
    """A position is added to it in int32: 2^31 - 1 and one more would look at no key at all, in the
    gradients alone."""
    scale, qkv = C**-0.5, inputs(40, 40)
    widest = functools.partial(attention, window=2**31 - 1, scale=scale, block=16)
    ours = values_and_gradients(widest, qkv)
    theirs = values_and_gradients(functools.partial(reference_attention, scale=scale), qkv)
    assert_all_close(ours, theirs, atol=2e-5, rtol=2e-5)


# ################################################################################################
# Kernels for GPUs, interpreted
# ##################################################################################################


KERNEL_CASES = {  # lengths of queries and keys, query and key-value heads, channels, batch
    "several tiles with a tail": ((50, 50, 4, 2, 16, 2), {}),
    "a group of three heads, 48 channels, a window, documents": (
        (37, 37, 6, 2, 48, 1),
        {"window": 20, "packed": True},
    ),
    "a chunk of a longer sequence of documents": (
        (19, 43, 4, 1, 16, 2),
        {"offset": 24, "packed": True},
    ),
    "the first queries see no key, the last keys no query": (
        (40, 71, 2, 2, 16, 1, jnp.float16),
        {"window": 9, "offset": -7, "made_for": H200, "tolerance": 0.01},
    ),
    "one head, a window that leaves the first keys out": ((33, 33, 1, 1, 32, 1), {"window": 5}),
    "groups of six heads, three tiles of two each": ((33, 33, 12, 2, 16, 1), {}),
    "queries behind all keys, which end within a block": ((19, 43, 2, 1, 16, 1), {"offset": 60}),
    "96 channels and tokens: whole tiles of 32, no power of two": (
        (96, 96, 2, 1, 96, 1),
        {"block": 32},
    ),
    "95 tokens": ((95, 95, 2, 1, 96, 1), {"block": 32}),
    "97 tokens of 160 channels": (
        (97, 97, 2, 1, 160, 1, jnp.bfloat16),
        {"block": 32, "tolerance": 0.06},
    ),
    "bfloat16 at the table's tiles, gradients too": (
        (150, 150, 4, 1, 64, 1, jnp.bfloat16),
        {"window": 70, "packed": True, "block": None, "tolerance": 0.06},
    ),
}
FAST_KERNEL_CASES = {
    "a group of three heads, 48 channels, a window, documents",
    "a chunk of a longer sequence of documents",
    "the first queries see no key, the last keys no query",
    "97 tokens of 160 channels",
    "bfloat16 at the table's tiles, gradients too",
}


@pytest.mark.parametrize("case", fast_alone(FAST_KERNEL_CASES, KERNEL_CASES))
def test_values_and_gradients(case):
    args, options = KERNEL_CASES[case]
    compare(*args, **{"made_for": MI300X} | options)


def test_ranges_of_blocks_count_padding_apart():
    """Padding behind the last document would else stretch its block over all documents before."""
    ranges = triton.ranges_of(jnp.asarray([[3, 3, 3, 4, 5, 0, 0, 0, 0, 9]]), 2)
    most, least = jnp.iinfo(jnp.int32).max, jnp.iinfo(jnp.int32).min
    np.testing.assert_array_equal(ranges[0], [[3, 3, 5, most, 9, 9, 9, 9]])
    np.testing.assert_array_equal(ranges[1], [[3, 4, 5, least, 9, 9, 9, 9]])
    np.testing.assert_array_equal(ranges[2], [[0, 0, 1, 1, 1, 0, 0, 0]])


def by_blocks(seen: np.ndarray, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """For each block of a visibility matrix: whether any pair is visible, and whether all pairs of
    a block are."""
    num_rows, num_columns = -(-seen.shape[0] // rows), -(-seen.shape[1] // columns)
    some, whole = np.zeros((2, num_rows, num_columns), bool)
    for i, j in np.ndindex(num_rows, num_columns):
        block = seen[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        some[i, j], whole[i, j] = block.any(), block.all() and block.shape[1] == columns
    return some, whole


LONGEST = 96


@functools.partial(jax.jit, static_argnames=["packed", "windowed"])
def blocks_met(sizes, window, offset, q_ranges, k_ranges, packed, windowed):
    """What each block of queries meets, and each block of keys; sizes are arrays, so that it is
    compiled once."""
    q_len, k_len, queries, keys = sizes
    at = triton._Shape(q_len, k_len, 1, 1, 1, 16, queries, keys, 1.0, packed, windowed, True)
    bounds = window[None] if windowed else None, offset[None]
    refs = {"bounds": bounds, "ids": (None, None), "ranges": (q_ranges, k_ranges)}
    masks = triton._Masks(at, refs, 0)
    blocks = jnp.arange(LONGEST // 4)
    return jax.vmap(masks.met_by_queries)(blocks), jax.vmap(masks.met_by_keys)(blocks)


@given(st.data())
@settings(max_examples=15, deadline=None, derandomize=True)
def test_blocks_that_are_met_and_blocks_without_a_mask(data):
    """No block is left out that has a pair, none goes unmasked that has a hidden one, and causality
    wastes none."""
    draw = data.draw
    q_len, k_len = draw(st.integers(1, 90)), draw(st.integers(1, 90))
    queries, keys = (draw(st.sampled_from([4, 8, 16])) for _ in range(2))
    offset, window = draw(st.integers(-40, 60)), draw(st.none() | st.integers(1, 70))
    packed = draw(st.booleans())
    ids = documents(np.random.default_rng(draw(st.integers(0, 9))), 1, 160)
    q_ids, k_ids = ids[:, max(offset, 0) :][:, :q_len], ids[:, :k_len]
    ranges = [
        jax.jit(triton.ranges_of, static_argnums=1)(
            np.pad(x, ((0, 0), (0, LONGEST - x.shape[1])), "edge"), block
        )
        for x, block in ((q_ids, queries), (k_ids, keys))
    ]
    sizes = tuple(jnp.int32(x) for x in (q_len, k_len, queries, keys))
    found = blocks_met(
        sizes, jnp.int32(window or 0), jnp.int32(offset), *ranges, packed, window is not None
    )
    back = np.arange(q_len)[:, None] + offset - np.arange(k_len)
    near = (back >= 0) & (back < (window or 1 << 30))
    seen = near & (q_ids[0][:, None] == k_ids[0]) if packed else near
    for met, turn, rows, columns in (
        (found[0], np.asarray, queries, keys),
        (found[1], np.transpose, keys, queries),
    ):
        some, whole = by_blocks(turn(seen), rows, columns)
        lo, hi, start, end = (np.asarray(x)[: len(some), None] for x in met)
        blocks = np.arange(some.shape[1])
        assert np.all((lo <= start) & (start <= end) & (end <= hi))
        inside, plain = (blocks >= lo) & (blocks < hi), (blocks >= start) & (blocks < end)
        assert not (some & ~inside).any() and not (plain & ~whole).any()
        if not packed:
            np.testing.assert_array_equal(inside, by_blocks(turn(near), rows, columns)[0])
            np.testing.assert_array_equal(plain, whole & inside)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_any_shape(data):
    draw = data.draw
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    k_len = draw(st.integers(16, 80))
    q_len = draw(st.just(k_len) | st.integers(16, 80))
    low = draw(st.booleans())
    compare(
        q_len,
        k_len,
        kv_heads * group,
        kv_heads,
        draw(st.sampled_from([16, 32, 48, 80, 96, 112])),
        draw(st.integers(1, 2)),
        jnp.bfloat16 if low else jnp.float32,
        window=draw(st.none() | st.integers(1, 90)),
        offset=draw(st.integers(-20, 64)),
        packed=draw(st.booleans()),
        block=draw(st.sampled_from([16, 32])),
        tolerance=0.06 if low else 3e-5,
        made_for=draw(st.sampled_from([MI300X, H200])) if low else MI300X,
        seed=draw(st.integers(0, 9)),
    )


def test_work_behind_the_diagonal():
    """At most 2% at 4,096 tokens, of the FLOPs that the kernels say of themselves."""
    q, k = (jnp.empty((1, 4096, heads, 128), jnp.bfloat16) for heads in (8, 2))
    all_pairs = 2 * 128 * 8 * 4096**2
    for of, kernel in itertools.product((MI300X, H200), ("forward", "queries", "keys")):
        with chip.making(of):
            whole, chunk = (
                triton._Call(kernel, q, k, None, None, None, offset, 1.0, None).work(1)
                for offset in (None, jnp.int32(0))
            )
        assert whole.most is None and 1 <= whole.flops / (all_pairs / 2 * 4097 / 4096) < 1.02
        assert (chunk.flops, chunk.most) == (all_pairs / 2, all_pairs)
