"""The small parts that the blocks share: a weight's declaration, linear maps, RMSNorm, residual
scaling.

A weight is declared once: shape, initialiser and logical axes are in one `weight(...)` call; its
dtype is always float32. `axes` names the meaning of each dimension; the mesh axis for it is decided
elsewhere.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from pallas_kernels.products import dot
from pallas_kernels.residual_norm import Joining, join, join_and_read, read, rms_norm

PAIR = "pair"  # the logical axis of gate and up, [.., in, 2, out]: their columns are one matrix's


def weight(
    rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str | None, ...], init: float | str
) -> nnx.Param:
    """A float32 parameter: `init` is "zeros", "ones", or the standard deviation of a normal
    distribution."""
    if init == "zeros":
        value = jnp.zeros(shape, jnp.float32)
    elif init == "ones":
        value = jnp.ones(shape, jnp.float32)
    else:
        value = float(init) * jax.random.normal(rngs.params(), shape, jnp.float32)
    return nnx.Param(value, axes=axes)


class TokenSum(nnx.Intermediate):
    """A figure of a layer: a quantity summed over this device's real tokens.

    A layer assigns one while it runs, `self.size = TokenSum(jnp.sum(sizes * placement.real(h)))`,
    and metrics.jsonl has its mean over the step's tokens, for each layer, under this name. A module
    in the layer may do the same: its path comes first.
    """


class Linear(nnx.Module):
    """x W (+ b), multiplied in `dtype`."""

    def __init__(
        self,
        rngs: nnx.Rngs,
        d_in: int,
        d_out: int,
        axes: tuple[str | None, str | None],
        std: float,
        bias: bool,
    ):
        self.kernel = weight(rngs, (d_in, d_out), axes, std)
        if bias:
            self.bias = weight(rngs, (d_out,), axes[1:], "zeros")

    def __call__(
        self, x: jax.Array, dtype: Any, out_dtype: Any = None, precision: Any = None
    ) -> jax.Array:
        out_dtype = out_dtype or dtype
        y = dot(x, self.kernel[...], dtype, out_dtype, precision)
        if hasattr(self, "bias"):
            y = y + self.bias[...].astype(out_dtype)
        return y


class RMSNorm(nnx.Module):
    """x / rms(x) * scale, always in float32."""

    def __init__(self, rngs: nnx.Rngs, dim: int, axis: str, eps: float):
        self.scale = weight(rngs, (dim,), (axis,), "ones")
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.scale[...], self.eps)

    def norm_and_stream(self, h: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """The norm of the residual stream in `dtype`, and the stream, for the join."""
        return read(h, self.scale[...], self.eps, dtype)


class Join(nnx.Module):
    """How a block's output y joins the residual stream h, in float32: (y + b_y) a_y + (h + b_h)
    a_h.

    This follows the released code and its ports; the paper writes a x + b.

    A gate that comes with y multiplies y's rows.
    """

    def __init__(self, rngs: nnx.Rngs, dim: int):
        self.y_scale = weight(rngs, (dim,), ("embed",), "ones")
        self.y_bias = weight(rngs, (dim,), ("embed",), "zeros")
        self.h_scale = weight(rngs, (dim,), ("embed",), "ones")
        self.h_bias = weight(rngs, (dim,), ("embed",), "zeros")

    def __call__(
        self,
        y: Float[Array, "B S D"],
        h: Float[Array, "B S D"],
        gate: Float[Array, "B S"] | None = None,
    ) -> Float[Array, "B S D"]:
        return join(y, h, self._scales(), gate)

    def join_norm_project(
        self,
        y: Float[Array, "B S D"],
        h: Float[Array, "B S D"],
        norm: RMSNorm,
        dtype: Any,
        linear: Linear,
        linear_dtype: Any,
    ) -> tuple[Float[Array, "B S D"], Float[Array, "B S D"], Float[Array, "B S R"]]:
        """The residual stream after the join, its norm in `dtype`, and that norm's product with
        the kernel of `linear`, in another `dtype`; one pass over the stream does all three."""
        kernel, scale = linear.kernel[...], norm.scale[...]
        return join_and_read(y, h, self._scales(), scale, kernel, norm.eps, dtype, linear_dtype)

    def _scales(self) -> Joining:
        return Joining(self.y_scale[...], self.y_bias[...], self.h_scale[...], self.h_bias[...])
