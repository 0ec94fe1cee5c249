"""How a block reads the residual stream and joins it: RMSNorm, and a sum with scales and biases.
All in float32.

    x, h = read(h, ...)                 a block's input, and the stream for its join
    h = join(y, h, ...)                 the block's output, added
    h, x, product = join_and_read(...)  both, where one block follows another in a layer

All are cheap arithmetic on a layer's widest array: the number of its passes through memory counts.
The stream goes through `read` and comes out again so that one pass of the backward can add up both
its gradients. Backward passes repeat the arithmetic instead of reading its results.

An implementation (`xla`, `triton`; `reference` is the definition) has these three, with gradients
of its own: the values worth keeping for them differ.
"""

from typing import Any

from jaxtyping import Array, Float

from pallas_kernels import chip
from pallas_kernels.residual_norm import triton, xla
from pallas_kernels.residual_norm.xla import Joining, rms_norm

__all__ = ["Joining", "join", "join_and_read", "read", "rms_norm"]

IMPLEMENTATIONS = {"xla": xla, "triton": triton}


def read(
    h: Float[Array, "*N D"], scale: Float[Array, "D"], eps: float, dtype: Any
) -> tuple[Float[Array, "*N D"], Float[Array, "*N D"]]:
    """The norm h / rms(h) * scale in `dtype`, and h: a caller that needs both takes h from here."""
    return chip.choose("residual_norm", IMPLEMENTATIONS).read(h, scale, eps, dtype)


def join(
    y: Float[Array, "*N D"],
    h: Float[Array, "*N D"],
    how: Joining,
    gate: Float[Array, "*N"] | None = None,
) -> Float[Array, "*N D"]:
    """(gate y + y_bias) y_scale + (h + h_bias) h_scale; no gate is 1."""
    return chip.choose("residual_norm", IMPLEMENTATIONS).join(y, h, how, gate)


def join_and_read(
    y: Float[Array, "*N D"],
    h: Float[Array, "*N D"],
    how: Joining,
    scale: Float[Array, "D"],
    kernel: Float[Array, "D R"],
    eps: float,
    dtype: Any,
    kernel_dtype: Any,
) -> tuple[Float[Array, "*N D"], Float[Array, "*N D"], Float[Array, "*N R"]]:
    """The stream after a join, its norm in `dtype`, and the product of its norm with `kernel`,
    float32.

    The product is of numbers in `kernel_dtype`, which may be wider than `dtype`: a router chooses
    by it.
    """
    operator = chip.choose("residual_norm", IMPLEMENTATIONS)
    return operator.join_and_read(y, h, how, scale, kernel, eps, dtype, kernel_dtype)
