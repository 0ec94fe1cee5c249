"""Mixtures: says which source each row of the global batch comes from, by weight, in closed form.

One table of M entries holds each source in proportion to its weight and as evenly spread as
possible; the r-th row of a stretch of steps takes entry r mod M. So every batch is as balanced as
its size allows, and how many rows a source gave before a (step, slot) is a prefix sum, with no
replay. Weights and batch size may change from stretch to stretch; counts add up.

`skipping` passes over the rows that some steps have taken: the steps' batch sizes, weights and
entries of the table stay where they are, and each source continues after the last row that it gave.
"""

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Sequence

import numpy as np

from zaya_jax import schedule
from zaya_jax.config import Config, UserError

TABLE_SIZE = 4099  # a prime, so that no usual batch sees the same part of the table each time


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Steps of one batch size, one mixture and one way to cut rows."""

    first_step: int  # 0 is the run's first
    batch: int  # rows per step
    weights: tuple[float, ...]  # one for each source
    seq_len: int
    packing: str


class Mixture:
    """The sources of all rows of some stretches of steps that follow one another, the last without
    an end.

    `skipped` is (step, rows of each source), by ascending step: from the step on, each source is
    this many rows ahead of the plan, in all.
    """

    def __init__(
        self, stretches: list[Stretch], skipped: Sequence[tuple[int, np.ndarray]] = ()
    ) -> None:
        self.stretches = stretches
        self._skipped = skipped
        self._tables = [_table(stretch.weights) for stretch in stretches]
        num_sources = len(stretches[0].weights)
        self._prefixes = [_prefix(table, num_sources) for table in self._tables]
        # rows that the sources have given when each stretch begins
        self._at_start = [np.zeros(num_sources, np.int64)]
        for number, (stretch, following) in enumerate(itertools.pairwise(stretches)):
            rows = (following.first_step - stretch.first_step) * stretch.batch
            self._at_start.append(self._at_start[-1] + self._counts(number, rows))

    def stretch_of(self, step: int) -> tuple[int, Stretch]:
        """The stretch of a step, with its number."""
        number = bisect.bisect_right(self.stretches, step, key=lambda s: s.first_step) - 1
        assert number >= 0  # a fork has no steps before its own
        return number, self.stretches[number]

    def sources(self, step: int) -> np.ndarray:
        """The source of each slot of a step's global batch."""
        number, rows = self._rows_of_step(step)
        return self._tables[number][rows % TABLE_SIZE]

    def row_numbers(self, step: int, source: int) -> np.ndarray:
        """For each slot of the step: how many rows the source gave or passed over before it, in all
        steps and slots."""
        counts = self._counts(*self._rows_of_step(step))[:, source]
        return self._rows_before(step)[source] + counts - counts[0]

    def skipping(self, first: int, stop: int) -> "Mixture":
        """This mixture, passing over from step `first` on the rows that steps `first` to `stop` - 1
        took.

        No rows may have been skipped from a step after `stop` on.
        """
        earlier = [item for item in self._skipped if item[0] < first]
        ahead = self._rows_before(stop) - self._planned(first)
        return Mixture(self.stretches, [*earlier, (first, ahead)])

    def batch_row_counts(self, source: int) -> tuple[int, int]:
        """(most, usual) rows of the source in a batch, over all stretches; (0, 0) if it is
        unused."""
        most = usual = 0
        for number, stretch in enumerate(self.stretches):
            prefix = self._prefixes[number][:, source]
            # of batches that begin at each entry of the table
            ends = np.arange(TABLE_SIZE) + stretch.batch
            counts = self._counts(number, ends)[:, source] - prefix[:-1]
            most = max(most, int(counts.max()))
            usual = max(usual, round(stretch.batch * int(prefix[-1]) / TABLE_SIZE))
        return most, max(usual, min(most, 1))

    def _rows_of_step(self, step: int) -> tuple[int, np.ndarray]:
        """(number of the step's stretch, rows of the stretch that the step takes)."""
        number, stretch = self.stretch_of(step)
        first = (step - stretch.first_step) * stretch.batch
        return number, first + np.arange(stretch.batch)

    def _rows_before(self, step: int) -> np.ndarray:
        """How many rows each source gave or passed over before this step."""
        ahead = [rows for first, rows in self._skipped if first <= step]
        return self._planned(step) + (ahead[-1] if ahead else 0)

    def _planned(self, step: int) -> np.ndarray:
        """How many rows each source would have given before this step if none had been skipped."""
        number, stretch = self.stretch_of(step)
        rows = (step - stretch.first_step) * stretch.batch
        return self._at_start[number] + self._counts(number, rows)

    def _counts(self, number: int, rows: np.ndarray | int) -> np.ndarray:
        """How many of a stretch's first rows are of each source."""
        prefix = self._prefixes[number]
        rounds, rest = np.divmod(rows, TABLE_SIZE)
        return np.multiply.outer(rounds, prefix[-1]) + prefix[rest]


