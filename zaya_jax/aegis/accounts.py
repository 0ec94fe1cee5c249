"""Accounts for a run's wall-clock time from its events: each second has exactly one use.

    account = account_of(events.read(workdir))      None where no start was recorded
    account.goodput                         seconds of steps that counted over the seconds that the run was supervised

From the first start to the last event there is always one of these uses:

    step        a step whose update is in the run now
    start, compile, evaluate, save, end     as the process said
    recomputed  steps that were computed again after going back, or left out
    undetected  from a fault until it was noticed
    stopping    from there until nothing ran, and the pause before the next start
    recovering  start-up, restoring and compiling after a fault, until the first new step
    idle        between an end and the next start: no agent ran
    unrecorded  a start that reported nothing

A start that follows a fault owes its time to that fault, whichever section it was in.
"""

import dataclasses
import itertools
import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from zaya_jax.cluster.beats import SECTIONS
from zaya_jax.cluster.events import RunEvent

LABELS = {
    "step": "training",
    "start": "starting",
    "compile": "compiling",
    "evaluate": "evaluating",
    "save": "saving",
    "end": "ending",
    "recomputed": "steps done again or left out",
    "undetected": "faults before they were noticed",
    "stopping": "stopping and waiting",
    "recovering": "starting again",
    "idle": "not supervised",
    "unrecorded": "not recorded",
}
USES = tuple(LABELS)
INTERRUPTIONS = ("died", "hangs", "lost", "found", "border")
# A window of the ledger has so many seconds at least, and this share of the start's age.
MIN_WINDOW = 10.0
WINDOW_SHARE = 0.01
# A gap between two windows that counts as the later one's, in seconds: events have another clock.
GAP = 1.0
LABELS_OF_KINDS = {
    "border": "planned restart between phases",
    "hangs": "a process hangs",
    "lost": "a node is lost",
    "spike": "a spike",
    "corrupt": "silent corruption",
}
ROLLBACKS = ("spike", "corrupt")  # the training itself goes back


@dataclasses.dataclass
class Interruption:
    """A fault, or a rollback."""

    event: RunEvent
    recover: float | None = None  # seconds from the fault to the first new step; None: it did not
    lost: float = 0.0

    @property
    def label(self) -> str:
        """The cause in a few words: without names and numbers, so that equal ones are counted
        together."""
        event = self.event
        if event.concluded and event.kind in ("found", "died"):
            return event.concluded[:60]
        if event.kind == "died":
            return f"died: {re.split(r'[;,]', event.seen)[0][:40]}" if event.seen else "died"
        return LABELS_OF_KINDS.get(event.kind, event.kind)


@dataclasses.dataclass
class TimeSpan:
    """Some seconds with one use; `interruption`: to which they are lost; `steps`: done before, and
    after."""

    begin: float
    seconds: float
    use: str
    interruption: Interruption | None = None
    steps: tuple[int, int] = (-1, -1)


@dataclasses.dataclass
class Account:
    """The uses of the run's time."""

    begin: float
    end: float
    spans: list[TimeSpan]
    interruptions: list[Interruption]

    @property
    def totals(self) -> dict[str, float]:
        """Seconds by use, all of USES."""
        totals = dict.fromkeys(USES, 0.0)
        for span in self.spans:
            totals[span.use] += span.seconds
        return totals

    @property
    def supervised(self) -> float:
        """Seconds during which an agent was there."""
        return self.end - self.begin - self.totals["idle"]

    @property
    def goodput(self) -> float:
        """The share of the supervised time in steps that counted; NaN where no start reported
        anything."""
        totals = self.totals
        if self.supervised <= totals["unrecorded"]:
            return float("nan")
        return totals["step"] / self.supervised


@dataclasses.dataclass(frozen=True)
class CauseRow:
    """Interruptions of one cause. `detect` and `recover`: median and worst seconds; NaN where none
    recovered."""

    label: str
    group: str
    count: int
    lost: float  # seconds
    detect: tuple[float, float]
    recover: tuple[float, float]


