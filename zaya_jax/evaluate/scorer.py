"""Scores many rows of tokens: sorted by length, in batches of few shapes, shared among processes.

    scorer = Scorer(model)
    for log_probs, likeliest in scorer([TokenRow(ids, first=3), ...]): ...

Rows of similar length go together, so there is little padding and few programs are compiled:
lengths are rounded up to powers of two and the midpoints between, rows of a batch to powers of two,
within `tokens` a batch. If each of several processes has the whole model on its own devices, they
share the batches; if the model lies over all their devices, they compute each batch together. All
get all results.
"""

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from zaya_jax.functions import IGNORED, power_of_two, rounded

TOKENS = 8192  # in a batch
SHORTEST = 16  # shorter rows are padded to it

# A `library.LanguageModel`, or the state of a run as `during_training.StateModel` has it.
type ScoredModel = Any

# For each scored token: its log-probability in nats, and whether it is the likeliest.
Scores = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class TokenRow:
    """Tokens; those from `first` (at least 1) on are scored, each given all earlier ones."""

    ids: Sequence[int] | np.ndarray
    first: int = 1


class Scorer:
    """See the module. Results are in the order of the rows and, up to rounding, independent of
    other rows."""

    def __init__(self, model: ScoredModel, tokens: int = TOKENS):
        self.model = model
        self._tokens = tokens
        together = model.mesh is not None and model.mesh.is_multi_process
        self._process = 0 if together else jax.process_index()
        self._processes = 1 if together else jax.process_count()

    def __call__(
        self,
        rows: Sequence[TokenRow],
        on_batch: Callable[[list[TokenRow]], object] = lambda batch: None,
    ) -> list[Scores]:
        """`on_batch` is called with the rows of each finished batch."""
        lengths = [len(row.ids) - 1 for row in rows]
        # where each row's scores begin in the results
        begins = np.cumsum([0, *(len(row.ids) - row.first for row in rows)])
        log_probs, likeliest = np.zeros(begins[-1], np.float32), np.zeros(begins[-1], bool)
        longest = self.model.config.model.max_position_embeddings
        for turn, (numbers, length) in enumerate(batches(lengths, self._tokens, longest)):
            batch = [rows[number] for number in numbers]
            if turn % self._processes == self._process:
                scores = self._score(batch, length)
                for i, number in enumerate(numbers):
                    scored = slice(rows[number].first - 1, lengths[number])
                    target = slice(begins[number], begins[number + 1])
                    log_probs[target] = scores[0][i, scored]
                    likeliest[target] = scores[1][i, scored]
            on_batch(batch)
        if self._processes > 1:
            log_probs, likeliest = sum_over_processes(log_probs), sum_over_processes(likeliest)
        return [(log_probs[i:j], likeliest[i:j]) for i, j in itertools.pairwise(begins)]

    def _score(self, rows: Sequence[TokenRow], length: int) -> Scores:
        """[B, S] of the tokens that rows, padded to this length, have after each of theirs."""
        shape = power_of_two(len(rows)), length
        ids = np.zeros(shape, np.int32)
        labels = np.full(shape, IGNORED, np.int32)
        segments = np.zeros(shape, np.int32)
        for i, row in enumerate(rows):
            last = len(row.ids) - 1
            assert 1 <= row.first <= last
            ids[i, :last] = row.ids[:-1]
            segments[i, :last] = 1
            labels[i, row.first - 1 : last] = row.ids[row.first :]
        return self.model.scores(ids, labels, segments=segments)


def sum_over_processes(ours: np.ndarray) -> np.ndarray:
    """The exact sum of arrays in which each entry is zero on all processes except one."""
    # imported here: it pulls in half of JAX's experiments
    from jax.experimental import multihost_utils

    size = len(ours)
    padded = np.pad(ours, (0, power_of_two(size) - size))  # few lengths: each is a program
    arrays = np.asarray(multihost_utils.process_allgather(padded))[:, :size]
    return arrays.any(axis=0) if ours.dtype == bool else arrays.sum(axis=0, dtype=ours.dtype)


def batches(
    lengths: Sequence[int], tokens: int, longest: int | None = None
) -> Iterator[tuple[list[int], int]]:
    """The rows of each batch, and their padded length, at most `longest`.

    The longest come first: they need the most memory.
    """
    by_size: dict[int, list[int]] = {}  # rows by their padded length
    for number, length in enumerate(lengths):
        size = max(min(rounded(length, SHORTEST), longest or sys.maxsize), length)
        by_size.setdefault(size, []).append(number)
    for size in sorted(by_size, reverse=True):
        # As many rows as there is room for, rounded down to a power of two.
        count = 1 << (max(tokens // size, 1).bit_length() - 1)
        for numbers in itertools.batched(by_size[size], count):
            yield list(numbers), size
