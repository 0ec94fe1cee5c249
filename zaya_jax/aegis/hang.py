"""Finds the process that hangs, from the positions that all processes report.

    hangs = Hangs(); hangs.begin()          a new start; times learned in earlier ones are kept
    hangs.take_views(views, now)            an agent reports its processes
    hangs.woke(now)                         an agent stood still itself: no process is blamed for it
    hangs.find(now)                         facts.Hung, or None

A run hangs when its least advanced process has stayed at one position for longer than the limit of
that position. The others wait for it, so only its own limit counts. docs/aegis.md has the limits.

A process whose agent is silent is treated as unknown, not as stuck: steps are synchronous, so it
lives while others come to later ones, and time counts only as far as any agent has reported.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from zaya_jax.aegis.facts import Hung
from zaya_jax.cluster.beats import MARKS, SECTIONS

# Seconds that a section may take at least, whatever was learned. Data may be slow for a while
# without any help from a restart; a first compilation of a large model takes minutes, as do
# restoring, saving and evaluating.
FLOORS = {
    "start": 600.0,
    "compile": 1800.0,
    "step": 4.5,
    "fetch": 30.0,
    "evaluate": 600.0,
    "save": 600.0,
    "end": 600.0,
}
FACTOR = 3  # a limit is so many times the usual time
MIN_LAPS = 3  # before a start's own times tell how long a step is
FLOOR_OF_FEW_LAPS = 60.0  # seconds for a step until then, at least
STOPPED = 4.5  # seconds in which the system shows a process as stopped
LAPS = 64
DEVICE = ("dispatch", "wait")  # the marks of a step whose program runs
NO_PULSE = 2.5  # seconds; five pulses were due
# States in /proc for which a process is blamed before others at its position, in this order.
STATES = {"T": "stopped", "D": "waits for a disk or a driver", "Z": "dead"}


class View(NamedTuple):
    """An agent's view of a process: its beat, ages for times, and its letter in /proc."""

    process: int
    section: str  # "" until its first report
    step: int
    mark: str
    age: float  # seconds at this position
    quiet: float  # seconds without a sign of life
    state: str
    laps: Sequence[Sequence[float]] = ()  # new ones: step, whole, own, data


@dataclasses.dataclass
class _Tracked:
    view: View
    since: float  # at this position
    pulse: float
    last_heard: float = 0.0  # when its agent last reported it
    stopped: float | None = None  # since when the system shows it as stopped
    last_step: int = -1
    laps: collections.deque[float] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=LAPS)
    )

    @property
    def position(self) -> tuple[int, int, int]:
        """Step, section and mark, in an order that grows."""
        if not self.view.section:
            return -1, 0, 0
        return self.view.step, SECTIONS.index(self.view.section), MARKS.index(self.view.mark)

    def blame(self, now: float) -> tuple:
        """The process with the lowest is blamed first."""
        state = [*STATES, self.view.state].index(self.view.state)
        return self.position, now - self.pulse <= NO_PULSE, state, self.since


