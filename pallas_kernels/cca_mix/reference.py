"""The definition of CCA's mixing, token by token and head by head."""

import jax
import jax.numpy as jnp


def convolve(x, before, by_channel, by_head, segments) -> jax.Array:
    """The result of `pallas_kernels.cca_mix.convolve` in float32: a token from its neighbours in
    its segment."""
    heads, batch, seq, channels = x.shape
    reach = by_channel.shape[0] + by_head.shape[0] - 2
    x = jnp.concatenate(
        [jnp.zeros((heads, batch, reach, channels)) if before is None else before, x], axis=2
    )
    if segments is None:
        segments = jnp.ones((batch, reach + seq), jnp.int32)
    out = []
    for n in range(reach, reach + seq):
        total = jnp.zeros((heads, batch, channels))
        for i in range(by_head.shape[0]):
            for j in range(by_channel.shape[0]):
                back = n - (by_head.shape[0] - 1 - i) - (by_channel.shape[0] - 1 - j)
                same_document = (segments[:, back] == segments[:, n])[None, :, None]
                taken = jnp.where(same_document, x[:, :, back], 0) * by_channel[j][:, None]
                total += jnp.einsum("gbi,gio->gbo", taken, by_head[i])
        out.append(total)
    return jnp.stack(out, axis=2)


def queries_and_keys(by_head, mixed, bias, temperature, num_kv) -> tuple[jax.Array, jax.Array]:
    """The result of `pallas_kernels.cca_mix.queries_and_keys` without rotation, in float32."""
    num_heads = by_head.shape[0] - num_kv
    group = num_heads // num_kv
    q = [(by_head[h] + by_head[num_heads + h // group]) / 2 for h in range(num_heads)]
    k = [sum(q[g * group : (g + 1) * group]) / group for g in range(num_kv)]
    both = [mean + convolved + b for mean, convolved, b in zip([*q, *k], mixed, bias, strict=True)]
    both = [x * x.shape[-1] ** 0.5 / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in both]
    keys = [x * t for x, t in zip(both[num_heads:], temperature, strict=True)]
    return jnp.stack(both[:num_heads], axis=2), jnp.stack(keys, axis=2)
