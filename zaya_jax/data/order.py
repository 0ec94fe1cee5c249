"""Which tokens a row holds: pure functions of the row's number, so that any process can ask for any row.

A row is a list of spans (bundle, start, stop). There are two orders. `Windows` is for sources that fit in
memory: rows of the whole source in an order that is new each epoch. `Lanes` is for sources that do not:
bundles are permuted each epoch and dealt out to lanes, a lane's bundles form one endless tape, and the batch
slot that owns the lane reads it from left to right. So a bundle is read once, by one process, whatever the
number of processes; and a slot has several lanes and takes turns, so that one step's rows are not the
continuation of the last one's. Both orders work in tokens (concatenate-and-split) or in whole rows that
`pack.plan` has made.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from zaya_jax.data import pack, shuffle
from zaya_jax.data.pack import Piece
from zaya_jax.data.sources import Bundle

ORDER_BLOCK = 4096  # rows whose order is worked out at once: it is all overhead for a few (0.5 ms for 8)
LANE_BLOCK = 64  # bundles by which a lane's tape grows
LANES_PER_SLOT = 8
UNIT_ROWS = 64  # rows that are packed together: best-fit leaves part of one row empty in each unit


class Store(Protocol):
    """A source's tokens in bundles, readable in any order."""

    name: str
    fingerprint: str  # of everything the tokens depend on
    lengths: np.ndarray  # int64: tokens of each bundle

    def read(self, bundles: list[int]) -> dict[int, Bundle]:
        """The bundles of these numbers."""
        ...


class Memory:
    """A store of one bundle that is in memory already."""

    def __init__(self, name: str, bundle: Bundle, fingerprint: str) -> None:
        self.name, self.fingerprint, self._bundle = name, fingerprint, bundle
        self.lengths = np.array([len(bundle)], np.int64)

    def read(self, bundles: list[int]) -> dict[int, Bundle]:
        """The one bundle."""
        return dict.fromkeys(bundles, self._bundle)

    def pieces(self, bundle: int) -> np.ndarray:
        """The tokens of each document."""
        return np.diff(np.append(np.flatnonzero(self._bundle.starts), len(self._bundle)))


class Tape:
    """Bundles one after another, cut every S tokens: concatenate-and-split."""

    def __init__(self, lengths: np.ndarray, seq_len: int) -> None:
        self.sizes, self.unit, self.seq_len = lengths, 1, seq_len

    def size(self, unit: int) -> int:
        """Tokens in a unit, which is one bundle."""
        return int(self.sizes[unit])

    @property
    def num_units(self) -> int:
        """Units in an epoch."""
        return len(self.sizes)

    @property
    def step(self) -> int:
        """How far one row advances."""
        return self.seq_len

    def cut(self, unit: int, start: int, stop: int) -> list[Piece]:
        """The spans that places start..stop of a unit are."""
        return [(unit, start, stop)]


