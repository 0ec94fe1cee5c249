"""Ways to keep XLA's CPU compiler from slow choices, for CPU implementations only."""

from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint

from pallas_kernels import chip


def apart(x: Any) -> Any:
    """x, which the compiler must compute separately: a fusion is not always faster than its
    parts."""
    return jax.lax.optimization_barrier(x)


def apart_on_cpus(x: Any) -> Any:
    """`apart` on a CPU; elsewhere the arrays unchanged."""
    return apart(x) if chip.current().is_host else x


def written(x: jax.Array) -> jax.Array:
    """A transposed x, written out in its new order before it goes into a product.

    Left alone, XLA's CPU backend transposes the layout and copies that back: eight times slower
    (0.66 ms against 0.08 for 2048 rows of 256 in bfloat16), and it then has no fast bfloat16
    product over rows (5.4 ms against 2.6).
    """
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
