"""The grouped MLP against its definition, in blocks and by `ragged_dot`: values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_helpers import CPU
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


@pytest.mark.parametrize("implementation", ["cpu", "xla", "triton"], indirect=True)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_values_and_gradients(sizes, implementation):
    assert_equal_to_the_reference(sizes, num_rows=100)


@pytest.fixture
def tiles_of_16(monkeypatch):
    """Tiles so small that an expert has several, and that they reach over its rows and over all
    sides."""
    monkeypatch.setattr(triton.tiles, "tile_of", lambda *_: triton.Tile(16, 16, 16, 4, 2))


@pytest.mark.usefixtures("tiles_of_16")
@pytest.mark.parametrize("implementation", ["triton"], indirect=True)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_kernels_over_several_tiles(sizes, implementation):
    assert_equal_to_the_reference(sizes, 100, "tiles of 16")


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("heights", [(8,), (8, 16, 24)], ids=str)
def test_blocks_of_any_height(sizes, heights, monkeypatch):
    """Many whole blocks, one that fits, and both, each running over into the next expert's rows."""
    monkeypatch.setattr(cpu, "heights", lambda num_rows, num_groups: heights)
    assert_equal_to_the_reference(sizes, sum(sizes), heights)


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
    num = max(sum(sizes) + more, 1)
    keys = jax.random.split(jax.random.key(seed), 5)
    x, d_out = (jax.random.normal(key, (num, dim)).astype(dtype) for key in keys[:2])
    gate_up = jax.random.normal(keys[2], (len(sizes), dim, 2 * width)) / dim**0.5
    down = jax.random.normal(keys[3], (len(sizes), width, dim)) / width**0.5
    order = jax.random.permutation(keys[4], num).astype(jnp.int32)
    sizes = jnp.asarray(sizes, jnp.int32)

    def plain(x, *weights):
        y = reference.grouped_mlp(x.astype(jnp.float32)[order], sizes, *weights)
        return y[jnp.argsort(order)]

    with chip.making(chip.Chip("cpu", kind)), jax.default_matmul_precision("highest"):
        mlp = lambda x, *weights: grouped_mlp(x, sizes, *weights, order)  # noqa: E731
        ours, theirs = (
            jax.jit(
                lambda *args, f=f: (lambda y, pull: (y, *pull(d_out.astype(y.dtype))))(
                    *jax.vjp(f, *args)
                )
            )(x, gate_up, down)
            for f in (mlp, plain)
        )
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(
            a, b, atol=(1e-5 if dtype == "float32" else 2e-2) * max(np.abs(b).max(), 1)
        )


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
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (num, D))
    weights = (
        jax.random.normal(keys[1], (layers, E, D, 2 * F)) / 3,
        jax.random.normal(keys[2], (layers, E, F, D)) / 3,
    )
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
        mlp = lambda h, kept, layer, *_: stacked_mlp(  # noqa: E731
            h, order, sizes, *weights, layer, refs, kept, add, shares
        )
        d_x = jax.grad(lambda x: run(x, weights, mlp, kept))(x)
        sums = tuple(jax.freeze(ref) for ref in refs)
        return d_x, tuple(map(jnp.negative, sums)) if shares else sums

    def plain(h, kept, layer, *w):
        return reference.grouped_mlp(h[order], sizes, *w)[order], kept

    with chip.making(chip.Chip("cpu", "gfx942")), jax.default_matmul_precision("highest"):
        ours = jax.jit(in_place)(x, weights)
    with jax.default_matmul_precision("highest"):
        theirs = jax.jit(jax.grad(lambda *of: run(*of, plain), (0, 1)))(x, weights)
    theirs = theirs[0], [w + add for w in theirs[1]]
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("implementation", ["cpu", "xla", "triton"], indirect=True)
def test_weight_gradients_are_float32_of_bfloat16_rows(implementation):
    """The products are of bfloat16, their sums in float32; a CPU and our kernels round nothing on the
    way."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (64, 32)).astype(jnp.bfloat16)
    weights = (
        jax.random.normal(keys[1], (2, 32, 48)) / 32**0.5,
        jax.random.normal(keys[2], (2, 24, 32)) / 24**0.5,
    )
    choice = jnp.arange(64, dtype=jnp.int32) % 3
    order = jnp.argsort(choice)
    sizes = jnp.bincount(choice, length=2)
    y, pull = jax.jit(lambda *of: jax.vjp(lambda *of: own_expert_mlp(of[0], choice, *of[1:]), *of))(
        x, *weights
    )
    dx, *found = jax.jit(pull)(jnp.ones_like(y))
    assert y.dtype == dx.dtype == jnp.bfloat16
    exact = reference.grouped_mlp(x.astype(jnp.float32)[order], sizes, *weights)
    np.testing.assert_allclose(y[order].astype(jnp.float32), exact, atol=0.1)
    for gradient in found:
        assert gradient.dtype == jnp.float32
        if implementation != "xla":
            assert np.mean(gradient != gradient.astype(jnp.bfloat16).astype(jnp.float32)) > 0.9


@functools.cache
def program(mlp, patched=None):
    """Values and all gradients by one program for all sizes; another one where something is
    `patched`."""
    del patched

    def objective(rows, gate_up, down, sizes, weight):
        y = mlp(rows, sizes, gate_up, down)
        return jnp.vdot(y, weight), y

    return jax.jit(jax.value_and_grad(objective, (0, 1, 2), has_aux=True))


def assert_equal_to_the_reference(sizes, num_rows, patched=None):
    keys = jax.random.split(jax.random.key(0), 4)
    rows, weight = (jax.random.normal(key, (num_rows, D)) for key in keys[:2])
    gate_up, down = (
        jax.random.normal(keys[2], (E, D, 2 * F)) / 3,
        jax.random.normal(keys[3], (E, F, D)) / 3,
    )
    sizes = jnp.asarray(sizes, jnp.int32)
    with jax.default_matmul_precision("highest"):
        ours = program(grouped_mlp, patched)(rows, gate_up, down, sizes, weight)
        with chip.making(CPU):
            theirs = program(reference.grouped_mlp)(rows, gate_up, down, sizes, weight)
    np.testing.assert_array_equal(ours[0][1][int(sizes.sum()) :], 0)
    np.testing.assert_array_equal(ours[1][0][int(sizes.sum()) :], 0)
    np.testing.assert_allclose(ours[0][1], theirs[0][1], atol=1e-4)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("implementation", ["cpu", "xla", "triton"], indirect=True)
@pytest.mark.parametrize("sizes", [*SIZES.values(), (0, 0, 1, 0)], ids=[*SIZES, "a single row"])
def test_a_layers_weights_where_they_lie(sizes, implementation, monkeypatch):
    """Weights in strips and whole, blocks of few rows and of many."""
    # 4 of the 12 rows of gate_up
    monkeypatch.setattr("pallas_kernels.products.cpu.STRIP", 4 * 2 * F * 4)
    monkeypatch.setattr(cpu, "TALL", 32)
    keys = jax.random.split(jax.random.key(0), 3)
    gate_up = jax.random.normal(keys[0], (3, E, D, 2 * F)) / 3
    down = jax.random.normal(keys[1], (3, E, F, D)) / 3
    counts = jnp.asarray(sizes, jnp.int32)
    for num, few in [(100, (1, 8, 64)), (100, (1, 4)), (max(sum(sizes), 1), cpu.FEW)]:
        monkeypatch.setattr(cpu, "FEW", few)
        rows = jax.random.normal(keys[2], (num, D))
        with jax.default_matmul_precision("highest"):
            found = of_layer(few)(rows, counts, gate_up, down, jnp.int32(1))
            wanted = reference.grouped_mlp(rows, counts, gate_up[1], down[1])
        np.testing.assert_allclose(found, wanted, atol=1e-4)


@functools.cache
def of_layer(few):
    """One program for all sizes, with these heights of few rows."""
    del few
    return jax.jit(lambda *of: layer_mlp(*of))


def test_weight_gradients_of_grouped_products_are_rounded_once():
    """As a GPU computes them: a rounding of each result is all that parts them from float32,
    however many rows."""
    calls, rows = 16, 256
    keys = jax.random.split(jax.random.key(0), 2)
    # Of one sign, so that sums grow large: added up in bfloat16 they would stop growing after some
    # 256 rows.
    x = jax.random.uniform(keys[0], (calls, rows, D)).astype(jnp.bfloat16)
    dy = jax.random.uniform(keys[1], (calls, rows, F)).astype(jnp.bfloat16)
    sizes = jnp.asarray([rows - 20, 3, 0, 10], jnp.int32)

    def ours(x, dy):
        # Not jitted: a compiler may leave a rounding out, as XLA's for CPUs does; hipBLASLt's
        # product cannot.
        return xla.grouped_outer(x, dy, sizes)

    ends = np.cumsum(sizes)
    group = (np.arange(rows)[:, None] >= ends).sum(-1)
    wide = [np.asarray(a, np.float64) for a in (x, dy)]
    exact = np.stack(
        [
            np.stack([x[group == e].T @ dy[group == e] for e in range(E)])
            for x, dy in zip(*wide, strict=True)
        ]
    )
    found = np.stack([ours(a, b) for a, b in zip(x, dy, strict=True)])
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, found.astype(jnp.bfloat16))  # so the table of formats says
    assert (np.abs(found - exact) <= 2.0**-8 * np.abs(exact)).all()

    def error(a, b):
        return np.linalg.norm(a - b) / np.linalg.norm(b)

    once, summed = error(found[0], exact[0]), error(found.sum(0), exact.sum(0))
    assert 1e-3 < once < 2e-3
    assert summed < once / 3  # float32 sums of independent roundings
    assert (found.sum(0) != found.sum(0).astype(jnp.bfloat16)).any()
