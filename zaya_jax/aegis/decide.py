"""Decides how to respond to failures: a state machine without clock, files or connections.

    decider = Decider(Rules(nodes=2, agents=3, min_nodes=2), now)
    for action in decider.take(facts.Exited(node=1, process=3, code=-9), now): ...

Facts go in with their time, actions come out; docs/aegis.md has the table. A start takes `nodes` of
the nodes whose agents have come. When a process ends, the others get a moment to end too, since the
first end may be reported after those that followed from it; then the rest is killed, the cause is
named, and the run starts again or ends.
"""

import dataclasses
import enum
import signal
from collections.abc import Sequence
from typing import Any

from zaya_jax.aegis import facts
from zaya_jax.aegis.cause import (
    COMPUTES_WRONGLY,
    TOGETHER,
    Cause,
    by_signal,
    cause_of,
    first_end,
    shell,
)
from zaya_jax.cluster.events import Finding
from zaya_jax.cluster.leaving import BAD_INPUT, DONE, HARDWARE, PREEMPTED, STORAGE, UNHEALTHY

# Seconds that the others have after a process has ended: with these codes they still save, or
# report an error.
PATIENCE = {DONE: 120.0, PREEMPTED: 120.0, UNHEALTHY: 120.0, STORAGE: 120.0, BAD_INPUT: 10.0}
GRACE = 3.0  # with any other: the training's own lines end all within a second or so
KILLED = 1.0  # where a signal killed it, which nothing that comes later began
COLLECT = 15.0  # until stacks are there
STOP = 20.0  # until a killed node says that nothing runs there
SILENT = (
    5.0  # until an agent that owes such an answer is given up, where the others suffice for a start
)
LEAVE = 600.0  # until a run that is asked to save has ended
STORAGE_PAUSE = 30.0
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 300.0  # before the second restart without progress, and at most


@dataclasses.dataclass(frozen=True)
class Rules:
    """How many nodes a start has (and at least, where some are lost), of how many agents; restarts
    without progress."""

    nodes: int
    agents: int
    min_nodes: int
    restarts: int = 5
    join: float = 600.0  # seconds until all agents have come
    processes: int = 1  # of a node
    check: bool = False  # whether nodes are tried before each start


class State(enum.StrEnum):
    """The state of the run."""

    GATHERING = "gathering"  # agents come
    CHECKING = "checking"  # the nodes of the next start are tried
    RUNNING = "running"
    LEAVING = "leaving"  # it was asked to save and stop, for another start
    ENDING = "ending"  # a process has ended; the others have a moment
    COLLECTING = "collecting"  # stacks, before a hanging run is killed
    STOPPING = "stopping"  # everything is killed, and not yet gone
    WAITING = "waiting"  # the pause before the next start
    ENDED = "ended"


S = State
LIVE = (S.RUNNING, S.LEAVING, S.ENDING, S.COLLECTING)  # a start's processes may be there
# Which state may follow which.
MAY_FOLLOW = {
    S.GATHERING: {S.CHECKING, S.RUNNING, S.ENDED},
    S.CHECKING: {S.GATHERING, S.ENDED},
    S.RUNNING: {S.LEAVING, S.ENDING, S.COLLECTING, S.STOPPING, S.WAITING, S.ENDED},
    S.LEAVING: {S.ENDING, S.COLLECTING, S.STOPPING, S.WAITING, S.ENDED},
    S.ENDING: {S.ENDING, S.STOPPING, S.WAITING, S.ENDED},
    S.COLLECTING: {S.STOPPING, S.WAITING, S.ENDED},
    S.STOPPING: {S.WAITING, S.ENDED},
    S.WAITING: {S.GATHERING, S.ENDED},
    S.ENDED: set(),
}


