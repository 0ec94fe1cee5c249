"""The gated MLP of each token's own expert: products of groups of rows, each with its group's
matrices.

Letters: M rows sorted by expert, D model, E experts, F expert width. Rows past the last expert's
give zero.

An implementation (`xla`, `cpu`, `triton`; `reference` is the definition) has

    forward(rows, sizes, gate_up, down)                → out [M, D], hidden [M, 2 F]
    backward(rows, sizes, gate_up, down, hidden, d)    → d_rows, and the gradients of both weights in float32
    of_layer(rows, sizes, gate_up, down, layer)        → out alone, with the weights of a layer of stacks

with weights in their own number format; products run in that of the rows, which `out` and `hidden`
have too. There gate_up is a matrix [D, 2 F] of each expert, the same numbers in the same order as
[D, 2, F] (`_matrices`): the operators here take either form, and give gradients in that of the
weights.

`triton` also takes unsorted rows with their `order` (`takes_unsorted_rows`): it reads each where it
lies, and writes its result to the same place. `layer_mlp` then does without `of_layer`.
`stacked_mlp` is for its training step: it reads a layer's weights inside the stack of all layers,
and writes what the backward pass needs, and gradients, into such stacks.
"""

import functools
from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from pallas_kernels import chip
from pallas_kernels.grouped_mlp import cpu, triton, xla

IMPLEMENTATIONS = {"xla": xla, "cpu": cpu, "triton": triton}
PRODUCTS = "experts"  # the name under which a remat policy finds the grouped products' results


def _matrices(gate_up, down) -> jax.Array:
    """gate_up [.., D, 2, F] as matrices [D, 2 F], gate columns first; a stack of them like down's."""
    return gate_up.reshape(*down.shape[:-2], down.shape[-1], -1)


def _like(gradients, gate_up, down) -> tuple[jax.Array, jax.Array]:
    """The gradients of both weights in the weights' own form and number format."""
    d_gate_up, d_down = gradients
    return d_gate_up.reshape(gate_up.shape).astype(gate_up.dtype), d_down.astype(down.dtype)


def takes_unsorted_rows() -> bool:
    """Whether the chip's implementation does."""
    return chip.runs_kernels("grouped_mlp")


@jax.custom_vjp
def grouped_mlp(
    rows: Float[Array, "M D"],
    sizes: Int[Array, "E"],
    gate_up: Float[Array, "E D 2 F"],
    down: Float[Array, "E F D"],
    order: Int[Array, "M"] | None = None,
) -> Float[Array, "M D"]:
    """The gated MLP of rows sorted by expert, `sizes` of each, in the rows' number format; gate
    columns come first.

    Given an `order`, only where the chip `takes_unsorted_rows`, it is that of rows[order], each put
    back in its place.
    """
    return _forward(rows, sizes, gate_up, down, order, keep=False)[0]


def _forward(rows, sizes, gate_up, down, order, keep=True):
    matrices = _matrices(gate_up, down)
    if takes_unsorted_rows():
        return triton.forward(rows, sizes, matrices, down, order, keep=keep)
    return chip.choose("grouped_mlp", IMPLEMENTATIONS).forward(rows, sizes, matrices, down)


def _grouped_mlp_fwd(rows, sizes, gate_up, down, order=None):
    out, hidden = _forward(rows, sizes, gate_up, down, order)
    out, hidden = checkpoint_name(out, PRODUCTS), checkpoint_name(hidden, PRODUCTS)
    return out, (rows, order, sizes, gate_up, down, hidden)


def _grouped_mlp_bwd(saved, d_out):
    rows, order, sizes, gate_up, down, hidden = saved
    arrays = rows, sizes, _matrices(gate_up, down), down, hidden, d_out.astype(rows.dtype)
    if takes_unsorted_rows():
        d_rows, *d_weights = triton.backward(*arrays, order)
    else:
        d_rows, *d_weights = chip.choose("grouped_mlp", IMPLEMENTATIONS).backward(*arrays)
    return d_rows, None, *_like(d_weights, gate_up, down), None


grouped_mlp.defvjp(_grouped_mlp_fwd, _grouped_mlp_bwd)