def by_cause(account: Account) -> list[CauseRow]:
    """The table by cause, the costliest first."""
    alike: dict[tuple[str, str], list[Interruption]] = {}
    for interruption in account.interruptions:
        key = interruption.label, interruption.event.group
        alike.setdefault(key, []).append(interruption)
    rows = [
        CauseRow(
            label,
            group,
            len(members),
            sum(member.lost for member in members),
            _median_max([member.event.seconds for member in members]),
            _median_max([member.recover for member in members if member.recover is not None]),
        )
        for (label, group), members in alike.items()
    ]
    return sorted(rows, key=lambda row: (-row.lost, row.label))


def _median_max(values: Sequence[float]) -> tuple[float, float]:
    return (statistics.median(values), max(values)) if values else (float("nan"), float("nan"))


def account_of(events: Sequence[RunEvent]) -> Account | None:
    """The account of a run's events, which are in order of time; None where no start was
    recorded."""
    starts = [i for i, event in enumerate(events) if event.kind == "started"]
    if not starts:
        return None
    accountant = _Accountant(events[starts[0]].time)
    end = events[-1].time
    for first, following in itertools.pairwise([*starts, len(events)]):
        next_start = events[following].time if following < len(events) else end
        accountant.add_start(events[first], events[first + 1 : following], next_start)
    return accountant.account(end)


class _Accountant:
    """Adds up a run's time, start by start."""

    def __init__(self, begin: float):
        self._begin = begin
        self._cursor = begin  # up to which time everything has a use
        self._spans: list[TimeSpan] = []
        self._interruptions: list[Interruption] = []
        self._pending: Interruption | None = None  # which is not recovered from yet
        self._ended = False

    def add_start(self, start: RunEvent, events: Sequence[RunEvent], next_start: float) -> None:
        """A start with its events until the next one."""
        self._add("idle" if self._ended else "stopping", start.time, self._pending)
        self._go_back(start.time, max(start.step, 0), self._pending)
        # An interruption counts only if it names the start that it ended.
        stop = _first(events, lambda e: e.kind in INTERRUPTIONS and "start" in e.facts)
        end = _first(events, lambda e: e.kind == "ended")
        last = stop or end
        until = last.time if last else next_start
        fault = until
        if stop:  # its event is written once nothing runs any more
            fault -= stop.seconds + float(stop.facts.get("stop", 0.0))
        fault = max(min(fault, until), self._cursor)
        if self._pending:
            recovered = _first(events, lambda e: e.kind == "restarted")
            until_new_step = min(recovered.time, fault) if recovered else fault
            self._add("recovering", until_new_step, self._pending)
            if recovered:
                self._pending.recover = recovered.seconds
                self._pending = None
        self._add_sections(fault, events)
        for event in events:
            if event.kind in ROLLBACKS and "step" in event.facts:
                rollback = Interruption(event)
                self._interruptions.append(rollback)
                self._go_back(event.time, int(event.facts["step"]), rollback)
        if stop:
            interruption = Interruption(stop)
            self._interruptions.append(interruption)
            self._pending = self._pending or interruption
            self._add("undetected", min(self._cursor + stop.seconds, until), interruption)
            self._add("stopping", until, interruption)
        self._ended = end is not None
        if end:
            self._add("stopping", end.time, self._pending)
            self._pending = None

    def account(self, end: float) -> Account:
        """The whole, up to the last event."""
        use = "stopping" if self._pending else "unrecorded"
        self._add("idle" if self._ended else use, end, self._pending)
        for span in self._spans:
            if span.interruption:
                span.interruption.lost += span.seconds
        return Account(self._begin, end, self._spans, self._interruptions)

    def _add(
        self,
        use: str,
        until: float,
        interruption: Interruption | None = None,
        steps: tuple[int, int] = (-1, -1),
    ) -> None:
        """The time from the cursor on has this use."""
        if until > self._cursor:
            seconds = until - self._cursor
            self._spans.append(TimeSpan(self._cursor, seconds, use, interruption, steps))
            self._cursor = until

    def _add_sections(self, until: float, events: Sequence[RunEvent]) -> None:
        """Adds the sections that a start reported; the rest is unrecorded."""
        begin = self._cursor
        for event in events:
            reported = event.facts.get("sections", {})
            sections = {
                name: float(reported[name]) for name in SECTIONS if reported.get(name, 0.0) > 0
            }
            reached = event.time - event.seconds
            if event.kind != "spent" or not sections or event.seconds <= 0 or reached >= until:
                continue
            if reached - self._cursor > GAP:
                self._add("unrecorded", reached)
            steps = int(event.facts.get("from", -1)), event.step
            for name, seconds in sections.items():
                reached += event.seconds * seconds / sum(sections.values())
                self._add(name, min(reached, until), steps=steps)
        # A killed start's last seconds, after its last window, count like that window.
        last = self._spans[-1] if self._spans and self._cursor > begin else None
        if last and last.use in SECTIONS:
            self._add(last.use, until, steps=(last.steps[1], last.steps[1]))
        self._add("unrecorded", until)

    def _go_back(self, time: float, step: int, interruption: Interruption | None) -> None:
        """The run continues from this step: later steps that were computed before that time are
        computed again."""
        spans: list[TimeSpan] = []
        for span in self._spans:
            before, after = span.steps
            if span.use != "step" or span.begin >= time or (after <= step and before < step):
                spans.append(span)
                continue
            # A span in which no step ended counts as computed again, unless it is an earlier one.
            share = float(after < step)
            if after > before:
                share = min(max((step - before) / (after - before), 0.0), 1.0)
            counted = span.seconds * share
            lost = span.seconds - counted
            if counted:
                steps = before, min(after, step)
                spans.append(TimeSpan(span.begin, counted, "step", span.interruption, steps))
            if lost:
                steps = max(before, step), after
                spans.append(
                    TimeSpan(span.begin + counted, lost, "recomputed", interruption, steps)
                )
        self._spans = spans


