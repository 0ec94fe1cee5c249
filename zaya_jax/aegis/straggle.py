"""Finds processes that are persistently slower than the others at their own part of each step.

    watch = Stragglers(count)                   of so many processes
    watch.add(process, step, whole, own)        seconds of a lap, as `beats.lap` says them
    watch.poll()                                those found since the last poll, each at most once per start

The measure is the ratio of a process's own work in a step to the median of the others'. A process
is named if its ratio is above SLOWER in MOST_STEPS of each of two windows in a row, and costs more
than MIN_STEP_SHARE of the step. Steps are counted, not averaged, because ratios scatter by a factor
of ten where the others have next to nothing to do. Garbage collection, and anything else in few
steps, names nobody.
"""

import collections
from typing import NamedTuple

import numpy as np

WINDOW = 64  # steps
SLOWER = 1.15
MOST_STEPS = 0.75  # equal processes reach it in two windows once in 10^9
MIN_STEP_SHARE = 0.05  # that it must cost
# seconds that process 0 may take more: it writes the figures, 8 to 20 ms on a crowded machine
WRITER_ALLOWANCE = 0.05
MAX_PENDING_STEPS = 1000  # steps that some process has not reported yet


class Straggler(NamedTuple):
    """A process, its ratio, the share of a step that it costs, and over which steps."""

    process: int
    ratio: float
    costs: float
    steps: tuple[int, int]


class Stragglers:
    def __init__(self, count: int):
        self._count = count
        self._waiting: dict[int, dict[int, tuple[float, float]]] = {}
        self._rows: collections.deque[tuple[int, np.ndarray, np.ndarray]] = collections.deque(
            maxlen=2 * WINDOW
        )
        self._new, self._named = 0, set[int]()

    def add(self, process: int, step: int, whole: float, own: float) -> None:
        """A process has ended a step."""
        laps = self._waiting.setdefault(step, {})
        laps[process] = whole, own
        if len(laps) == self._count > 1:
            del self._waiting[step]
            wholes, owns = np.array([laps[p] for p in range(self._count)]).T
            others = _median_of_others(owns)
            more = owns - others
            more[0] -= WRITER_ALLOWANCE
            costs = more / max(float(np.median(wholes)), 1e-9)
            self._rows.append((step, owns / np.maximum(others, 1e-9), costs))
            self._new += 1
        while len(self._waiting) > MAX_PENDING_STEPS:
            del self._waiting[min(self._waiting)]

    def poll(self) -> list[Straggler]:
        """The processes that are slow in both windows and were not named yet, judged at each
        quarter of a window."""
        if len(self._rows) < 2 * WINDOW or self._new < WINDOW // 4:
            return []
        self._new = 0
        steps, *tables = zip(*self._rows, strict=True)
        ratios, costs = map(np.array, tables)  # [steps, processes]
        windows = 2, WINDOW, self._count
        often = np.mean(ratios.reshape(windows) > SLOWER, axis=1) >= MOST_STEPS
        slow = often & (np.median(costs.reshape(windows), axis=1) > MIN_STEP_SHARE)
        found = {*np.flatnonzero(slow.all(0)).tolist()} - self._named
        self._named |= found
        ratio, cost = np.median(ratios, axis=0), np.median(costs, axis=0)
        return [
            Straggler(p, float(ratio[p]), float(cost[p]), (steps[0], steps[-1]))
            for p in sorted(found)
        ]


def _median_of_others(owns: np.ndarray) -> np.ndarray:
    """The median of the others, for each process; 12 ms for 1,024."""
    count = len(owns)
    others = np.broadcast_to(owns, (count, count))[~np.eye(count, dtype=bool)]
    return np.median(others.reshape(count, count - 1), axis=1)
