"""Draws the next token: temperature, top-k, top-p and min-p, with noise that depends only on the
row.

A row's n-th new token is drawn with the key (its seed, n), which does not depend on the batch,
padding or pieces. Letters: B rows, V vocabulary.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from zaya_jax.config import UserError, shown

_LIMITS: tuple[tuple[str, Any, float], ...] = (
    ("temperature", int | float, 1e38),  # as far as float32 goes
    ("top_k", int, 2**31 - 1),
    ("top_p", int | float, 1),
    ("min_p", int | float, 1),
)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The tokens that may be drawn; the default always takes the likeliest.

    `top_k` keeps that many of the likeliest tokens (0: all). Of those, `top_p` keeps as few of the
    likeliest as have together at least that share of their probability. `min_p` keeps tokens whose
    probability is at least that fraction of the likeliest token's. Tokens of equal probability are
    kept or dropped together.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self):
        for name, x in vars(self).items():
            if isinstance(x, np.number):  # a number taken from an array
                object.__setattr__(self, name, x.item())

        for name, kind, most in _LIMITS:
            x = getattr(self, name)
            if not (isinstance(x, kind) and not isinstance(x, bool) and 0 <= x <= most):
                numbers = "a whole number" if kind is int else "a number"
                raise UserError(f"{name}={shown(x)} must be {numbers} from 0 to {most:g}")

    @property
    def unused(self) -> str:
        """Says which limits have no effect, where the likeliest token is taken; "" without any."""
        limits = {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        given = [f"{name}={x}" for name, x in limits.items() if x != getattr(Sampling, name)]
        if self.temperature or not given:
            return ""
        return f"{', '.join(given)} without effect: temperature=0 takes the likeliest token"

    @property
    def variant(self) -> str:
        """The variant of the program: "greedy", "plain", or "truncated" if tokens may be excluded."""
        if self.temperature == 0:
            return "greedy"
        excludes = self.top_k or self.top_p < 1 or self.min_p
        return "truncated" if excludes else "plain"

    def arrays(self) -> "SamplingArrays":
        """The options as arguments of a program, so that other values use the same program."""
        return SamplingArrays(
            jnp.float32(max(self.temperature, 1e-30)),
            jnp.float32(self.top_p),
            jnp.float32(self.min_p),
            jnp.int32(self.top_k or 2**31 - 1),
        )


class SamplingArrays(NamedTuple):
    """A Sampling as arrays."""

    temperature: Float[Array, ""]
    top_p: Float[Array, ""]
    min_p: Float[Array, ""]
    top_k: Int[Array, ""]


def pick(
    logits: Float[Array, "B V"],
    variant: str,
    options: SamplingArrays,
    seeds: UInt32[Array, "B"],
    count: Int[Array, ""],
) -> Int[Array, "B"]:
    """Each row's next token, its `count`-th new one."""
    if variant == "greedy":
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # so that a temperature near 0 cannot make infinities
    logits = logits - logits.max(-1, keepdims=True)
    logits = logits / options.temperature
    if variant == "truncated":
        logits = jnp.where(allowed(logits, options), logits, -jnp.inf)

    def draw(seed, logits):
        return jax.random.categorical(jax.random.fold_in(jax.random.key(seed), count), logits)

    return jax.vmap(draw)(seeds, logits).astype(jnp.int32)


def allowed(logits: Float[Array, "B V"], options: SamplingArrays) -> Array:
    """The tokens that may be drawn, bool [B, V]; the greatest logit of each row is 0."""
    weights = jnp.exp(logits)

    def at_least(limit):
        return weights >= limit[:, None]

    least = _greatest(lambda t: at_least(t).sum(-1) >= options.top_k, len(weights))
    weights = jnp.where(at_least(least), weights, 0)
    enough = options.top_p * weights.sum(-1)
    of_p = _greatest(lambda t: jnp.where(at_least(t), weights, 0).sum(-1) >= enough, len(weights))
    least = jnp.maximum(least, jnp.where(options.top_p < 1, of_p, 0))
    return jnp.exp(logits) >= jnp.maximum(least, options.min_p)[:, None]


def _greatest(holds: Callable, rows: int) -> Float[Array, "B"]:
    """The greatest t in [0, 1] of each row for which the condition holds; if it holds for t, it
    holds for all below.

    Found by bisection over the float32 bit patterns of that range, which are in order: 30 passes
    over the vocabulary, while sorting ZAYA1's takes a CPU as long as hundreds of passes.
    """

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low + 1) // 2
        good = holds(lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(good, middle, low), jnp.where(good, high, middle - 1)

    one = lax.bitcast_convert_type(jnp.float32(1), jnp.int32)
    low, _ = lax.fori_loop(0, 30, halve, (jnp.zeros(rows, jnp.int32), jnp.full(rows, one)))
    return lax.bitcast_convert_type(low, jnp.float32)
