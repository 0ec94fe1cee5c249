"""Decides how to respond to failures: a state machine without clock, files or connections.

    decider = Decider(Rules(nodes=2, agents=3, min_nodes=2), now)
    for action in decider.take(facts.Exited(node=1, process=3, code=-9), now): ...

Facts go in with their time, actions come out; docs/aegis.md has the table. A start goes through
these states:

    GATHERING -> CHECKING -> RUNNING -> ENDING or DUMPING -> KILLING -> PAUSING -> GATHERING

It takes `nodes` of the nodes whose agents are connected. When a process ends, the others get a
moment to end too, since the first end may be reported after those that followed from it; then the
rest is killed, the cause is named, and the run starts again or ends.
"""

import dataclasses
import enum
import signal
from collections.abc import Sequence
from typing import Any

from zaya_jax.aegis import facts
from zaya_jax.aegis.cause import COMPUTES_WRONGLY, TOGETHER, Cause, cause_of, first_end, shell_code
from zaya_jax.cluster.events import Finding
from zaya_jax.cluster.leaving import BAD_INPUT, DONE, HARDWARE, PREEMPTED, STORAGE, UNHEALTHY

# Seconds that the others have after a process has ended: with these codes they still save;
# otherwise lifelines end all processes within a second or so.
PATIENCE = dict.fromkeys((DONE, PREEMPTED, UNHEALTHY, STORAGE), 120.0)
GRACE = 3.0
COLLECT = 15.0  # until stacks are there
STOP = 20.0  # until a killed node reports that no process is left there
SILENT = 5.0  # how long we wait for an answering agent if a start can do without it
STORAGE_PAUSE = 30.0
# Pause before the second restart without progress; it doubles up to the longest.
FIRST_PAUSE = 5.0
LONGEST_PAUSE = 300.0
NO_SPARE = "goes on: no spare node could take its place"
NEEDS_PERSON = "ending the run: manual intervention needed"


@dataclasses.dataclass(frozen=True)
class Rules:
    """Limits: nodes of a start, the minimum if some are lost, agents in total, restarts without
    progress."""

    nodes: int
    agents: int
    min_nodes: int
    restarts: int = 5
    join: float = 600.0  # seconds until all agents have connected
    processes: int = 1  # of a node
    check: bool = False  # whether nodes are tested before each start


class RunState(enum.StrEnum):
    """The state of the run."""

    GATHERING = "gathering"  # agents connect
    CHECKING = "checking"  # the nodes of the next start are tested
    RUNNING = "running"
    ENDING = "ending"  # a process has ended; the others have a moment
    DUMPING = "dumping"  # stacks are saved, before a hanging run is killed
    KILLING = "killing"  # everything is killed, and not yet gone
    PAUSING = "pausing"  # before the next start
    OVER = "over"


LIVE = (RunState.RUNNING, RunState.ENDING, RunState.DUMPING)  # a start's processes may be there
# Which state may follow which.
MAY_FOLLOW = {
    RunState.GATHERING: {RunState.CHECKING, RunState.RUNNING, RunState.OVER},
    RunState.CHECKING: {RunState.GATHERING, RunState.OVER},
    RunState.RUNNING: {
        RunState.ENDING,
        RunState.DUMPING,
        RunState.KILLING,
        RunState.PAUSING,
        RunState.OVER,
    },
    RunState.ENDING: {RunState.ENDING, RunState.KILLING, RunState.PAUSING, RunState.OVER},
    RunState.DUMPING: {RunState.KILLING, RunState.PAUSING, RunState.OVER},
    RunState.KILLING: {RunState.PAUSING, RunState.OVER},
    RunState.PAUSING: {RunState.GATHERING, RunState.OVER},
    RunState.OVER: set(),
}


