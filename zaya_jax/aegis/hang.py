"""Finds the process that hangs, from the positions that all processes report.

    watch = Hangs(); watch.begin()              a new start; times learned in earlier ones count on
    watch.heard(node, views, now)               a node's agent reports its processes
    watch.woke(now)                             an agent stood still itself: no process is blamed for it
    watch.find(now)                             facts.Hung, or None

A run hangs when its least advanced process has stayed at one position for longer than the limit of
that position. The others wait for it, so only its own limit counts. docs/aegis.md has the limits.

A process whose agent is silent is unknown, which is not standing: steps are synchronous, so it lives
while others come to later ones, and time counts only as far as any agent has reported.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from zaya_jax.aegis.facts import Hung
from zaya_jax.cluster.beats import MARKS, SECTIONS

# Seconds that a place may take at least, whatever was learned. Data may be slow for a while without
# any help from a restart; a first compilation of a large model takes minutes, as do restoring,
# saving and evaluating.
FLOORS = {
    "start": 600.0,
    "compile": 1800.0,
    "step": 4.5,
    "fetch": 30.0,
    "evaluate": 600.0,
    "save": 600.0,
    "end": 600.0,
}
TIMES = 3  # as long as the longest usual time
STEADY = 3  # laps before a start's own times say how long a step is
UNSTEADY = 60.0  # seconds for a step until then, at least
STOPPED = 4.5  # seconds in which the system shows a process as stopped
LAPS = 64
DEVICE = ("dispatch", "wait")  # the marks of a step whose program runs
QUIET = 2.5  # seconds without a pulse: five were due


class View(NamedTuple):
    """An agent's view of a process: its beat, ages for times, and its letter in /proc."""

    process: int
    section: str  # "" until its first report
    step: int
    mark: str
    age: float  # seconds in this place
    quiet: float  # seconds without a sign of life
    state: str
    laps: Sequence[Sequence[float]] = ()  # new ones: step, whole, own, data


@dataclasses.dataclass
class _Seen:
    node: int
    view: View
    since: float
    pulse: float
    heard: float = 0.0  # when its agent last reported it
    stopped: float | None = None  # since when
    ended: int = -1  # the newest step
    laps: collections.deque[float] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=LAPS)
    )

    @property
    def place(self) -> tuple[int, int, int]:
        if not self.view.section:
            return -1, 0, 0
        return self.view.step, SECTIONS.index(self.view.section), MARKS.index(self.view.mark)


