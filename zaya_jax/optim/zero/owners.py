"""The owner of each matrix, and the way of rows to it: plans made from sizes, and the collectives
that execute them.

    pour       matrices of one size over devices with these loads, each to the least loaded one
    assign     the same for all buckets of a model: the most expensive matrices first
    Travel     the numbers of a bucket as one run of rows, cut evenly over a group of devices
    plan       from a device's chunk of the run to the matrices that it owns, and back: an `Exchange`
    to_owners, from_owners       an `Exchange` inside `jax.shard_map`

A matrix is M rows of UNIT numbers. Devices own matrices in order: the first ones belong to the
first device with a matrix, and so on. So every pair of (device that holds a part of the run, owner)
has one piece in common. `zero` has an example.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Owners, in NumPy.


class Kind(NamedTuple):
    """Matrices of one size: `number` in each group of devices; any device of the group may own
    them."""

    number: int
    cost: int
    groups: np.ndarray  # [groups, devices of a group]


def pour(loads: np.ndarray, cost: int, count: int) -> np.ndarray:
    """How many of `count` matrices each device gets if every one goes to the device least loaded so
    far.

    Devices with equal loads are taken at even distances, so that owners are near the rows' first
    places.
    """
    levels, devices = np.unique(loads, return_counts=True)

    def poured(level: int) -> int:  # matrices that begin at or below this load
        return int(((np.maximum(level - levels, -cost) // cost + 1) * devices).sum())

    low, high = int(levels[0]), int(levels[0]) + cost * (count // int(devices[0]) + 1)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if poured(middle) >= count else (middle + 1, high)
    counts = np.maximum((low - 1 - loads) // cost + 1, 0)
    tied = np.flatnonzero((loads <= low) & ((low - loads) % cost == 0))
    more = count - int(counts.sum())
    counts[tied[(np.arange(more) * len(tied) + len(tied) // 2) // max(more, 1)]] += 1
    return counts


def assign(kinds: list[Kind], num_devices: int) -> tuple[list[np.ndarray], np.ndarray]:
    """The number of matrices of each kind that each device of its groups owns, and every device's
    load."""
    loads = np.zeros(num_devices, np.int64)
    result: list[np.ndarray] = [np.zeros(0)] * len(kinds)
    for i in sorted(range(len(kinds)), key=lambda i: -kinds[i].cost):
        count, cost, groups = kinds[i]
        result[i] = np.stack([pour(loads[group], cost, count) for group in groups])
        loads[groups.reshape(-1)] += cost * result[i].reshape(-1)
    return result, loads


# Travel.


class Travel(NamedTuple):
    """`rows` rows cut over `parts` devices, each with `chunk` of them."""

    rows: int
    parts: int

    @property
    def chunk(self) -> int:
        """Rows of a device; those past the end are padding."""
        return -(-self.rows // self.parts)

    @property
    def padded(self) -> int:
        """Rows with padding."""
        return self.chunk * self.parts


@dataclasses.dataclass(frozen=True, eq=False)
class Leg:
    """One round in one direction: a slice of every device, sent to one other, or kept if `pairs` is
    None.

    The tables have one entry per device: the begin of its slice, the place of the incoming one
    (counted from the target's row 0, and possibly below it), and the range of its valid rows, from
    `low` up to `high`.
    """

    length: int
    pairs: np.ndarray | None  # [pairs, 2]: from, to
    take: np.ndarray
    put: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Exchange:
    """From each device's chunk to the rows of the matrices that it owns (`out`), and back.

    Where a matrix spans many chunks, these are first joined by doubling: in round j every
    2^(j+1)-th device gets the 2^j chunks of the one 2^j further on (`joins`). These joined chunks
    are no more than a matrix, so every holder and every owner communicates with only a few others.
    """

    joins: tuple[np.ndarray, ...]  # the pairs of each round
    rank: np.ndarray  # each device's number in its group
    chunk: int
    owned: int  # rows
    out: tuple[Leg, ...]
    back: tuple[Leg, ...]

    @property
    def nothing(self) -> bool:
        """Whether every device owns exactly the matrices of its chunk."""
        return not self.joins and all(leg.pairs is None for leg in self.out)

    def sent_rows(self) -> tuple[int, int]:
        """Rows that all devices together send on the way out, and the number of valid ones."""
        joined = [(len(pairs) * (self.chunk << j)) for j, pairs in enumerate(self.joins)]
        legs = [leg for leg in self.out if leg.pairs is not None]
        sent = sum(len(leg.pairs) * leg.length for leg in legs if leg.pairs is not None)
        return sum(joined) + sent, sum(joined) + sum(
            int((leg.high - leg.low).sum()) for leg in legs
        )


class Pieces(NamedTuple):
    """The pieces that one device has of another one's matrices; arrays with one entry per piece."""

    source: np.ndarray
    target: np.ndarray
    begin: np.ndarray  # at the source
    end: np.ndarray  # its begin at the target
    length: np.ndarray

    def chosen(self, which: np.ndarray) -> "Pieces":
        """A selection of them."""
        return Pieces(*(column[which] for column in self))

    def busiest(self) -> int:
        """The most pieces that one device sends or receives."""
        return max(
            int(np.bincount(column, minlength=1).max()) for column in (self.source, self.target)
        )

    def no_longer_than(self, most: int) -> "Pieces":
        """The same, with long pieces cut into equal parts."""
        parts = -(-self.length // most)
        each = np.repeat(-(-self.length // parts), parts)
        at = (np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)) * each
        source, target, begin, end, length = (np.repeat(column, parts) for column in self)
        found = Pieces(source, target, begin + at, end + at, np.minimum(each, length - at))
        return found.chosen(found.length > 0)


def plan(
    counts: np.ndarray, groups: np.ndarray, matrix: int, chunk: int, spare: int = 0
) -> Exchange:
    """The plan for owners with `counts` matrices each, [groups, devices of a group], of `matrix`
    rows.

    If the slices of all rounds would be more than `spare` rows longer than their contents, pieces
    are cut.
    """
    size, owned = groups.shape[1], int(counts.max()) * matrix
    found, doublings, fewest = None, 0, 0
    for joins in range(size.bit_length()):
        if joins and (chunk << joins > owned or 1 << joins - 1 >= size):
            break
        each = [
            _pieces(row, group, matrix, chunk, joins)
            for row, group in zip(counts, groups, strict=True)
        ]
        pieces = Pieces(*(np.concatenate(column) for column in zip(*each, strict=True)))
        if found is None or joins + pieces.busiest() < fewest:
            found, doublings, fewest = pieces, joins, joins + pieces.busiest()
    assert found is not None
    held, stays = chunk << doublings, found.source == found.target
    moving = found.chosen(~stays)
    longest = int(moving.length.max(initial=1))
    for cuts in (1, 2, 4, 8):
        cut = moving.no_longer_than(-(-longest // cuts))
        number = _rounds(cut, groups.size)
        rounds = [cut.chosen(number == n) for n in range(int(number.max(initial=-1)) + 1)]
        if sum(int((r.length.max() - r.length).sum()) for r in rounds) <= spare:
            break
    out, back = [], []
    for r in ([found.chosen(stays)] if stays.any() else []) + rounds:
        kept = bool((r.source == r.target).all())
        out.append(_leg(groups.size, r, held, kept))
        back.append(
            _leg(groups.size, Pieces(r.target, r.source, r.end, r.begin, r.length), owned, kept)
        )
    rank = np.zeros(groups.size, np.int32)
    rank[groups] = np.arange(size)
    joined = []
    for j in range(doublings):
        lower = np.arange(0, size - (1 << j), 2 << j)
        joined.append(np.stack([groups[:, lower + (1 << j)], groups[:, lower]], -1).reshape(-1, 2))
    return Exchange(tuple(joined), rank, chunk, owned, tuple(out), tuple(back))


def _pieces(counts: np.ndarray, group: np.ndarray, matrix: int, chunk: int, joins: int) -> Pieces:
    """Every piece of a group's run, when every 2^joins-th device holds as many chunks."""
    held = chunk << joins
    starts = np.concatenate([[0], np.cumsum(counts)]) * matrix
    edges = np.unique(np.concatenate([starts, np.arange(0, starts[-1], held)]))
    begins, lengths = edges[:-1], np.diff(edges)
    holder = begins // held
    owner = np.searchsorted(starts, begins, side="right") - 1
    return Pieces(
        group[holder << joins],
        group[owner],
        begins - holder * held,
        begins - starts[owner],
        lengths,
    )


def _rounds(pieces: Pieces, num_devices: int) -> np.ndarray:
    """A round for each piece: no device sends or receives two in one round.

    The longest pieces choose first, because all devices send as much as the longest piece of a
    round.
    """
    number = np.zeros(len(pieces.source), np.int64)
    sends, gets = [0] * num_devices, [0] * num_devices  # rounds taken, as bits
    for i in np.argsort(-pieces.length, kind="stable").tolist():
        source, target = int(pieces.source[i]), int(pieces.target[i])
        taken = sends[source] | gets[target]
        bit = ~taken & (taken + 1)
        sends[source] |= bit
        gets[target] |= bit
        number[i] = bit.bit_length() - 1
    return number


def _leg(num_devices: int, pieces: Pieces, source_rows: int, kept: bool) -> Leg:
    longest = int(pieces.length.max())
    take, put, low, high = (np.zeros(num_devices, np.int32) for _ in range(4))
    # A slice must not reach past the source's end; it then begins earlier, by `shift`.
    at = np.minimum(pieces.begin, source_rows - longest)
    shift = pieces.begin - at
    take[pieces.source] = at
    target = pieces.target
    put[target], low[target], high[target] = pieces.end - shift, shift, shift + pieces.length
    return Leg(
        longest, None if kept else np.stack([pieces.source, target], 1), take, put, low, high
    )


# Inside shard_map over all axes of the mesh. Arrays are [T, rows, UNIT], for any T.

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
    """All-to-all of [T, ...] over axes of T devices in all: part t goes to the t-th, and the t-th's
    comes. Its own inverse."""
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
    """The target's rows, assembled from the slices of all rounds."""
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
