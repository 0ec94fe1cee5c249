"""The gated MLP of each token's own expert: products of groups of rows, each with its group's
matrices.

Letters: M rows sorted by expert, D model, E experts, F expert width. Rows past the last expert's
give zero.

An implementation (`xla`, `cpu`, `triton`; `reference` is the definition) has

    forward(rows, sizes, gate_up, down)                → out [M, D], hidden [M, 2 F]
    backward(rows, sizes, gate_up, down, hidden, d)    → d_rows, and the gradients of both weights in float32
    of_layer(rows, sizes, gate_up, down, layer)        → out, with the weights of a layer of stacks

with weights in their own number format; products run in that of the rows, which `out` and `hidden`
have too. One that `routes` also reads rows in place and writes their results, times a gate, to the
same places: `routed_mlp`, and `layer_mlp` in the place of `of_layer`.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from pallas_kernels import chip, tiles
from pallas_kernels.grouped_mlp import cpu, triton, xla

IMPLEMENTATIONS = {"xla": xla, "cpu": cpu, "triton": triton}
PRODUCTS = "experts"  # the name under which a remat policy finds the grouped products' results


@jax.custom_vjp
def grouped_mlp(
    rows: Float[Array, "M D"],
    sizes: Int[Array, "E"],
    gate_up: Float[Array, "E D F2"],
    down: Float[Array, "E F D"],
) -> Float[Array, "M D"]:
    """The gated MLP of rows sorted by expert, `sizes` of each, in the rows' number format; gate
    columns come first."""
    return chip.choose(IMPLEMENTATIONS).forward(rows, sizes, gate_up, down)[0]


def _grouped_mlp_fwd(rows, sizes, gate_up, down):
    out, hidden = chip.choose(IMPLEMENTATIONS).forward(rows, sizes, gate_up, down)
    out, hidden = checkpoint_name(out, PRODUCTS), checkpoint_name(hidden, PRODUCTS)
    return out, (rows, sizes, gate_up, down, hidden)


def _grouped_mlp_bwd(saved, d_out):
    rows, _, gate_up, down, _ = saved
    d_rows, *d_weights = chip.choose(IMPLEMENTATIONS).backward(*saved, d_out.astype(rows.dtype))
    return (
        d_rows,
        None,
        *(d.astype(w.dtype) for d, w in zip(d_weights, (gate_up, down), strict=True)),
    )


grouped_mlp.defvjp(_grouped_mlp_fwd, _grouped_mlp_bwd)


def routes() -> bool:
    """Whether the chip's implementation takes unsorted rows."""
    return chip.choose(IMPLEMENTATIONS) is triton


@jax.custom_vjp
def routed_mlp(
    x: Float[Array, "N D"],
    order: Int[Array, "N"],
    sizes: Int[Array, "E"],
    gate: Float[Array, "N"] | None,
    gate_up: Float[Array, "E D F2"],
    down: Float[Array, "E F D"],
) -> Float[Array, "N D"]:
    """gate * `grouped_mlp` of the rows x[order], each put back in its place; only for
    implementations that `routes`."""
    return triton.routed_forward(x, order, sizes, gate, gate_up, down, keep=False)[0]


def _routed_mlp_fwd(x, order, sizes, gate, gate_up, down):
    out, hidden = triton.routed_forward(x, order, sizes, gate, gate_up, down)
    out, hidden = checkpoint_name(out, PRODUCTS), checkpoint_name(hidden, PRODUCTS)
    return out, (x, order, sizes, gate, gate_up, down, hidden)


def _routed_mlp_bwd(saved, d_out):
    x, order, sizes, gate, gate_up, down, hidden = saved
    d_x, d_gate, *d_weights = triton.routed_backward(
        x, order, sizes, gate, gate_up, down, hidden, d_out.astype(x.dtype)
    )
    return (
        d_x,
        None,
        None,
        d_gate,
        *(d.astype(w.dtype) for d, w in zip(d_weights, (gate_up, down), strict=True)),
    )


routed_mlp.defvjp(_routed_mlp_fwd, _routed_mlp_bwd)


def layer_mlp(
    rows: Float[Array, "M D"],
    sizes: Int[Array, "E"],
    gate_up: Float[Array, "L E D F2"],
    down: Float[Array, "L E F D"],
    layer: Int[Array, ""],
    order: Int[Array, "M"] | None = None,
) -> Float[Array, "M D"]:
    """`grouped_mlp` with the weights of a layer of stacks, read in place; without gradients.

    Given their `order`, rows are not sorted yet, as for `routed_mlp`: of implementations that
    `routes`.
    """
    if routes():
        return triton.routed_forward(rows, order, sizes, None, gate_up, down, layer, keep=False)[0]
    assert order is None
    return chip.choose(IMPLEMENTATIONS).of_layer(rows, sizes, gate_up, down, layer)


def unwritten(weights: Float[Array, "L E D1 D2"]) -> jax.Array:
    """An unwritten stack for the gradients of these: `stacked_mlp` writes all of it."""
    return tiles.empty(weights.shape, jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(8, 9))
def stacked_mlp(
    x: Float[Array, "N D"],
    order: Int[Array, "N"],
    sizes: Int[Array, "E"],
    gate: Float[Array, "N"],
    gate_up: Float[Array, "L E D F2"],
    down: Float[Array, "L E F D"],
    layer: Int[Array, ""],
    sums: tuple[jax.Ref, jax.Ref],
    add: bool,
    shares: tuple[Callable, Callable] | None = None,
) -> Float[Array, "N D"]:
    """`routed_mlp` with the weights of a layer of stacks. Neither they nor their gradients are
    copied.

    The backward pass writes these into `sums`, references to float32 stacks, in the layer's place,
    or adds them; that the caller must ignore the weights' own gradients, which are zero. With
    `shares` it writes their results.
    """
    return triton.routed_forward(x, order, sizes, gate, gate_up, down, layer, keep=False)[0]


def _stacked_mlp_fwd(x, order, sizes, gate, gate_up, down, layer, sums, add, shares):
    out, hidden = triton.routed_forward(x, order, sizes, gate, gate_up, down, layer)
    out, hidden = checkpoint_name(out, PRODUCTS), checkpoint_name(hidden, PRODUCTS)
    return out, (x, order, sizes, gate, gate_up, down, hidden, layer, sums)


def _stacked_mlp_bwd(add, shares, saved, d_out):
    x, order, sizes, gate, gate_up, down, hidden, layer, sums = saved
    backward = functools.partial(
        triton.routed_backward,
        x,
        order,
        sizes,
        gate,
        gate_up,
        down,
        hidden,
        d_out.astype(x.dtype),
        layer,
    )
    if shares:
        d_x, d_gate, *given = backward()
        for ref, share, d in zip(sums, shares, given, strict=True):
            ref[layer] = share(d)
        return d_x, None, None, d_gate, None, None, None, None
    held = [ref[...] for ref in sums]
    d_x, d_gate, *held = backward((held, add))
    for ref, new in zip(sums, held, strict=True):
        ref[...] = new
    return d_x, None, None, d_gate, None, None, None, None


stacked_mlp.defvjp(_stacked_mlp_fwd, _stacked_mlp_bwd)
