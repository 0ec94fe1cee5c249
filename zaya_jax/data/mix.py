"""Mixtures: says which source each row of the global batch comes from, by weight, in closed form.

One table of M entries holds each source in proportion to its weight and as evenly spread as possible; row r of a
stretch of steps takes entry r mod M. So every batch is as balanced as its size allows, and the number of rows that a
source gave before any (step, slot) is a prefix count instead of a replay. Weights and batch size may change from
stretch to stretch; counts add up.

`leave_out` skips the rows that some steps would have taken, or have: the steps' batch sizes and weights stay where they
are, each source goes on after the last row that it gave, and the table after its last entry.
"""

import bisect
import dataclasses
import functools

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
    entry: int = 0  # of the table's rows, endlessly repeated, the one that it begins with
    left_out: tuple[int, ...] = ()  # rows that each source passes over where it begins
    cut: bool = False  # whether it is the rest of one that something was left out of


class Mixture:
    """The sources of all rows of some stretches of steps that follow one another, the last without an end."""

    def __init__(self, stretches: list[Stretch]) -> None:
        self.stretches = stretches
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
        p, stretch = self.at(step)
        rows = _entry(stretch, step) + np.arange(stretch.batch)
        return self._tables[p][rows % TABLE_SIZE]

    def ranks(self, step: int, source: int) -> np.ndarray:
        """For each slot of the step: how many rows the source gave before it, in all steps and slots."""
        p, stretch = self.at(step)
        rows = _entry(stretch, step) + np.arange(stretch.batch)
        return self.before(step, source) + self._given(p, rows, source)

    def before(self, step: int, source: int) -> int:
        """How many rows the source gave before the stretch of this step, or has passed over until it begins."""
        p, _ = self.at(step)
        count = 0
        for q, stretch in enumerate(self.stretches[: p + 1]):
            count += stretch.left_out[source] if stretch.left_out else 0
            if q < p:
                count += int(self._given(q, np.int64(_entry(stretch, self.starts[q + 1])), source))
        return count

    def until(self, step: int, source: int) -> int:
        """How many it gave, or passed over, before this step."""
        p, stretch = self.at(step)
        return self.before(step, source) + int(self._given(p, np.int64(_entry(stretch, step)), source))

    def leave_out(self, first: int, stop: int) -> "Mixture":
        """From step `first` on without the rows that it and the steps after it, up to `stop`, have taken.

        Nothing may have been left out behind `stop` before.
        """
        p, stretch = self.at(first)
        left_out = np.array([self.until(stop, k) - self.until(first, k) for k in range(self.num_sources)])
        # Of the planned stretch that the step is of: where it ends, and where its table stood at the stop.
        later = [other for other in self.stretches[p + 1 :] if not other.cut]
        end = min(stop, later[0].first_step) if later else stop
        parts = [s for s in self.stretches[p:] if s.first_step <= end and (s.cut or s == stretch)]
        if first == stretch.first_step:
            left_out += np.array(stretch.left_out or [0] * self.num_sources)
        rest = dataclasses.replace(
            stretch, first_step=first, entry=_entry(parts[-1], end), left_out=tuple(left_out.tolist()),
            cut=stretch.cut or first > stretch.first_step,
        )  # fmt: skip
        later = [dataclasses.replace(s, left_out=() if s.first_step <= stop else s.left_out) for s in later]
        kept = self.stretches[: p + (first > stretch.first_step)]
        return Mixture([*kept, rest, *later])

    def rows_of(self, source: int) -> tuple[int, int]:
        """(rows that the source has at most in a batch, and as a rule), where it has most; (0, 0) without any."""
        most = share = 0
        for stretch, prefix in zip(self.stretches, self._prefixes, strict=True):
            places = np.arange(TABLE_SIZE)
            counts = self._count(prefix, places + stretch.batch, source) - prefix[:-1, source]
            most = max(most, int(counts.max()))
            share = max(share, round(stretch.batch * int(prefix[-1, source]) / TABLE_SIZE))
        return most, max(share, min(most, 1))

    def _given(self, p: int, rows, source: int):
        """How many rows of the source there are in a stretch's table from its first entry to these."""
        first = np.int64(self.stretches[p].entry)
        return self._count(self._prefixes[p], rows, source) - self._count(self._prefixes[p], first, source)

    def _count(self, prefix: np.ndarray, entries, source: int) -> np.ndarray:
        rounds, rest = np.divmod(entries, TABLE_SIZE)
        return rounds * prefix[-1, source] + prefix[rest, source]


def _entry(stretch: Stretch, step: int) -> int:
    """The entry of the table that a step of the stretch begins with."""
    return stretch.entry + (step - stretch.first_step) * stretch.batch


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
                f"a mixture weight of {weight} is below the resolution of 1/{TABLE_SIZE} of all rows; raise it or "
                "drop it"
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
            raise UserError(f"{where} has {part!r}; write each source once as path=weight, such as /data/web=0.7")
        weights[path] = weight
    if parts and sum(weights.values()) <= 0:
        raise UserError(f"{where}={parts} gives no source any weight; raise one above 0")
    return weights


def plan_sources(config: Config) -> tuple[list[str], list[tuple[int, str, Stretch]]]:
    """(paths of all sources, (context length, packing, stretch) of each part of the run) from data.* and
    schedule.phases.
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
    # In the order of the whole run, by which a mixture breaks ties, also where a fork has only some phases left.
    paths = [path for path in dict.fromkeys(path for weights in named for path in weights) if path in left]
    stretches = []
    for segment in segments:
        weights = named[segment.phase_index]
        row = tuple(weights.get(path, 0.0) for path in paths)
        stretch = Stretch(segment.first_step - 1, segment.sequences, row)
        stretches.append((segment.phase.seq_len, segment.phase.packing, stretch))
    return paths, stretches
