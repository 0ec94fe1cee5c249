"""The loop's clock: reports where the loop is (`cluster.beats`), and measures each step's seconds.

    pace.begin("step", number, program)   waits for a batch; the first call of a program counts as "compile"
    pace.mark_dispatch()                  the step's program is called
    pace.at(section, number, mark)        any other place; pace.mark(mark) changes only the mark
    pace.lap()                            reports the times of the step that has ended
    pace.start(); pace.end_step()         seconds from the end of one step to that of the next,
    with pace.outside_a_step(): ...       without what runs in here: evaluations, replays

The time that a save holds the loop up counts for the step after it. A step's own seconds, which
`lap` reports, leave out the time that this process waited for data, figures or other processes.
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Hashable, Iterator

import jax

from zaya_jax.cluster import beats

OTHERS = ("fetch", "wait")  # marks at which a process only waits


class Pace:
    """The pace of one start; `device` is one of those that compute."""

    def __init__(self, device: jax.Device):
        # On a CPU the call itself computes, so time in it counts as waiting for other processes.
        self._calling = "wait" if device.platform == "cpu" else "dispatch"
        self._known, self._compiled = set[Hashable](), False
        self._spent = defaultdict[tuple[str, str], float](float)
        # `_where`: section and mark
        self._where, self._step, self._since = ("start", ""), 0, time.perf_counter()
        self.start()

    def start(self) -> None:
        """The first step begins now."""
        self._step_began = time.perf_counter()

    def end_step(self) -> float:
        """Ends a step and begins the next; returns the seconds of the one that ended."""
        began, self._step_began = self._step_began, time.perf_counter()
        return self._step_began - began

    @contextlib.contextmanager
    def outside_a_step(self) -> Iterator[None]:
        """Leaves the time spent inside out of the step's seconds."""
        since = time.perf_counter()
        yield
        self._step_began += time.perf_counter() - since

    def at(self, section: str, step: int, mark: str = "") -> None:
        """Reports where the loop is now, and counts the time until now for where it was."""
        now = time.perf_counter()
        self._spent[self._where] += now - self._since
        self._where, self._step, self._since = (section, mark), step, now
        beats.at(section, step, mark)

    def mark(self, mark: str) -> None:
        """Reports another place within the same section and step."""
        self.at(self._where[0], self._step, mark)

    def begin(self, section: str, step: int, program: Hashable) -> None:
        """Begins a step or an evaluation; a program that was not called before is compiled in
        it."""
        mark = "fetch" if section == "step" else "dispatch"
        if program not in self._known:
            self._known.add(program)
            # An evaluation's time is no part of the lap that it falls into.
            self._compiled = self._compiled or section == "step"
            section = "compile"
        self.at(section, step, mark)

    def mark_dispatch(self) -> None:
        """Reports that the step's batch has come and its program is called."""
        self.mark("dispatch" if self._where[0] == "compile" else self._calling)

    def lap(self) -> None:
        """Reports the times of the step that ended, unless it compiled: no other step could be
        compared with it."""
        self.mark(self._where[1])  # counts the time until now
        spent, self._spent = self._spent, defaultdict(float)
        compiled, self._compiled = self._compiled, False
        if compiled:
            return
        by_mark = {mark: seconds for (section, mark), seconds in spent.items() if section == "step"}
        busy = sum(seconds for mark, seconds in by_mark.items() if mark not in OTHERS)
        beats.lap(self._step, sum(by_mark.values()), busy, by_mark.get("fetch", 0.0))
