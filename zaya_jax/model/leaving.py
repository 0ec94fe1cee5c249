"""What is made of a weight's gradient as it leaves a layer, inside the scan: its whole stack then never exists."""

import functools
from collections.abc import Callable, Mapping

import jax
from flax import nnx


def leave(weights: nnx.State, leaving: Mapping[str, tuple[Callable, jax.Array]]) -> nnx.State:
    """A layer's weights as they are; of those named, what a function makes of the gradient goes to its slot."""
    if not leaving:
        return weights
    found = dict(nnx.to_flat_state(weights))
    for path, (made, slot) in leaving.items():
        key = tuple(path.split("/"))
        found[key] = found[key].replace(_leaving(made, found[key][...], slot))
    return nnx.from_flat_state(found)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _leaving(made: Callable, weight: jax.Array, slot: jax.Array) -> jax.Array:
    del made, slot
    return weight


_leaving.defvjp(
    lambda made, weight, slot: (weight, None),
    lambda made, _, gradient: (None, made(gradient)),
)
