"""The owner of each matrix, and how its rows get there: plans made from sizes, and the collectives
that execute them.

    water_fill   matrices of one size over devices with these loads, each to the least loaded one
    assign       the same for all buckets of a model: the most expensive matrices first
    plan         from a device's chunk of the run to the matrices that it owns, and back: an `Exchange`
    to_owners, from_owners       an `Exchange` inside `jax.shard_map`

A matrix is M rows of UNIT numbers. Devices own matrices in order: the first ones belong to the
first device with a matrix, and so on. So every pair of (device that holds a part of the run, owner)
has one piece in common. The package's head has an example.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zaya_jax.optim.muon import greatest_divisor
from zaya_jax.optim.zero.grid import pad

# ################################################################################################
# Owners, in NumPy
# ################################################################################################


class WorkItem(NamedTuple):
    """Matrices of one size: `number` in each group of devices; any device of the group may own
    them."""

    number: int
    cost: int
    groups: np.ndarray  # [groups, devices of a group]


def water_fill(loads: np.ndarray, cost: int, count: int) -> np.ndarray:
    """How many of `count` matrices each device gets if every one goes to the device least loaded so
    far.

    Devices with equal loads are taken at even distances, so that owners are near the rows' first
    places.
    """
    levels, devices = np.unique(loads, return_counts=True)

    def begun_by(level: int) -> int:
        """Matrices that begin at or below this load."""
        begun = np.maximum((level - levels) // cost + 1, 0)
        return int((begun * devices).sum())

    # The lowest level at which all matrices have begun, by bisection.
    level, high = int(levels[0]), int(levels[0]) + cost * (count // int(devices[0]) + 1)
    while level < high:
        middle = (level + high) // 2
        if begun_by(middle) >= count:
            high = middle
        else:
            level = middle + 1
    # Each device gets those that begin below it. Of the devices where one begins at the level
    # itself, as many as there are matrices left get one more, at even distances.
    counts = np.maximum((level - 1 - loads) // cost + 1, 0)
    tied = np.flatnonzero((loads <= level) & ((level - loads) % cost == 0))
    left = count - int(counts.sum())
    chosen = (np.arange(left) * len(tied) + len(tied) // 2) // max(left, 1)
    counts[tied[chosen]] += 1
    return counts


def assign(items: list[WorkItem], num_devices: int) -> list[np.ndarray]:
    """The number of matrices of each item that each device of its groups owns."""
    loads = np.zeros(num_devices, np.int64)
    counts: list[np.ndarray] = [np.zeros(0)] * len(items)
    for i in sorted(range(len(items)), key=lambda i: -items[i].cost):
        number, cost, groups = items[i]
        counts[i] = np.stack([water_fill(loads[group], cost, number) for group in groups])
        loads[groups.reshape(-1)] += cost * counts[i].reshape(-1)
    return counts


# ################################################################################################
# Plans of an exchange, in NumPy
# ################################################################################################


@dataclasses.dataclass(frozen=True, eq=False)
class Leg:
    """One round in one direction: every device sends a slice to one other, or keeps it if `pairs`
    is None.

    The tables have one entry per device. `recv_start` counts from the target's row 0 and may lie
    below it; of the slice that comes, the rows from `valid_from` to `valid_to` count.
    """

    length: int
    pairs: np.ndarray | None  # [pairs, 2]: from, to
    send_start: np.ndarray
    recv_start: np.ndarray
    valid_from: np.ndarray
    valid_to: np.ndarray


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
    def is_noop(self) -> bool:
        """Whether every device owns exactly the matrices of its chunk."""
        return not self.joins and all(leg.pairs is None for leg in self.out)

    def sent_rows(self) -> tuple[int, int]:
        """Rows that all devices together send on the way out, and the number of valid ones."""
        sent = valid = 0
        for j, pairs in enumerate(self.joins):
            sent += len(pairs) * (self.chunk << j)
        valid = sent
        for leg in self.out:
            if leg.pairs is not None:
                sent += len(leg.pairs) * leg.length
                valid += int((leg.valid_to - leg.valid_from).sum())
        return sent, valid


class Pieces(NamedTuple):
    """Row ranges that one device holds of matrices that another one owns; arrays with one entry per
    piece."""

    source: np.ndarray  # devices
    target: np.ndarray
    source_row: np.ndarray
    target_row: np.ndarray
    length: np.ndarray

    def chosen(self, which: np.ndarray) -> "Pieces":
        """A selection of them."""
        return Pieces(*(column[which] for column in self))

    def back(self) -> "Pieces":
        """The same ranges on their way back."""
        return Pieces(self.target, self.source, self.target_row, self.source_row, self.length)

    def busiest(self) -> int:
        """The most pieces that one device sends or receives."""
        sends, receives = np.bincount(self.source), np.bincount(self.target)
        return int(max(sends.max(), receives.max()))


def plan(counts: np.ndarray, groups: np.ndarray, matrix: int, chunk: int) -> Exchange:
    """The plan for owners with `counts` matrices each, [groups, devices of a group], of `matrix`
    rows."""
    size, owned = groups.shape[1], int(counts.max()) * matrix
    doublings, pieces = _fewest_messages(counts, groups, matrix, chunk)
    rounds = _rounds(pieces, groups.size)
    out, back = [], []
    for number in np.unique(rounds):
        of_round = pieces.chosen(rounds == number)
        out.append(_leg(groups.size, of_round, chunk << doublings))
        back.append(_leg(groups.size, of_round.back(), owned))
    rank = np.zeros(groups.size, np.int32)
    rank[groups] = np.arange(size)
    joins = []
    for j in range(doublings):
        lower = np.arange(0, size - (1 << j), 2 << j)
        upper = lower + (1 << j)
        joins.append(np.stack([groups[:, upper], groups[:, lower]], -1).reshape(-1, 2))
    return Exchange(tuple(joins), rank, chunk, owned, tuple(out), tuple(back))


def _fewest_messages(
    counts: np.ndarray, groups: np.ndarray, matrix: int, chunk: int
) -> tuple[int, Pieces]:
    """How often chunks are joined by doubling, and the pieces of the run after it.

    Each doubling is a message more, and halves the holders that an owner of a long matrix hears
    from. The sum is least: doublings, and the messages of the busiest device after them.
    """
    owned, best = int(counts.max()) * matrix, None
    for doublings in range(groups.shape[1].bit_length()):
        too_long = chunk << doublings > owned
        if doublings and (too_long or 1 << (doublings - 1) >= groups.shape[1]):
            break
        by_group = []
        for number, group in enumerate(groups):
            by_group.append(_pieces(counts[number], group, matrix, chunk, doublings))
        pieces = Pieces(*map(np.concatenate, zip(*by_group, strict=True)))
        messages = doublings + pieces.busiest()
        if best is None or messages < best[0]:
            best = messages, doublings, pieces
    assert best is not None
    return best[1:]


def _pieces(
    counts: np.ndarray, group: np.ndarray, matrix: int, chunk: int, doublings: int
) -> Pieces:
    """Every piece of a group's run, when every 2^doublings-th device holds as many chunks."""
    joined = chunk << doublings
    starts = np.concatenate([[0], np.cumsum(counts)]) * matrix
    edges = np.unique(np.concatenate([starts, np.arange(0, starts[-1], joined)]))
    begins = edges[:-1]
    holder = begins // joined
    owner = np.searchsorted(starts, begins, side="right") - 1
    source, target = group[holder << doublings], group[owner]
    return Pieces(source, target, begins - holder * joined, begins - starts[owner], np.diff(edges))


