"""Accounts for a run's wall-clock time from its events: each second has exactly one use.

    account = account_of(events.read(workdir))      None where no start was recorded
    account.goodput                         seconds of steps that counted over the seconds that the run was supervised

From the first start to the last event there is always one of these uses:

    step       a step whose update is in the run now
    start, compile, evaluate, save, end     as the process said
    redone     steps that were computed again after going back, or left out
    silent     from a fault until it was noticed
    stopping   from there until nothing ran, and the pause before the next start
    again      start-up, restoring and compiling after a fault, until the first new step
    idle       between an end and the next start: no agent ran
    untold     a start that reported nothing

A start that follows a fault owes its time to that fault, whichever section it was in.
"""

import dataclasses
import itertools
import re
import statistics
from collections.abc import Sequence
from typing import Any

from zaya_jax.cluster.beats import SECTIONS
from zaya_jax.cluster.events import Event

LABELS = {
    "step": "training",
    "start": "starting",
    "compile": "compiling",
    "evaluate": "evaluating",
    "save": "saving",
    "end": "ending",
    "redone": "steps done again or left out",
    "silent": "faults before they were noticed",
    "stopping": "stopping and waiting",
    "again": "starting again",
    "idle": "not supervised",
    "untold": "not recorded",
}
USES = tuple(LABELS)
INTERRUPTIONS = ("died", "hangs", "lost", "found", "border")
LEAST, SHARE = 10.0, 0.01  # a window's seconds at least, and its share of the start's age
# Seconds between two windows that are the later one's: they are counted by another clock than
# events.
GAP = 1.0
WORDS = {
    "border": "border of phases, planned",
    "hangs": "a process hangs",
    "lost": "a node is lost",
    "spike": "a spike",
    "corrupt": "silent corruption",
}
DECISIONS = ("spike", "corrupt")  # of the training itself, which goes back


@dataclasses.dataclass
class Piece:
    """Some seconds with one use; `cause`: to which of the causes they are lost; `steps`: done
    before, and after."""

    begin: float
    seconds: float
    use: str
    cause: int | None = None
    steps: tuple[int, int] = (-1, -1)


@dataclasses.dataclass
class Cause:
    """One interruption, or one going back."""

    event: Event
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
        return WORDS.get(event.kind, event.kind)


@dataclasses.dataclass
class Account:
    """The uses of the run's time."""

    begin: float
    end: float
    pieces: list[Piece]
    causes: list[Cause]

    @property
    def left_out(self) -> list[Event]:
        """The decisions to leave batches out."""
        events = [cause.event for cause in self.causes]
        return [event for event in events if event.kind in DECISIONS and event.facts.get("batches")]

    @property
    def totals(self) -> dict[str, float]:
        """Seconds by use, all of USES."""
        found = dict.fromkeys(USES, 0.0)
        for piece in self.pieces:
            found[piece.use] += piece.seconds
        return found

    @property
    def goodput(self) -> float:
        """The share of the supervised time in steps that counted; NaN where no start reported
        anything."""
        totals = self.totals
        whole = sum(totals.values()) - totals["idle"]
        reported = whole - totals["untold"]
        return totals["step"] / whole if reported > 0 and whole > 0 else float("nan")


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
    alike: dict[tuple[str, str], list[Cause]] = {}
    for cause in account.causes:
        alike.setdefault((cause.label, cause.event.group), []).append(cause)
    rows = [
        CauseRow(
            *key,
            len(causes),
            sum(cause.lost for cause in causes),
            _spread([cause.event.seconds for cause in causes]),
            _spread([cause.recover for cause in causes if cause.recover is not None]),
        )
        for key, causes in alike.items()
    ]
    return sorted(rows, key=lambda row: (-row.lost, row.label))


def _spread(values: Sequence[float]) -> tuple[float, float]:
    return (statistics.median(values), max(values)) if values else (float("nan"), float("nan"))


def account_of(events: Sequence[Event]) -> Account | None:
    """The account of a run's events, which are in order of time; None where no start was
    recorded."""
    starts = [i for i, event in enumerate(events) if event.kind == "started"]
    if not starts:
        return None
    account = Account(events[starts[0]].time, events[-1].time, [], [])
    at, ended = account.begin, False
    pending: int | None = None  # the cause that is not recovered from yet
    for first, following in itertools.pairwise([*starts, len(events)]):
        begun, mine = events[first], events[first + 1 : following]
        at = _add(account, at, begun.time, "idle" if ended else "stopping", pending)
        _go_back(account, begun.time, max(begun.step, 0), pending)
        stop, end = _first(mine, *INTERRUPTIONS), _first(mine, "ended")
        until = (stop or end or events[min(following, len(events) - 1)]).time
        # A fault's event is written once nothing runs any more.
        began = stop.time - stop.seconds - float(stop.facts.get("stop", 0.0)) if stop else until
        fault = max(min(began, until), at)
        if pending is not None:
            recovered = _first(mine, "restarted")
            at = _add(
                account, at, min(recovered.time, fault) if recovered else fault, "again", pending
            )
            if recovered:
                account.causes[pending].recover = recovered.seconds
                pending = None
        at = _live(account, at, fault, mine)
        for event in mine:
            if event.kind in DECISIONS and "step" in event.facts:
                account.causes.append(Cause(event))
                _go_back(account, event.time, int(event.facts["step"]), len(account.causes) - 1)
        if stop:
            account.causes.append(Cause(stop))
            cause = len(account.causes) - 1
            pending = cause if pending is None else pending
            at = _add(account, at, min(at + stop.seconds, until), "silent", cause)
            at = _add(account, at, until, "stopping", cause)
        ended = end is not None
        if end:
            at = _add(account, at, end.time, "stopping", pending)
            pending = None
    use = "idle" if ended else "stopping" if pending is not None else "untold"
    _add(account, at, account.end, use, pending)
    for piece in account.pieces:
        if piece.cause is not None:
            account.causes[piece.cause].lost += piece.seconds
    return account


