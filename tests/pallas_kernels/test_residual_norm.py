"""Reading and joining the residual stream: each implementation against the definition, values and
all gradients."""

import functools

import jax
import jax.numpy as jnp
import kernel_helpers
import numpy as np
import pytest
from rows import slow

from pallas_kernels import chip
from pallas_kernels.residual_norm import Joining, join, join_and_read, read, reference, triton

EPS = 1e-5
CHIPS = {
    "cpu": chip.Chip("cpu", "cpu"),
    "xla": chip.Chip("gpu", "gfx942", ()),
    "kernels for ROCm": chip.Chip("cpu", "gfx942", ("residual_norm",)),
    "kernels for CUDA": chip.Chip("cpu", "NVIDIA H200", ("residual_norm",)),
}


def block(module, gated, dtype, wide):
    """A layer's operations on its stream: read, joined and read, joined; every result, and
    gradients."""
    read, join, join_and_read = module

    def objective(arrays, d):
        y, h, how, scale, kernel, gate = arrays
        x, h = read(h, scale, EPS, dtype)
        h, again, product = join_and_read(y, h, how, scale, kernel, EPS, dtype, wide)
        out = join(again, h, how, gate if gated else None)
        total = sum(
            jnp.sum(a.astype(jnp.float32) * b) for a, b in zip((out, x, product), d, strict=True)
        )
        return total, (out, x, again, product)

    return jax.jit(jax.value_and_grad(objective, has_aux=True))


OURS, THEIRS = (
    (read, join, join_and_read),
    (reference.read, reference.join, reference.join_and_read),
)


def assert_equal_to_the_reference(
    target, rows, columns, width, dtype, wide, gated=True, tolerance=2e-5
):
    normal = functools.partial(kernel_helpers.normal, np.random.default_rng(0))
    how = Joining(*(normal(columns) for _ in range(4)))
    y, h, gate = normal(*rows, columns).astype(dtype), normal(*rows, columns), normal(*rows)
    arrays = y, h, how, normal(columns), normal(columns, width), gate
    d = normal(*rows, columns), normal(*rows, columns), normal(*rows, width)
    with chip.making(target):
        ours = block(OURS, gated, dtype, wide)(arrays, d)
    theirs = block(THEIRS, gated, dtype, wide)(arrays, d)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(np.abs(b).max(), 1))


@pytest.mark.parametrize("target", CHIPS.values(), ids=CHIPS)
@pytest.mark.parametrize("gated", [slow(False), True])
def test_values_and_all_gradients(target, gated):
    assert_equal_to_the_reference(target, (3, 7), 48, 5, jnp.float32, jnp.float32, gated)


@pytest.mark.parametrize("target", CHIPS.values(), ids=CHIPS)
@pytest.mark.parametrize("wide", [jnp.float32, slow(jnp.bfloat16)], ids=lambda x: x.__name__)
def test_a_narrow_norm_and_a_product_that_may_be_wider(target, wide):
    """In float32 the product is float32's, for any dtype of the written norm."""
    # One rounding to bfloat16 may fall on the other side: its step.
    assert_equal_to_the_reference(target, (2, 33), 64, 8, jnp.bfloat16, wide, tolerance=2.0**-8)


@pytest.mark.parametrize(
    ("rows", "columns"), [slow(1, 1), (5, 2048), slow(96, 96), (95, 97), slow(97, 95)]
)
def test_tails_of_rows_and_columns_one_of_either_and_rows_that_fill_a_programs_tile(rows, columns):
    target = CHIPS["kernels for ROCm"]
    assert_equal_to_the_reference(
        target, (rows,), columns, 3, jnp.float32, jnp.float32, rows in (5, 96)
    )


@pytest.mark.parametrize("columns", [24, slow(128)])
def test_many_programs_of_many_tiles(columns, monkeypatch):
    """Some 40 programs of three tiles each; the last one's reach over the end."""
    monkeypatch.setattr(triton, "_tile", functools.partial(small_tiles, triton._tile))
    target = CHIPS["kernels for ROCm"]
    assert_equal_to_the_reference(target, (3, 77), columns, 3, jnp.float32, jnp.float32)


def small_tiles(make, rows, columns, kernel):
    return make(rows, columns, kernel)._replace(tall=2, steps=3)


def test_rows_too_wide_for_registers_are_left_to_xla(monkeypatch):
    monkeypatch.setattr(triton, "MOST", 16)
    monkeypatch.setattr(triton, "_tile", None)
    target = CHIPS["kernels for ROCm"]
    assert_equal_to_the_reference(target, (3, 7), 48, 5, jnp.float32, jnp.float32)
