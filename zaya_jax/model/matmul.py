"""Matrix products with one number format for the operands, float32 accumulation and float32 weight gradients.

Plain `jnp.einsum` on bfloat16 either rounds the weight's gradient to bfloat16 or, asked for a float32 result, runs its
two backward products in float32 (half the speed here). These products fix both: operands are cast inside, the
cotangent is cast too, and the weight's gradient leaves its product in float32.

Float32 operands are another matter: XLA multiplies them in TF32 on a GPU (10 bits instead of 23) unless it is asked
for more. What `precision.compute` makes float32 follows `precision.matmul`, by JAX's context; what is float32 by itself
(the router's matrices, the convolutions' biases, Muon's iteration) asks for `whole(dtype)` at the product.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.lax import Precision


def whole(dtype: Any) -> Precision | None:
    """The precision that keeps a product of `dtype` what it is called: float32 asks for all its bits, others need not.

    In the kernels that jaxlib 0.12.0 makes for an H200 and an MI300X "default" and "high" are TF32, XF32 (mma .. tf32,
    mfma .. xf32).
    """
    return Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4, 5))
def einsum(
    spec: str, x: jax.Array, w: jax.Array, dtype, out_dtype, precision: Precision | None = None
) -> jax.Array:
    """jnp.einsum(spec, x, w) in `dtype`, given as `out_dtype`; `precision` is for the gradients' products too.

    Rows are the index n, in x and in the result; each index must stand in two of the three arrays.
    """
    out = jnp.dtype(out_dtype)
    accumulate = out if out == jnp.dtype(dtype) else jnp.float32
    product = functools.partial(jnp.einsum, precision=precision, preferred_element_type=accumulate)
    return product(spec, x.astype(dtype), w.astype(dtype)).astype(out)


def _einsum_fwd(spec, x, w, dtype, out_dtype, precision):
    x_cast = x.astype(dtype)
    return einsum(spec, x_cast, w, dtype, out_dtype, precision), (x_cast, w, jnp.zeros((), x.dtype))


def _einsum_bwd(spec, dtype, out_dtype, precision, saved, d_out):
    x, w, like_x = saved
    operands, out = spec.split("->")
    x_spec, w_spec = operands.split(",")
    d_out = d_out.astype(dtype)
    product = functools.partial(jnp.einsum, precision=precision, preferred_element_type=like_x.dtype)
    dx = product(f"{out},{w_spec}->{x_spec}", d_out, w.astype(dtype))
    dw = sum_rows(x_spec, out, w_spec, x, d_out, precision)
    return dx, dw.astype(w.dtype)


einsum.defvjp(_einsum_fwd, _einsum_bwd)


def sum_rows(
    x_spec: str, y_spec: str, w_spec: str, x: jax.Array, y: jax.Array, precision: Precision | None = None
) -> jax.Array:
    """einsum of x and y over their rows "n", float32; the smaller one is transposed first."""
    if y.size < x.size:
        turned = w_spec[:-2] + w_spec[:-3:-1]
        return apart(sum_rows(y_spec, x_spec, turned, y, x, precision)).swapaxes(-1, -2)
    channels = x_spec.replace("n", "") + "n"
    x = written(jnp.moveaxis(apart(x), x_spec.index("n"), -1))
    product = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    return product(f"{channels},{y_spec}->{w_spec}", x, y)


def rows_dot(x: jax.Array, y: jax.Array) -> jax.Array:
    """x [n, d] and y [n, f] to the sum over rows of their outer products, [d, f], float32."""
    return sum_rows("nd", "nf", "df", x, y)


def sum_tokens(x: jax.Array, axis: int = 0) -> jax.Array:
    """The sum of x over this axis and the others but the last one. On a CPU its eighths are added to one another first.

    That is one pass, in which what x is made of is read in its own format; a reduction would have it written out. Let x
    be a cheap product of arrays that stand `apart`: what made these would else be computed again for each eighth.
    """
    x = x.reshape(*x.shape[:axis], -1, x.shape[-1])
    if jax.default_backend() == "cpu" and x.shape[axis] % 8 == 0:
        first, *others = jnp.split(x, 8, axis=axis)
        x = apart(sum(others, first))
    return x.sum(axis)


def dot(x: jax.Array, w: jax.Array, dtype, out_dtype=None, precision: Precision | None = None) -> jax.Array:
    """x [..., in] times w [in, out]."""
    y = einsum("nd,df->nf", x.reshape(-1, x.shape[-1]), w, dtype, out_dtype or dtype, precision)
    return y.reshape(*x.shape[:-1], -1)


def apart(x: Any) -> Any:
    """x, which a CPU's compiler shall compute on its own: what it fuses is not always faster than its parts."""
    return jax.lax.optimization_barrier(x) if jax.default_backend() == "cpu" else x


def written(x: jax.Array) -> jax.Array:
    """A transposed x, written out in its new order on a CPU before it goes into a product.

    Left alone, XLA's CPU backend transposes the layout and copies that back: eight times slower (0.66 ms against 0.08
    for 2048 rows of 256 in bfloat16), and it then has no fast bfloat16 product over rows (5.4 ms against 2.6).
    """
    if jax.default_backend() != "cpu":
        return x
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def turn(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """x transposed and written out, and so is its gradient."""
    return written(apart(x).transpose(axes))


def _turn_bwd(axes, _, d):
    back = sorted(range(len(axes)), key=axes.__getitem__)
    return (turn(d, tuple(back)),)


turn.defvjp(lambda x, axes: (turn(x, axes), None), _turn_bwd)


@jax.custom_vjp
def heads_first(x: jax.Array) -> jax.Array:
    """x [B, S, H, C] as [H, B, S, C]. On a CPU its gradient is put together head by head, not turned."""
    return written(x.transpose(2, 0, 1, 3))


def _heads_first_bwd(_, d):
    if jax.default_backend() != "cpu":
        return (d.transpose(1, 2, 0, 3),)
    heads, batch, length, channels = d.shape
    d = apart(d)
    side_by_side = jnp.concatenate([d[i] for i in range(heads)], axis=-1)
    return (side_by_side.reshape(batch, length, heads, channels),)


heads_first.defvjp(lambda x: (heads_first(x), None), _heads_first_bwd)
