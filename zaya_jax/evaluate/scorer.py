"""Log-probabilities of many rows of tokens: sorted by length, in batches of few shapes.

    scorer = Scorer(model)
    for log_probs, likeliest in scorer([Row(ids, first=3), ...]): ...

Rows of like length go together, so that little is padding and few programs are compiled: lengths are rounded up to
powers of two and halfway between, rows of a batch to powers of two, within `tokens` a batch.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from zaya_jax.functions import IGNORED
from zaya_jax.library import LanguageModel

TOKENS = 8192  # of a batch
SHORTEST = 16  # shorter rows are padded to it

Scores = tuple[
    np.ndarray, np.ndarray
]  # of each scored token: log-probability in nats, whether it is the likeliest


@dataclasses.dataclass(frozen=True)
class Row:
    """Tokens, of which those from `first` on are scored, each after all before it. `first` is at least 1."""

    ids: Sequence[int]
    first: int = 1


class Scorer:
    """See the module. The results are in the order of the rows, and depend on no other row."""

    def __init__(self, model: LanguageModel, tokens: int = TOKENS):
        self.model, self._tokens = model, tokens

    def __call__(self, rows: Sequence[Row], tell: Callable[[int], None] = lambda done: None) -> list[Scores]:
        """`tell` is called with the number of rows of each batch that is done."""
        found: list[Scores | None] = [None] * len(rows)
        for numbers, length in batches([len(row.ids) - 1 for row in rows], self._tokens):
            shape = power_of_two(len(numbers)), length
            ids, labels = np.zeros(shape, np.int32), np.full(shape, IGNORED, np.int32)
            segments = np.zeros(shape, np.int32)
            for place, number in enumerate(numbers):
                row = np.asarray(rows[number].ids, np.int32)
                first, end = rows[number].first, len(row)
                assert 1 <= first < end
                ids[place, : end - 1], segments[place, : end - 1] = row[:-1], 1
                labels[place, first - 1 : end - 1] = row[first:]
            log_probs, likeliest = self.model.scores(ids, labels, segments=segments)
            for place, number in enumerate(numbers):
                scored = slice(rows[number].first - 1, len(rows[number].ids) - 1)
                found[number] = log_probs[place, scored], likeliest[place, scored]
            tell(len(numbers))
        return [scores for scores in found if scores is not None]


def batches(lengths: Sequence[int], tokens: int) -> Iterator[tuple[list[int], int]]:
    """Which rows go together, and how long they are with padding. The longest come first: they need the most memory."""
    waiting: list[int] = []
    padded = [rounded(length) for length in lengths]
    for number in sorted(range(len(lengths)), key=lambda n: (-padded[n], n)):
        full = waiting and (
            padded[number] != padded[waiting[0]]
            or len(waiting) >= power_of_two(tokens // padded[waiting[0]], up=False)
        )
        if full:
            yield waiting, padded[waiting[0]]
            waiting = []
        waiting.append(number)
    if waiting:
        yield waiting, padded[waiting[0]]


def rounded(length: int) -> int:
    """The next of 16, 24, 32, 48, 64, 96, ...: at most a third is padding."""
    above = power_of_two(max(length, SHORTEST))
    return above * 3 // 4 if length <= above * 3 // 4 and above > SHORTEST else above


def power_of_two(number: int, up: bool = True) -> int:
    """The next one from here, or the last one before; at least 1."""
    below = 1 << (max(number, 1).bit_length() - 1)
    return below * 2 if up and below < number else below