def _rounds(pieces: Pieces, num_devices: int) -> np.ndarray:
    """A round for each piece, 0 for those that stay: no device sends or receives two in one round.
    The longest pieces choose first, so that those of a round are of similar length."""
    number = np.zeros(len(pieces.source), np.int64)
    sends, receives = [0] * num_devices, [0] * num_devices  # rounds taken, as bits
    for i in np.argsort(-pieces.length, kind="stable").tolist():
        source, target = int(pieces.source[i]), int(pieces.target[i])
        if source == target:
            continue
        taken = sends[source] | receives[target]
        first_free = ~taken & (taken + 1)
        sends[source] |= first_free
        receives[target] |= first_free
        number[i] = first_free.bit_length()
    return number


def _leg(num_devices: int, pieces: Pieces, source_rows: int) -> Leg:
    longest, target = int(pieces.length.max()), pieces.target
    send_start, recv_start, valid_from, valid_to = np.zeros((4, num_devices), np.int32)
    # A slice must not reach past the source's end; it then begins earlier, by `shift`.
    start = np.minimum(pieces.source_row, source_rows - longest)
    shift = pieces.source_row - start
    send_start[pieces.source] = start
    recv_start[target] = pieces.target_row - shift
    valid_from[target] = shift
    valid_to[target] = shift + pieces.length
    pairs = None
    if (pieces.source != target).any():
        pairs = np.stack([pieces.source, target], 1)
    return Leg(longest, pairs, send_start, recv_start, valid_from, valid_to)


