"""Which tokens row j of a source holds: pure functions of the row's global number, so that any process can ask for any.

`Windows` cuts the whole source into windows of S tokens and gives them in an order that is new each epoch.
"""

from typing import Protocol

import numpy as np

from zaya_jax.data import shuffle
from zaya_jax.data.pack import Rows
from zaya_jax.data.sources import Bundle

ORDER_BLOCK = 4096  # rows whose order is worked out at once


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


class Windows:
    """Concatenate-and-split: windows of S tokens over the whole source, all of them once an epoch, shuffled."""

    def __init__(self, store: Store, seq_len: int, key: int) -> None:
        self.store, self.seq_len, self.key = store, seq_len, key
        self.ends = np.cumsum(store.lengths)
        self.num_rows = -(-int(self.ends[-1]) // seq_len)
        self._block = -1, np.zeros(0, np.int64)  # the last block of the order: (its number, windows)

    def fill(self, rows: Rows, row_ids: np.ndarray, numbers: np.ndarray) -> None:
        """Fill rows `row_ids` of a batch with this source's rows of these global numbers."""
        self.fill_windows(rows, row_ids, self._order(numbers))

    def _order(self, numbers: np.ndarray) -> np.ndarray:
        """The windows of these rows. Permuting is all overhead for a few numbers (0.5 ms for 8), so by the block."""
        out = np.empty(len(numbers), np.int64)
        blocks, within = np.divmod(numbers, ORDER_BLOCK)
        for block in np.unique(blocks):
            held = self._block
            if held[0] != block:
                numbers_there = int(block) * ORDER_BLOCK + np.arange(ORDER_BLOCK)
                epochs, places = np.divmod(numbers_there, self.num_rows)
                order = shuffle.permute(places, self.num_rows, shuffle.keys((self.key,), epochs))
                self._block = held = int(block), order
            mine = blocks == block
            out[mine] = held[1][within[mine]]
        return out

    def fill_windows(self, rows: Rows, row_ids: np.ndarray, windows: np.ndarray) -> None:
        """Fill rows `row_ids` with these windows, counted from the source's beginning."""
        starts = windows * self.seq_len
        stops = np.minimum(starts + self.seq_len, self.ends[-1])
        first = np.searchsorted(self.ends, starts, side="right")
        last = np.searchsorted(self.ends, stops - 1, side="right")
        needed = sorted({int(b) for lo, hi in zip(first, last, strict=True) for b in range(lo, hi + 1)})
        bundles = self.store.read(needed)
        for row, start, stop, lo, hi in zip(row_ids, starts, stops, first, last, strict=True):
            for b in range(lo, hi + 1):
                base = int(self.ends[b]) - int(self.store.lengths[b])
                bundle = bundles[b]
                rows.add(row, bundle, max(int(start) - base, 0), min(int(stop) - base, len(bundle)))
