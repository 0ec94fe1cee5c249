"""Loss-free balancing: a bias on each expert's score, which falls as its load over the global batch
rises.

The router chooses argmax(p + bias); the bias is state, not a parameter: no gradient, no decay, no
clipping. Once a step, for each layer,

    f_e = tokens that went to e / all real tokens, skipped ones included
    AdamW on the gradient f_e - 1/E, without decay
    the mean of the E experts' biases is subtracted from them

so the counts must be summed over devices and micro-batches before they come here. The last class,
which computes nothing, keeps its bias. This is a little arithmetic on [L, E], the same on every
device.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class BalanceState(NamedTuple):
    """The biases (last class: skip), AdamW's moments, and for how many steps an expert has had no
    token."""

    bias: jax.Array  # [L, E+1] float32
    mean: jax.Array  # [L, E] float32
    square: jax.Array  # [L, E] float32
    silent: jax.Array  # [L, E] int32
    steps: jax.Array  # [] int32


def init(num_layers: int, num_experts: int, skip_bias: float = -1.0) -> BalanceState:
    """All experts equal, the skip class below them."""
    experts = jnp.zeros((num_layers, num_experts), jnp.float32)
    bias = jnp.concatenate([experts, jnp.full((num_layers, 1), skip_bias, jnp.float32)], 1)
    return BalanceState(bias, experts, experts, experts.astype(jnp.int32), jnp.zeros((), jnp.int32))


def update(
    state: BalanceState,
    counts: jax.Array,
    *,
    lr: float = 1e-3,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    dead_after: int = 100,
    enabled: bool = True,
    keep: jax.Array | bool = True,
) -> tuple[BalanceState, dict[str, jax.Array]]:
    """(new state, figures) from the counts [L, E+1] of a step's real tokens over all devices and
    micro-batches.

    Without `enabled` biases do not change; experts without a token are still counted. With `keep`
    false (the step's update is skipped) the state does not change; the load is of the skipped step.
    """
    num_experts = state.mean.shape[1]
    load = counts.astype(jnp.float32)
    load = load / jnp.maximum(jnp.sum(load, 1, keepdims=True), 1)
    experts = load[:, :num_experts]

    gradient = experts - 1 / num_experts
    steps = state.steps + 1
    mean = b1 * state.mean + (1 - b1) * gradient
    square = b2 * state.square + (1 - b2) * jnp.square(gradient)
    t = steps.astype(jnp.float32)
    direction = (mean / (1 - b1**t)) / (jnp.sqrt(square / (1 - b2**t)) + eps)
    bias = state.bias[:, :num_experts] - lr * direction
    bias = bias - jnp.mean(bias, 1, keepdims=True)
    bias = jnp.concatenate([bias, state.bias[:, num_experts:]], 1)
    silent = jnp.where(counts[:, :num_experts] > 0, 0, state.silent + 1)

    new = state._replace(silent=silent)
    if enabled:
        new = BalanceState(bias, mean, square, silent, steps)
    new = jax.tree.map(lambda new, old: jnp.where(keep, new, old), new, state)
    return new, figures(load) | {
        "dead_experts": jnp.sum(new.silent >= dead_after, 1),
        "bias_change": jnp.max(jnp.abs(new.bias - state.bias), 1),
    }


def figures(load: jax.Array) -> dict[str, jax.Array]:
    """Each layer's health, [L] each, from its shares [L, E+1] of all real tokens.

    `load_entropy` is H(f) / ln E with f renormalised over the experts: 1 means evenly spread, 0
    that one has all, or that no token went to any.
    """
    num_experts = load.shape[1] - 1
    experts = load[:, :num_experts]
    f = experts / jnp.maximum(jnp.sum(experts, 1, keepdims=True), 1e-30)
    entropy = -jnp.sum(jnp.where(f > 0, f * jnp.log(jnp.where(f > 0, f, 1.0)), 0.0), 1)
    spread = jnp.ones_like(entropy)
    if num_experts > 1:
        spread = entropy / jnp.log(float(num_experts))
    return {
        "load": load,
        "load_entropy": spread,
        "greatest_share": jnp.max(f, 1),
        "skip_share": load[:, num_experts],
    }
