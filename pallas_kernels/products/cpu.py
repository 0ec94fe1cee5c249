"""Sums over rows on a CPU, where XLA has one fast bfloat16 product; and products of few rows, which
read weights."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.cpu import row_major, unfused
from pallas_kernels.products import xla

# bytes of weights that XLA copies, into the order that it multiplies in, within a core's cache
STRIP = 1 << 20
# rows whose products take the time in which weights are read; one row is multiplied without a copy
FEW = range(2, 64)


def sum_rows(x_spec, y_spec, w_spec, x, y, precision=None) -> jax.Array:
    """See `pallas_kernels.products`. One operand is transposed first, and written out."""
    channels = x_spec.replace("n", "") + "n"
    x = row_major(jnp.moveaxis(unfused(x), x_spec.index("n"), -1))
    spec = f"{channels},{y_spec}->{w_spec}"
    return jnp.einsum(spec, x, y, precision=precision, preferred_element_type=jnp.float32)


def strip_of(weights: jax.Array, width: int) -> int:
    """How many rows of weights so wide are a strip: a power of two."""
    return 1 << max(STRIP // (width * weights.dtype.itemsize), 1).bit_length() - 1


def times_rows(x, w) -> jax.Array:
    """See `pallas_kernels.products`. 16 rows and a w of [32768, 1024] take 17 ms in strips, 27 at
    once."""
    strip = strip_of(w, w.shape[1])
    if len(x) not in FEW or len(w) % strip:
        return xla.times_rows(x, w)

    def columns(i, out):
        part = lax.dynamic_slice_in_dim(w, i * strip, strip)
        return lax.dynamic_update_slice_in_dim(out, xla.times_rows(part, x), i * strip, 0)

    return lax.fori_loop(0, len(w) // strip, columns, jnp.zeros((len(w), len(x)), jnp.float32)).T
