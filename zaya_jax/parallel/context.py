"""Context parallelism: a sequence is split over devices in zig-zag chunks, and attention gathers
keys and values.

Over N devices the sequence is cut into 2N chunks and device i holds chunks i and 2N - 1 - i, in
that order: under a causal mask an early chunk is little work and a late one much, so each pair is
the same work. For layers the two are rows of the batch (`ZigzagChunks`), each with the columns
before it (`halo`), and only attention needs other tokens: it gathers all keys and values, or sends
them round a ring (`ring.py`). Everything else is per token.

All functions run inside `shard_map`; `axes` are the mesh axes that carry the sequence, flattened in
that order. Letters: B batch, S whole sequence, S / N a device's part, c = S / 2N a chunk, H query
heads, K KV heads, C channels.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import attention, softmax_scale, visited
from pallas_kernels.loops import expected_share
from zaya_jax.model.placement import Placement, PrecedingTokens, Weights, Windows
from zaya_jax.parallel import ring
from zaya_jax.parallel.linear import lasp2
from zaya_jax.parallel.spread import Spread


def zigzag(length: int, parts: int) -> np.ndarray:
    """The token of a sequence at each place, such that a plain split gives device i chunks i and 2N
    - 1 - i."""
    if parts == 1:
        return np.arange(length)
    assert length % (2 * parts) == 0  # `sharding.check` guarantees it
    pieces = np.arange(length).reshape(2 * parts, -1)
    return np.stack([pieces[:parts], pieces[: parts - 1 : -1]], axis=1).reshape(-1)


def natural(length: int, parts: int) -> np.ndarray:
    """The inverse of `zigzag`: the place of each token."""
    return np.argsort(zigzag(length, parts))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZigzagChunks(Placement):
    """The device's two chunks of each sequence, each a row of the batch: cut once, before the first
    layer."""

    axes: tuple[str, ...]
    parts: int  # devices that share a sequence
    chunk: int  # tokens in a chunk
    starts: Int[Array, "2"]  # where the device's chunks begin in the sequence
    # of all devices, in the sequence's own order; gathered once per step
    whole_segments: Int[Array, "B S"] | None
    # [2N, 2N]: chunks that have a document in common in some row (the ring asks)
    meet: jax.Array | None
    ring: bool

    def rows(self, x: jax.Array) -> jax.Array:
        return x.reshape(-1, self.chunk, *x.shape[2:])

    def joined(self, x: jax.Array) -> jax.Array:
        return x.reshape(-1, 2 * self.chunk, *x.shape[2:])

    def positions(self, batch: int, length: int) -> Int[Array, "2B c"]:
        row = self.starts[:, None] + jnp.arange(self.chunk)
        return self.rows(jnp.broadcast_to(row.reshape(-1), (batch // 2, 2 * self.chunk)))

    def before(self, x, project, history, initial_value) -> PrecedingTokens:
        """From the inputs there, which `halo` fetches. The delayed value looks one back, for any
        number of taps."""
        reach = max(history, 1)
        packed, _, later = project(halo(self.joined(x), reach, self))
        # Before the sequence the input is zero: correct for the value, but packed columns then hold
        # the projections' biases.
        begins = jnp.tile(self.starts == 0, len(x) // 2)
        packed = jnp.where(begins[:, None, None], 0, packed)
        return PrecedingTokens(
            packed[:, reach - history :], later[:, -1:], self._segments_before(reach)
        )

    def _segments_before(self, reach: int) -> Int[Array, "2B reach"] | None:
        """Segments of the columns before each chunk, -1 before the sequence."""
        if self.whole_segments is None:
            return None
        padded = jnp.pad(self.whole_segments, ((0, 0), (reach, 0)), constant_values=-1)
        both = [lax.dynamic_slice_in_dim(padded, start, reach, 1) for start in self.starts]
        return jnp.stack(both, axis=1).reshape(-1, reach)

    def _softmax(self, q, k, v):
        """Causal attention of the device's queries over the whole sequence, for any number of heads.

        Gathered: the device receives N - 1 times its own 2 B (S / N) K C numbers, and all S keys
        and values are in memory. A ring receives as many, and two devices' parts are in memory.
        """
        scale = softmax_scale(q.shape[-1])
        q, kv = self.joined(q), self.joined(jnp.concatenate([k, v], axis=-1))
        segments, window, windows = self.whole_segments, self.window, self.windows
        if self.ring:
            out = ring.ring_attention(
                q, kv, segments, self.meet, window, self.axes, self.parts, scale, windows
            )
            return self.rows(out), None
        outs, kv = [], gather(kv, self.axes)
        for half in early_and_late(kv, self.starts, segments, window, windows, q):
            with half.cost:
                outs.append(attention(*half.arrays, *half.masks, scale=scale)[0])
        return self.rows(jnp.concatenate(outs, axis=1)), None

    def _linear(self, q, k, v):
        q, k, v = (self.joined(x) for x in (q, k, v))
        visible = None if self.visible is None else self.joined(self.visible)
        return self.rows(lasp2(q, k, v, visible, axis=self.axes)), None


def zigzag_placement(
    spread: Spread,
    length: int,
    segments: Int[Array, "B S/N"] | None,
    mask: Int[Array, "B S/N"] | None,
    weights: Weights,
) -> ZigzagChunks:
    """The placement of sequences, each with `length` tokens on this device. One all-gather: 4 B S
    bytes of segments."""
    axes, parts = spread.sequence_axes, spread.sequence_parts
    assert length % 2 == 0
    me, chunk = lax.axis_index(axes), length // 2
    starts = jnp.stack([me, 2 * parts - 1 - me]).astype(jnp.int32) * chunk
    visible = segments if segments is not None else mask
    whole = None if visible is None else gather(visible, axes)
    meet = ring.chunks_that_meet(whole, chunk) if spread.ring and whole is not None else None
    segments, mask = (
        None if x is None else x.reshape(-1, chunk, *x.shape[2:]) for x in (segments, mask)
    )
    return ZigzagChunks(
        segments,
        mask,
        weights,
        axes=axes,
        parts=parts,
        chunk=chunk,
        starts=starts,
        whole_segments=whole,
        meet=meet,
        ring=spread.ring,
    )


def halo(
    x: Float[Array, "B S/N D"], reach: int, chunks: ZigzagChunks
) -> Float[Array, "2B reach D"]:
    """The `reach` columns before each of the device's chunks, zero before the sequence.

    One collective-permute each way: an early chunk's neighbour lies on the device before, a late
    one's on the device after, and the two chunks in the middle of the sequence on the same device.
    A device sends 2 B reach D numbers forward and as many back. The halo carries the block's input,
    not its projections: the input exists before the projection, which thus hides the exchange; the
    receiver projects these few columns itself, with its part of the weights.
    """
    assert chunks.chunk >= reach
    early, late = x[:, chunks.chunk - reach : chunks.chunk], x[:, 2 * chunks.chunk - reach :]
    pairs = [(i, i + 1) for i in range(chunks.parts - 1)]
    before_early = lax.ppermute(early, chunks.axes, pairs)
    before_late = lax.ppermute(late, chunks.axes, [(b, a) for a, b in pairs])
    middle = lax.axis_index(chunks.axes) == chunks.parts - 1
    both = jnp.stack([before_early, jnp.where(middle, early, before_late)], axis=1)
    return both.reshape(-1, *both.shape[2:])


def gather(x: Array, axes: tuple[str, ...]) -> Array:
    """[B, S / N, ...] of all devices to [B, S, ...] in the sequence's own order; one all-gather,
    backwards one reduce-scatter in x's number format."""
    pieces = lax.all_gather(x, axes)
    parts, batch, local = pieces.shape[:3]
    pieces = pieces.reshape(parts, batch, 2, local // 2, *x.shape[2:])
    ordered = jnp.concatenate([pieces[:, :, 0], pieces[::-1, :, 1]])
    return jnp.moveaxis(ordered, 0, 1).reshape(batch, parts * local, *x.shape[2:])


class Half(NamedTuple):
    """The attention of one of the device's two chunks."""

    cost: AbstractContextManager[None]  # tells the cost account the share of keys that it visits
    arrays: tuple  # its queries, the keys and values that it may see, its part of the other arrays
    masks: tuple  # segments of queries and keys, the window, the queries' place


def early_and_late(
    kv: Float[Array, "B S K C2"],
    starts: Int[Array, "2"],
    segments: Int[Array, "B S"] | None,
    window: jax.Array | int | None,
    windows: Windows,
    *local: jax.Array,
) -> Iterator[Half]:
    """For each of the device's two chunks, which begin at `starts`: its part of the device's `local`
    arrays (queries first) with the keys and values that it may see.

    The share of keys is a mean over devices: an early chunk is in the keys' first half, a late one
    in their second.
    """
    chunk = local[0].shape[1] // 2
    for half, start in enumerate(starts):
        seen = kv.shape[1] // (2 - half)  # no early chunk reaches into the second half
        q_segments = k_segments = None
        if segments is not None:
            q_segments = lax.dynamic_slice_in_dim(segments, start, chunk, 1)
            k_segments = segments[:, :seen]
        k, v = jnp.split(kv[:, :seen], 2, axis=-1)
        q, *others = (x[:, half * chunk : (half + 1) * chunk] for x in local)
        cost = expected_share(visited(chunk, seen, range(half * seen // 2, seen, chunk), windows))
        yield Half(cost, (q, k, v, *others), (q_segments, k_segments, window, start))
