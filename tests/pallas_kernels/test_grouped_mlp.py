"""The grouped MLP against its definition, in blocks and by `ragged_dot`: values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compared import assert_all_close, values_and_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_helpers import CPU, EACH, MI300X, normal
from rows import slow

from pallas_kernels import chip, tiles
from pallas_kernels.grouped_mlp import (
    PRODUCTS,
    cpu,
    grouped_mlp,
    hold,
    layer_mlp,
    reference,
    stacked_mlp,
    triton,
    xla,
)
from pallas_kernels.grouped_mlp.tokens import own_expert_mlp

E, D, F = 4, 12, 20
OF_PRODUCTS = jax.checkpoint_policies.save_only_these_names(PRODUCTS)
SIZES = {
    "uneven": (30, 5, 1, 41),
    "one has all": (0, 77, 0, 0),
    "the last is empty": (40, 30, 7, 0),
    "some rows skipped": (10, 0, 25, 12),
    "all skipped": (0, 0, 0, 0),
}


def inputs(num, *stack, dim=D, width=F, dtype=jnp.float32, seed=0):
    """Rows, and the weights of stacks of experts."""
    rng = np.random.default_rng(seed)
    gate_up = normal(rng, *stack, dim, 2 * width) / dim**0.5
    return normal(rng, num, dim, dtype=dtype), gate_up, normal(rng, *stack, width, dim) / width**0.5


def mlp(rows, gate_up, down, sizes, order=None):
    return grouped_mlp(rows, sizes, gate_up, down, order)


def definition(rows, gate_up, down, sizes, order=None):
    if order is None:
        return reference.grouped_mlp(rows, sizes, gate_up, down)
    sorted_rows = reference.grouped_mlp(rows[order], sizes, gate_up, down)
    return sorted_rows[jnp.argsort(order)]


def assert_equal_to_the_reference(sizes, num_rows, ours=mlp):
    arrays, sizes = inputs(num_rows, E), jnp.asarray(sizes, jnp.int32)
    with jax.default_matmul_precision("highest"):
        out, (d_rows, *d_weights) = values_and_gradients(ours, arrays, (sizes,))
        with chip.making(CPU):
            theirs = values_and_gradients(definition, arrays, (sizes,))
    np.testing.assert_array_equal(out[int(sizes.sum()) :], 0)
    np.testing.assert_array_equal(d_rows[int(sizes.sum()) :], 0)
    np.testing.assert_allclose(out, theirs[0], atol=1e-4)
    assert_all_close((d_rows, d_weights), theirs[1], atol=1e-3, rtol=1e-4)


@EACH
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_values_and_gradients(sizes, implementation):
    assert_equal_to_the_reference(sizes, 100)


@pytest.fixture
def tiles_of_16(monkeypatch):
    """Tiles so small that an expert has several, and that they reach over its rows and over all
    sides."""
    monkeypatch.setattr(triton.tiles, "tile_of", lambda *_: triton.Tile(16, 16, 16, 4, 2))


@functools.cache
def patched(how):
    """The operator, traced for itself where something of it is changed."""
    return functools.partial(mlp)


@pytest.mark.usefixtures("tiles_of_16")
@pytest.mark.parametrize("implementation", ["triton"], indirect=True)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_kernels_over_several_tiles(sizes, implementation):
    assert_equal_to_the_reference(sizes, 100, patched("tiles of 16"))


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("heights", [(8,), (8, 16, 24)], ids=str)
def test_blocks_of_any_height(sizes, heights, monkeypatch):
    """Many whole blocks, one that fits, and both, each running over into the next expert's rows."""
    monkeypatch.setattr(cpu, "heights", lambda num_rows, num_groups: heights)
    assert_equal_to_the_reference(sizes, sum(sizes), patched(heights))


