"""Whether to leave out an update: decided on the device from the gradient's norm, with the same
result on all devices.

`decide` is a pure function of the norm and a small running state; the chain asks it, keeps the
optimizer's state and makes the update zero when the answer is no. The data position still advances.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

DECAY = 0.99  # of the running mean and variance: about the last 100 steps
WARMUP_STEPS = 30  # steps before anything counts as a spike
MIN_DEVIATION = 0.05  # share of the mean, so that after very steady norms not every step is one


class SkipState(NamedTuple):
    """Running statistics of the gradient norm."""

    mean: jax.Array
    variance: jax.Array
    steps: jax.Array


def init() -> SkipState:
    """The statistics before any step."""
    return SkipState(
        jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
    )


def decide(
    rule: str, norm: jax.Array, state: SkipState, deviations: float = 6.0
) -> tuple[jax.Array, SkipState]:
    """(whether to make the update, the new state).

    A spike is a norm more than `deviations` standard deviations above the running mean. It enters
    the statistics as that limit: one spike moves them little, yet a norm that has risen permanently
    is accepted after a while.
    """
    finite = jnp.isfinite(norm)
    deviation = jnp.maximum(jnp.sqrt(state.variance), MIN_DEVIATION * state.mean)
    limit = jnp.where(state.steps < WARMUP_STEPS, jnp.inf, state.mean + deviations * deviation)
    rules = {"never": jnp.ones((), bool), "nonfinite": finite, "spike": finite & (norm <= limit)}
    keep = rules[rule]
    capped = jnp.minimum(norm, limit)
    weight = jnp.maximum(1 - DECAY, 1 / (state.steps + 1))
    delta = capped - state.mean
    new = SkipState(
        state.mean + weight * delta,
        (1 - weight) * (state.variance + weight * jnp.square(delta)),
        state.steps + 1,
    )
    return keep, jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, state)
