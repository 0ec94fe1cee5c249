"""The scan over stacked layers.

Full and sliding attention differ only in data, so each layer is one step of the scan. Linear
attention is other code: a step then runs the shortest stretch of layers whose pattern of kinds
repeats, and only that stretch is traced.
"""

import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from zaya_jax.config import Model
from zaya_jax.model.cache import Held

# entries of a cache that only (or no) linear layers have
ONLY = {"k": False, "v": False, "state": True}


def side_by_side(weights: nnx.State, together: bool) -> tuple[Any, Callable[[Any], nnx.State]]:
    """Weights stacked over layers as a scan is given them, and the function that makes a layer's
    weights of what a turn gets.

    A turn takes its part of each input, and puts a gradient into as many stacks: on a GPU a kernel
    each, of microseconds, for kilobytes. `together`, float32 vectors are one input.
    """
    found = dict(nnx.to_flat_state(weights))
    vectors = {
        path: x for path, x in found.items() if x[...].ndim == 2 and x[...].dtype == jnp.float32
    }
    if not together or not vectors:
        return weights, lambda own: own
    ends = list(itertools.accumulate(x[...].shape[1] for x in vectors.values()))
    others = nnx.from_flat_state({path: x for path, x in found.items() if path not in vectors})

    def of_layer(own: tuple[jax.Array, nnx.State]) -> nnx.State:
        parts = zip(vectors.items(), jnp.split(own[0], ends[:-1]), strict=True)
        one = {path: x.replace(part) for (path, x), part in parts}
        return nnx.from_flat_state(one | dict(nnx.to_flat_state(own[1])))

    return (jnp.concatenate([x[...] for x in vectors.values()], axis=1), others), of_layer


def linear_pattern(model: Model) -> tuple[bool, ...]:
    """The layers of the repeating stretch that have linear attention; (False,) if the model has
    none."""
    linear = tuple(kind == "hybrid_linear" for kind in model.kinds)
    lengths = (n for n in range(1, len(linear) + 1) if len(linear) % n == 0)
    return next(linear[:n] for n in lengths if linear[:n] * (len(linear) // n) == linear)


def scan_layers(
    steps: list[Callable],
    remat: Callable[[Callable], Callable] | None,
    pattern: tuple[bool, ...],
    carry: Any,
    per_layer: Any,
    cache: dict | None,
    unroll: bool = False,
) -> tuple[Any, Any, dict | None]:
    """Runs step(carry, a layer's inputs, its cache) → (carry, output, its cache) on all layers,
    bottom first.

    `steps` are those of the layers of the repeating stretch. The layers' inputs are stacked, and so
    are the outputs; an entry of the cache is stacked over the layers that have it, and the loop
    carries it whole: a layer holds its place in the stack. Without a cache the entries that layers
    of one kind return are stacked. `remat` turns a step into one that the backward pass recomputes;
    `unroll` writes the layers out if they are of one kind.
    """
    num = jax.tree.leaves(per_layer)[0].shape[0] // len(pattern)
    numbers = None if cache is None else jnp.arange(num)
    if len(pattern) == 1:
        step = remat(steps[0]) if remat else steps[0]

        def one(carry, inputs):
            (carry, cache), (number, per_layer) = carry, inputs
            carry, out, kept = step(carry, per_layer, _held(cache, number, 0, pattern))
            if cache is None:
                return (carry, None), (out, kept)
            return (carry, _after(cache, kept)), (out, None)

        (carry, cache), (outs, kept) = jax.lax.scan(
            one, (carry, cache), (numbers, per_layer), unroll=unroll
        )
        return carry, outs, kept if cache is None else cache

    def of_stretch(i, carry, per_layer, held):
        return steps[i](carry, jax.tree.map(operator.itemgetter(i), per_layer), held)

    # A layer takes its weights out of the stretch's inside the recomputed part: taken before, they
    # would be values that the scan keeps for the backward pass, a second copy of all weights.
    again = remat or functools.partial(jax.checkpoint, prevent_cse=False, policy=_all_but_slices)
    layers = [again(functools.partial(of_stretch, i)) for i in range(len(pattern))]

    def stretch(carry, inputs):
        (carry, cache), (number, per_layer), outs = carry, inputs, []
        for i, layer in enumerate(layers):
            carry, out, held = layer(carry, per_layer, _held(cache, number, i, pattern))
            cache = _after(cache, held)
            outs.append(out)
        return (carry, cache), jax.tree.map(lambda *x: jnp.stack(x), *outs)

    per_layer = jax.tree.map(lambda x: x.reshape(num, -1, *x.shape[1:]), per_layer)
    (carry, cache), outs = jax.lax.scan(stretch, (carry, cache), (numbers, per_layer))
    return carry, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outs), cache


def _held(
    cache: dict | None, stretch: Any, layer: int, pattern: tuple[bool, ...]
) -> dict[str, Held] | None:
    """The cache of one layer in the stretch with this number."""
    if cache is None:
        return None
    held = {}
    for name, stack in cache.items():
        owners = [i for i, linear in enumerate(pattern) if ONLY.get(name, linear) == linear]
        if layer in owners:
            held[name] = Held(stack, stretch * len(owners) + owners.index(layer))
    return held


def _after(cache: dict | None, held: dict[str, Held] | None) -> dict | None:
    """The cache after a layer."""
    return cache and held and cache | {name: own.stack for name, own in held.items()}


def _all_but_slices(primitive: Any, *_: Any, **__: Any) -> bool:
    """Keeps all values for the backward pass except slices, which it takes again."""
    return primitive.name not in ("slice", "squeeze")
