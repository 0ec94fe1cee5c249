"""Which tokens a row holds: pure functions of the row's number, so that any process can ask for any row.

A source is a tape of tokens. Its *layout* cuts the tape into numbered rows (`Tape`: every S tokens;
`Plan`: whole documents, packed), its *order* says which of them comes when: each once an epoch, exactly, for any
number of rows, in closed form. No list of rows exists, and none is shuffled.

An epoch's order has locality, since a read brings a whole bundle, of which a short row is a small part:

- Rows are taken in *blocks* of R neighbours, some bundles long. A few rows at the end that fill no block come last.
- Blocks are permuted anew each epoch and opened L at a time, a *round*; rows go round its blocks, so that one batch has
  one row of each, and a block's next row comes `TURNS` steps later. L is a multiple of the rows that the source gives
  to a step, so a block belongs to one batch slot, and is read by one process. (Blocks that are left over, fewer than a
  batch has rows, go round by themselves.)
- A source has at least `ROUNDS` rounds an epoch, otherwise R is smaller; small sources have R = 1: all rows shuffled.

No row comes twice in a batch, at an epoch's end neither: blocks belong to one of G groups for ever, an epoch goes
through the groups one after another, and no group is larger than the rows of an epoch less those of a batch. G is two,
where a source has twice the rows of a batch. One with fewer rows than a batch gives each equally often.
"""

import collections
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from zaya_jax.data import pack, shuffle
from zaya_jax.data.pack import Part, Span
from zaya_jax.data.sources import Bundle

VERSION = 2  # of the order: a run is not continued in another one
BLOCK_BUNDLES = 16  # of a block, which reads two more: the ones at its ends are its neighbours' too
TURNS = 8  # steps between two rows of a block
ROUNDS = 8  # of blocks in an epoch, at least
UNIT_ROWS = 64  # rows that are packed together: best-fit leaves part of one row empty in each unit
UNITS = 4096  # whose rows stay planned


class Store(Protocol):
    """A source's tokens: a tape of documents in shards, none of which crosses a shard's end."""

    name: str
    fingerprint: str  # of everything the tokens depend on

    @property
    def bundle_tokens(self) -> int:
        """Tokens that one read brings; 0 where reading costs nothing."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens on the tape."""
        ...

    @property
    def num_shards(self) -> int:
        """Shards on the tape."""
        ...

    @property
    def first_token(self) -> np.ndarray:
        """The place of each shard on the tape, and its end."""
        ...

    def lengths(self, shard: int) -> np.ndarray:
        """The tokens of each document of a shard."""
        ...

    def parts(self, spans: Sequence[Span]) -> list[list[Part]]:
        """For each (start, stop) of the tape: the pieces of bundles that it is, one after another."""
        ...


class Memory:
    """A store of one bundle that is in memory already."""

    bundle_tokens, num_shards = 0, 1

    def __init__(self, name: str, bundle: Bundle, fingerprint: str) -> None:
        self.name, self.fingerprint, self.bundle = name, fingerprint, bundle
        self.num_tokens = len(bundle)
        self.first_token = np.array([0, len(bundle)], np.int64)

    def lengths(self, shard: int) -> np.ndarray:
        """The tokens of each document."""
        return np.diff(np.append(np.flatnonzero(self.bundle.starts), len(self.bundle)))

    def parts(self, spans: Sequence[Span]) -> list[list[Part]]:
        """Each span, as a piece of the one bundle."""
        return [[(self.bundle, start, stop)] for start, stop in spans]


