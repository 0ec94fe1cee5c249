"""Ways to keep XLA's CPU compiler from slow choices, for CPU implementations only."""

from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint

from pallas_kernels import chip


def unfused(x: Any) -> Any:
    """x, which the compiler must not fuse with what reads it: a fusion is not always faster than
    its parts."""
    return jax.lax.optimization_barrier(x)


def unfused_on_cpus(x: Any) -> Any:
    """`unfused` on a CPU; elsewhere the arrays unchanged."""
    return unfused(x) if chip.current().is_host else x


def row_major(x: jax.Array) -> jax.Array:
    """x in memory as its shape says, last dim fastest: for a transposed array before a product.

    Left alone, XLA's CPU backend transposes the layout and copies that back: eight times slower
    (0.66 ms against 0.08 for 2048 rows of 256 in bfloat16), and it then has no fast bfloat16
    product over rows (5.4 ms against 2.6).
    """
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
