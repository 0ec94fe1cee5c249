"""The gated MLP of groups by `lax.ragged_dot`: for GPUs.

With bfloat16 rows the numbers of a weight's gradient add up in float32 and are then rounded to
bfloat16. That happens at most once per call (a compiler may leave it out), so once for each
micro-batch and each round in which experts exchange tokens. They are given as float32, and their
sums are float32 from there on. The rounding costs 0.0017 of the gradient's norm where rounding rows
and gradients to bfloat16 costs 0.0024 (normally distributed, one call or 16). Asked for float32
instead, XLA 0.12.0 gives up MI300X's grouped product (hipBLASLt's) for a dense one: E times the
work and operands.
"""

import jax
import jax.numpy as jnp
from jax import lax

BY_ROWS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (1,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0],
)
# x times each group's transposed matrix, without a copy of it
INTO_COLUMNS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0],
)
OVER_ROWS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)


def forward(rows, sizes, gate_up, down) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.grouped_mlp`."""
    hidden = grouped_dot(rows, gate_up, sizes)
    return grouped_dot(swiglu(hidden).astype(rows.dtype), down, sizes), hidden


def of_layer(rows, sizes, gate_up, down, layer) -> jax.Array:
    """See `pallas_kernels.grouped_mlp`. A grouped product takes an array of its own, so the layer's
    are copied."""
    return forward(rows, sizes, gate_up[layer], down[layer])[0]


def backward(rows, sizes, gate_up, down, hidden, d_out) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `pallas_kernels.grouped_mlp`."""
    activation, pull = jax.vjp(swiglu, hidden)
    d_down = grouped_outer(activation.astype(rows.dtype), d_out, sizes)
    (d_hidden,) = pull(grouped_dot(d_out, down, sizes, INTO_COLUMNS).astype(jnp.float32))
    d_gate_up = grouped_outer(rows, d_hidden, sizes)
    return grouped_dot(d_hidden, gate_up, sizes, INTO_COLUMNS), d_gate_up, d_down


def swiglu(hidden) -> jax.Array:
    """silu of the first half times the second, float32."""
    gate, up = jnp.split(hidden.astype(jnp.float32), 2, axis=-1)
    return jax.nn.silu(gate) * up


def grouped_dot(x, w, sizes, numbers=BY_ROWS) -> jax.Array:
    """Rows of x, sorted by group, times their group's matrix in x's dtype; rows past the last group
    give zero."""
    return lax.ragged_dot_general(x, w.astype(x.dtype), sizes, numbers)


def grouped_outer(x, y, sizes) -> jax.Array:
    """For each group the sum over its rows of the outer products of x and y, float32."""
    return lax.ragged_dot_general(x, y, sizes, OVER_ROWS).astype(jnp.float32)