class Plan:
    """Units of consecutive bundles whose documents `pack.plan` puts into rows; a place is one row."""

    step = 1

    def __init__(
        self,
        store: Store,
        seq_len: int,
        packing: str,
        pieces: Callable[[int], np.ndarray],
        most_bundles: int | None,
    ) -> None:
        self._store, self._seq_len, self._packing, self._pieces = store, seq_len, packing, pieces
        mean = max(1.0, float(store.lengths.mean()))
        self.unit = max(1, round(UNIT_ROWS * seq_len / mean))
        if most_bundles is not None:
            self.unit = max(1, min(self.unit, most_bundles))
        self._rows: dict[int, list[list[Piece]]] = {}
        self._counts: dict[int, int] = {}

    @property
    def num_units(self) -> int:
        """Units in an epoch."""
        return -(-len(self._store.lengths) // self.unit)

    def size(self, unit: int) -> int:
        """Rows that the unit's documents fill."""
        if unit not in self._counts:
            self._counts[unit] = len(self.rows(unit))
        return self._counts[unit]

    def rows(self, unit: int) -> list[list[Piece]]:
        """The unit's rows."""
        if unit not in self._rows:
            if len(self._rows) > 4096:
                self._rows.clear()
            bundles = range(unit * self.unit, min((unit + 1) * self.unit, len(self._store.lengths)))
            planned = pack.plan({b: self._pieces(b) for b in bundles}, self._seq_len, self._packing)
            places = shuffle.permute(np.arange(len(planned)), len(planned), shuffle.key(unit))
            self._rows[unit] = [planned[p] for p in places]
        return self._rows[unit]

    def cut(self, unit: int, start: int, stop: int) -> list[Piece]:
        """The spans of rows start..stop of a unit."""
        return [piece for row in self.rows(unit)[start:stop] for piece in row]


class Windows:
    """Every row of a source once an epoch, in an order of that epoch's own."""

    def __init__(self, layout: Tape | Plan, key: int) -> None:
        self.layout, self.key = layout, key
        sizes = np.array([layout.size(u) for u in range(layout.num_units)], np.int64)
        self.ends = np.cumsum(sizes)
        self.num_rows = -(-int(self.ends[-1]) // layout.step)
        self._block = -1, np.zeros(0, np.int64)

    def rows(self, numbers: np.ndarray) -> list[list[Piece]]:
        """The spans of the rows of these numbers, counted from the first row of the run."""
        out = np.empty(len(numbers), np.int64)
        blocks, within = np.divmod(numbers, ORDER_BLOCK)
        for block in np.unique(blocks):
            held = self._block
            if held[0] != block:
                epochs, places = np.divmod(int(block) * ORDER_BLOCK + np.arange(ORDER_BLOCK), self.num_rows)
                windows = shuffle.permute(places, self.num_rows, shuffle.keys((self.key,), epochs))
                self._block = held = int(block), windows
            mine = blocks == block
            out[mine] = held[1][within[mine]]
        return self.windows(out)

    def windows(self, windows: np.ndarray) -> list[list[Piece]]:
        """The spans of these rows in the order of the source itself."""
        starts = windows * self.layout.step
        stops = np.minimum(starts + self.layout.step, self.ends[-1])
        units = np.searchsorted(self.ends, starts, side="right")
        return [
            _cut(self.layout, self.ends, 0, u, a, b) for u, a, b in zip(units, starts, stops, strict=True)
        ]


class Lanes:
    """Endless tapes of permuted bundles, one for each lane, each read by one batch slot from left to right."""

    def __init__(self, layout: Tape | Plan, key: int, num_lanes: int) -> None:
        self.layout, self.key, self.num_lanes = layout, key, num_lanes
        self._tapes: dict[int, _LaneTape] = {}

    def rows(self, lanes: np.ndarray, numbers: np.ndarray) -> list[list[Piece]]:
        """The spans of row `number` of each lane."""
        out = []
        for lane, number in zip(lanes, numbers, strict=True):
            tape = self._tapes.get(int(lane))
            start = int(number) * self.layout.step
            if tape is None or start < tape.begin:
                tape = self._tapes[int(lane)] = _LaneTape(self, int(lane))
            out.append(tape.cut(start, start + self.layout.step))
        return out

    def deal(self, lane: int, begin: int, count: int) -> np.ndarray:
        """Units `begin`..`begin + count` of a lane: every num_lanes-th of the permuted epochs in a row."""
        dealt = lane + self.num_lanes * np.arange(begin, begin + count, dtype=np.int64)
        epochs, places = np.divmod(dealt, self.layout.num_units)
        return shuffle.permute(places, self.layout.num_units, shuffle.keys((self.key,), epochs))


class _LaneTape:
    """The stretch of a lane's tape that is being read."""

    def __init__(self, lanes: Lanes, lane: int) -> None:
        self._lanes, self._lane = lanes, lane
        self._dealt = 0  # units of the lane before the end of this stretch
        self.begin = 0  # where the stretch begins on the tape
        self._units = np.zeros(0, np.int64)
        self._ends = np.zeros(0, np.int64)

    def cut(self, start: int, stop: int) -> list[Piece]:
        layout = self._lanes.layout
        while not len(self._ends) or self._ends[-1] < stop:
            keep = int(np.searchsorted(self._ends, start, side="right"))
            self.begin = int(self._ends[keep - 1]) if keep else self.begin
            units = self._lanes.deal(self._lane, self._dealt, LANE_BLOCK)
            if isinstance(layout, Tape):
                sizes = layout.sizes[units]
            else:
                sizes = np.array([layout.size(int(u)) for u in units], np.int64)
            last = int(self._ends[-1]) if len(self._ends) else self.begin
            self._ends = np.concatenate([self._ends[keep:], last + np.cumsum(sizes)])
            self._units = np.concatenate([self._units[keep:], units])
            self._dealt += LANE_BLOCK
        first = int(np.searchsorted(self._ends, start, side="right"))
        return _cut(layout, self._ends, self.begin, first, start, stop, self._units)


def _cut(layout, ends, begin, place, start, stop, units=None) -> list[Piece]:
    """The spans of start..stop on a tape of units that end at `ends`, from unit number `place` on."""
    out = []
    while start < stop:
        base = int(ends[place - 1]) if place else begin
        here = min(int(stop), int(ends[place]))
        unit = int(place) if units is None else int(units[place])
        out += layout.cut(unit, int(start) - base, here - base)
        start, place = here, place + 1
    return out
