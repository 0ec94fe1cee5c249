"""Greedy and sampled continuation with the cache: one prompt pass, then one token at a time inside a scan.

Several devices hold the keys and values in parts, for caches that one cannot hold (`zaya_jax.parallel.tree.InParts`);
everything else, the prompt's pass too, is done alike on all of them.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from pallas_kernels import chip
from zaya_jax.config import Model, Precision
from zaya_jax.model import cca, dense, zaya
from zaya_jax.model.placement import ALONE, Devices

Carry = tuple[Any, ...]  # last token, its position, its column, which columns may be seen, the cache
REPLICATED = PartitionSpec()


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
    devices: Devices = ALONE,
) -> Int[Array, "B T"]:
    """The next `num_tokens` ids of each row; temperature 0 is greedy. `mask` (1 = real) marks left padding."""
    if num_tokens < 1:
        return jnp.zeros((ids.shape[0], 0), ids.dtype)
    keys = jax.random.split(jax.random.key(0) if key is None else key, num_tokens)
    arguments = _everywhere(devices.mesh, (params, balance, ids, mask, keys))
    with chip.making(chip.made_for(params if devices.mesh is None else devices.mesh)):
        return _generate(*arguments, model, precision, temperature, devices)


def stream(
    model: Model,
    params: dict,
    balance: jax.Array,
    ids: Int[Array, "B S"],
    num_tokens: int,
    precision: Precision = Precision(),
    *,
    temperature: float = 0.0,
    key: jax.Array | None = None,
    piece: int = 16,
    devices: Devices = ALONE,
) -> Iterator[Int[Array, "B T"]]:
    """What `generate` gives, as it comes: the first token, then pieces of `piece`, the last one shorter."""
    keys = jax.random.split(jax.random.key(0) if key is None else key, num_tokens)
    target = chip.made_for(params if devices.mesh is None else devices.mesh)
    params, balance, ids, keys = _everywhere(devices.mesh, (params, balance, ids, keys))
    with chip.making(target):
        carry, first = _start_jit(
            params, balance, ids, None, keys[0], model, precision, temperature, num_tokens, devices
        )
    yield first
    for begin in range(1, num_tokens, piece):
        with chip.making(target):  # not over a yield: what runs there is none of ours
            carry, tokens = _go_on_jit(
                params, balance, carry, keys[begin : begin + piece], model, precision, temperature, devices
            )
        yield tokens


def _empty_cache(model, precision, batch, length):
    make = dense.empty_cache if model.model_type == "dense" else cca.empty_cache
    return make(model, precision, batch, length)


def _everywhere(mesh, arguments):
    """The arguments on all devices of the mesh."""
    return arguments if mesh is None else jax.device_put(arguments, NamedSharding(mesh, REPLICATED))


def _on_all(devices: Devices, model, precision, run, arguments, *, out_specs):
    """run(*arguments), on each of the devices where there are several; "carry" stands for a Carry's specs."""
    with jax.default_matmul_precision(precision.matmul):
        return _mapped(devices, model, run, arguments, out_specs)


def _mapped(devices, model, run, arguments, out_specs):
    axis = devices.cache().axis
    if axis is None:
        return run(*arguments)
    cache = jax.eval_shape(lambda: _empty_cache(model, Precision(), 1, 1))
    in_parts = {name: PartitionSpec(None, None, axis) for name in ("k", "v")}
    carry = (*[REPLICATED] * 4, {name: in_parts.get(name, REPLICATED) for name in cache})
    in_specs = tuple(carry if isinstance(x, tuple) else REPLICATED for x in arguments)
    out_specs = jax.tree.map(lambda x: carry if x == "carry" else x, out_specs)
    # What every device computes alike is the same on all of them, which the check of replication cannot see.
    mapped = jax.shard_map(run, mesh=devices.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return mapped(*arguments)


def _generate_impl(params, balance, ids, mask, keys, model, precision, temperature, devices):
    def run(params, balance, ids, mask, keys):
        carry, first = _start(
            devices, params, balance, ids, mask, keys[0], model, precision, temperature, keys.size
        )
        _, rest = _go_on(devices, params, balance, carry, keys[1:], model, precision, temperature)
        return jnp.concatenate([first, rest], axis=1)

    return _on_all(devices, model, precision, run, (params, balance, ids, mask, keys), out_specs=REPLICATED)


def _start_impl(params, balance, ids, mask, key, model, precision, temperature, num_tokens, devices):
    def run(params, balance, ids, mask, key):
        return _start(devices, params, balance, ids, mask, key, model, precision, temperature, num_tokens)

    return _on_all(
        devices, model, precision, run, (params, balance, ids, mask, key), out_specs=("carry", REPLICATED)
    )


def _go_on_impl(params, balance, carry, keys, model, precision, temperature, devices):
    def run(params, balance, carry, keys):
        return _go_on(devices, params, balance, carry, keys, model, precision, temperature)

    return _on_all(
        devices, model, precision, run, (params, balance, carry, keys), out_specs=("carry", REPLICATED)
    )


def _start(
    devices, params, balance, ids, mask, key, model, precision, temperature, num_tokens
) -> tuple[Carry, Any]:
    """The prompt through the model, and the first new token [B, 1]."""
    batch, length = ids.shape
    columns = devices.cache().columns(length + num_tokens)
    cache = _empty_cache(model, precision, batch, columns)
    real = jnp.ones_like(ids) if mask is None else mask
    # A row's first real token is at position 0, as the port's generate counts.
    positions = jnp.maximum(jnp.cumsum(real, axis=1) - 1, 0)
    valid = jnp.concatenate([real > 0, jnp.zeros((batch, num_tokens), bool)], axis=1)
    out = zaya.apply(
        model, params, balance, ids, precision=precision, mask=mask, positions=positions, cache=cache,
        cache_index=jnp.int32(0), devices=devices,
    )  # fmt: skip
    token = _pick(model, params, out.hidden[:, -1:], precision, temperature, key).astype(ids.dtype)
    return (token, positions[:, -1] + 1, jnp.int32(length), valid, out.cache), token[:, None]


def _go_on(devices, params, balance, carry, keys, model, precision, temperature) -> tuple[Carry, Any]:
    """One more token a key: [B, T]."""

    def step(carry, key):
        token, position, index, valid, cache = carry
        valid = valid.at[:, index].set(True)
        out = zaya.apply(
            model, params, balance, token[:, None], precision=precision, positions=position[:, None],
            cache=cache, cache_index=index, cache_valid=valid, devices=devices,
        )  # fmt: skip
        token = _pick(model, params, out.hidden, precision, temperature, key).astype(token.dtype)
        return (token, position + 1, index + 1, valid, out.cache), token

    carry, tokens = jax.lax.scan(step, carry, keys)
    return carry, tokens.T


def _pick(model, params, hidden, precision, temperature, key):
    logits = zaya.logits(model, params, hidden, precision)[:, -1]
    if temperature == 0:
        return jnp.argmax(logits, axis=-1)
    return jax.random.categorical(key, logits / temperature, axis=-1)


_generate = functools.partial(jax.jit, static_argnums=(5, 6, 7, 8))(_generate_impl)
_start_jit = functools.partial(jax.jit, static_argnums=(5, 6, 7, 8, 9))(_start_impl)
_go_on_jit = functools.partial(jax.jit, static_argnums=(4, 5, 6, 7), donate_argnums=(2,))(_go_on_impl)