CASES = st.fixed_dictionaries(
    {
        "sizes": st.lists(st.integers(0, 70), min_size=1, max_size=5),
        "more": st.integers(0, 40),
        "dim": st.integers(1, 70),
        "width": st.integers(1, 70),
        "seed": st.integers(0, 99),
        "dtype": st.sampled_from(["float32", "bfloat16"]),
        "kind": st.sampled_from(["gfx942", "NVIDIA H200"]),
    }
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(CASES)
def test_tokens_where_they_lie_in_any_shape(case):
    assert_routed_equals_the_reference(**case)


@pytest.mark.usefixtures("tiles_of_16")
@pytest.mark.parametrize(("dim", "width"), [slow(48, 96), (47, 95), slow(49, 97)])
def test_sides_of_whole_tiles_and_one_more_and_less(dim, width):
    of = {"dtype": "float32", "kind": "gfx942", "seed": 0}
    assert_routed_equals_the_reference([48, 47, 49], 0, dim=dim, width=width, **of)


@pytest.mark.parametrize(("kind", "dtype"), [("NVIDIA H200", "bfloat16"), ("gfx942", "float32")])
def test_tokens_where_they_lie(kind, dtype):
    of = {"dim": 130, "width": 40, "kind": kind}
    assert_routed_equals_the_reference([0, 70, 300, 0], 9, dtype=dtype, seed=0, **of)


def assert_routed_equals_the_reference(sizes, more, dim, width, dtype, kind, seed):
    """With tokens in any order, some without an expert, whose numbers in hidden are not finite."""
    num, options = max(sum(sizes) + more, 1), {"dim": dim, "width": width, "seed": seed}
    x, *weights = inputs(num, len(sizes), dtype=dtype, **options)
    order = np.random.default_rng(seed).permutation(num).astype(np.int32)
    given = jnp.asarray(sizes, jnp.int32), order
    with chip.making(chip.Chip("cpu", kind)), jax.default_matmul_precision("highest"):
        ours = values_and_gradients(mlp, (x, *weights), given)
        exact = x.astype(jnp.float32), *weights
        theirs = values_and_gradients(definition, exact, given)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        near = (1e-5 if dtype == "float32" else 2e-2) * max(np.abs(b).max(), 1)
        np.testing.assert_allclose(a.astype(jnp.float32), b, atol=near)


@pytest.mark.parametrize(
    ("add", "shares", "keep"),
    [
        slow(False, None, False),
        (True, None, True),
        slow(True, None, False),
        (False, (jnp.negative, jnp.negative), True),
    ],
)
def test_a_layers_gradients_are_written_in_its_place(add, shares, keep):
    """In a loop over checkpointed layers, whose gradients' stack is not yet filled, or whose sums
    are added to; or whose gradients are converted. What the backward pass needs lies in a stack too
    (`keep`), or is computed again."""
    layers, num, sizes = 3, 40, jnp.asarray([11, 0, 20, 5], jnp.int32)
    x, *weights = inputs(num, layers, E)
    order = jnp.arange(num)[::-1]

    def run(x, weights, mlp, kept=None):
        @functools.partial(jax.checkpoint, policy=OF_PRODUCTS if keep else None)
        def body(carry, of):
            y, kept = mlp(*carry, *of)
            return (jnp.tanh(carry[0] + y), kept), None

        (h, kept), _ = jax.lax.scan(body, (x, kept), (jnp.arange(layers), *weights))
        return ((h if kept is None else hold(h, kept)) ** 2).sum()

    def in_place(x, weights):
        refs = tuple(
            jax.new_ref(jnp.ones_like(w) if add else jnp.full_like(w, jnp.nan)) for w in weights
        )
        kept = tiles.empty((layers, num, 2 * F), jnp.float32) if keep else None

        def stacked(h, kept, layer, *_):
            return stacked_mlp(h, order, sizes, *weights, layer, refs, kept, add, shares)

        d_x = jax.grad(lambda x: run(x, weights, stacked, kept))(x)
        sums = [jax.freeze(ref) for ref in refs]
        return d_x, [-x for x in sums] if shares else sums

    def plain(h, kept, layer, *w):
        return definition(h, *w, sizes, order), kept

    with chip.making(MI300X), jax.default_matmul_precision("highest"):
        ours = jax.jit(in_place)(x, weights)
    with jax.default_matmul_precision("highest"):
        theirs = jax.jit(jax.grad(lambda *of: run(*of, plain), (0, 1)))(x, weights)
    theirs = theirs[0], [d + add for d in theirs[1]]
    assert_all_close(ours, theirs, atol=1e-3, rtol=1e-4)


@EACH
def test_weight_gradients_are_float32_of_bfloat16_rows(implementation):
    """The products are of bfloat16, their sums in float32; a CPU and our kernels round nothing on the
    way."""
    x, *weights = inputs(64, 2, dim=32, width=24, dtype=jnp.bfloat16)
    choice = jnp.arange(64, dtype=jnp.int32) % 3
    order, sizes = jnp.argsort(choice), jnp.bincount(choice, length=2)

    def ours(x, *weights):
        return own_expert_mlp(x, choice, *weights)

    y, (dx, *found) = values_and_gradients(ours, (x, *weights))
    assert y.dtype == dx.dtype == jnp.bfloat16
    exact = definition(x.astype(jnp.float32), *weights, sizes, order)
    np.testing.assert_allclose(y.astype(jnp.float32), exact, atol=0.1)
    for gradient in found:
        assert gradient.dtype == jnp.float32
        if implementation != "xla":
            assert np.mean(gradient != gradient.astype(jnp.bfloat16).astype(jnp.float32)) > 0.9


@EACH
@pytest.mark.parametrize("sizes", [*SIZES.values(), (0, 0, 1, 0)], ids=[*SIZES, "a single row"])
def test_a_layers_weights_where_they_lie(sizes, implementation, monkeypatch):
    """Weights in strips and whole, blocks of few rows and of many."""
    # 4 of the 12 rows of gate_up
    monkeypatch.setattr("pallas_kernels.products.cpu.STRIP", 4 * 2 * F * 4)
    monkeypatch.setattr(cpu, "TALL", 32)
    counts = jnp.asarray(sizes, jnp.int32)
    for num, few in [(100, (1, 8, 64)), (100, (1, 4)), (max(sum(sizes), 1), cpu.FEW)]:
        monkeypatch.setattr(cpu, "FEW", few)
        rows, gate_up, down = inputs(num, 3, E)
        with jax.default_matmul_precision("highest"):
            found = of_layer(few)(rows, counts, gate_up, down, jnp.int32(1))
            wanted = definition(rows, gate_up[1], down[1], counts)
        np.testing.assert_allclose(found, wanted, atol=1e-4)


@functools.cache
def of_layer(few):
    """One program for all sizes, with these heights of few rows."""
    return jax.jit(lambda *of: layer_mlp(*of))


def test_weight_gradients_of_grouped_products_are_rounded_once():
    """As a GPU computes them: a rounding of each result is all that parts them from float32."""
    rng, rows = np.random.default_rng(0), 256
    # Of one sign, so that sums grow large: added up in bfloat16 they would stop growing.
    x, dy = (jnp.asarray(rng.random((rows, n)), jnp.bfloat16) for n in (D, F))
    sizes = jnp.asarray([rows - 20, 3, 0, 10], jnp.int32)
    group = (np.arange(rows)[:, None] >= np.cumsum(sizes)).sum(-1)
    exact = [
        np.asarray(x[group == e], np.float64).T @ np.asarray(dy[group == e], np.float64)
        for e in range(E)
    ]
    # Not jitted: a compiler may leave a rounding out, as XLA's for CPUs does; hipBLASLt's product
    # cannot.
    found = np.asarray(xla.grouped_outer(x, dy, sizes))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, found.astype(jnp.bfloat16))  # so the table of formats says
    np.testing.assert_allclose(found, exact, rtol=2.0**-8)