def _first(events: Sequence[RunEvent], fits: Callable[[RunEvent], bool]) -> RunEvent | None:
    return next((event for event in events if fits(event)), None)


class TimeLedger:
    """Gathers a start's seconds by section, for events of kind "spent" that `account_of` adds up.

    ledger = TimeLedger(now, step)                the start continues from this step
    fields = ledger.observe(section, step, now)   each second or so, of process 0; sometimes the fields of an event
    fields = ledger.close(now)                    the start has ended

    `now` is of any steady clock. Windows grow with the start's age, so that a month is some
    thousand lines.
    """

    def __init__(self, now: float, step: int):
        self._start = self._window_start = self._last = now
        self._section = "start"
        self._first_step = self._step = max(step, 0)
        self._sections: dict[str, float] = {}

    def observe(self, section: str, step: int, now: float) -> dict[str, Any] | None:
        """The process is there now: since the last time it was where it was then."""
        self._add(now)
        self._section = section or self._section
        # A process that has begun step n has ended n - 1; before its first step it says 0.
        done = step - 1 if section in ("step", "compile") else step
        self._step = max(self._step, done)
        window = max(MIN_WINDOW, WINDOW_SHARE * (now - self._start))
        return self._flush(now) if now - self._window_start >= window else None

    def close(self, now: float) -> dict[str, Any] | None:
        """Returns the rest."""
        self._add(now)
        return self._flush(now) if self._sections else None

    def _add(self, now: float) -> None:
        if now > self._last:
            seconds = self._sections.get(self._section, 0.0) + now - self._last
            self._sections[self._section] = seconds
            self._last = now

    def _flush(self, now: float) -> dict[str, Any]:
        sections = {name: round(seconds, 3) for name, seconds in self._sections.items()}
        fields = {
            "seconds": round(now - self._window_start, 3),
            "step": self._step,
            "facts": {"sections": sections, "from": self._first_step},
        }
        self._window_start, self._first_step, self._sections = now, self._step, {}
        return fields
