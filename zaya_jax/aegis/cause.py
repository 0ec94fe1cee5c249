"""Finds the cause of a start's end from its processes' exits and the findings of the minute before.

    cause = first_end(exits, findings, saved, node_of)

Several processes end for one reason, and the first end may be reported after those that followed
from it. Among the ends within TOGETHER seconds of the first bad one, the one with the lowest
`_rank` came first. A finding explains it:

    all processes end with one code (a wrong device, the storage)    the line that names a process
    a signal                                                         only a line of that process
    anything else                      the first critical finding, or the first that has no other cause

If two processes each report that the other is gone, their connection broke.
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
Findings = Sequence[tuple[float, facts.Observed]]


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
    seconds: float = 0.0  # until it was noticed


def exit_words(code: int) -> str:
    """SIGKILL, or exit code 3."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def shell_code(code: int) -> int:
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


def cause_of(fact: facts.Observed, time: float) -> Cause:
    """A finding that ends a start."""
    finding = fact.finding
    return Cause(
        "found", time, fact.node, finding.process, finding.seen, finding.name, group=finding.group
    )


def first_end(
    exits: Exits, findings: Findings, saved: bool, node_of: Callable[[int], int]
) -> Cause:
    """The end that began it, and the finding that explains it. `saved`: whether this start has made
    a checkpoint."""
    failures = [(when, e) for when, e in exits if e.code not in (DONE, PREEMPTED)] or exits
    began = failures[0][0]
    together = [(when, e) for when, e in failures if when - began <= TOGETHER]
    time, first = min(together, key=lambda entry: (_rank(entry[1].code), entry[0]))
    cause = Cause("died", time, first.node, first.process, exit_words(first.code), code=first.code)
    if first.code in (DONE, PREEMPTED):
        if saved and PREEMPTED in {e.code for _, e in exits}:
            cause.kind = "border"  # planned, or asked for from outside: no failure
        return cause
    cause.group = "distributed"
    recent = [(when, observed) for when, observed in findings if when - began >= -EXPLAINS]
    reported = [observed.finding for _, observed in recent]
    if first.code in (HARDWARE, STORAGE):
        _name_process(cause, reported, node_of)
    elif first.code not in SAYS_WHY and (explanation := _explanation(first, recent)):
        explained = cause_of(explanation, time)
        explained.kind, explained.code = "died", cause.code
        explained.seen = f"{cause.seen} of process {cause.process}; {explained.seen}"
        return explained
    elif _rank(first.code) == 4 and (broken := _accuse_each_other(reported)):
        cause.process = broken[0]
        cause.concluded = f"the connection between processes {broken[0]} and {broken[1]} broke"
    return cause


def _explanation(first: facts.Exited, recent: Findings) -> facts.Observed | None:
    """The finding that explains an end: the first critical one, which isolates its host; without
    one the first of all. Consequences are notes, and explain nothing."""
    explain = [
        observed
        for _, observed in recent
        if observed.finding.action != "note"
        # What kills by a signal is no line of others: those follow from it.
        and (not by_signal(first.code) or _is_of(first, observed))
    ]
    isolating = [
        observed
        for observed in explain
        if observed.finding.group == "critical" and observed.finding.action != "warn"
    ]
    return next(iter(isolating or explain), None)


def _is_of(first: facts.Exited, observed: facts.Observed) -> bool:
    """Whether a finding is of this process, or of its node."""
    return observed.node == first.node and observed.finding.process in (-1, first.process)


def _accuse_each_other(reported: Iterable[Finding]) -> tuple[int, int] | None:
    """Two processes that each say that the other is gone, and were there to say so: their
    connection broke."""
    accusations = {
        (finding.process, int(other))
        for finding in reported
        if finding.name == "process gone"
        for other in re.findall(r"process (\d+) on ", finding.seen)
    }
    mutual = [(a, b) for a, b in accusations if a < b and (b, a) in accusations]
    return min(mutual, default=None)


def _name_process(cause: Cause, reported: Iterable[Finding], node_of: Callable[[int], int]) -> None:
    """All processes end with these codes together; a line of one of them names the culprit, or
    several suspects. A node is left out only if all of them are on it."""
    if cause.code == STORAGE:
        cause.group, cause.concluded = "storage", "the storage fails"
        lines = [finding for finding in reported if finding.group == "storage"]
        if lines:
            cause.seen += f"; {lines[-1].seen}"
            cause.process = lines[-1].process
            cause.node = node_of(cause.process)
        return
    cause.group, cause.concluded = "critical", f"a {WRONG}"
    cause.node = cause.process = -1
    lines = [finding for finding in reported if finding.name == WRONG]
    if not lines:
        return
    cause.seen += f"; {lines[-1].seen}"
    # "of process 0 on a, process 1 on b computes wrongly" (`guard`)
    match = re.search(rf"\bof (process .*?) {COMPUTES_WRONGLY}", lines[-1].seen)
    suspects = [int(n) for n in re.findall(r"process (\d+) on ", match[1])] if match else []
    if len(suspects) == 1:
        cause.process = suspects[0]
    nodes = {node_of(process) for process in suspects}
    if len(nodes) == 1:
        cause.node = nodes.pop()
