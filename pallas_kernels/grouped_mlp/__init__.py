"""The gated MLP of each token's own expert: products of groups of rows, each with its group's matrices.

Letters: M rows sorted by expert, D model, E experts, F expert width. Rows past the last expert's give zero.

An implementation (`xla`, `cuda`, `cpu`; `reference` is the definition) has

    forward(rows, sizes, gate_up, down)                → out [M, D], hidden [M, 2 F]
    backward(rows, sizes, gate_up, down, hidden, d)    → d_rows, and the gradients of both weights in float32

with weights in their own number format; products run in that of the rows, which `out` and `hidden` have too.
"""

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from pallas_kernels import chip
from pallas_kernels.grouped_mlp import cpu, cuda, triton, xla

IMPLEMENTATIONS = {"xla": xla, "cuda": cuda, "cpu": cpu, "triton": triton}
PRODUCTS = "experts"  # the name under which a remat policy finds what the grouped products gave


@jax.custom_vjp
def grouped_mlp(
    rows: Float[Array, "M D"],
    sizes: Int[Array, "E"],
    gate_up: Float[Array, "E D F2"],
    down: Float[Array, "E F D"],
) -> Float[Array, "M D"]:
    """The gated MLP of rows sorted by expert, `sizes` of each, in the rows' number format; gate columns come first."""
    return chip.choose(IMPLEMENTATIONS).forward(rows, sizes, gate_up, down)[0]


def _grouped_mlp_fwd(rows, sizes, gate_up, down):
    out, hidden = chip.choose(IMPLEMENTATIONS).forward(rows, sizes, gate_up, down)
    out, hidden = checkpoint_name(out, PRODUCTS), checkpoint_name(hidden, PRODUCTS)
    return out, (rows, sizes, gate_up, down, hidden)


def _grouped_mlp_bwd(saved, d_out):
    rows, _, gate_up, down, _ = saved
    d_rows, *d_weights = chip.choose(IMPLEMENTATIONS).backward(*saved, d_out.astype(rows.dtype))
    return d_rows, None, *(d.astype(w.dtype) for d, w in zip(d_weights, (gate_up, down), strict=True))


grouped_mlp.defvjp(_grouped_mlp_fwd, _grouped_mlp_bwd)
