"""Decoding over a key-value cache split along the sequence over several devices: tree attention.

Column t of the cache is on device t mod N, as its column t // N: at any point of decoding, and for
any window that a layer has, devices hold equally many valid columns. Everything else is the same on
every device: the queries, the valid columns, the other caches, the tokens. For one new token in
each of B rows, H heads of C channels, a layer sends three all-reduces: the greatest log-sum-exp (4
B H bytes), the outputs and the weights weighed by it (4 B H C and 4 B H). This does not depend on
the number of devices or the length; the compiler makes one message of the last two, so a layer
waits for two.

Everything here runs inside `jax.shard_map`. Letters: T columns of the whole cache, K key-value heads.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float

from pallas_kernels.attention import MASKED, attention
from zaya_jax.model.cache import WHOLE_CACHE, CacheLayout, LayerSlice
from zaya_jax.model.placement import ONE_DEVICE, Devices

# Attention to some keys: its output, its log-sum-exp.
Attended = tuple[Float[Array, "B H C"], Float[Array, "B H"]]


@dataclasses.dataclass(frozen=True)
class SplitCache(CacheLayout):
    """A cache's keys and values in parts over the devices of `axis`."""

    parts: int
    axis: str = "context"

    def local_length(self, length: int) -> int:
        return -(-length // self.parts)

    def write(self, entry: LayerSlice, new: Float[Array, "B S K C"], column: Any) -> LayerSlice:
        """A prompt's columns begin on the first device; a new column is on the device of its
        number."""
        if new.shape[1] > 1:
            return entry.write(own_columns(new, self.axis), 0, column // self.parts)
        rows, column = jnp.arange(len(new)), jnp.broadcast_to(column, len(new))
        mine = column % self.parts == lax.axis_index(self.axis)
        old = entry.stack[entry.layer, rows, column // self.parts]
        new = jnp.where(mine[:, None, None], new[:, 0].astype(old.dtype), old)
        return entry.write_rows(new, column // self.parts)

    def read(self, q, k, v, valid, scale) -> jax.Array:
        """Keys and values are this device's; `valid` covers all columns."""
        out, lse = attend_to_part(q, k, v, own_columns(valid, self.axis), scale)
        return self._of_all(out, lse)[:, None].astype(v.dtype)

    def read_piece(self, q, k, v, window, start, scale) -> jax.Array:
        """The piece begins on the first device.

        Queries N columns apart see a device's columns as a sequence sees itself: for the query of
        place b from residue s of start + b N + s, and the key of place j on device r, the distance
        is (b + start / N - j) N + s - r.
        """
        devices, me, length = self.parts, lax.axis_index(self.axis), q.shape[1]
        q = jnp.pad(q, ((0, 0), (0, -length % devices), (0, 0), (0, 0)))
        q = q.reshape(len(q), -1, devices, *q.shape[2:])

        def of_residue(s):
            later = (s < me).astype(jnp.int32)  # the key in the query's own place comes after it
            within = None if window is None else -(-(window + me - s) // devices) - later
            return attention(
                q[:, :, s], k, v, None, None, within, start // devices - later, scale=scale
            )

        out, lse = (jnp.moveaxis(x, 0, 2) for x in lax.map(of_residue, jnp.arange(devices)))
        out = self._of_all(out.astype(jnp.float32), lse)
        return out.reshape(len(q), -1, *out.shape[3:])[:, :length].astype(v.dtype)

    def _of_all(self, out: jax.Array, lse: jax.Array) -> jax.Array:
        """Attention to all keys, from each device's attention to its own keys and the
        log-sum-exp."""
        weight = jnp.exp(lse - lax.pmax(lse, self.axis))
        out, total = lax.psum(out * weight[..., None], self.axis), lax.psum(weight, self.axis)
        return out / total[..., None]


@dataclasses.dataclass(frozen=True)
class DecodeDevices(Devices):
    """A mesh whose context axis splits a cache's keys and values; everything else is on every
    device."""

    mesh: Mesh
    alone = False

    def cache_layout(self) -> CacheLayout:
        devices = self.mesh.shape["context"]
        return SplitCache(devices) if devices > 1 else WHOLE_CACHE


def cache_over(mesh: Mesh | None) -> Devices:
    """The devices to decode on with weights on a mesh: if it has a context axis for the cache, all
    of them, each with a copy of the weights; otherwise one."""
    if mesh is None or mesh.shape.get("context", 1) == 1:
        return ONE_DEVICE
    return DecodeDevices(mesh)


def own_columns(x: Array, axis: str) -> Array:
    """This device's columns of x [B, T, ..]."""
    device, devices = lax.axis_index(axis), lax.axis_size(axis)
    x = jnp.pad(x, [(0, -x.shape[i] % devices if i == 1 else 0) for i in range(x.ndim)])
    x = x.reshape(x.shape[0], -1, devices, *x.shape[2:])
    return lax.dynamic_index_in_dim(x, device, 2, keepdims=False)


def attend_to_part(q, k, v, valid: Bool[Array, "B T"], scale: float) -> Attended:
    """Attention of one query per row to some of its keys, float32; without any it is 0 with a
    log-sum-exp of -1e30."""
    batch, _, num_heads, channels = q.shape
    q = q.reshape(batch, k.shape[2], -1, channels)
    scores = jnp.einsum("bkgc,bjkc->bkgj", q, k, preferred_element_type=jnp.float32) * scale
    mask = valid[:, None, None]
    scores = jnp.where(mask, scores, MASKED)
    top = scores.max(-1, keepdims=True)
    weights = jnp.where(mask, jnp.exp(scores - top), 0)
    total = weights.sum(-1)
    out = jnp.einsum(
        "bkgj,bjkc->bkgc", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    out = out / jnp.where(total > 0, total, 1)[..., None]
    lse = jnp.where(total > 0, top[..., 0] + jnp.log(jnp.where(total > 0, total, 1)), MASKED)
    return out.reshape(batch, num_heads, channels), lse.reshape(batch, num_heads)
