"""The scan over stacked layers.

Full and sliding attention differ only in data, so each layer is one step of the scan. Linear
attention is other code: a step then runs the shortest sequence of layers whose pattern of kinds
repeats (a period), and only that is traced.
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
from zaya_jax.model.cache import LayerSlice
from zaya_jax.model.placement import CacheEntries

# Entries of a cache that only layers with linear attention have, or only the others; all layers
# have the entries that are not here.
ENTRY_IS_LINEAR = {"k": False, "v": False, "state": True}


def pack_vectors(weights: nnx.State, wanted: bool) -> tuple[Any, Callable[[Any], nnx.State]]:
    """Weights stacked over layers as inputs of a scan, and the function that makes a layer's
    weights of what an iteration gets.

    An iteration takes its part of each input, and puts a gradient into as many stacks: on a GPU a
    kernel each, of microseconds, for kilobytes. If `wanted`, all float32 vectors are one input.
    """
    flat = dict(nnx.to_flat_state(weights))
    vectors = {
        path: x for path, x in flat.items() if x[...].ndim == 2 and x[...].dtype == jnp.float32
    }
    if not wanted or not vectors:
        return weights, lambda of_layer: of_layer
    ends = list(itertools.accumulate(x[...].shape[1] for x in vectors.values()))
    others = nnx.from_flat_state({path: x for path, x in flat.items() if path not in vectors})

    def unpack(of_layer: tuple[jax.Array, nnx.State]) -> nnx.State:
        packed, unpacked = of_layer
        parts = jnp.split(packed, ends[:-1])
        flat = dict(nnx.to_flat_state(unpacked))
        for (path, x), part in zip(vectors.items(), parts, strict=True):
            flat[path] = x.replace(part)
        return nnx.from_flat_state(flat)

    return (jnp.concatenate([x[...] for x in vectors.values()], axis=1), others), unpack


def linear_pattern(model: Model) -> tuple[bool, ...]:
    """The layers of a period that have linear attention; (False,) if the model has none."""
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
    bottom first; there is a step for each layer of a period.

    The layers' inputs are stacked, and so are the outputs. An entry of the cache is stacked over
    the layers that have it, and the loop carries it whole: a layer gets its place in the stack.
    `remat` turns a step into one that the backward pass recomputes.

    If layers are of one kind, `unroll` writes them out, and without a cache the entries that they
    return are stacked (a trace of attention's weights).
    """
    num_layers = jax.tree.leaves(per_layer)[0].shape[0]
    numbers = None if cache is None else jnp.arange(num_layers // len(pattern))
    if len(pattern) > 1:
        return _scan_periods(steps, remat, pattern, carry, per_layer, cache, numbers)
    step = remat(steps[0]) if remat else steps[0]

    def iteration(state, inputs):
        (carry, cache), (number, inputs_of_layer) = state, inputs
        entries = _layer_cache(cache, number, 0, pattern)
        carry, out, entries = step(carry, inputs_of_layer, entries)
        if cache is None:
            return (carry, None), (out, entries)
        return (carry, _updated_cache(cache, entries)), (out, None)

    (carry, cache), (outs, entries) = jax.lax.scan(
        iteration, (carry, cache), (numbers, per_layer), unroll=unroll
    )
    return carry, outs, entries if cache is None else cache


def _scan_periods(steps, remat, pattern, carry, per_layer, cache, numbers):
    """`scan_layers` of layers of two kinds: an iteration runs a period."""

    def of_period(i, carry, per_layer, entries):
        return steps[i](carry, jax.tree.map(operator.itemgetter(i), per_layer), entries)

    # A layer takes its weights out of the period's inside the recomputed part: taken before, they
    # would be values that the scan keeps for the backward pass, a second copy of all weights.
    remat = remat or functools.partial(jax.checkpoint, prevent_cse=False, policy=_all_but_slices)
    layers = [remat(functools.partial(of_period, i)) for i in range(len(pattern))]

    def iteration(state, inputs):
        (carry, cache), (number, inputs_of_period), outs = state, inputs, []
        for i, layer in enumerate(layers):
            entries = _layer_cache(cache, number, i, pattern)
            carry, out, entries = layer(carry, inputs_of_period, entries)
            if cache is not None:
                cache = _updated_cache(cache, entries)
            outs.append(out)
        return (carry, cache), jax.tree.map(lambda *x: jnp.stack(x), *outs)

    per_layer = jax.tree.map(lambda x: x.reshape(-1, len(pattern), *x.shape[1:]), per_layer)
    (carry, cache), outs = jax.lax.scan(iteration, (carry, cache), (numbers, per_layer))
    return carry, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outs), cache


def _layer_cache(
    cache: dict | None, period: Any, layer: int, pattern: tuple[bool, ...]
) -> CacheEntries | None:
    """The cache of one layer in the period with this number."""
    if cache is None:
        return None
    entries = {}
    for name, stack in cache.items():
        kinds = (ENTRY_IS_LINEAR[name],) if name in ENTRY_IS_LINEAR else (False, True)
        owners = [i for i, linear in enumerate(pattern) if linear in kinds]
        if layer in owners:
            entries[name] = LayerSlice(stack, period * len(owners) + owners.index(layer))
    return entries


def _updated_cache(cache: dict, entries: CacheEntries | None) -> dict:
    """The cache after a layer; entries that it did not return stay as they are."""
    return cache | {name: entry.stack for name, entry in (entries or {}).items()}


def _all_but_slices(primitive: Any, *_: Any, **__: Any) -> bool:
    """Keeps all values for the backward pass except slices, which it takes again."""
    return primitive.name not in ("slice", "squeeze")
