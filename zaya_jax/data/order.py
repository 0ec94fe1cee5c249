"""Says which row of a source comes when: each once an epoch, exactly, for any number of rows, in
closed form. No list of rows exists, and none is shuffled: any process can ask for any row.

The order keeps neighbours close in time: one read fetches a whole bundle, which holds many short
rows.

- Rows are taken in *blocks* of R neighbours, some bundles long. Rows that fill no block, the
  *loose* ones, are spread over the epoch.
- Blocks are permuted anew each epoch and opened L at a time, a *round*; each has a *lane*. Rows go
  round the lanes, so that one batch has one row of each block, and a block's next row comes
  `VISIT_STEPS` steps later. A step's rows lie in the batch by their lanes (`RowOrder.slots`), so a
  block stays with a batch slot or its neighbour, and is read by one process.
- A source has at least `MIN_ROUNDS` rounds an epoch, otherwise R is smaller; small sources have
  R = 1: all rows shuffled.

No row comes twice in a batch, not even at an epoch's end: each block belongs to one of G groups for
ever, an epoch goes through the groups one after another, and no group is larger than the rows of an
epoch less those of a batch. G is two where a source has twice the rows of a batch. A source with
fewer rows than a batch gives each row equally often.

An example: 1,300 rows, 2 in each batch, 5 in a block. There are 16 lanes, and 260 blocks in two
groups of 130; no row is loose. An epoch opens the first group's blocks in 8 rounds, of 16 blocks
each and the last of 18, then the second group's. A round of 16 takes 80 rows: the numbers 0, 16,
32, 48 and 64 of an epoch are the first lane's block, 8 batches apart, and number 80 begins the next
round.
"""

from typing import NamedTuple

import numpy as np

from zaya_jax.data import shuffle
from zaya_jax.data.layout import ceil_div

VERSION = 2  # raised when the order changes: a checkpoint of another version is refused
BLOCK_BUNDLES = 16  # bundles of a block, which touches up to two more, shared with its neighbours
VISIT_STEPS = 8  # steps between two rows of a block
MIN_ROUNDS = 8  # rounds of an epoch


class _Turn(NamedTuple):
    """Where numbers of an epoch are among its blocks."""

    group: np.ndarray
    opened: np.ndarray  # blocks of the group that were opened before this round
    visit: np.ndarray  # how many rows of its block came before
    lane: np.ndarray


class RowOrder:
    """The order in which a source's rows come, epoch after epoch.

    A batch has at most `max_rows` rows of the source, as a rule `usual_rows`. Blocks have
    `block_rows` rows, where the source has enough of them.
    """

    def __init__(
        self,
        num_rows: int,
        max_rows: int,
        usual_rows: int,
        block_rows: int,
        key: int,
        rounds: int = MIN_ROUNDS,
    ) -> None:
        self.num_rows = num_rows
        self._key = key
        self._usual_rows = usual_rows
        self._lanes = VISIT_STEPS * usual_rows
        self.block_rows, self.num_blocks = self._choose_blocks(block_rows, rounds)
        self._loose = num_rows - self.num_blocks * self.block_rows
        # so many that the largest is small enough to keep a row out of the next batch
        groups = ceil_div(num_rows, max(num_rows - max_rows, 0) + 1)
        if self.block_rows > 1:
            assert num_rows >= 4 * max_rows
            groups = 2
        # in blocks
        self._bounds = self.num_blocks * np.arange(groups + 1, dtype=np.int64) // groups
        self._sizes = np.diff(self._bounds)
        self._rounds = np.maximum(self._sizes // self._lanes, 1)  # of each group
        # Blocks that are open at a time, at most: a group's last round has up to twice the others'.
        self.most_open = int((self._sizes - (self._rounds - 1) * self._lanes).max())
        # of the permutation that says which blocks a group has
        self._group_key = shuffle.key(key, 0)

    def _choose_blocks(self, block_rows: int, rounds: int) -> tuple[int, int]:
        """(rows of a block, number of blocks): a multiple of 2 · `usual_rows` blocks, and of these
        the one that leaves the fewest loose rows."""
        pair = 2 * self._usual_rows
        # enough for the rounds of an epoch, and for blocks that are short enough
        least = max(
            ceil_div(rounds * self._lanes, pair), ceil_div(self.num_rows, pair * max(block_rows, 1))
        )
        counts = pair * np.arange(least, least + min(least, 4096), dtype=np.int64)
        counts = counts[counts * 2 <= self.num_rows]  # a block has two rows at least
        if block_rows < 2 or not len(counts):
            return 1, self.num_rows
        best = int(counts[(self.num_rows % counts).argmin()])
        return self.num_rows // best, best

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """The source's rows that come as number `numbers`, counted from the first of the run."""
        epochs, in_epoch = np.divmod(np.asarray(numbers, np.int64), self.num_rows)
        is_loose, loose_before = self._loose_rows(in_epoch)
        turn = self._locate(in_epoch - loose_before)
        epoch_keys = shuffle.keys((self._key, 1), epochs * len(self._sizes) + turn.group)
        in_group = shuffle.permute(turn.opened + turn.lane, self._sizes[turn.group], epoch_keys)
        block = shuffle.permute(
            self._bounds[turn.group] + in_group, self.num_blocks, self._group_key
        )
        # Lanes begin at different rows of their blocks, so that they do not all come to new bundles
        # at once.
        rows = block * self.block_rows + (turn.visit + turn.lane) % self.block_rows
        return np.where(is_loose, self.num_rows - self._loose + loose_before, rows)

    def slots(self, numbers: np.ndarray) -> np.ndarray:
        """Where the rows that come as these numbers belong among the source's rows of a batch: below
        `usual_rows`, and the same for all rows of a block."""
        in_epoch = np.asarray(numbers, np.int64) % self.num_rows
        _, loose_before = self._loose_rows(in_epoch)
        return self._locate(in_epoch - loose_before).lane % self._usual_rows

    def _loose_rows(self, in_epoch: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(whether a number of an epoch is a loose row's, how many of those come before it): evenly
        spread."""
        before = in_epoch * self._loose // self.num_rows
        is_loose = (in_epoch + 1) * self._loose // self.num_rows > before
        return is_loose, before

    def _locate(self, numbers: np.ndarray) -> _Turn:
        """The turns of numbers that count an epoch's rows of blocks."""
        # a loose row at the end has none
        numbers = np.minimum(numbers, self.num_blocks * self.block_rows - 1)
        group = np.searchsorted(self._bounds, numbers // self.block_rows, side="right") - 1
        in_group = numbers - self._bounds[group] * self.block_rows
        last_round = self._rounds[group] - 1
        round_index = np.minimum(in_group // (self._lanes * self.block_rows), last_round)
        opened = round_index * self._lanes
        # the last round has all blocks that are left
        lanes = np.where(round_index < last_round, self._lanes, self._sizes[group] - opened)
        visit, lane = np.divmod(in_group - opened * self.block_rows, lanes)
        return _Turn(group, opened, visit, lane)
