"""Matrix products with one number format for the operands, float32 accumulation and float32 weight
gradients.

Plain `jnp.einsum` on bfloat16 either rounds the weight's gradient to bfloat16 or, asked for a
float32 result, runs its two backward products in float32 (half the speed here). These products fix
both: operands are cast inside, the cotangent is cast too, and the weight's gradient leaves its
product in float32.

Float32 operands are another matter: XLA multiplies them in TF32 on a GPU (10 bits instead of 23)
unless it is asked for more. Products that `precision.compute` makes float32 follow
`precision.matmul`, by JAX's context; those that are always float32 (the router's matrices, the
convolutions' biases, Muon's iteration) ask for `full_precision(dtype)`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.lax import DotAlgorithmPreset, Precision, PrecisionLike

from pallas_kernels import chip
from pallas_kernels.products import cpu, xla

IMPLEMENTATIONS = {"xla": xla, "cpu": cpu}
DOTS = "products"  # the name under which a remat policy finds the results of `einsum` and `dot`


def full_precision(dtype: Any) -> PrecisionLike:
    """The precision that a product of `dtype` needs to deserve the name: float32 asks for all its
    bits.

    In the kernels that jaxlib 0.12.0 makes for an H200 and an MI300X "default" and "high" are TF32,
    XF32 (mma .. tf32, mfma .. xf32). NVIDIA's other float32 products run outside the matrix units.
    So each operand is cut into two of TF32 there, 21 bits, and three products of these are added:
    errors of 3.6e-7 of a product 2,048 deep, float32's own are 3.7e-7 (benchmarks/router.py).
    """
    if jnp.dtype(dtype) != jnp.float32:
        return None
    target = chip.current()
    if target.maker == "cuda" and "bfloat16" in target.formats and not target.is_host:
        return DotAlgorithmPreset.TF32_TF32_F32_X3
    return Precision.HIGHEST


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4, 5))
def einsum(
    spec: str, x: jax.Array, w: jax.Array, dtype, out_dtype, precision: PrecisionLike = None
) -> jax.Array:
    """jnp.einsum(spec, x, w) in `dtype`, given as `out_dtype`; `precision` is for the gradients'
    products too.

    Rows are the index n, in x and in the result; each index must occur in two of the three arrays.
    """
    out = jnp.dtype(out_dtype)
    accumulate = out if out == jnp.dtype(dtype) else jnp.float32
    product = functools.partial(jnp.einsum, precision=precision, preferred_element_type=accumulate)
    return product(spec, x.astype(dtype), w.astype(dtype)).astype(out)


def _einsum_fwd(spec, x, w, dtype, out_dtype, precision):
    x_cast = x.astype(dtype)
    out = checkpoint_name(einsum(spec, x_cast, w, dtype, out_dtype, precision), DOTS)
    return out, (x_cast, w, jnp.zeros((), x.dtype))


def _einsum_bwd(spec, dtype, out_dtype, precision, saved, d_out):
    x, w, like_x = saved
    operands, out = spec.split("->")
    x_spec, w_spec = operands.split(",")
    d_out = d_out.astype(dtype)
    product = functools.partial(
        jnp.einsum, precision=precision, preferred_element_type=like_x.dtype
    )
    dx = product(f"{out},{w_spec}->{x_spec}", d_out, w.astype(dtype))
    dw = sum_rows(x_spec, out, w_spec, x, d_out, precision)
    return dx, dw.astype(w.dtype)


einsum.defvjp(_einsum_fwd, _einsum_bwd)


def sum_rows(
    x_spec: str,
    y_spec: str,
    w_spec: str,
    x: jax.Array,
    y: jax.Array,
    precision: PrecisionLike = None,
) -> jax.Array:
    """einsum of x and y over their rows "n", float32."""
    return chip.choose("products", IMPLEMENTATIONS).sum_rows(
        x_spec, y_spec, w_spec, x, y, precision
    )


def times_rows(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [n, d] times w [v, d] transposed, both of one number format, accumulated and given in
    float32."""
    return chip.choose("products", IMPLEMENTATIONS).times_rows(x, w)


def dot(
    x: jax.Array, w: jax.Array, dtype, out_dtype=None, precision: PrecisionLike = None
) -> jax.Array:
    """x [..., in] times w [in, out]."""
    y = einsum("nd,df->nf", x.reshape(-1, x.shape[-1]), w, dtype, out_dtype or dtype, precision)
    return y.reshape(*x.shape[:-1], -1)