class Hangs:
    def __init__(self) -> None:
        # Seconds, of all starts: the longest by section and "fetch", the usual ones of "step".
        self._learned: dict[str, float] = {}
        self._tracked: dict[int, _Tracked] = {}

    def begin(self) -> None:
        """A new start: no process has reported yet."""
        self._learn_steps(*self._tracked.values())
        self._tracked.clear()

    def step(self) -> int:
        """The newest step that all have ended; -1 where that is not known."""
        return min((t.last_step for t in self._tracked.values()), default=-1)

    def woke(self, now: float) -> None:
        """Times begin anew."""
        for tracked in self._tracked.values():
            tracked.since = tracked.pulse = now
            if tracked.stopped is not None:
                tracked.stopped = now

    def take_views(self, views: Sequence[View], now: float) -> None:
        """Takes an agent's views."""
        for view in views:
            since, pulse = now - view.age, now - view.quiet
            tracked = self._tracked.get(view.process)
            if tracked is None:
                tracked = self._tracked[view.process] = _Tracked(view, since, pulse)
            if view.section != tracked.view.section:
                self._learn(tracked.view.section, since - tracked.since)
                if view.section == "compile":  # another program: its steps may take longer
                    self._learn_steps(tracked)
                    tracked.laps.clear()
            tracked.view, tracked.last_heard = view, now
            # What it says may be older than its agent's sleep.
            tracked.since, tracked.pulse = max(since, tracked.since), max(pulse, tracked.pulse)
            for step, whole, _, data in view.laps:
                tracked.last_step = int(step)
                tracked.laps.append(whole)
                self._learn("fetch", data)
            if view.state != "T":
                tracked.stopped = None
            elif tracked.stopped is None:
                tracked.stopped = now

    def find(self, now: float) -> Hung | None:
        """The process that has made no progress for longer than it may, if there is one."""
        tracked = [*self._tracked.values()]
        if not tracked:
            return None
        stopped = [
            t for t in tracked if t.stopped is not None and t.last_heard - t.stopped > STOPPED
        ]
        # Those that the furthest ones have left behind since they were last heard of may have moved.
        furthest, since = max((t.position[:2], t.since) for t in tracked)
        known = [t for t in tracked if t.position[:2] == furthest or t.last_heard >= since]
        last = min(known, key=lambda t: t.blame(now))
        newest_report = max(t.last_heard for t in tracked)
        if not stopped and newest_report - last.since <= self._limit(last):
            return None
        # One that is known to be behind stopped before any whose agent is silent.
        reached = max(t.position for t in tracked)
        behind = [t for t in known if t.position < reached]
        first = min(stopped or behind or tracked, key=lambda t: t.blame(now))
        return _name(first, [t for t in tracked if t is not first], now)

    def _limit(self, tracked: _Tracked) -> float:
        """How long a process may be at its position."""
        laps = tracked.laps
        section = tracked.view.section or "start"  # it imports, and reports nothing yet
        if section == "step" and not laps:
            section = "compile"  # its first step of a start may compile
        if section != "step":
            return max(FLOORS[section], FACTOR * self._learned.get(section, 0.0))
        if tracked.view.mark in ("fetch", "figures"):  # it reads or writes a disk
            usual = max(_usual(laps), self._learned.get("fetch", 0.0))
            return max(FLOORS["fetch"], FACTOR * usual)
        if len(laps) < MIN_LAPS:
            # Its own steps count too: a run that never came to a third would learn nothing.
            usual = max(_usual(laps), self._learned.get("step", 0.0))
            return max(FLOOR_OF_FEW_LAPS, FACTOR * usual)
        return max(FLOORS["step"], FACTOR * _usual(laps))

    def _learn(self, section: str, seconds: float) -> None:
        if section in FLOORS and section != "step":
            self._learned[section] = max(self._learned.get(section, 0.0), seconds)

    def _learn_steps(self, *tracked: _Tracked) -> None:
        """The usual step of a program that ends."""
        usual = [_usual(t.laps) for t in tracked if len(t.laps) >= MIN_LAPS]
        if usual:
            self._learned["step"] = max(usual)


def _name(first: _Tracked, others: Sequence[_Tracked], now: float) -> Hung:
    """The hang of the process that stopped first."""
    view, process = first.view, first.view.process
    seconds = now - max(first.since, first.stopped or 0.0)
    state = STATES.get(view.state, "")
    no_pulse = now - first.pulse > NO_PULSE
    seen = f"process {process} has been at an unknown position for {seconds:.1f} s"
    if view.section:
        place = f"{view.section} {view.step}" + (f" ({view.mark})" if view.mark else "")
        seen = f"process {process} has been at {place} for {seconds:.1f} s"
    if no_pulse and view.section:
        seen += ", without a sign of life"
    if state:
        seen += f", {state} (state {view.state})"
    alike = [other for other in others if other.blame(now)[:3] == first.blame(now)[:3]]
    concluded = f"process {process} stopped first; {len(others)} wait for it"
    if not others:
        concluded = f"process {process} hangs"
    elif alike:
        concluded = (
            f"process {process} and {len(alike)} others are stuck at the same point; it is not"
            " clear which stopped first"
        )
    # All wait for each other in one step's program, and live.
    in_program = view.section == "step" and view.mark in DEVICE
    live = not no_pulse and not state
    all_wait = 0 < len(others) == len(alike) and in_program and live
    return Hung(process, seen, concluded, seconds, all_wait)


def _usual(laps: Sequence[float]) -> float:
    """The 95th percentile of some steps' seconds: the longest, but for a twentieth of them."""
    ordered = sorted(laps)
    return ordered[min(int(0.95 * len(ordered)), len(ordered) - 1)]