class Decider:
    """The state machine."""

    def __init__(self, rules: Rules, now: float):
        self.rules, self.state = rules, RunState.GATHERING
        self._now, self._deadline = now, now + rules.join
        self._actions: list[facts.Action] = []
        self._stop_signals: list[str] = []
        # Nodes
        self._hosts: dict[int, str] = {}  # all that have ever connected
        self._idle, self._lost = set[int](), set[int]()
        self.excluded: dict[int, str] = {}
        # With a finding that excludes: left out of the next start that can do without them.
        self._to_exclude: dict[int, str] = {}
        self._nodes_passed: tuple[int, ...] = ()  # the check, and start next
        # Over all starts
        self.newest_checkpoint = self._last_step = -1
        self._recovering: tuple[Cause, int] | None = None  # and the step before; until a new step
        # This start
        self.start_number = 0
        self.nodes: tuple[int, ...] = ()
        self._forget_start()
        # Since the last progress
        self._failures = 0
        self._faults_of_nodes: dict[int, int] = {}
        self._codes_retried: set[int] = set()

    def _forget_start(self) -> None:
        self._exits: list[tuple[float, facts.Exited]] = []
        self._findings: list[tuple[float, facts.Observed]] = []
        self._cause: Cause | None = None
        self._saved = False
        self._begun_from = self.newest_checkpoint  # a newer one is progress

    def take(self, fact: facts.Fact, now: float) -> list[facts.Action]:
        """Returns the actions that this fact calls for; none after EndAll."""
        self._now = max(now, self._now)
        if self.state != RunState.OVER:
            self._apply(fact)
            before: RunState | None = None
            while before != self.state != RunState.OVER:  # a pause of no time is over at once
                before = self.state
                self._check_deadline()
        actions, self._actions = self._actions, []
        return actions

    def usable(self) -> list[int]:
        """The nodes that a start may have."""
        return [n for n in sorted(self._hosts) if n not in self._lost and n not in self.excluded]

    def node_of(self, process: int) -> int:
        """The node of a process of this start, or -1."""
        slot = process // self.rules.processes
        return self.nodes[slot] if 0 <= slot < len(self.nodes) else -1

    def ends_with(self, node: int = -1) -> bool:
        """Whether nothing of a start is left, or only what is on this node."""
        left = {*self.nodes} - self._idle - self._lost
        return self.state in (*LIVE, RunState.KILLING) and left <= {node}

    def gives_up(self, node: int, silent: float) -> bool:
        """Whether an agent that has been silent for so long is lost before its time: only while the
        run waits for its answer, and if a start can do without it. A node without a spare may come
        back for as long as answers are waited for."""
        answers = node in self.nodes and self.state in (RunState.DUMPING, RunState.KILLING)
        return answers and silent > SILENT and self._can_exclude(node)

    # Facts

    def _apply(self, fact: facts.Fact) -> None:
        match fact:
            case facts.AgentConnected(node, host):
                self._agent_connected(node, host)
            case facts.Ready(node):
                self._idle.add(node)
            case facts.AgentLost(node, why):
                self._agent_lost(node, why)
            case facts.Exited():
                self._exited(fact)
            case facts.Observed():
                self._observed(fact)
            case facts.Hung():
                self._hung(fact)
            case facts.StacksCollected(text):
                if self.state == RunState.DUMPING and self._cause:
                    if text:
                        self._cause.seen += f"; {text}"
                    self._kill()
            case facts.CheckpointSeen(step):
                self._checkpoint_seen(step)
            case facts.Stepped(step):
                self._stepped(step)
            case facts.StopRequested(signal_name):
                self._stop_requested(signal_name)
            case facts.NodesChecked(findings, seconds):
                self._nodes_checked(findings, seconds)

    def _agent_connected(self, node: int, host: str) -> None:
        self._hosts[node] = host
        self._lost.discard(node)
        self._idle.discard(node)
        if self.state != RunState.GATHERING:
            out = node in self.excluded
            self._log(
                "came", node, done="it stays left out" if out else "it waits for the next start"
            )

    def _agent_lost(self, node: int, why: str) -> None:
        if node in self._lost or node not in self._hosts:
            return
        self._lost.add(node)
        self._idle.discard(node)
        if node not in self.nodes or self.state not in LIVE:
            self._log("lost", node, seen=why)
            if self.state == RunState.CHECKING and node in self.nodes:
                self._enter(RunState.GATHERING, self.rules.join)
            return
        # After a process that failed, it follows from it, or makes no difference.
        failed = any(exited.code not in (DONE, PREEMPTED) for _, exited in self._exits)
        if self.state == RunState.DUMPING and self._cause:
            self._cause.seen += f"; {why}"
        elif not failed:
            self._cause = Cause("lost", self._now, node, seen=why, group="critical")
        self._kill()

    def _exited(self, fact: facts.Exited) -> None:
        if fact.node not in self.nodes or self.state not in (RunState.RUNNING, RunState.ENDING):
            return
        patience = PATIENCE.get(fact.code, GRACE)
        if self.state == RunState.ENDING:
            patience = min(patience, max(self._deadline - self._now, 0.0))
        self._exits.append((self._now, fact))
        self._enter(RunState.ENDING, patience)

    def _observed(self, fact: facts.Observed) -> None:
        finding = fact.finding
        done = ""
        self._findings.append((self._now, fact))
        if finding.action == "exclude":
            self._to_exclude.setdefault(fact.node, finding.name)
            done = "the next start leaves it out if others suffice"
        acts = finding.action in ("restart", "exclude") and fact.node in self.nodes
        if self.state == RunState.RUNNING and acts:
            if finding.action == "exclude" and not self._can_exclude(fact.node):
                done = NO_SPARE
            else:
                done = "restart"
                self._cause = cause_of(fact, self._now)
                self._kill()
        kind = "hardware" if finding.device else "log"
        if finding.name == "straggler":
            kind = "straggles"
        self._log_finding(kind, fact.node, finding, done)

    def _hung(self, fact: facts.Hung) -> None:
        if self.state != RunState.RUNNING:
            return
        self._cause = Cause(
            "hangs",
            self._now - fact.seconds,
            self.node_of(fact.process),
            fact.process,
            fact.seen,
            fact.concluded,
            seconds=fact.seconds,
            group="distributed",
        )
        self._enter(RunState.DUMPING, COLLECT, facts.Command.DUMP_STACKS)

    def _checkpoint_seen(self, step: int) -> None:
        self.newest_checkpoint = step
        if step > self._begun_from and self.state in (*LIVE, RunState.KILLING):
            self._saved = True
            self._failures = 0
            self._faults_of_nodes.clear()
            self._codes_retried.clear()

    def _stepped(self, step: int) -> None:
        if self.state != RunState.RUNNING:
            return
        self._last_step = step
        # The run went on after these lines of its processes, so they explain no end.
        self._findings = [
            (when, observed)
            for when, observed in self._findings
            if observed.finding.process < 0 or self._now - when <= TOGETHER
        ]
        if self._recovering:
            cause, step_before = self._recovering
            self._recovering = None
            self._log(
                "restarted",
                cause.node,
                cause.process,
                {"was_at": step_before},
                step=step,
                seconds=round(self._now - cause.time, 3),
                concluded=f"after it {cause.kind}",
                done=f"start {self.start_number} goes on",
            )

    def _stop_requested(self, signal_name: str) -> None:
        self._stop_signals.append(signal_name)
        if len(self._stop_signals) > 1:
            if self.state in LIVE:
                self._kill()
        elif self.state == RunState.RUNNING:
            self._actions.append(facts.Command.SAVE)
            self._log("asked", seen=signal_name, done="all save and stop")
        elif self.state in (RunState.GATHERING, RunState.CHECKING, RunState.PAUSING):
            self._end(PREEMPTED, f"{signal_name} while nothing ran")

    def _nodes_checked(self, findings: Sequence[tuple[int, Finding]], seconds: float) -> None:
        """Leaves unfit nodes out where spares can take their place."""
        if self.state != RunState.CHECKING:
            return
        hopeless: Finding | None = None
        for node, finding in findings:
            done = ""
            if finding.action == "stop":
                hopeless, done = finding, NEEDS_PERSON
            elif finding.action == "exclude" and node not in self.excluded:
                if self._can_exclude(node):
                    self._exclude(node, finding.name)
                elif finding.name.endswith(COMPUTES_WRONGLY):
                    hopeless, done = finding, "ending the run: no spare node could take its place"
                else:
                    done = NO_SPARE
            self._log_finding("check", node, finding, done)
        what = f"{len(self.nodes)} nodes, {len(findings)} findings"
        self._log("checked", seconds=round(seconds, 3), seen=what, extra={"places": self.nodes})
        if hopeless:
            code = HARDWARE if hopeless.name.endswith(COMPUTES_WRONGLY) else 1
            self._end(code, f"{hopeless.name}: {hopeless.seen}")
            return
        fit = not set(self.nodes) & set(self.excluded)
        self._nodes_passed = self.nodes if fit else ()
        self._enter(RunState.GATHERING, self.rules.join)

    # Time

    def _check_deadline(self) -> None:
        late = self._now >= self._deadline
        if self.state in (*LIVE, RunState.KILLING):
            if self.ends_with():
                self._conclude()
            elif late and self.state != RunState.RUNNING:  # training has no deadline
                self._overdue()
        elif self.state == RunState.PAUSING and late:
            self._enter(RunState.GATHERING, self.rules.join)
        if self.state == RunState.GATHERING:
            self._try_to_start()

    def _overdue(self) -> None:
        """Processes that should have ended still run, or a node does not answer."""
        if self.state == RunState.KILLING:
            why = f"no answer within {STOP:g} s of the order to stop"
            for node in self.nodes:
                if node not in self._idle and node not in self._lost:
                    self._lost.add(node)
                    self._log("lost", node, seen=why)
                    self._actions.append(facts.Disconnect(node))
            self._conclude()
            return
        if self.state == RunState.ENDING and not self._cause:
            began, ended = self._exits[0]
            if {exited.code for _, exited in self._exits} <= {DONE, PREEMPTED}:
                seconds = self._now - began
                self._cause = Cause(
                    "hangs",
                    began,
                    node=next(node for node in self.nodes if node not in self._idle),
                    group="distributed",
                    seen=(
                        f"still running {seconds:.0f} s after process {ended.process} exited with"
                        f" code {ended.code}"
                    ),
                    seconds=seconds,
                )
        self._kill()

    def _try_to_start(self) -> None:
        """Starts the run, checks its nodes first, or ends where too few nodes are there."""
        rules = self.rules
        for node, reason in self._to_exclude.items():
            if node in self.usable() and self._can_exclude(node):
                self._exclude(node, reason)
        usable = self.usable()
        candidates = [node for node in usable if node in self._idle][: rules.nodes]
        to_come = [node for node in range(rules.agents) if node not in self._hosts]
        late = self._now >= self._deadline
        all_idle = len(candidates) == min(len(usable), rules.nodes)
        nobody_more = late or (not to_come and all_idle)
        if len(candidates) == rules.nodes or (nobody_more and len(candidates) >= rules.min_nodes):
            self.nodes = tuple(candidates)
            if rules.check and self._nodes_passed != self.nodes:
                self._enter(RunState.CHECKING, 0, facts.CheckNodes(self.nodes))
            else:
                self._start()
        elif nobody_more or len(usable) + len(to_come) < rules.min_nodes:
            self._end(1, self._why_too_few(len(candidates), to_come if late else []))

    def _start(self) -> None:
        self._nodes_passed = ()
        self.start_number += 1
        self._forget_start()
        self._idle -= set(self.nodes)
        self._enter(RunState.RUNNING, 0.0, facts.Start(self.start_number, self.nodes))
        spares = [self._hosts[node] for node in self.usable() if node not in self.nodes]
        self._log(
            "started",
            extra={
                "start": self.start_number,
                "nodes": [self._hosts[node] for node in self.nodes],
                "places": self.nodes,
                "spares": spares,
            },
            step=self.newest_checkpoint,
        )

    def _why_too_few(self, idle: int, missing: Sequence[int]) -> str:
        text = f"{idle} of {self.rules.nodes} nodes are there"
        gone = sorted(self._lost | set(self.excluded))
        if gone:
            text += f"; lost or left out: node {', '.join(map(str, gone[:16]))}"
        if missing:
            names = ", ".join(map(str, missing[:16]))
            text += f"; no agent came from node {names} within {self.rules.join:g} s"
        return text

    def _enter(self, state: RunState, seconds: float, *actions: facts.Action) -> None:
        """Enters a state, for so many seconds at most."""
        assert state in MAY_FOLLOW[self.state], f"{state} cannot follow {self.state}"
        self.state, self._deadline = state, self._now + seconds
        self._actions += actions

    def _kill(self) -> None:
        self._enter(RunState.KILLING, STOP, facts.Command.KILL)

    # The end of a start

    def _conclude(self) -> None:
        """All of the start has ended: ends the run, or starts it again."""
        codes = {exited.code for _, exited in self._exits}
        cause = self._cause
        if cause is None and self._exits:
            cause = first_end(self._exits, self._findings, self._saved, self.node_of)
        cause = cause or Cause("died", self._now, seen="no process of it is left")
        # A device that computes wrongly goes with its node, if there is a spare.
        in_vain = cause.code == STORAGE or (
            cause.code == HARDWARE and not (cause.node >= 0 and self._can_exclude(cause.node))
        )
        if codes == {DONE} and self.state != RunState.KILLING:
            self._end(DONE, "done")
        elif self._stop_signals:
            self._end_as_asked(codes, cause)
        elif cause.code in (BAD_INPUT, UNHEALTHY) or (
            in_vain and cause.code in self._codes_retried
        ):
            self._report_cause(cause, NEEDS_PERSON)
            self._end(cause.code, cause.concluded or cause.seen)
        else:
            self._codes_retried.add(cause.code)
            self._restart(cause)

    def _end_as_asked(self, codes: set[int], cause: Cause) -> None:
        last = self._stop_signals[-1]
        # Before its first step there is nothing to save: the training ends as a signal ends a
        # program.
        early = {128 + signal.SIGTERM, -signal.SIGTERM}
        if len(self._stop_signals) > 1:
            self._end(128 + signal.Signals[last], f"{last}, a second time")
        elif codes <= {DONE, PREEMPTED, *early} and self.state != RunState.KILLING:
            self._end(PREEMPTED, "stopped as asked")
        else:
            self._end(shell_code(cause.code), cause.seen)

    def _restart(self, cause: Cause) -> None:
        """Starts the run again, after a pause; ends it after too many failures without progress."""
        pause = 0.0
        if cause.kind != "border":  # as planned
            self._failures += 1
            if self._failures > 1:  # since progress
                pause = min(FIRST_PAUSE * 2 ** (self._failures - 2), LONGEST_PAUSE)
            if cause.node >= 0:
                faults = self._faults_of_nodes.get(cause.node, 0)
                self._faults_of_nodes[cause.node] = faults + 1
        if self._failures > self.rules.restarts:
            self._report_cause(cause, "ending the run")
            code = shell_code(cause.code) or 1
            self._end(
                1 if code == PREEMPTED else code,
                f"{self.rules.restarts} restarts without a newer checkpoint, the last for:"
                f" {cause.seen or cause.kind}",
            )
            return
        if cause.code == STORAGE:
            pause = max(pause, STORAGE_PAUSE)
        done = f"restart in {pause:g} s" if pause else "restart at once"
        unfit = cause.code == HARDWARE or self._faults_of_nodes.get(cause.node, 0) > 1
        if cause.node in self.usable() and (unfit or cause.node in self._to_exclude):
            if self._can_exclude(cause.node):
                reason = cause.concluded or cause.seen
                self._exclude(cause.node, self._to_exclude.get(cause.node, reason))
                done += " without the node"
            else:
                done += ", with the node: no spare could take its place"
        self._report_cause(cause, done)
        self._recovering = cause, self._last_step
        self._enter(RunState.PAUSING, pause)

    def _report_cause(self, cause: Cause, done: str) -> None:
        # From when it was noticed to when nothing ran.
        stopping = self._now - cause.time - cause.seconds
        self._log(
            cause.kind,
            cause.node,
            cause.process,
            {"start": self.start_number, "failures": self._failures, "stop": round(stopping, 3)},
            group=cause.group,
            seen=cause.seen,
            concluded=cause.concluded,
            done=done,
            seconds=round(cause.seconds, 3),
            step=self._last_step,
        )

    def _can_exclude(self, node: int) -> bool:
        return len([n for n in self.usable() if n != node]) >= self.rules.min_nodes

    def _exclude(self, node: int, reason: str) -> None:
        self.excluded[node] = reason
        self._log("excluded", node, concluded=reason, done="no later start uses it")

    def _end(self, code: int, text: str) -> None:
        self._log(
            "ended",
            extra={"code": code, "starts": self.start_number},
            seen=text,
            done=f"exit code {code}",
            step=self._last_step,
        )
        self._enter(RunState.OVER, 0.0, facts.EndAll(code, text))

    def _log_finding(self, kind: str, node: int, finding: Finding, done: str) -> None:
        self._log(
            kind,
            node,
            finding.process,
            {"device": finding.device} if finding.device else {},
            group=finding.group,
            seen=finding.seen,
            concluded=finding.name,
            done=done,
        )

    def _log(
        self,
        kind: str,
        node: int = -1,
        process: int = -1,
        extra: dict[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        fields |= {"node": self._hosts.get(node, ""), "process": process, "facts": extra or {}}
        self._actions.append(facts.LogEvent(kind, fields))