def _quotas(weights: tuple[float, ...]) -> np.ndarray:
    """The entries of the table that each source has."""
    exact = np.array(weights, np.float64)
    exact = exact / exact.sum() * TABLE_SIZE
    quotas = np.floor(exact).astype(np.int64)
    for source in np.argsort(-(exact - quotas), kind="stable")[: TABLE_SIZE - quotas.sum()]:
        quotas[source] += 1
    for weight, quota in zip(weights, quotas, strict=True):
        if weight > 0 and quota == 0:
            raise UserError(
                f"a mixture weight of {weight} is below the resolution of 1/{TABLE_SIZE} of all"
                " rows; raise it or drop it"
            )
    return quotas


@functools.lru_cache(64)  # 60 ms each
def _table(weights: tuple[float, ...]) -> np.ndarray:
    """Each source as often as its quota says, always the one that is furthest behind its share."""
    quotas = _quotas(weights)
    used = np.zeros(len(quotas), np.int64)
    table = np.empty(TABLE_SIZE, np.int64)
    for i in range(TABLE_SIZE):
        behind = quotas * (i + 1) - used * TABLE_SIZE
        behind[used >= quotas] = -TABLE_SIZE * TABLE_SIZE
        table[i] = behind.argmax()
        used[table[i]] += 1
    return table


def _prefix(table: np.ndarray, num_sources: int) -> np.ndarray:
    chosen = table[:, None] == np.arange(num_sources)
    return np.concatenate([np.zeros((1, num_sources), np.int64), np.cumsum(chosen, axis=0)])


def parse_mixture(entries: tuple[str, ...], where: str = "config.data.mixture") -> dict[str, float]:
    """The weight of each path of a mixture that is written as "path=weight"."""
    weights: dict[str, float] = {}
    for entry in entries:
        path, _, text = entry.rpartition("=")
        try:
            weight = float(text)
        except ValueError:
            weight = -1.0
        if not path or not 0 <= weight < float("inf") or path in weights:
            raise UserError(
                f"{where} has {entry!r}; write each source once as path=weight, such as"
                " /data/web=0.7"
            )
        weights[path] = weight
    if entries and sum(weights.values()) <= 0:
        raise UserError(f"{where}={entries} gives no source any weight; raise one above 0")
    return weights


def plan_sources(config: Config) -> tuple[list[str], list[Stretch]]:
    """(paths of all sources, stretches of the run) from data.* and schedule.phases."""
    default = parse_mixture(config.data.mixture) or {config.data.path: 1.0}
    if not config.schedule.phases:
        data, weights = config.data, tuple(default.values())
        first = config.run.fork_step
        return list(default), [
            Stretch(first, data.global_batch, weights, data.seq_len, data.packing)
        ]
    segments = schedule.make_plan(config).segments
    mixtures = [
        parse_mixture(phase.mixture, f"config.schedule.phases[{i}].mixture") or default
        for i, phase in enumerate(config.schedule.phases)
    ]
    left = {path for segment in segments for path in mixtures[segment.phase_index]}
    # In the order of the whole run, by which a mixture breaks ties, also where a fork has only some
    # phases left.
    named = dict.fromkeys(path for weights in mixtures for path in weights)
    paths = [path for path in named if path in left]
    stretches = []
    for segment in segments:
        mixture, phase = mixtures[segment.phase_index], segment.phase
        weights = tuple(mixture.get(path, 0.0) for path in paths)
        first = segment.first_step - 1  # steps are counted from 1 in a plan, from 0 here
        stretches.append(Stretch(first, segment.sequences, weights, phase.seq_len, phase.packing))
    return paths, stretches
