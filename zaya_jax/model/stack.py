"""The scan over stacked layers, where some are of a kind that other code computes.

Kinds that differ by data are one step of the scan each. Linear attention is other code: there a step runs the shortest
stretch of layers whose pattern of kinds repeats, so that a stretch is traced, not the whole model.
"""

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
    pattern: tuple[bool, ...],
    carry: Any,
    per_layer: Any,
    cache: dict | None,
    unroll: bool = False,
) -> tuple[Any, Any, dict | None]:
    """Runs step(carry, what belongs to a layer, its cache) → (carry, output, cache) on all layers, bottom first.

    `steps` are those of the layers of the repeating stretch. What belongs to layers is stacked, and so are the
    outputs; an entry of the cache is stacked over the layers that have it. `unroll` writes the layers out, where they
    are all of one kind.
    """
    if len(pattern) == 1:

        def one(carry, inputs):
            carry, out, cache = steps[0](carry, *inputs)
            return carry, (out, cache)

        carry, (outs, cache) = jax.lax.scan(one, carry, (per_layer, cache), unroll=unroll)
        return carry, outs, cache

    def stretch(carry, inputs):
        per_layer, cache = inputs
        outs, caches = [], []
        for i, step in enumerate(steps):
            own = cache and {
                n: x[_owners(n, pattern).index(i)] for n, x in cache.items() if i in _owners(n, pattern)
            }
            carry, out, own = step(carry, jax.tree.map(operator.itemgetter(i), per_layer), own)
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
