"""The scan over stacked layers, where some are of a kind that other code computes.

Kinds that differ by data are one step of the scan each. Linear attention is other code: there a step runs the shortest
stretch of layers whose pattern of kinds repeats, so that a stretch is traced, not the whole model.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from zaya_jax.config import Model

ONLY = {"k": False, "v": False, "state": True}  # entries of a cache that only (or no) linear layers have


def linear_pattern(model: Model) -> tuple[bool, ...]:
    """Which layers of the repeating stretch have linear attention; (False,) where none does."""
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
    """Runs step(carry, what belongs to a layer, its cache) → (carry, output, cache) on all layers, bottom first.

    `steps` are those of the layers of the repeating stretch. What belongs to layers is stacked, and so are the
    outputs; an entry of the cache is stacked over the layers that have it. `remat` makes of a step one that is computed
    again in the backward pass, if any is to be; `unroll` writes the layers out, where they are all of one kind.
    """
    if len(pattern) == 1:
        step = remat(steps[0]) if remat else steps[0]

        def one(carry, inputs):
            carry, out, cache = step(carry, *inputs)
            return carry, (out, cache)

        carry, (outs, cache) = jax.lax.scan(one, carry, (per_layer, cache), unroll=unroll)
        return carry, outs, cache

    def of_stretch(i, carry, per_layer, cache):
        return steps[i](carry, jax.tree.map(operator.itemgetter(i), per_layer), cache)

    # A layer takes its weights out of the stretch's within what is computed again: taken before, they would be values
    # of their own, which the scan keeps for the backward pass, a second copy of all weights.
    again = remat or functools.partial(jax.checkpoint, prevent_cse=False, policy=_all_but_slices)
    layers = [again(functools.partial(of_stretch, i)) for i in range(len(pattern))]

    def stretch(carry, inputs):
        per_layer, cache = inputs
        outs, caches = [], []
        for i, layer in enumerate(layers):
            own = cache and {
                n: x[_owners(n, pattern).index(i)] for n, x in cache.items() if i in _owners(n, pattern)
            }
            carry, out, own = layer(carry, per_layer, own)
            outs.append(out)
            caches.append(own)
        cache = cache and {n: jnp.stack([caches[i][n] for i in _owners(n, pattern)]) for n in cache}
        return carry, (jax.tree.map(lambda *x: jnp.stack(x), *outs), cache)

    num = jax.tree.leaves(per_layer)[0].shape[0] // len(pattern)
    inputs = jax.tree.map(lambda x: x.reshape(num, -1, *x.shape[1:]), (per_layer, cache))
    carry, found = jax.lax.scan(stretch, carry, inputs)
    outs, cache = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), found)
    return carry, outs, cache


def _owners(name: str, pattern: tuple[bool, ...]) -> list[int]:
    """Which layers of the stretch have an entry of the cache."""
    return [i for i, linear in enumerate(pattern) if ONLY.get(name, linear) == linear]


def _all_but_slices(primitive: Any, *_: Any, **__: Any) -> bool:
    """What the backward pass finds where nothing is to be computed again: slices alone it takes anew."""
    return primitive.name not in ("slice", "squeeze")
