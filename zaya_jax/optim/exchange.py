"""Between a run of rows that is cut over devices and the matrices that they own: `placing.Exchange`, carried out.

Everything here runs inside `jax.shard_map` over all axes of the mesh; arrays are [T, rows, UNIT], and what T is makes
no difference.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zaya_jax.optim.placing import Exchange, Leg

MOST_AT_ONCE = 64  # devices of one all-to-all: XLA takes it apart into as many operands, twice


def to_owners(x: jax.Array, plan: Exchange, axes: tuple[str, ...]) -> jax.Array:
    """A device's chunk to the rows that it owns, zeros past the last one."""
    if plan.nothing:
        return _fit(x, plan.owned)
    for pairs in plan.joins:
        x = jnp.concatenate([x, _send(x, axes, pairs)], 1)
    return _carry(x, plan.out, plan.owned, axes)


def from_owners(x: jax.Array, plan: Exchange, axes: tuple[str, ...]) -> jax.Array:
    """The inverse of `to_owners`."""
    if plan.nothing:
        return _fit(x, plan.chunk)
    x = _carry(x, plan.back, plan.chunk << len(plan.joins), axes)
    rank = of_device(plan.rank, axes)
    for j, pairs in reversed(list(enumerate(plan.joins))):
        lower, upper = jnp.split(x, 2, 1)
        came = _send(upper, axes, pairs[:, ::-1])
        x = jnp.where((rank >> j) % 2 == 1, came, lower)
    return x


def of_device(table: np.ndarray, axes: tuple[str, ...]) -> jax.Array:
    """This device's entry of a table with one per device."""
    if (table == table[0]).all():
        return jnp.asarray(table[0])
    return jnp.asarray(table)[lax.axis_index(axes)]


def swap(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """All-to-all of [T, ...] over axes of T devices in all: part t goes to the t-th, and the t-th's comes. Its own
    inverse."""
    sizes = [lax.axis_size(axis) for axis in axes]
    parts = x.reshape(*sizes, *x.shape[1:])
    for dim, (axis, size) in enumerate(zip(axes, sizes, strict=True)):
        parts = _swap_one(parts, axis, size, dim)
    return parts.reshape(x.shape)


def _swap_one(x: jax.Array, axis: str, size: int, dim: int) -> jax.Array:
    low = max((n for n in range(1, MOST_AT_ONCE + 1) if size % n == 0 and n * n <= size), default=1)
    if size <= MOST_AT_ONCE or low == 1:
        return lax.all_to_all(x, axis, dim, dim, tiled=True)
    # Two exchanges of about the square root of so many devices.
    numbers, shape = np.arange(size).reshape(size // low, low), x.shape
    x = x.reshape(*shape[:dim], size // low, low, *shape[dim + 1 :])
    for inner, groups in ((dim, numbers.T), (dim + 1, numbers)):
        x = lax.all_to_all(x, axis, inner, inner, axis_index_groups=groups.tolist(), tiled=True)
    return x.reshape(shape)


def _carry(x: jax.Array, legs: tuple[Leg, ...], rows: int, axes: tuple[str, ...]) -> jax.Array:
    """The target's rows, put together of what comes in all rounds."""
    before = max(-int(leg.put.min()) for leg in legs)
    behind = max(int(leg.put.max()) + leg.length for leg in legs) - rows
    before, behind = max(before, 0), max(behind, 0)
    target = jnp.zeros((x.shape[0], before + rows + behind, x.shape[2]), x.dtype)
    for leg in legs:
        piece = lax.dynamic_slice_in_dim(x, of_device(leg.take, axes), leg.length, 1)
        piece = piece if leg.pairs is None else _send(piece, axes, leg.pairs)
        at, row = of_device(leg.put, axes) + before, np.arange(leg.length)[:, None]
        counts = (row >= of_device(leg.low, axes)) & (row < of_device(leg.high, axes))
        old = lax.dynamic_slice_in_dim(target, at, leg.length, 1)
        target = lax.dynamic_update_slice_in_dim(target, jnp.where(counts, piece, old), at, 1)
    return target[:, before : before + rows]


def _send(x: jax.Array, axes: tuple[str, ...], pairs: np.ndarray) -> jax.Array:
    return lax.ppermute(x, axes, [(int(source), int(target)) for source, target in pairs])


def _fit(x: jax.Array, rows: int) -> jax.Array:
    if x.shape[1] >= rows:
        return x[:, :rows]
    return jnp.pad(x, ((0, 0), (0, rows - x.shape[1]), (0, 0)))
