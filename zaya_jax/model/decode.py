"""Greedy and sampled continuation with the cache: one prompt pass, then one token at a time inside a single scan."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from zaya_jax.config import Model, Precision
from zaya_jax.model import zaya
from zaya_jax.model.cca import empty_cache


def generate(
    model: Model,
    params: dict,
    balance: jax.Array,
    ids: Int[Array, "B S"],
    num_tokens: int,
    precision: Precision = Precision(),
    *,
    mask: Int[Array, "B S"] | None = None,
    temperature: float = 0.0,
    key: jax.Array | None = None,
) -> Int[Array, "B T"]:
    """The next `num_tokens` ids of each row; temperature 0 is greedy. `mask` (1 = real) marks left padding."""
    if num_tokens < 1:
        return jnp.zeros((ids.shape[0], 0), ids.dtype)
    key = jax.random.key(0) if key is None else key
    return _generate(params, balance, ids, mask, key, model, precision, num_tokens, temperature)


@functools.partial(jax.jit, static_argnums=(5, 6, 7, 8))
def _generate(params, balance, ids, mask, key, model, precision, num_tokens, temperature):
    batch, length = ids.shape
    total = length + num_tokens
    cache = empty_cache(model, precision, batch, total)
    real = jnp.ones_like(ids) if mask is None else mask
    # A row's first real token is at position 0, as the port's generate counts.
    positions = jnp.maximum(jnp.cumsum(real, axis=1) - 1, 0)
    valid = jnp.concatenate([real > 0, jnp.zeros((batch, num_tokens), bool)], axis=1)
    run = functools.partial(zaya.apply, model, params, balance, precision=precision)

    def pick(hidden, key):
        logits = zaya.logits(model, params, hidden, precision)[:, -1]
        if temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(ids.dtype)
        return jax.random.categorical(key, logits / temperature, axis=-1).astype(ids.dtype)

    keys = jax.random.split(key, num_tokens)
    out = run(ids, mask=mask, positions=positions, cache=cache, cache_index=jnp.int32(0))
    first = pick(out.hidden[:, -1:], keys[0])

    def step(carry, step_key):
        token, position, index, valid, cache = carry
        valid = valid.at[:, index].set(True)
        out = run(
            token[:, None], positions=position[:, None], cache=cache, cache_index=index, cache_valid=valid
        )
        token = pick(out.hidden, step_key)
        return (token, position + 1, index + 1, valid, out.cache), token

    start = (first, positions[:, -1] + 1, jnp.int32(length), valid, out.cache)
    _, rest = jax.lax.scan(step, start, keys[1:])
    return jnp.concatenate([first[:, None], rest.T], axis=1)
