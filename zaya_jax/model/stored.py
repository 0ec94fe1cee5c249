"""Where the scan over layers finds a layer's weights, and where their gradients go.

A scan copies each layer's weights out of the stack of all layers', and its gradient is a stack as
large as that. Where either costs too much, a `Stored` changes it, and the model uses only its
interface:

    experts   kernels read a layer's experts inside the stack of all layers, and may write gradients into such a stack
    adapters  a layer's matrices are changed by products of small ones (`lora`), which are scanned beside them
    slots     a weight's gradient is reduced as it leaves its layer, inside the scan: its whole stack never exists
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from zaya_jax.model.placement import Weights

NONE: Mapping = types.MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Stored:
    """How a scan over layers differs from a plain one; by default it does not.

    `experts` gives, for a layer's number, the `expert_mlp` that uses that layer's weights and
    ignores its arguments'. `slots` are zeros by the weight's path in a layer, stacked over layers:
    `shares` of a layer's gradient is the slot's gradient, and the weight has no gradient.
    `adapters` are pairs by path, "cca/q/kernel/a" and "../b".
    """

    experts: Callable[[jax.Array], Callable] | None = None
    slots: Mapping[str, jax.Array] = NONE
    shares: Mapping[str, Callable] = NONE
    adapters: Mapping[str, jax.Array] = NONE

    def by_layer(
        self, num_layers: int
    ) -> tuple[jax.Array | None, dict[str, jax.Array], dict[str, jax.Array]]:
        """The further inputs that the scan hands to each layer."""
        return (
            None if self.experts is None else jnp.arange(num_layers),
            dict(self.slots),
            dict(self.adapters),
        )

    def of_layer(self, given: Any, weights: nnx.State, lie: Weights) -> tuple[nnx.State, Weights]:
        """A layer's weights and their layout, from the inputs that the scan gave it."""
        number, slots, adapters = given
        if self.experts is not None:
            lie = dataclasses.replace(lie, expert_mlp=self.experts(number))
        if adapters:
            lie = dataclasses.replace(lie, adapters=adapters)
        if not slots:
            return weights, lie
        found = dict(nnx.to_flat_state(weights))
        for path, slot in slots.items():
            key = tuple(path.split("/"))
            found[key] = found[key].replace(_leaving(self.shares[path], found[key][...], slot))
        return nnx.from_flat_state(found), lie


SCANNED = Stored()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _leaving(share: Callable, weight: jax.Array, slot: jax.Array) -> jax.Array:
    del share, slot
    # of a bfloat16 copy too, whose gradient would be rounded otherwise
    return weight.astype(jnp.float32)


_leaving.defvjp(
    lambda share, weight, slot: (weight.astype(jnp.float32), None),
    lambda share, _, gradient: (None, share(gradient)),
)
