"""The gradients of a step, summed over its micro-batches on each device.

Weights are of three kinds, by where their gradients are stored:

    plain     ordinary arrays. Over several micro-batches they are added in place, in one set of references, so that
              there is no second buffer as large as the weights.
    leaving   each device's share. A layer's gradient is reduced over devices as soon as it is computed, while the
              backward pass goes on. Several micro-batches would each take a reduction, so theirs are plain, and the
              optimizer reduces their sums. Gradients of bfloat16 copies leave even then, in float32 and unreduced:
              as gradients of the copies themselves they would be rounded.
    experts   kernels read the weights in the stack of all layers, and write their gradients into a second such stack;
              or into shares, if the gradients of both weights (EXPERTS) can leave. Weights that lie in float32 are
              rounded once for the whole step: in a kernel's inner loop that would happen for each tile.

A gradient leaves through a slot: an argument of the loss, zeros in the shape of a device's share.
In the backward pass the layer returns its reduced gradient as the slot's gradient
(`model.scan_hooks`), and none for the weight itself.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import tiles
from zaya_jax import trees
from zaya_jax.model.experts import read_and_written_in_place
from zaya_jax.model.placement import NOTHING
from zaya_jax.model.scan_hooks import ScanHooks
from zaya_jax.optim.zero.by_layer import ByLayer


class Way(NamedTuple):
    """A way for gradients to leave: what all layers leave has this shape, and each layer's is made
    of its gradient."""

    shape: tuple[int, ...]
    share_of_layer: Callable[[jax.Array], jax.Array]


Ways = Mapping[str, ByLayer | Way]  # how gradients can leave, by the weight's path
LAYERS = "layers/"
EXPERTS = GATE_UP, DOWN = "layers/experts/gate_up", "layers/experts/down"


def gradients(
    loss_of: Callable,
    params: dict,
    batch: dict,
    ways: Ways,
    in_place: bool,
    copy_dtypes: Mapping[str, Any] = NOTHING,
) -> tuple[dict, Any]:
    """(gradients, the loss function's other results), both summed over the micro-batches.

    loss_of(params, micro-batch, hooks) → (loss, other results). Gradients lie like the parameters,
    or as shares. `in_place`: kernels read the experts, and write their gradients, in the stacks of
    all layers. `copy_dtypes` are the number formats of the copies that products make of weights
    anyway, by path.
    """
    several = batch["tokens"].shape[0] > 1
    weights = trees.flat(params, "/")
    if several:  # only bfloat16 copies' gradients leave, as they are
        ways = {
            path: Way(w.shape, lambda whole: whole)
            for path, w in weights.items()
            if w.dtype != jnp.float32
        }
    experts = {path: weights[path] for path in EXPERTS} if in_place else {}
    experts = {path: w.astype(copy_dtypes.get(path, w.dtype)) for path, w in experts.items()}
    leaving = {path: weights[path] for path in ways if path not in experts}
    plain = {path: w for path, w in weights.items() if path not in leaving and path not in experts}

    references, experts_hook = _in_place(experts, ways, several) if experts else ({}, None)
    slots = {path: jnp.zeros(ways[path].shape) for path in leaving}
    shares = {path: ways[path].share_of_layer for path in leaving}

    def loss(plain_and_slots, micro):
        plain, slots = plain_and_slots
        hooks = ScanHooks(experts_hook, _in_layer(slots), _in_layer(shares))
        return loss_of(trees.nested(plain | leaving | experts, "/"), micro, hooks)

    if several:
        (of_plain, of_slots), sums = _accumulated(loss, (plain, slots), batch)
    else:
        micro = jax.tree.map(lambda x: x[0], batch)
        (of_plain, of_slots), sums = jax.grad(loss, has_aux=True)((plain, slots), micro)
    of_experts = jax.tree.map(jax.freeze, references)
    return trees.nested(of_plain | of_slots | of_experts, "/"), sums


def _in_place(
    experts: dict[str, jax.Array], ways: Ways, add: bool
) -> tuple[dict[str, jax.Ref], Callable]:
    """References for the gradients of the experts' weights, and the hook whose kernels write or add
    these: whole, or a device's shares if both weights have a way and nothing is added."""
    shares = None
    if not add and experts.keys() <= ways.keys():
        shares = ways[GATE_UP].share_of_layer, ways[DOWN].share_of_layer

    def reference(path: str, weight: jax.Array) -> jax.Ref:
        if shares:
            return jax.new_ref(jnp.zeros(ways[path].shape))
        if add:
            return jax.new_ref(jnp.zeros(weight.shape))
        return jax.new_ref(tiles.empty(weight.shape, jnp.float32))

    # in the order of the parameters
    references = {path: reference(path, experts[path]) for path in sorted(experts)}
    both = references[GATE_UP], references[DOWN]
    hook = read_and_written_in_place(experts[GATE_UP], experts[DOWN], both, add, shares)
    return references, hook


def _in_layer(by_path: Mapping[str, Any]) -> dict[str, Any]:
    """The same by the weights' paths in their layer."""
    return {path.removeprefix(LAYERS): x for path, x in by_path.items()}


def _accumulated(loss: Callable, weights: Any, batch: dict) -> tuple[Any, Any]:
    """Sums the gradients, and the loss function's other results, over the micro-batches."""
    references = jax.tree.map(lambda w: jax.new_ref(jnp.zeros_like(w)), weights)

    def accumulate(carry, micro):
        pull: Any
        _, pull, results = jax.vjp(lambda w: loss(w, micro), weights, has_aux=True)
        pull.with_refs(references)(jnp.ones(()))  # adds each gradient to its reference
        return jax.tree.map(jnp.add, carry, results), None

    first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)
    like = jax.eval_shape(loss, weights, first)[1]
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    sums, _ = jax.lax.scan(accumulate, zero, batch)
    return jax.tree.map(jax.freeze, references), sums
