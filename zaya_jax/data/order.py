"""Says which tokens a row holds, as pure functions of the row's number: any process can ask for any
row.

A source is a tape of tokens. Its *layout* cuts the tape into numbered rows (`Tape`: every S tokens;
`Packed`: whole documents, packed), its *order* says which of them comes when: each once an epoch,
exactly, for any number of rows, in closed form. No list of rows exists, and none is shuffled.

An epoch's order has locality, since a read brings a whole bundle, and a short row is a small part
of it:

- Rows are taken in *blocks* of R neighbours, some bundles long. Rows that fill no block are spread
  over the epoch.
- Blocks are permuted anew each epoch and opened L at a time, a *round*; rows go round its blocks,
  so that one batch has one row of each, and a block's next row comes `TURNS` steps later. A step's
  rows lie in the batch by their blocks (`Order.lane`), so a block stays with a batch slot or its
  neighbour, and is read by one process.
- A source has at least `ROUNDS` rounds an epoch, otherwise R is smaller; small sources have R = 1:
  all rows shuffled.

No row comes twice in a batch, not even at an epoch's end: each block belongs to one of G groups for
ever, an epoch goes through the groups one after another, and no group is larger than the rows of an
epoch less those of a batch. G is two where a source has twice the rows of a batch. A source with
fewer rows than a batch gives each row equally often.
"""

import array
import itertools

import numpy as np

from zaya_jax.data import pack, shuffle, storage
from zaya_jax.data.pack import Span
from zaya_jax.data.storage import Lru
from zaya_jax.data.stores import TokenStore

VERSION = 2  # of the order: a run is not continued in another one
BLOCK_BUNDLES = 16  # of a block, which reads two more: the ones at its ends are its neighbours' too
TURNS = 8  # steps between two rows of a block
ROUNDS = 8  # of blocks in an epoch, at least
UNIT_ROWS = 64  # rows that are packed together: best-fit leaves part of one row empty in each unit
SPANS = 4 << 20  # that stay planned, 16 bytes each


