"""Finds the cause of a start's end from its processes' exits and the findings of the minute before.

    cause = first_end(exits, findings, saved, node_of)

Several processes end for one reason, and the first end may be reported after those that followed
from it. Among the ends within TOGETHER seconds of the first bad one, the lowest `_rank` began it. A
finding explains it: for the codes by which all processes end together (a wrong device, the storage)
the one that names its process; for a signal only one of that process; else the first critical
finding, or the first that is no consequence of another. Where two processes each say that the other
is gone, their connection broke.
"""

import dataclasses
import re
import signal
from collections.abc import Callable, Iterable, Sequence

from zaya_jax.aegis import facts
from zaya_jax.cluster.events import Finding
from zaya_jax.cluster.leaving import BAD_INPUT, DONE, HARDWARE, PREEMPTED, STORAGE, UNHEALTHY

COMPUTES_WRONGLY = "computes wrongly"
WRONG = f"device {COMPUTES_WRONGLY}"  # the rule for the line with which such a run ends
TOGETHER = 2.0  # seconds; an end so soon after the first one may be its cause, reported later
EXPLAINS = 60.0  # a finding so long before an end may be its reason
# Codes with which a training says itself why it ends: no line of a log explains them better.
SAYS_WHY = (DONE, PREEMPTED, UNHEALTHY, STORAGE, BAD_INPUT)

Exits = Sequence[tuple[float, facts.Exited]]
Findings = Sequence[tuple[float, facts.Found]]


@dataclasses.dataclass
class Cause:
    """Why a start came to its end."""

    kind: str
    time: float
    node: int = -1
    process: int = -1
    seen: str = ""
    concluded: str = ""
    code: int = 1
    group: str = "note"
    exclude: bool = False
    free: bool = False  # does not count as a restart
    seconds: float = 0.0  # until it was noticed


def words(code: int) -> str:
    """SIGKILL, or exit code 3."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def shell(code: int) -> int:
    """The code that a shell gives: 137 for SIGKILL."""
    return 128 - code if code < 0 else code


def by_signal(code: int) -> bool:
    """Whether a signal ended it from outside; libraries abort (SIGABRT) when others are gone."""
    return code < 0 and -code != signal.SIGABRT


def _rank(code: int) -> int:
    """Which of several ends that came together began it: the lowest."""
    if code < 0:
        return 0 if by_signal(code) else 1
    return {HARDWARE: 2, UNHEALTHY: 3, BAD_INPUT: 3, STORAGE: 3, PREEMPTED: 5, DONE: 6}.get(code, 4)


def cause_of(fact: facts.Found, time: float) -> Cause:
    """A finding that ends a start."""
    finding = fact.finding
    return Cause(
        "found",
        time,
        fact.node,
        finding.process,
        finding.seen,
        finding.name,
        group=finding.group,
        exclude=finding.action == "exclude",
    )


def first_end(
    exits: Exits, findings: Findings, saved: bool, node_of: Callable[[int], int]
) -> Cause:
    """The end that began it, and the finding that explains it. `saved`: whether this start has made
    a checkpoint."""
    bad = [e for e in exits if e[1].code not in (DONE, PREEMPTED)] or exits
    together = [e for e in bad if e[0] - bad[0][0] <= TOGETHER]
    time, first = min(together, key=lambda e: (_rank(e[1].code), e[0]))
    cause = Cause("died", time, first.node, first.process, words(first.code), code=first.code)
    if first.code in (DONE, PREEMPTED):
        if saved and PREEMPTED in {e.code for _, e in exits}:
            cause.kind, cause.free = "border", True
        return cause
    cause.group = "distributed"
    before = [(when, f) for when, f in findings if when - bad[0][0] >= -EXPLAINS]
    reported = [f.finding for _, f in before]
    if first.code in (HARDWARE, STORAGE):
        _name_process(cause, reported, node_of)
    elif first.code not in SAYS_WHY and (found := _explanation(first, before)):
        better = cause_of(found, time)
        better.kind, better.code = "died", cause.code
        better.seen = f"{cause.seen} of process {cause.process}; {found.finding.seen}"
        return better
    elif _rank(first.code) == 4 and (broken := _accuse_each_other(reported)):
        cause.process = broken[0]
        cause.concluded = f"the connection between processes {broken[0]} and {broken[1]} broke"
    return cause


def _explanation(first: facts.Exited, before: Findings) -> facts.Found | None:
    found = [e for e in before if e[1].finding.action != "note"]  # as all consequences are
    if by_signal(first.code):  # later lines of others follow from it
        found = [
            e
            for e in found
            if e[1].finding.process in (-1, first.process) and e[1].node == first.node
        ]
    # A critical error isolates its host; of those that several see the first counts.
    worst = [
        e for e in found if e[1].finding.group == "critical" and e[1].finding.action != "warn"
    ] or found
    return min(worst, key=lambda e: e[0], default=(0.0, None))[1]


def _accuse_each_other(reported: Iterable[Finding]) -> tuple[int, int] | None:
    """Two processes that each say that the other is gone, and were there to say so: their
    connection broke."""
    lines = [f for f in reported if f.name == "process gone"]
    gone = {
        (f.process, int(other)) for f in lines for other in re.findall(r"process (\d+) on ", f.seen)
    }
    return next(((a, b) for a, b in sorted(gone) if a < b and (b, a) in gone), None)


def _name_process(cause: Cause, reported: Iterable[Finding], node_of: Callable[[int], int]) -> None:
    """All processes end with these codes together; a line of one of them names the culprit, or
    several suspects. A node is left out only if all of them are on it."""
    wrong = cause.code == HARDWARE
    cause.group = "critical" if wrong else "storage"
    cause.concluded = "a device computes wrongly" if wrong else "the storage fails"
    lines = [f for f in reported if (f.name == WRONG if wrong else f.group == "storage")]
    suspects = [] if wrong else [cause.process]
    if lines:
        cause.seen = f"{cause.seen}; {lines[-1].seen}"
        # "of process 0 on a, process 1 on b computes wrongly" (`guard`)
        named = re.search(r"\bof (process .*?) computes wrongly", lines[-1].seen)
        those = re.findall(r"process (\d+) on ", named[1] if named else "")
        suspects = [int(process) for process in those] if wrong else [lines[-1].process]
    nodes = {node_of(process) for process in suspects}
    cause.process = suspects[0] if len(suspects) == 1 else -1
    cause.node = nodes.pop() if len(nodes) == 1 else -1 if wrong else cause.node
    cause.exclude = wrong and cause.node >= 0
