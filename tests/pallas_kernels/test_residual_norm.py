"""Reading and joining the residual stream: each implementation against the definition, values and
all gradients."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from compared import assert_near, values_and_gradients
from kernel_helpers import CPU, H200, MI300X, XLA, normal
from rows import slow

from pallas_kernels import chip, residual_norm
from pallas_kernels.residual_norm import Joining, reference, triton

EPS = 1e-5
CHIPS = {"cpu": CPU, "xla": XLA, "kernels for ROCm": MI300X, "kernels for CUDA": H200}


def block(y, h, how, scale, kernel, gate, *, of, dtype, wide):
    """A layer's operations on its stream: read, joined and read, joined; every result."""
    x, h = of.read(h, scale, EPS, dtype)
    h, again, product = of.join_and_read(y, h, how, scale, kernel, EPS, dtype, wide)
    return of.join(again, h, how, gate), x, again, product


def assert_equal_to_the_reference(
    target, rows, columns, width, dtype, wide, gated=True, tolerance=2e-5
):
    draw = functools.partial(normal, np.random.default_rng(0))
    how = Joining(*(draw(columns) for _ in range(4)))
    y, h, gate = draw(*rows, columns).astype(dtype), draw(*rows, columns), draw(*rows)
    arrays = y, h, how, draw(columns), draw(columns, width), gate if gated else None
    with chip.making(target):
        ours, theirs = (
            values_and_gradients(functools.partial(block, of=of, dtype=dtype, wide=wide), arrays)
            for of in (residual_norm, reference)
        )
    assert_near(ours, theirs, tolerance)


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
    gated = rows in (5, 96)
    assert_equal_to_the_reference(MI300X, (rows,), columns, 3, jnp.float32, jnp.float32, gated)


@pytest.mark.parametrize("columns", [24, slow(128)])
def test_many_programs_of_many_tiles(columns, monkeypatch):
    """Some 40 programs of three tiles each; the last one's reach over the end."""
    monkeypatch.setattr(triton, "_tile", functools.partial(small_tiles, triton._tile))
    assert_equal_to_the_reference(MI300X, (3, 77), columns, 3, jnp.float32, jnp.float32)


def small_tiles(make, rows, columns, kernel):
    return make(rows, columns, kernel)._replace(tall=2, steps=3)


def test_rows_too_wide_for_registers_are_left_to_xla(monkeypatch):
    monkeypatch.setattr(triton, "MOST", 16)
    monkeypatch.setattr(triton, "_tile", None)
    assert_equal_to_the_reference(MI300X, (3, 7), 48, 5, jnp.float32, jnp.float32)
