"""Mixtures: says which source each row of the global batch comes from, by weight, in closed form.

One table of M entries holds each source in proportion to its weight and as evenly spread as
possible; row r of a stretch of steps takes entry r mod M. So every batch is as balanced as its size
allows, and the number of rows that a source gave before any (step, slot) is a prefix count instead
of a replay. Weights and batch size may change from stretch to stretch; counts add up.

`leave_out` passes over the rows that some steps have taken: the steps' batch sizes, weights and
entries of the table stay where they are, and each source goes on after the last row that it gave.
"""

import bisect
import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from zaya_jax import schedule
from zaya_jax.config import Config, UserError

TABLE_SIZE = 4099  # a prime, so that no usual batch sees the same part of the table each time


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Steps of one batch size and one mixture."""

    first_step: int  # 0 is the run's first
    batch: int  # rows per step
    weights: tuple[float, ...]  # one for each source


class Mixture:
    """The sources of all rows of some stretches of steps that follow one another, the last without
    an end.

    `passed` has, for each step that a run went back to, the rows of each source that are passed
    over from there on.
    """

    def __init__(
        self, stretches: list[Stretch], passed: Sequence[tuple[int, tuple[int, ...]]] = ()
    ) -> None:
        self.stretches, self._passed = stretches, tuple(passed)
        self.num_sources = len(stretches[0].weights)
        self.starts = [s.first_step for s in stretches]
        self._tables = [_table(s.weights) for s in stretches]
        self._prefixes = [_prefix(t, self.num_sources) for t in self._tables]

    def at(self, step: int) -> tuple[int, Stretch]:
        """The stretch of a step, with its number."""
        number = bisect.bisect_right(self.starts, step) - 1
        return number, self.stretches[number]

    def sources(self, step: int) -> np.ndarray:
        """The source of each slot of a step's global batch."""
        p, rows = self._rows(step)
        return self._tables[p][rows % TABLE_SIZE]

    def ranks(self, step: int, source: int) -> np.ndarray:
        """For each slot of the step: how many rows the source gave or passed over before it, in all
        steps and slots."""
        p, rows = self._rows(step)
        inside = self._count(p, rows, source) - self._count(p, rows[:1], source)
        return self.until(step, source) + inside

    def until(self, step: int, source: int) -> int:
        """How many rows the source gave or passed over before this step."""
        passed = next((rows[source] for first, rows in reversed(self._passed) if first <= step), 0)
        return self._planned(step, source) + passed

    def leave_out(self, first: int, stop: int) -> "Mixture":
        """From step `first` on without the rows that it and the steps after it, up to `stop`, have
        taken.

        Nothing may have been left out behind `stop` before.
        """
        rows = tuple(self.until(stop, k) - self._planned(first, k) for k in range(self.num_sources))
        return Mixture(
            self.stretches, [*(one for one in self._passed if one[0] < first), (first, rows)]
        )

    def rows_of(self, source: int) -> tuple[int, int]:
        """(rows that the source has at most in a batch, and as a rule), where it has most; (0, 0)
        without any."""
        most = share = 0
        for p, (stretch, prefix) in enumerate(zip(self.stretches, self._prefixes, strict=True)):
            places = np.arange(TABLE_SIZE)
            counts = self._count(p, places + stretch.batch, source) - prefix[:-1, source]
            most = max(most, int(counts.max()))
            share = max(share, round(stretch.batch * int(prefix[-1, source]) / TABLE_SIZE))
        return most, max(share, min(most, 1))

    def _rows(self, step: int) -> tuple[int, np.ndarray]:
        """(number of the step's stretch, rows of the stretch that the step takes)."""
        p, stretch = self.at(step)
        return p, (step - stretch.first_step) * stretch.batch + np.arange(stretch.batch)

    def _planned(self, step: int, source: int) -> int:
        """How many rows the source would have given before this step if nothing had been left
        out."""
        p, _ = self.at(step)
        ends = [*self.starts[1 : p + 1], step]
        sizes = [
            (end - s.first_step) * s.batch for s, end in zip(self.stretches, ends, strict=False)
        ]
        return sum(int(self._count(q, np.int64(size), source)) for q, size in enumerate(sizes))

    def _count(self, p: int, rows, source: int) -> np.ndarray:
        """How many of a stretch's first rows are of the source."""
        rounds, rest = np.divmod(rows, TABLE_SIZE)
        return rounds * self._prefixes[p][-1, source] + self._prefixes[p][rest, source]


def _quotas(weights: tuple[float, ...]) -> np.ndarray:
    """The entries of the table that each source has."""
    shares = np.array(weights, np.float64)
    shares = shares / shares.sum() * TABLE_SIZE
    quotas = np.floor(shares).astype(np.int64)
    for k in np.argsort(-(shares - quotas), kind="stable")[: TABLE_SIZE - quotas.sum()]:
        quotas[k] += 1
    for k, weight in enumerate(weights):
        if weight > 0 and quotas[k] == 0:
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
        k = int(behind.argmax())
        table[i] = k
        used[k] += 1
    return table


def _prefix(table: np.ndarray, num_sources: int) -> np.ndarray:
    chosen = table[:, None] == np.arange(num_sources)
    return np.concatenate([np.zeros((1, num_sources), np.int64), np.cumsum(chosen, axis=0)])


def parse(parts: tuple[str, ...], where: str = "config.data.mixture") -> dict[str, float]:
    """The weight of each path of a mixture that is written as "path=weight"."""
    weights: dict[str, float] = {}
    for part in parts:
        path, _, given = part.rpartition("=")
        try:
            weight = float(given)
        except ValueError:
            weight = -1.0
        if not path or not 0 <= weight < float("inf") or path in weights:
            raise UserError(
                f"{where} has {part!r}; write each source once as path=weight, such as"
                " /data/web=0.7"
            )
        weights[path] = weight
    if parts and sum(weights.values()) <= 0:
        raise UserError(f"{where}={parts} gives no source any weight; raise one above 0")
    return weights


def plan_sources(config: Config) -> tuple[list[str], list[tuple[int, str, Stretch]]]:
    """(paths of all sources, (context length, packing, stretch) of each part of the run) from
    data.* and schedule.phases.
    """
    default = parse(config.data.mixture) or {config.data.path: 1.0}
    if not config.schedule.phases:
        stretch = Stretch(config.run.fork_step, config.data.global_batch, tuple(default.values()))
        return list(default), [(config.data.seq_len, config.data.packing, stretch)]
    segments = schedule.make_plan(config).segments
    named = [
        parse(phase.mixture, f"config.schedule.phases[{i}].mixture") or default
        for i, phase in enumerate(config.schedule.phases)
    ]
    left = {path for segment in segments for path in named[segment.phase_index]}
    # In the order of the whole run, by which a mixture breaks ties, also where a fork has only some
    # phases left.
    paths = [
        path
        for path in dict.fromkeys(path for weights in named for path in weights)
        if path in left
    ]
    stretches = []
    for segment in segments:
        weights = named[segment.phase_index]
        row = tuple(weights.get(path, 0.0) for path in paths)
        stretch = Stretch(segment.first_step - 1, segment.sequences, row)
        stretches.append((segment.phase.seq_len, segment.phase.packing, stretch))
    return paths, stretches