class Decider:
    """The state machine: gathering, checking, running, leaving, ending, collecting, stopping,
    waiting or ended."""

    def __init__(self, rules: Rules, now: float):
        self.rules = rules
        self.state, self.number, self.nodes = S.GATHERING, 0, tuple[int, ...]()
        self.excluded: dict[int, str] = {}
        # Nodes with a finding that excludes: left out of the next start that can do without them.
        self._unfit: dict[int, str] = {}
        self._checked = tuple[int, ...]()  # the nodes that have just been tried, and start next
        self._now, self._deadline, self._out = now, now + rules.join, list[facts.Action]()
        self._hosts: dict[int, str] = {}
        self._idle, self._lost = set[int](), set[int]()
        self._asked: list[str] = []
        self._failures, self._newest, self._base, self._step = 0, -1, -1, -1
        self._faults: dict[int, int] = {}  # of a node, since the last progress
        # codes after which one more start was made, since the last progress
        self._tried: set[int] = set()
        self._recovering: tuple[Cause, int] | None = (
            None  # and the step that was reached; until the first new one
        )
        self._begin()

    def _begin(self) -> None:
        """Forgets the last start."""
        self._exits: list[tuple[float, facts.Exited]] = []
        self._findings: list[tuple[float, facts.Found]] = []
        self._cause: Cause | None = None
        self._killed = self._saved = False

    def take(self, fact: facts.Fact, now: float) -> list[facts.Action]:
        """Returns the actions that this fact calls for; none after End."""
        self._now = max(now, self._now)
        if self.state != S.ENDED:
            self._hear(fact)
            before: State | None = None
            while before != self.state != S.ENDED:  # a pause of no time is over at once
                before = self.state
                self._due()
        out, self._out = self._out, []
        return out

    def usable(self) -> list[int]:
        """The nodes that a start may have."""
        return [n for n in sorted(self._hosts) if n not in self._lost and n not in self.excluded]

    def gives_up(self, node: int, silent: float) -> bool:
        """Whether an agent that has been silent for so long is lost before its time.

        Only while the run waits for its answer, and where a start can do without it: a node without
        a spare may come back for as long as answers are waited for.
        """
        waits = node in self.nodes and self.state in (S.COLLECTING, S.STOPPING)
        return waits and silent > SILENT and self._can_exclude(node)

    def _hear(self, fact: facts.Fact) -> None:
        match fact:
            case facts.Came(node, host):
                self._hosts[node] = host
                self._lost.discard(node)
                self._idle.discard(node)
                if self.state != S.GATHERING:
                    out = node in self.excluded
                    self._say(
                        "came",
                        node,
                        done="it stays left out" if out else "it waits for the next start",
                    )
            case facts.Ready(node):
                self._idle.add(node)
            case facts.Lost(node, why):
                self._lose(node, why)
            case facts.Exited():
                self._exited(fact)
            case facts.Found():
                self._found(fact)
            case facts.Hung(node, process, seen, concluded, seconds):
                if self.state in (S.RUNNING, S.LEAVING):
                    self._cause = Cause(
                        "hangs",
                        self._now - seconds,
                        node,
                        process,
                        seen,
                        concluded,
                        seconds=seconds,
                        group="distributed",
                    )
                    self._turn(S.COLLECTING, COLLECT, facts.Order.COLLECT)
            case facts.Collected(text):
                if self.state == S.COLLECTING and self._cause:
                    self._cause.seen += f"; {text}" if text else ""
                    self._kill()
            case facts.Saved(step):
                if step > self._base and self.state in (S.RUNNING, S.LEAVING, S.ENDING):
                    self._failures, self._base, self._saved = 0, step, True
                    self._faults.clear()
                    self._tried.clear()
                self._newest = step
            case facts.Stepped(step):
                self._stepped(step)
            case facts.Asked(name):
                self._ask(name)
            case facts.Checked(findings, seconds):
                self._judge(findings, seconds)

    # Facts

    def _lose(self, node: int, why: str) -> None:
        if node in self._lost or node not in self._hosts:
            return
        self._lost.add(node)
        self._idle.discard(node)
        if node not in self.nodes or self.state not in LIVE:
            ends = self.state == S.STOPPING and node in self.nodes
            self._say("lost", node, seen=why, done="" if ends else "nothing of the run was there")
            if self.state == S.CHECKING and node in self.nodes:
                self._turn(S.GATHERING, self.rules.join)
            return
        # After a process that failed, it follows from it, or makes no difference.
        failed = any(e.code not in (DONE, PREEMPTED) for _, e in self._exits)
        if self.state != S.COLLECTING and not failed:
            self._cause = Cause("lost", self._now, node, seen=why, group="critical")
        elif self._cause:
            self._cause.seen += f"; {why}"
        self._kill()

    def _exited(self, fact: facts.Exited) -> None:
        if (
            fact.node not in self.nodes
            or self._killed
            or self.state not in (S.RUNNING, S.LEAVING, S.ENDING)
        ):
            return
        patience = PATIENCE.get(fact.code, KILLED if by_signal(fact.code) else GRACE)
        if self.state == S.LEAVING and fact.code == PREEMPTED:
            patience = max(self._deadline - self._now, 0.0)
        if self.state == S.ENDING:
            patience = min(patience, max(self._deadline - self._now, 0.0))
        self._exits.append((self._now, fact))
        self._turn(S.ENDING, patience)

    def _found(self, fact: facts.Found) -> None:
        finding, done = fact.finding, ""
        self._findings.append((self._now, fact))
        if finding.action == "exclude":
            self._unfit.setdefault(fact.node, finding.name)
            done = "the next start leaves it out if others suffice"
        acts = finding.action in ("restart", "exclude") and fact.node in self.nodes
        if self.state == S.RUNNING and acts:
            done = self._act_on(fact)
        kind = (
            "straggles" if finding.name == "straggler" else "hardware" if finding.device else "log"
        )
        self._say_found(kind, fact.node, finding, done)

    def _act_on(self, fact: facts.Found) -> str:
        """Acts on a finding that calls for a restart; returns the action in words."""
        if fact.finding.action == "exclude" and not self._can_exclude(fact.node):
            return "goes on: no spare node could take its place"
        self._cause = cause_of(fact, self._now)
        if fact.finding.group != "note":
            self._kill()
            return "restart"
        self._cause.free = True
        # it computes rightly, so that nothing need be lost
        self._turn(S.LEAVING, LEAVE, facts.Order.ASK)
        return "restart after saving"

    def _stepped(self, step: int) -> None:
        if self.state != S.RUNNING:
            return
        self._step = step
        # The run went on after these lines of its processes, so they explain no end.
        self._findings = [
            (when, found)
            for when, found in self._findings
            if found.finding.process < 0 or self._now - when <= TOGETHER
        ]
        if self._recovering:
            cause, was = self._recovering
            self._recovering = None
            self._say(
                "restarted",
                cause.node,
                cause.process,
                step=step,
                seconds=round(self._now - cause.time, 3),
                concluded=f"after it {cause.kind}",
                done=f"start {self.number} goes on",
                was_at=was,
            )

    def _ask(self, name: str) -> None:
        self._asked.append(name)
        if len(self._asked) > 1:
            if self.state in LIVE:
                self._cause = self._cause or Cause(
                    "asked", self._now, seen=name, concluded="a second signal"
                )
                self._kill()
        elif self.state == S.RUNNING:
            self._out.append(facts.Order.ASK)
            self._say("asked", seen=name, done="all save and stop")
        elif self.state in (S.GATHERING, S.CHECKING, S.WAITING):
            self._end(PREEMPTED, f"{name} while nothing ran")

    # Time

    def _due(self) -> None:
        late = self._now >= self._deadline
        if self.state in (*LIVE, S.STOPPING):
            if all(n in self._idle or n in self._lost for n in self.nodes):
                return self._conclude()
            if not late or self.state == S.RUNNING:
                return None
            if self.state == S.STOPPING:
                for node in [n for n in self.nodes if n not in self._idle and n not in self._lost]:
                    self._lost.add(node)
                    self._say(
                        "lost", node, seen=f"no answer within {STOP:g} s of the order to stop"
                    )
                    self._out.append(facts.Drop(node))
                return self._conclude()
            if self.state == S.ENDING and {e.code for _, e in self._exits} <= {DONE, PREEMPTED}:
                (began, ended), *_ = self._exits
                still = [n for n in self.nodes if n not in self._idle]
                self._cause = self._cause or Cause(
                    "hangs",
                    began,
                    still[0],
                    group="distributed",
                    seen=(
                        f"still runs {self._now - began:.0f} s after process {ended.process} ended"
                        f" with exit code {ended.code}"
                    ),
                    seconds=self._now - began,
                )
            return self._kill()
        if self.state == S.WAITING and late:
            self._turn(S.GATHERING, self.rules.join)
        if self.state == S.GATHERING:
            self._gather()
        return None

    def _gather(self) -> None:
        for node, reason in self._unfit.items():
            if node in self.usable() and self._can_exclude(node):
                self._exclude(node, reason)
        usable, wanted = self.usable(), self.rules
        there = [n for n in usable if n in self._idle][: wanted.nodes]
        to_come = [n for n in range(wanted.agents) if n not in self._hosts]
        late = self._now >= self._deadline
        nobody_more = late or (not to_come and len(there) == min(len(usable), wanted.nodes))
        if len(there) == wanted.nodes or (len(there) >= wanted.min_nodes and nobody_more):
            if self.rules.check and self._checked != tuple(there):
                self.nodes = tuple(there)
                return self._turn(S.CHECKING, 0, facts.Check(self.nodes))
            self._checked = ()
            self.number, self.nodes = self.number + 1, tuple(there)
            self._begin()
            self._base = self._newest
            self._idle -= set(there)
            self._turn(S.RUNNING, 0.0, facts.Start(self.number, self.nodes))
            self._say(
                "started",
                step=self._newest,
                start=self.number,
                nodes=[self._hosts[n] for n in there],
                places=there,
                spares=[self._hosts[n] for n in usable if n not in there],
                done="from the newest checkpoint" if self._newest >= 0 else "from the beginning",
            )
        elif nobody_more or len(usable) + len(to_come) < wanted.min_nodes:
            what = f"{len(there)} of {wanted.nodes} nodes are there"
            gone = sorted(self._lost | set(self.excluded))
            if gone:
                what += f"; lost or left out: node {', '.join(map(str, gone[:16]))}"
            if to_come and late:
                named = ", ".join(map(str, to_come[:16]))
                what += f"; no agent came from node {named} within {wanted.join:g} s"
            self._end(1, what)
        return None

    def _judge(self, findings: Sequence[tuple[int, Finding]], seconds: float) -> None:
        """Judges the check before a start: unfit nodes are left out where spares can take their
        place."""
        if self.state != S.CHECKING:
            return None
        hopeless: Finding | None = None
        for node, finding in findings:
            done = ""
            if finding.action == "stop":
                hopeless, done = finding, "end: a person is wanted"
            elif finding.action == "exclude" and node not in self.excluded:
                if self._can_exclude(node):
                    self._exclude(node, finding.name)
                elif finding.name.endswith(COMPUTES_WRONGLY):
                    hopeless, done = finding, "end: no spare node could take its place"
                else:
                    done = "goes on: no spare node could take its place"
            self._say_found("check", node, finding, done)
        what = f"{len(self.nodes)} nodes, {len(findings)} findings"
        self._say("checked", seconds=round(seconds, 3), seen=what, places=self.nodes)
        if hopeless:
            code = HARDWARE if hopeless.name.endswith(COMPUTES_WRONGLY) else 1
            return self._end(code, f"{hopeless.name}: {hopeless.seen}")
        self._checked = self.nodes if not set(self.nodes) & set(self.excluded) else ()
        return self._turn(S.GATHERING, self.rules.join)

    def _turn(self, state: State, seconds: float, *actions: facts.Action) -> None:
        if state not in MAY_FOLLOW[self.state]:
            raise RuntimeError(f"{state} cannot follow {self.state}")
        self.state, self._deadline = state, self._now + seconds
        self._out += actions

    def _kill(self) -> None:
        self._killed = True
        self._turn(S.STOPPING, STOP, facts.Order.KILL)

    # The end of a start

    def _conclude(self) -> None:
        """All of the start has ended."""
        codes = {e.code for _, e in self._exits}
        cause = self._cause
        if cause is None and self._exits:
            cause = first_end(self._exits, self._findings, self._saved, self.node_of)
        cause = cause or Cause("died", self._now, seen="nothing of it is there any more")
        if codes == {DONE} and not self._killed:
            return self._end(DONE, "done")
        if len(self._asked) > 1:
            return self._end(
                128 + signal.Signals[self._asked[-1]], f"{self._asked[-1]}, a second time"
            )
        if self._asked:
            # Before its first step there is nothing to save: the training ends as a signal ends a
            # program.
            early = {128 + signal.SIGTERM, -signal.SIGTERM}
            clean = codes <= {DONE, PREEMPTED, *early} and not self._killed
            return self._end(
                PREEMPTED if clean else shell(cause.code),
                "stopped as asked" if clean else cause.seen,
            )
        if cause.code in (BAD_INPUT, UNHEALTHY):
            self._tell(cause, "end: a person is wanted")
            return self._end(cause.code, cause.concluded or cause.seen)
        stays = cause.node < 0 or not self._can_exclude(cause.node)
        hopeless = cause.code == STORAGE or (cause.code == HARDWARE and stays)
        if hopeless and cause.code in self._tried:
            self._tell(cause, "end: a person is wanted")
            return self._end(
                cause.code, f"{cause.concluded or cause.seen}, again and without progress"
            )
        self._tried.add(cause.code)
        return self._again(cause)

    def node_of(self, process: int) -> int:
        """The node of a process of this start, or -1."""
        place = process // self.rules.processes
        return self.nodes[place] if 0 <= place < len(self.nodes) else -1

    def _again(self, cause: Cause) -> None:
        pause = 0.0
        if not cause.free:
            self._failures += 1
            if self._failures > 1:  # since progress
                pause = min(FIRST_PAUSE * 2 ** (self._failures - 2), LONGEST_PAUSE)
            if cause.node >= 0:
                self._faults[cause.node] = self._faults.get(cause.node, 0) + 1
        if self._failures > self.rules.restarts:
            self._tell(cause, "end")
            code = shell(cause.code) or 1
            return self._end(
                1 if code == PREEMPTED else code,
                f"{self.rules.restarts} restarts without a newer checkpoint, the last for:"
                f" {cause.seen or cause.kind}",
            )
        if cause.code == STORAGE:
            pause = max(pause, STORAGE_PAUSE)
        done = f"restart {f'in {pause:g} s' if pause else 'at once'}"
        repeats = self._faults.get(cause.node, 0) > 1
        if cause.node in self.usable() and (cause.exclude or repeats):
            if self._can_exclude(cause.node):
                self._exclude(cause.node, cause.concluded or cause.seen)
                done += " without the node"
            else:
                done += ", with the node: no spare could take its place"
        self._tell(cause, done)
        self._recovering = cause, self._step
        return self._turn(S.WAITING, pause)

    def _tell(self, cause: Cause, done: str) -> None:
        self._say(
            cause.kind,
            cause.node,
            cause.process,
            group=cause.group,
            seen=cause.seen,
            concluded=cause.concluded,
            done=done,
            seconds=round(cause.seconds, 3),
            step=self._step,
            start=self.number,
            failures=self._failures,
            # from when it was noticed to when nothing ran
            stop=round(self._now - cause.time - cause.seconds, 3),
        )

    def _can_exclude(self, node: int) -> bool:
        return len([n for n in self.usable() if n != node]) >= self.rules.min_nodes

    def _exclude(self, node: int, reason: str) -> None:
        self.excluded[node] = reason
        self._say("excluded", node, concluded=reason, done="no later start uses it")

    def _end(self, code: int, text: str) -> None:
        self._say(
            "ended",
            seen=text,
            done=f"exit code {code}",
            step=self._step,
            code=code,
            starts=self.number,
        )
        self._turn(S.ENDED, 0.0, facts.End(code, text))

    def _say_found(self, kind: str, node: int, finding: Finding, done: str) -> None:
        given = {
            "group": finding.group,
            "seen": finding.seen,
            "concluded": finding.name,
            "device": finding.device,
        }
        self._say(kind, node, finding.process, done=done, **given)

    def _say(self, kind: str, node: int = -1, process: int = -1, **given: Any) -> None:
        known = ("group", "step", "seen", "concluded", "done", "seconds")
        more = {name: value for name, value in given.items() if name not in known and value != ""}
        given = {name: value for name, value in given.items() if name in known}
        where = self._hosts.get(node, "")
        self._out.append(
            facts.Say(kind, {"node": where, "process": process, **given, "facts": more})
        )