class Tape:
    """Rows are every S tokens: concatenate-and-split. The last one may be shorter."""

    def __init__(self, num_tokens: int, seq_len: int) -> None:
        self.num_tokens, self.seq_len = num_tokens, seq_len
        self.num_rows = -(-num_tokens // seq_len)
        self.unit_tokens = seq_len

    def spans(self, row: int) -> list[Span]:
        """The stretch of the tape that a row is."""
        return [(row * self.seq_len, min((row + 1) * self.seq_len, self.num_tokens))]


class Packed:
    """Rows are documents that `pack.plan` puts together, a unit of some consecutive documents at a
    time.

    A unit is the documents that begin in one of the even stretches of about 64 rows that a shard is
    divided into. All are planned at the start, to number their rows, at about a million documents
    per second.
    """

    def __init__(self, store: TokenStore, seq_len: int) -> None:
        self._store, self._seq_len = store, seq_len
        self.unit_tokens = UNIT_ROWS * seq_len
        shards, firsts, counts = (array.array("q") for _ in range(3))
        for shard, lengths in enumerate(storage.lengths_of_all(store)):
            cuts = self._cuts(lengths)
            for first, stop in itertools.pairwise(cuts.tolist()):
                shards.append(shard)
                firsts.append(first)
                counts.append(len(pack.plan(lengths[first:stop], seq_len)))
        self._shards, self._firsts = np.array(shards, np.int64), np.array(firsts, np.int64)
        self._ends = np.cumsum(np.array(counts, np.int64))
        self.num_rows = int(self._ends[-1]) if len(counts) else 0
        # Of each unit: its spans, row after row, and where each row ends among them.
        self._planned: Lru[int, tuple[np.ndarray, np.ndarray]] = Lru(SPANS)

    def _cuts(self, lengths: np.ndarray) -> np.ndarray:
        """Where a shard's units begin and the last one ends, in documents."""
        total = int(lengths.sum())
        size = -(-total // max(1, round(total / self.unit_tokens)))
        stretch = (np.cumsum(lengths) - lengths) // size
        return np.concatenate([[0], np.flatnonzero(np.diff(stretch)) + 1, [len(lengths)]]).astype(
            np.int64
        )

    def spans(self, row: int) -> list[Span]:
        """The documents of a row."""
        unit = int(np.searchsorted(self._ends, row, side="right"))
        spans, ends = self._unit(unit)
        at = row - int(self._ends[unit]) + len(ends)
        return [(a, b) for a, b in spans[ends[at - 1] if at else 0 : ends[at]].tolist()]

    def _unit(self, unit: int) -> tuple[np.ndarray, np.ndarray]:
        if (planned := self._planned.get(unit)) is not None:
            return planned
        shard, first = int(self._shards[unit]), int(self._firsts[unit])
        lengths = self._store.lengths(shard)
        last = unit + 1 == len(self._shards) or self._shards[unit + 1] != shard
        stop = len(lengths) if last else int(self._firsts[unit + 1])
        rows = pack.plan(lengths[first:stop], self._seq_len)
        # Best-fit has the longest documents first.
        rows = [
            rows[p] for p in shuffle.permute(np.arange(len(rows)), len(rows), shuffle.key(unit))
        ]
        begin = int(self._store.first_token[shard] + lengths[:first].sum())
        spans = begin + np.array([span for row in rows for span in row], np.int64)
        planned = spans, np.cumsum([len(row) for row in rows])
        self._planned.put(unit, planned, len(spans))
        return planned


def layout_of(store: TokenStore, seq_len: int, packing: str) -> Tape | Packed:
    """The rows that a source is cut into."""
    return Tape(store.num_tokens, seq_len) if packing == "concat" else Packed(store, seq_len)


class Order:
    """The order in which a source's rows come, epoch after epoch: the module's text says how it is
    made.

    `most`: rows that one batch may have of the source; `share`: those it has as a rule;
    `block_rows`: rows of a block, where the source has enough of them.
    """

    def __init__(
        self, num_rows: int, most: int, share: int, block_rows: int, key: int, rounds: int = ROUNDS
    ) -> None:
        self.num_rows, self.key = num_rows, key
        self.share, self.lanes = share, TURNS * share
        self.block_rows, self.num_blocks = self._cut(block_rows, rounds)
        self._loose = num_rows - self.num_blocks * self.block_rows
        groups = _groups(num_rows, most)
        if self.block_rows > 1:
            assert num_rows >= 4 * most
            groups = 2
        # in blocks
        self._bounds = self.num_blocks * np.arange(groups + 1, dtype=np.int64) // groups
        sizes = np.diff(self._bounds)
        # Blocks that are open at a time, at most: a group's last round has up to twice the others'.
        self.most_open = int((sizes - (np.maximum(sizes // self.lanes, 1) - 1) * self.lanes).max())
        self._members = shuffle.key(key, 0)  # of the permutation that says which blocks a group has

    def _cut(self, block_rows: int, rounds: int) -> tuple[int, int]:
        """(rows of a block, number of blocks): of a multiple of 2 · `share` blocks, that which
        leaves fewest rows."""
        pair = 2 * self.share
        least = max(
            -(-rounds * self.lanes // pair), -(-self.num_rows // (pair * max(block_rows, 1)))
        )
        numbers = pair * np.arange(least, least + min(least, 4096), dtype=np.int64)
        numbers = numbers[numbers * 2 <= self.num_rows]
        if block_rows < 2 or not len(numbers):
            return 1, self.num_rows
        best = int(numbers[(self.num_rows % numbers).argmin()])
        return self.num_rows // best, best

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """The source's rows that come as number `numbers`, counted from the first of the run."""
        epochs, places = np.divmod(np.asarray(numbers, np.int64), self.num_rows)
        loose, before = self._spread(places)
        group, opened, visit, lane = self._place(places - before)
        first, size = self._bounds[group], np.diff(self._bounds)[group]
        keys = shuffle.keys((self.key, 1), epochs * (len(self._bounds) - 1) + group)
        turn = shuffle.permute(opened + lane, size, keys)
        block = shuffle.permute(first + turn, self.num_blocks, self._members)
        # Lanes begin at different places of their blocks, so that they do not all come to new
        # bundles at once.
        out = block * self.block_rows + (visit + lane) % self.block_rows
        return np.where(loose, self.num_rows - self._loose + before, out)

    def lane(self, numbers: np.ndarray) -> np.ndarray:
        """Of rows that come as these numbers, the place in a batch, from 0 to `share`, that their
        blocks have."""
        places = np.asarray(numbers, np.int64) % self.num_rows
        *_, lane = self._place(places - self._spread(places)[1])
        return lane % self.share

    def _spread(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(whether a place of an epoch is a loose row's, how many of those come before it): evenly
        spread."""
        before = places * self._loose // self.num_rows
        loose = (places + 1) * self._loose // self.num_rows > before
        return loose, before

    def _place(self, places: np.ndarray) -> tuple[np.ndarray, ...]:
        """(group, blocks of it that were opened before this round, visit, lane) of places among
        blocks' rows."""
        # a loose row at the end has none
        places = np.minimum(places, self.num_blocks * self.block_rows - 1)
        group = np.searchsorted(self._bounds, places // self.block_rows, side="right") - 1
        first, size = self._bounds[group], np.diff(self._bounds)[group]
        inside = places - first * self.block_rows
        rounds = np.maximum(size // self.lanes, 1)
        this = np.minimum(inside // (self.lanes * self.block_rows), rounds - 1)
        lanes = np.where(this < rounds - 1, self.lanes, size - (rounds - 1) * self.lanes)
        opened = this * self.lanes
        visit, lane = np.divmod(inside - opened * self.block_rows, lanes)
        return group, opened, visit, lane


def _groups(num_rows: int, most: int) -> int:
    """The number of groups of blocks, so that the largest is small enough to keep a row out of the
    next batch."""
    return -(-num_rows // (max(num_rows - most, 0) + 1))