# ################################################################################################
# Inside shard_map over all axes of the mesh; arrays are [T, rows, UNIT], for any T
# ################################################################################################

# Devices of one all-to-all, where their number has divisors: XLA takes it apart into as many
# operands, twice.
MOST_AT_ONCE = 64


def to_owners(x: jax.Array, plan: Exchange, axes: tuple[str, ...]) -> jax.Array:
    """A device's chunk to the rows that it owns, zeros past the last one."""
    if plan.is_noop:
        return pad(x[:, : plan.owned], 1, plan.owned)
    for pairs in plan.joins:
        x = jnp.concatenate([x, _send(x, axes, pairs)], 1)
    return _run_legs(x, plan.out, plan.owned, axes)


def from_owners(x: jax.Array, plan: Exchange, axes: tuple[str, ...]) -> jax.Array:
    """The inverse of `to_owners`."""
    if plan.is_noop:
        return pad(x[:, : plan.chunk], 1, plan.chunk)
    x = _run_legs(x, plan.back, plan.chunk << len(plan.joins), axes)
    rank = of_device(plan.rank, axes)
    # Widest joins first. A device that is in no pair of a round has nothing yet, whichever half it
    # takes: it gets its chunks in a later round, of its rank's lowest bit.
    for j, pairs in reversed(list(enumerate(plan.joins))):
        lower, upper = jnp.split(x, 2, 1)
        received = _send(upper, axes, pairs[:, ::-1])
        x = jnp.where((rank >> j) % 2 == 1, received, lower)
    return x


def of_device(table: np.ndarray, axes: tuple[str, ...]) -> jax.Array:
    """This device's entry of a table with one per device."""
    if (table == table[0]).all():
        return jnp.asarray(table[0])
    return jnp.asarray(table)[lax.axis_index(axes)]


def all_to_all(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """All-to-all of [T, ...] over axes of T devices in all: part t goes to the t-th, and the t-th's
    comes. Its own inverse."""
    sizes = [lax.axis_size(axis) for axis in axes]
    parts = x.reshape(*sizes, *x.shape[1:])
    for dim, (axis, size) in enumerate(zip(axes, sizes, strict=True)):
        parts = _all_to_all_of_axis(parts, axis, size, dim)
    return parts.reshape(x.shape)


def _all_to_all_of_axis(x: jax.Array, axis: str, size: int, dim: int) -> jax.Array:
    low = first_stage(size)
    if low == 1:
        return lax.all_to_all(x, axis, dim, dim, tiled=True)
    numbers, shape = np.arange(size).reshape(size // low, low), x.shape
    x = x.reshape(*shape[:dim], size // low, low, *shape[dim + 1 :])
    for inner, groups in ((dim, numbers.T), (dim + 1, numbers)):
        x = lax.all_to_all(x, axis, inner, inner, axis_index_groups=groups.tolist(), tiled=True)
    return x.reshape(shape)


def first_stage(size: int) -> int:
    """The devices that exchange first, if `size` of them exchange in two stages: about the square
    root. 1 for few devices, and without such a divisor: one stage."""
    if size <= MOST_AT_ONCE:
        return 1
    return greatest_divisor(size, min(math.isqrt(size), MOST_AT_ONCE))


def _run_legs(x: jax.Array, legs: tuple[Leg, ...], rows: int, axes: tuple[str, ...]) -> jax.Array:
    """The target's rows, assembled from the slices of all rounds."""
    before = behind = 0  # rows that slices put before the target's first, and behind its last
    for leg in legs:
        before = max(before, -int(leg.recv_start.min()))
        behind = max(behind, int(leg.recv_start.max()) + leg.length - rows)
    target = jnp.zeros((x.shape[0], before + rows + behind, x.shape[2]), x.dtype)
    for leg in legs:
        piece = lax.dynamic_slice_in_dim(x, of_device(leg.send_start, axes), leg.length, 1)
        if leg.pairs is not None:
            piece = _send(piece, axes, leg.pairs)
        start, row = of_device(leg.recv_start, axes) + before, np.arange(leg.length)[:, None]
        valid = (row >= of_device(leg.valid_from, axes)) & (row < of_device(leg.valid_to, axes))
        old = lax.dynamic_slice_in_dim(target, start, leg.length, 1)
        new = jnp.where(valid, piece, old)
        target = lax.dynamic_update_slice_in_dim(target, new, start, 1)
    return target[:, before : before + rows]


def _send(x: jax.Array, axes: tuple[str, ...], pairs: np.ndarray) -> jax.Array:
    return lax.ppermute(x, axes, [(int(source), int(target)) for source, target in pairs])