def _first(events: Sequence[Event], *kinds: str) -> Event | None:
    """The first event of these kinds. An interruption counts only if it names the start that it
    ended."""
    return next(
        (
            e
            for e in events
            if e.kind in kinds and (e.kind not in INTERRUPTIONS or "start" in e.facts)
        ),
        None,
    )


def _add(
    account: Account,
    begin: float,
    end: float,
    use: str,
    cause: int | None = None,
    steps: tuple[int, int] = (-1, -1),
) -> float:
    """Some seconds more; the time that is reached."""
    if end > begin:
        account.pieces.append(Piece(begin, end - begin, use, cause, steps))
    return max(begin, end)


def _live(account: Account, begin: float, end: float, mine: Sequence[Event]) -> float:
    """Adds the sections that a start reported between these times; the rest is untold."""
    at = begin
    for event in mine:
        given = event.facts.get("sections", {})
        sections = {name: float(given[name]) for name in SECTIONS if given.get(name, 0.0) > 0}
        reached = event.time - event.seconds
        if event.kind != "spent" or not sections or event.seconds <= 0 or reached >= end:
            continue
        if reached - at > GAP:
            at = _add(account, at, reached, "untold")
        steps = int(event.facts.get("from", -1)), event.step
        for name, seconds in sections.items():
            reached += event.seconds * seconds / sum(sections.values())
            at = _add(account, at, min(reached, end), name, steps=steps)
    # A killed start's last seconds, after its last window, count like that window.
    last = account.pieces[-1] if account.pieces and at > begin else None
    if last and last.use in SECTIONS:
        return _add(account, at, end, last.use, steps=(last.steps[1], last.steps[1]))
    return _add(account, at, end, "untold")


def _go_back(account: Account, time: float, step: int, cause: int | None) -> None:
    """The run goes on from this step: later steps that were computed before that time are done
    again."""
    pieces: list[Piece] = []
    for piece in account.pieces:
        before, after = piece.steps
        if piece.use != "step" or piece.begin >= time or (after <= step and before < step):
            pieces.append(piece)
            continue
        share = (step - before) / (after - before) if after > before else float(after < step)
        kept = piece.seconds * min(max(share, 0.0), 1.0)
        if kept:
            pieces.append(Piece(piece.begin, kept, "step", piece.cause, (before, min(after, step))))
        if kept < piece.seconds:
            lost = piece.begin + kept, piece.seconds - kept
            pieces.append(Piece(*lost, "redone", cause, (max(before, step), after)))
    account.pieces[:] = pieces


class Spending:
    """Gathers a start's seconds by section, for events of kind "spent" that `account_of` adds up.

    spending = Spending(now, step)              the start goes on from this step
    given = spending.see(section, step, now)      each second or so, of process 0; sometimes the fields of an event
    given = spending.end(now)                     the start has ended

    `now` is of any steady clock. Windows grow with the start's age, so that a month is some
    thousand lines.
    """

    def __init__(self, now: float, step: int):
        self._began = self._since = self._at = now
        self._section, self._from, self._step = "start", max(step, 0), max(step, 0)
        self._sections: dict[str, float] = {}

    def see(self, section: str, step: int, now: float) -> dict[str, Any] | None:
        """The process is there now: since the last look it was where it was then."""
        self._add(now)
        self._section = section or self._section
        # A process that has begun step n has ended n - 1; before its first step it says 0.
        done = step - 1 if section in ("step", "compile") else step
        self._step = max(self._step, done)
        due = max(LEAST, SHARE * (now - self._began))
        return self._take(now) if now - self._since >= due else None

    def end(self, now: float) -> dict[str, Any] | None:
        """Returns the rest."""
        self._add(now)
        return self._take(now) if self._sections else None

    def _add(self, now: float) -> None:
        if now > self._at:
            self._sections[self._section] = self._sections.get(self._section, 0.0) + now - self._at
            self._at = now

    def _take(self, now: float) -> dict[str, Any]:
        sections = {name: round(seconds, 3) for name, seconds in self._sections.items()}
        given = {
            "seconds": round(now - self._since, 3),
            "step": self._step,
            "facts": {"sections": sections, "from": self._from},
        }
        self._since, self._from, self._sections = now, self._step, {}
        return given