class Hangs:
    def __init__(self) -> None:
        self._longest: dict[str, float] = {}  # by place, of all starts
        self._seen: dict[int, _Seen] = {}
        self._woke = 0.0

    def begin(self) -> None:
        """A new start: no process has reported yet."""
        steps = [_usual(s.laps) for s in self._seen.values() if len(s.laps) >= STEADY]
        self._longest["step"] = max(steps, default=self._longest.get("step", 0.0))
        self._seen.clear()

    def step(self) -> int:
        """The newest step that all have ended; -1 where that is not known."""
        return min((s.ended for s in self._seen.values()), default=-1)

    def woke(self, now: float) -> None:
        """Times begin anew."""
        self._woke = now

    def heard(self, node: int, views: Sequence[View], now: float) -> None:
        """Takes the views of a node's agent."""
        for view in views:
            seen = self._seen.get(view.process)
            if seen is None:
                seen = self._seen[view.process] = _Seen(
                    node, view, now - view.age, now - view.quiet
                )
            since = now - view.age
            if view.section != seen.view.section:
                self._learn(seen.view.section, since - max(seen.since, self._woke))
                if view.section == "compile" and len(seen.laps) >= STEADY:
                    self._longest["step"] = _usual(seen.laps)
                if view.section == "compile":
                    seen.laps.clear()  # another program: its steps may take longer
            seen.view, seen.pulse, seen.heard = view, now - view.quiet, now
            seen.since = max(since, seen.since)
            for step, whole, _, data in view.laps:
                seen.ended = int(step)
                seen.laps.append(whole)
                self._learn("fetch", data)
            if view.state != "T":
                seen.stopped = None
            elif seen.stopped is None:
                seen.stopped = now

    def find(self, now: float) -> Hung | None:
        """The process that has stood still for longer than it may, if there is one."""
        if not self._seen:
            return None
        stopped = [
            p
            for p, s in self._seen.items()
            if s.stopped is not None and s.heard - max(s.stopped, self._woke) > STOPPED
        ]
        # Those that the furthest ones have left behind since they were last heard of may have moved.
        furthest, since = max((s.place[:2], s.since) for s in self._seen.values())
        known = [p for p, s in self._seen.items() if s.place[:2] == furthest or s.heard >= since]
        first = min(known, key=lambda p: self._order(p, now))
        told = max(s.heard for s in self._seen.values())
        late = told - max(self._seen[first].since, self._woke) > self.limit(first)
        if not stopped and not late:
            return None
        # One that is known to be behind stopped before any whose agent is silent.
        reached = max(s.place for s in self._seen.values())
        behind = [p for p in known if self._seen[p].place < reached]
        suspects = stopped or behind or self._seen
        return self._name(min(suspects, key=lambda p: self._order(p, now)), now)

    def limit(self, process: int) -> float:
        """How long this process may be where it is."""
        seen = self._seen[process]
        section, laps = seen.view.section or "start", seen.laps  # it imports, and says nothing yet
        if section != "step":
            return max(FLOORS[section], TIMES * self._longest.get(section, 0.0))
        if not laps:  # its first step of a start may compile
            return max(FLOORS["compile"], TIMES * self._longest.get("compile", 0.0))
        # it waits for a disk: for data, or to write its figures
        if seen.view.mark in ("fetch", "figures"):
            return max(
                FLOORS["fetch"], TIMES * _usual(laps), TIMES * self._longest.get("fetch", 0.0)
            )
        if len(laps) < STEADY:
            return max(UNSTEADY, TIMES * self._longest.get("step", 0.0))
        return max(FLOORS["step"], TIMES * _usual(laps))

    def _learn(self, section: str, seconds: float) -> None:
        if section in FLOORS and section != "step":
            self._longest[section] = max(self._longest.get(section, 0.0), seconds)

    def _order(self, process: int, now: float) -> tuple:
        seen = self._seen[process]
        quiet = now - max(seen.pulse, self._woke) > QUIET
        return seen.place, not quiet, "TDZ".find(seen.view.state) % 4, seen.since

    def _name(self, first: int, now: float) -> Hung:
        seen = self._seen[first]
        view, since = seen.view, max(seen.since, self._woke)
        if seen.stopped is not None:
            since = max(since, seen.stopped)
        where = (
            f"{view.section} {view.step} {view.mark}".strip()
            if view.section
            else "an unknown place"
        )
        quiet = now - max(seen.pulse, self._woke) > QUIET
        how = {"T": "stopped", "D": "waits for a disk or a driver", "Z": "dead"}.get(view.state, "")
        seen_words = f"process {first} stands at {where} for {now - since:.1f} s"
        seen_words += ", without a sign of life" if quiet and view.section else ""
        seen_words += f", {how} (state {view.state})" if how else ""
        others = [p for p in self._seen if p != first]
        alike = [p for p in others if self._order(p, now)[:3] == self._order(first, now)[:3]]
        if not others:
            return Hung(seen.node, first, seen_words, f"process {first} hangs", now - since)
        if alike:
            concluded = (
                f"process {first} and {len(alike)} more stand alike at one place: which began it"
                " does not show"
            )
        else:
            concluded = f"process {first} stopped first; {len(others)} wait for it"
        together = len(alike) == len(others) and view.section == "step" and view.mark in DEVICE
        return Hung(
            seen.node, first, seen_words, concluded, now - since, together and not quiet and not how
        )


def _usual(laps: Sequence[float]) -> float:
    """The longest of a step's times but for a twentieth of them."""
    ordered = sorted(laps)
    return ordered[min(int(0.95 * len(ordered)), len(ordered) - 1)]
