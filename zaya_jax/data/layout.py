"""Cuts a source's tape into numbered rows, by the values of `data.packing`: every S tokens
(`Concat`), or whole documents (`BestFit`)."""

import array
import itertools

import numpy as np

from zaya_jax.data import pack, prepared_store, shuffle
from zaya_jax.data.pack import Span
from zaya_jax.data.stores import TokenStore

UNIT_ROWS = 64  # rows that are packed together: best-fit leaves part of one row empty in each unit
CACHED_SPANS = 4 << 20  # that stay planned, 16 bytes each


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


class Concat:
    """Each S tokens of the tape are a row: concatenate-and-split. The last row may be shorter."""

    def __init__(self, num_tokens: int, seq_len: int) -> None:
        self._num_tokens, self._seq_len = num_tokens, seq_len
        self.num_rows = ceil_div(num_tokens, seq_len)
        self.unit_tokens = seq_len

    def spans(self, row: int) -> list[Span]:
        """The tokens of a row, as one span of the tape."""
        begin = row * self._seq_len
        return [(begin, min(begin + self._seq_len, self._num_tokens))]


class BestFit:
    """Rows are documents that `pack.pack_documents` puts together, a unit of some consecutive
    documents at a time.

    A unit is the documents that begin in one of the even pieces of about 64 rows that a shard is
    divided into. All are planned at the start, to number their rows, at about a million documents
    per second.
    """

    def __init__(self, store: TokenStore, seq_len: int) -> None:
        self._store = store
        self._seq_len = seq_len
        self.unit_tokens = UNIT_ROWS * seq_len
        # of each unit: its shard, its first document there, its number of rows
        shards, firsts, counts = (array.array("q") for _ in range(3))
        for shard, lengths in enumerate(prepared_store.lengths_of_all(store)):
            cuts = self._cuts(lengths)
            for first, stop in itertools.pairwise(cuts.tolist()):
                shards.append(shard)
                firsts.append(first)
                counts.append(len(pack.pack_documents(lengths[first:stop], seq_len)))
        self._shards, self._firsts = np.array(shards, np.int64), np.array(firsts, np.int64)
        self._first_rows = np.append(0, np.cumsum(np.array(counts, np.int64)))
        self.num_rows = int(self._first_rows[-1])
        # Of each unit: its spans, row after row, and where each row begins among them.
        self._planned: prepared_store.Lru[int, tuple[np.ndarray, np.ndarray]] = prepared_store.Lru(
            CACHED_SPANS
        )

    def _cuts(self, lengths: np.ndarray) -> np.ndarray:
        """Where a shard's units begin and the last one ends, in documents."""
        total = int(lengths.sum())
        size = ceil_div(total, max(1, round(total / self.unit_tokens)))
        unit = (np.cumsum(lengths) - lengths) // size
        begins = np.flatnonzero(np.diff(unit)) + 1
        return np.concatenate([[0], begins, [len(lengths)]]).astype(np.int64)

    def spans(self, row: int) -> list[Span]:
        """The documents of a row."""
        unit = int(np.searchsorted(self._first_rows, row, side="right")) - 1
        spans, begins = self._plan(unit)
        index = row - int(self._first_rows[unit])
        return [(start, stop) for start, stop in spans[begins[index] : begins[index + 1]].tolist()]

    def _plan(self, unit: int) -> tuple[np.ndarray, np.ndarray]:
        planned = self._planned.get(unit)
        if planned is not None:
            return planned
        shard, first = int(self._shards[unit]), int(self._firsts[unit])
        lengths = self._store.lengths(shard)
        stop = len(lengths)
        if unit + 1 < len(self._shards) and self._shards[unit + 1] == shard:
            stop = int(self._firsts[unit + 1])
        rows = pack.pack_documents(lengths[first:stop], self._seq_len)
        # Best-fit's first rows have the longest documents, and the rows of a unit come in turn.
        order = shuffle.permute(np.arange(len(rows)), len(rows), shuffle.key(unit))
        rows = [rows[index] for index in order]
        first_token = int(self._store.first_token[shard] + lengths[:first].sum())
        spans = first_token + np.array([span for row in rows for span in row], np.int64)
        planned = spans, np.cumsum([0, *map(len, rows)])
        self._planned.put(unit, planned, len(spans))
        return planned


def layout_of(store: TokenStore, seq_len: int, packing: str) -> Concat | BestFit:
    """The rows that a source is cut into."""
    if packing == "concat":
        return Concat(store.num_tokens, seq_len)
    return BestFit(store, seq_len)
