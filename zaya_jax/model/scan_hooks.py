"""Where the scan over layers finds a layer's weights, and where their gradients go.

A scan copies each layer's weights out of the stack of all layers, and builds a full stack of
gradients. `ScanHooks` avoid either where it is too expensive; the model uses only their interface:

    experts   kernels read a layer's experts inside the stack of all layers, and may write gradients into such a stack,
              and what the backward pass needs of the layer into another, which the scan carries
    beside    a layer's matrices are changed by products of small ones (`lora`), or are codes with a scale
              (`quantized`); these are scanned beside them
    slots     a weight's gradient is reduced as it leaves its layer, inside the scan: its whole stack never exists
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from zaya_jax.model.placement import NOTHING, Weights


class HookInputs(NamedTuple):
    """What the scan hands to each layer for its hooks."""

    number: jax.Array | None  # the layer's, for `experts`
    slots: dict[str, jax.Array]
    beside: dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class ScanHooks:
    """How a scan over layers differs from a plain one; by default it does not.

    `experts` are (layer's number, hidden stack, tokens, their choice, dtype) → (the outputs of the
    experts that the tokens chose, the stack with the layer's part filled in). Without a stack,
    None, each layer keeps its own part for the backward pass.
    `slots` are zeros by the weight's path in a layer, stacked over layers: `shares` of a layer's
    gradient is the slot's gradient, and the weight has no gradient.
    `beside` are arrays by path: "cca/q/kernel/a" and "../b", "experts/down/scale".
    """

    experts: Callable[..., tuple[jax.Array, jax.Array | None]] | None = None
    slots: Mapping[str, jax.Array] = NOTHING
    shares: Mapping[str, Callable] = NOTHING
    beside: Mapping[str, jax.Array] = NOTHING

    def scan_inputs(self, num_layers: int) -> HookInputs:
        """The further inputs of the scan, stacked over layers."""
        numbers = None if self.experts is None else jnp.arange(num_layers)
        return HookInputs(numbers, dict(self.slots), dict(self.beside))

    def for_layer(
        self,
        inputs: HookInputs,
        weights: nnx.State,
        access: Weights,
        hidden_stack: jax.Array | None,
    ) -> tuple[nnx.State, Weights]:
        """A layer's weights, and how the layer gets at them."""
        if self.experts is not None:
            in_stack = functools.partial(self.experts, inputs.number, hidden_stack)
            access = dataclasses.replace(access, experts_in_stack=in_stack)
        if inputs.beside:
            access = dataclasses.replace(access, beside=inputs.beside)
        if not inputs.slots:
            return weights, access
        flat = dict(nnx.to_flat_state(weights))
        for path, slot in inputs.slots.items():
            key = tuple(path.split("/"))
            flat[key] = flat[key].replace(
                _gradient_to_slot(self.shares[path], flat[key][...], slot)
            )
        return nnx.from_flat_state(flat), access


PLAIN = ScanHooks()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradient_to_slot(share: Callable, weight: jax.Array, slot: jax.Array) -> jax.Array:
    """The weight, float32 even if it is a bfloat16 copy, so that its gradient is not rounded."""
    del share, slot
    return weight.astype(jnp.float32)


_gradient_to_slot.defvjp(
    lambda share, weight, slot: (weight.astype(jnp.float32), None),
    lambda share, _, gradient: (None, share(gradient)),
)