def layer_mlp(
    rows: Float[Array, "M D"],
    sizes: Int[Array, "E"],
    gate_up: Float[Array, "L E D 2 F"],
    down: Float[Array, "L E F D"],
    layer: Int[Array, ""],
    order: Int[Array, "M"] | None = None,
) -> Float[Array, "M D"]:
    """`grouped_mlp` with the weights of a layer of stacks, read in place; without gradients.

    Given their `order`, rows are not sorted yet.
    """
    matrices = _matrices(gate_up, down)
    if takes_unsorted_rows():
        return triton.forward(rows, sizes, matrices, down, order, layer, keep=False)[0]
    assert order is None
    return chip.choose("grouped_mlp", IMPLEMENTATIONS).of_layer(rows, sizes, matrices, down, layer)


@functools.partial(jax.custom_vjp, nondiff_argnums=(8, 9))
def stacked_mlp(
    x: Float[Array, "N D"],
    order: Int[Array, "N"],
    sizes: Int[Array, "E"],
    gate_up: Float[Array, "L E D 2 F"],
    down: Float[Array, "L E F D"],
    layer: Int[Array, ""],
    sums: tuple[jax.Ref, jax.Ref],
    hidden_stack: Float[Array, "L N F2"] | None,
    add: bool,
    shares: tuple[Callable, Callable] | None = None,
) -> tuple[Float[Array, "N D"], Float[Array, "L N F2"] | None]:
    """`grouped_mlp` with the weights of a layer of stacks, and `hidden_stack` with `hidden`, which
    the backward pass needs, in the layer's place. Neither weights nor their gradients nor this are
    copied.

    The backward pass writes the gradients into `sums`, references to float32 stacks, in the layer's
    place, or adds them. The weights' own gradients are zero: the caller takes those in `sums`. With
    `shares` it writes the results of these functions. The filled stack comes back as the gradient
    of `hidden_stack` (`hold`), without a copy of each layer's part.
    """
    matrices = _matrices(gate_up, down)
    out, _ = triton.forward(x, sizes, matrices, down, order, layer, keep=False)
    return out, hidden_stack


def _stacked_mlp_fwd(x, order, sizes, gate_up, down, layer, sums, hidden_stack, add, shares):
    matrices = _matrices(gate_up, down)
    out, hidden = triton.forward(x, sizes, matrices, down, order, layer, stack=hidden_stack)
    out = checkpoint_name(out, PRODUCTS)
    saved = x, order, sizes, gate_up, down, layer, sums
    if hidden_stack is None:
        return (out, None), (*saved, checkpoint_name(hidden, PRODUCTS))
    return (out, hidden), (*saved, None)


def _stacked_mlp_bwd(add, shares, saved, d):
    x, order, sizes, gate_up, down, layer, sums, hidden = saved
    d_out, hidden_stack = d
    backward = functools.partial(
        triton.backward,
        x,
        sizes,
        _matrices(gate_up, down),
        down,
        hidden_stack if hidden is None else hidden,
        d_out.astype(x.dtype),
        order,
        layer,
    )
    if shares:
        d_x, *given = backward()
        for ref, share, d in zip(sums, shares, given, strict=True):
            ref[layer] = share(d)
        return d_x, None, None, None, None, None, None, hidden_stack
    of_gate_up, of_down = (ref[...] for ref in sums)
    d_x, *held = backward(([_matrices(of_gate_up, down), of_down], add))
    for ref, new in zip(sums, held, strict=True):
        ref[...] = new.reshape(ref.shape)
    return d_x, None, None, None, None, None, None, hidden_stack


stacked_mlp.defvjp(_stacked_mlp_fwd, _stacked_mlp_bwd)


@jax.custom_vjp
def hold(x: Array, hidden_stack: Array) -> Array:
    """x, after the last layer. The gradient of `hidden_stack` is the stack itself: so what the
    layers filled goes back through them in a gradient's place, and the backward pass of each
    `stacked_mlp` finds its layer's part there."""
    return x


hold.defvjp(lambda x, hidden_stack: (x, hidden_stack), lambda hidden_stack, d: (d, hidden_stack))