class Tape:
    """Rows are every S tokens: concatenate-and-split. The last one may be shorter."""

    def __init__(self, num_tokens: int, seq_len: int) -> None:
        self.num_tokens, self.seq_len = num_tokens, seq_len
        self.num_rows = -(-num_tokens // seq_len)
        self.unit_tokens = seq_len

    def spans(self, row: int) -> list[Span]:
        """The stretch of the tape that a row is."""
        return [(row * self.seq_len, min((row + 1) * self.seq_len, self.num_tokens))]


class Plan:
    """Rows are documents that `pack.plan` puts together, a unit of some consecutive documents at a time.

    A unit is the documents that begin in one of the even stretches of about 64 rows that a shard is divided into. All
    are planned at the start, to number their rows, at about a million documents a second.
    """

    def __init__(self, store: Store, seq_len: int, packing: str) -> None:
        self._store, self._seq_len, self._packing = store, seq_len, packing
        self.unit_tokens = UNIT_ROWS * seq_len
        shards, places, counts = [], [], []
        for shard in range(store.num_shards):
            cuts = self._cuts(lengths := store.lengths(shard))
            for place in range(len(cuts) - 1):
                shards.append(shard)
                places.append(place)
                counts.append(len(pack.plan(lengths[cuts[place] : cuts[place + 1]], seq_len, packing)))
        self._shards, self._places = np.array(shards, np.int64), np.array(places, np.int64)
        self._ends = np.cumsum(np.array(counts, np.int64))
        self.num_rows = int(self._ends[-1]) if counts else 0
        self._planned: collections.OrderedDict[int, list[list[Span]]] = collections.OrderedDict()

    def _cuts(self, lengths: np.ndarray) -> np.ndarray:
        """Where a shard's units begin and the last one ends, in documents."""
        total = int(lengths.sum())
        size = -(-total // max(1, round(total / self.unit_tokens)))
        stretch = (np.cumsum(lengths) - lengths) // size
        return np.concatenate([[0], np.flatnonzero(np.diff(stretch)) + 1, [len(lengths)]]).astype(np.int64)

    def spans(self, row: int) -> list[Span]:
        """The documents of a row."""
        unit = int(np.searchsorted(self._ends, row, side="right"))
        rows = self._unit(unit)
        return rows[row - int(self._ends[unit]) + len(rows)]

    def _unit(self, unit: int) -> list[list[Span]]:
        if unit not in self._planned:
            shard = int(self._shards[unit])
            lengths = self._store.lengths(shard)
            first, stop = self._cuts(lengths)[self._places[unit] :][:2]
            begin = int(self._store.first_token[shard] + lengths[:first].sum())
            rows = pack.plan(lengths[first:stop], self._seq_len, self._packing)
            # Best-fit has the longest documents first.
            places = shuffle.permute(np.arange(len(rows)), len(rows), shuffle.key(unit))
            self._planned[unit] = [[(begin + a, begin + b) for a, b in rows[p]] for p in places]
            while len(self._planned) > UNITS:
                self._planned.popitem(last=False)
        self._planned.move_to_end(unit)
        return self._planned[unit]


class Order:
    """The order in which a source's rows come, epoch after epoch: the module's text says how it is made.

    `most`: rows that one batch may have of the source; `share`: those it has as a rule; `block_rows`: rows of a block,
    where the source has enough of them.
    """

    def __init__(
        self, num_rows: int, most: int, share: int, block_rows: int, key: int, rounds: int = ROUNDS
    ) -> None:
        self.num_rows, self.key = num_rows, key
        self.share, self.lanes = share, TURNS * share
        self.block_rows = max(1, min(block_rows, num_rows // (rounds * self.lanes)))
        self.num_blocks = num_rows // self.block_rows
        apart = (
            max(num_rows - most, 0) + 1
        )  # rows of the largest group that keeps a row out of the next batch
        groups = -(-num_rows // apart)
        if self.block_rows > 1:
            assert num_rows >= 2 * most
            groups = 2
        self._bounds = self.num_blocks * np.arange(groups + 1, dtype=np.int64) // groups  # in blocks
        sizes = np.diff(self._bounds) // share * share
        # Blocks that are open at a time, at most: a group's last round has up to twice the others'.
        self.most_open = int((sizes - (np.maximum(sizes // self.lanes, 1) - 1) * self.lanes).max())
        self._members = shuffle.key(key, 0)  # of the permutation that says which blocks a group has

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """The source's rows that come as number `numbers`, counted from the first of the run."""
        epochs, places = np.divmod(np.asarray(numbers, np.int64), self.num_rows)
        out = places.copy()  # what fills no block comes last, as it stands
        whole = places < self.num_blocks * self.block_rows
        epochs, places = epochs[whole], places[whole]
        group = np.searchsorted(self._bounds, places // self.block_rows, side="right") - 1
        first, size = self._bounds[group], np.diff(self._bounds)[group]
        inside = places - first * self.block_rows
        # Rounds of a multiple of `share` blocks; fewer than that many are left over, and go round by themselves.
        even = size // self.share * self.share
        rest = inside >= even * self.block_rows
        rounds = np.maximum(even // self.lanes, 1)
        this = np.where(rest, 0, np.minimum(inside // (self.lanes * self.block_rows), rounds - 1))
        lanes = np.where(this < rounds - 1, self.lanes, even - (rounds - 1) * self.lanes)
        lanes = np.where(rest, size - even, lanes)
        opened = np.where(rest, even, this * self.lanes)  # before this round
        visit, lane = np.divmod(inside - opened * self.block_rows, lanes)
        keys = shuffle.keys((self.key, 1), epochs * (len(self._bounds) - 1) + group)
        turn = shuffle.permute(opened + lane, size, keys)
        block = shuffle.permute(first + turn, self.num_blocks, self._members)
        # Lanes begin at different places of their blocks, so that they do not all come to new bundles at once.
        out[whole] = block * self.block_rows + (visit + lane) % self.block_rows
        return out
