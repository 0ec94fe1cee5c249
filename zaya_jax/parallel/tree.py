"""Decoding over a key-value cache that lies along the sequence on several devices: tree attention.

Column t of the cache lies on device t mod N, as its column t // N: however far decoding has come, and whatever window
a layer has, devices hold equally many columns that count. All else is the same on every device: the queries, which
columns count, the other caches, the tokens. For one new token in each of B rows, H heads of C channels, a layer sends
three all-reduces: the greatest log-sum-exp (4 B H bytes), the outputs and the weights weighed by it (4 B H C and
4 B H). Neither the number of devices nor the sequence's length is in it; the compiler makes one message of the latter
two, so that two follow each other. Rings, to be compared with, are in benchmarks/rivals.py.

All runs inside `jax.shard_map`. Letters: T columns of the whole cache, K key-value heads.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float

from pallas_kernels.attention import MASKED
from zaya_jax.model.cache import WHOLE, Cache
from zaya_jax.model.placement import Devices

# Attention to some keys: its output, its log-sum-exp.
Attended = tuple[Float[Array, "B H C"], Float[Array, "B H"]]


@dataclasses.dataclass(frozen=True)
class Parts(Cache):
    """A cache's keys and values in parts over so many devices of `axis`."""

    devices: int
    axis: str = "context"

    def columns(self, length: int) -> int:
        return columns_of(length, self.devices)

    def write(self, held, new, index) -> jax.Array:
        return write_columns(held, new, index, self.axis)

    def read(self, q, k, v, valid, scale) -> jax.Array:
        return tree_attention(q, k, v, valid, scale=scale, axis=self.axis)


@dataclasses.dataclass(frozen=True)
class InParts(Devices):
    """A mesh whose context axis holds a cache's keys and values in parts, and all else alike."""

    mesh: Mesh
    alone = False

    def cache(self) -> Cache:
        devices = self.mesh.shape["context"]
        return Parts(devices) if devices > 1 else WHOLE


def columns_of(length: int, devices: int) -> int:
    """Columns that each device holds of a cache of this length."""
    return -(-length // devices)


def own_columns(x: Array, axis: str) -> Array:
    """This device's columns of x [B, T, ..]."""
    return columns_on(lax.axis_index(axis), x, axis)


def columns_on(device: jax.Array, x: Array, axis: str) -> Array:
    """A device's columns of x [B, T, ..]."""
    devices = lax.axis_size(axis)
    x = jnp.pad(x, [(0, -x.shape[i] % devices if i == 1 else 0) for i in range(x.ndim)])
    x = x.reshape(x.shape[0], -1, devices, *x.shape[2:])
    return lax.dynamic_index_in_dim(x, device, 2, keepdims=False)


def write_columns(
    cache: Float[Array, "B T K C"], x: Float[Array, "B S K C"], index: jax.Array, axis: str
) -> jax.Array:
    """The cache with a prompt's columns at its start, or with one new column at `index` on the device that it is on."""
    x = x.astype(cache.dtype)
    if x.shape[1] > 1:
        return lax.dynamic_update_slice_in_dim(cache, own_columns(x, axis), 0, 1)
    devices = lax.axis_size(axis)
    place = index // devices
    here = index % devices == lax.axis_index(axis)
    old = lax.dynamic_slice_in_dim(cache, place, 1, 1)
    return lax.dynamic_update_slice_in_dim(cache, jnp.where(here, x, old), place, 1)


def tree_attention(
    q: Float[Array, "B 1 H C"],
    k: Float[Array, "B T K C"],
    v: Float[Array, "B T K C"],
    valid: Bool[Array, "B T"],
    *,
    scale: float,
    axis: str,
) -> Float[Array, "B 1 H C"]:
    """One new query per row against the cache's parts; k and v are this device's, `valid` is of all columns."""
    out, lse = attend_to_part(q, k, v, own_columns(valid, axis), scale)
    weight = jnp.exp(lse - lax.pmax(lse, axis))
    out, total = lax.psum(out * weight[..., None], axis), lax.psum(weight, axis)
    return (out / total[..., None])[:, None].astype(v.dtype)


def attend_to_part(q, k, v, valid: Bool[Array, "B T"], scale: float) -> Attended:
    """Attention of one query per row to some of its keys, float32; without any it is 0 with a log-sum-exp of -1e30."""
    batch, _, num_heads, channels = q.shape
    q = q.reshape(batch, k.shape[2], -1, channels)
    scores = jnp.einsum("bkgc,bjkc->bkgj", q, k, preferred_element_type=jnp.float32) * scale
    mask = valid[:, None, None]
    scores = jnp.where(mask, scores, MASKED)
    top = scores.max(-1, keepdims=True)
    weights = jnp.where(mask, jnp.exp(scores - top), 0)
    total = weights.sum(-1)
    out = jnp.einsum("bkgj,bjkc->bkgc", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    out = out / jnp.where(total > 0, total, 1)[..., None]
    lse = jnp.where(total > 0, top[..., 0] + jnp.log(jnp.where(total > 0, total, 1)), MASKED)
    return out.reshape(batch, num_heads, channels), lse.reshape(batch, num_heads)
