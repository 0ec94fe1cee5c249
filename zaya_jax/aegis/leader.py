"""Leads all agents from that of node 0: takes their messages, asks `decide`, and sends orders.

    leader = Leader(options, keeper, print_line, order, now)
    leader.receive(node, message, now)     a message of an agent; `node.Node` lists them
    leader.take(fact, now)                 a fact that is no message
    leader.poll(now)                       called often
    leader.outcome                         once it is decided: (exit code, words)

`order(node, message)` carries ["start", number, address, count, first], ["save"], ["kill"],
["dump_stacks"], ["drop"] or an order of `preflight.NodeCheck` to a node's agent.

    message -> receive -> fact -> Decider.take -> actions -> orders, events
"""

import contextlib
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zaya_jax.aegis import facts, straggle
from zaya_jax.aegis.accounts import TimeLedger
from zaya_jax.aegis.decide import Decider, RunState
from zaya_jax.aegis.hang import Hangs, View
from zaya_jax.aegis.keeping import Hook, Keeper
from zaya_jax.aegis.node import SupervisorOptions
from zaya_jax.aegis.preflight import NodeCheck
from zaya_jax.aegis.straggle import Stragglers
from zaya_jax.checkpoint import folders
from zaya_jax.cluster import beats, events, leaving
from zaya_jax.cluster.connections import OddMessage, matches_shape
from zaya_jax.cluster.events import Finding
from zaya_jax.cluster.rank import join_address, name_processes

PROGRESS = 10.0  # seconds between two looks for a newer checkpoint
LINES = 4  # of stacks that an event has
FINDING = {
    "name": str,
    "group": frozenset(events.GROUPS),
    "action": frozenset(events.ACTIONS),
    "seen": str,
    "process": int,
    "device": str,
}
LAP = (int, float, float, float)
SECTION = frozenset(("", *beats.SECTIONS))
VIEW = (int, SECTION, int, frozenset(beats.MARKS), float, float, str, [LAP])
# The fields of each message of an agent (`node`); any other drops its sender.
FIELDS = {
    "ready": (range(1, 2**16),),
    "views": (int, [VIEW]),
    "exited": (int, int, range(-64, 256)),
    "finding": (FINDING,),
    "checked": (int, [FINDING], range(1, 2**16)),
    "linked": (int, str),
    "stacks": (int, [(int, str, str)]),
    "asked": (frozenset(("SIGTERM", "SIGINT", "SIGHUP")),),
    "slept": (float,),
}
OF_A_START = ("views", "exited", "stacks")  # whose first field is its number


class Leader:
    def __init__(
        self,
        options: SupervisorOptions,
        keeper: Keeper,
        print_line: Callable[[str], None],
        order: Callable[[int, list], None],
        now: float,
    ):
        self._options, self._keeper = options, keeper
        self._print_line, self._order = print_line, order
        self.hook = Hook(options.hook, print_line) if options.hook else None
        self.outcome: tuple[int, str] | None = None
        self.decider = Decider(options.rules, now)
        # Those of an agent before this one keep their logs.
        self.decider.start_number = _last_start(options.workdir)
        # Nodes
        self._addresses: dict[int, str] = {}  # by which others reach a node
        self._ports: dict[int, int] = {}
        self._nodes_asked: set[int] = set()  # to stop
        self._check: NodeCheck | None = None
        self._tickets = itertools.count(1)  # of the orders of checks
        # This start
        self._hangs = Hangs()
        self._stragglers = Stragglers(0)
        self._ledger: TimeLedger | None = None
        self._step_reported, self._waits_for_link = -1, False
        # The stacks of a start that hangs
        self._hung_process = -1
        self._stacks: dict[int, tuple[str, str]] = {}  # how they were had, and the line
        # Checkpoints
        self._newest, self._looks = -1, False
        self._look_for_checkpoint(5, now)  # from which the first start begins

    def agent_connected(self, node: int, host: str, address: str, now: float) -> None:
        """An agent is there, on a host that others reach by this address."""
        self._addresses[node] = address
        self.take(facts.AgentConnected(node, host), now)

    def receive(self, node: int, message: list, now: float) -> None:
        """Takes an agent's message; ignores one of an earlier start."""
        kind, *fields = message
        if not matches_shape(fields, FIELDS.get(kind)):
            raise OddMessage
        if kind in OF_A_START and fields.pop(0) != self.decider.start_number:
            return
        match kind, *fields:
            case "ready", port:
                self._ports[node] = port
                self.take(facts.Ready(node), now)
            case "views", views:
                self._take_views(node, views, now)
            case "exited", process, code:
                if self.decider.node_of(process) == node:
                    self.take(facts.Exited(node, process, code), now)
            case "finding", finding:
                self.take(facts.Observed(node, Finding(**finding)), now)
            case "checked", ticket, findings, port if self._check:
                self._check.node_answered(node, ticket, findings, port)
            case "linked", ticket, why if self._check:
                self._check.link_answered(node, ticket, why)
            case "stacks", stacks:
                self._stacks |= {process: (how, line) for process, how, line in stacks}
                if len(self._stacks) >= self._options.rules.processes * len(self.decider.nodes):
                    self.take(facts.StacksCollected(self._where_all_are()), now)
            case "asked", signal_name:
                # A scheduler tells all agents at once, which is one wish.
                if node in self._nodes_asked or not self._nodes_asked:
                    self.take(facts.StopRequested(signal_name), now)
                self._nodes_asked.add(node)
            case "slept", seconds:
                self._hangs.woke(now)
                if self._check:
                    self._check.woke(seconds)

    def _take_views(self, node: int, fields: list, now: float) -> None:
        views = [View(*view) for view in fields if self.decider.node_of(view[0]) == node]
        self._hangs.take_views(views, now)
        for view in views:
            for step, whole, own, _ in view.laps:
                self._stragglers.add(view.process, int(step), whole, own)
            if view.process == 0 and view.section and self._ledger:
                self._log_spent(self._ledger.observe(view.section, view.step, now))
        step = self._hangs.step()
        if step >= 0 and step != self._step_reported:
            self._step_reported = step
            self.take(facts.Stepped(step), now)

    def poll(self, now: float) -> None:
        """Looks for progress, for hanging processes and for slow ones."""
        if now - self._looked_at >= PROGRESS:
            self._look_for_checkpoint(1, now)
        if self._check:
            findings = self._check.poll(now)
            if findings is not None:
                seconds = now - self._check.begun
                self._check = None
                self.take(facts.NodesChecked(tuple(findings), seconds), now)
        if self.decider.state == RunState.RUNNING:
            hung = self._hangs.find(now)
            if hung and not self._may_be_a_link(hung):
                self._stacks, self._hung_process = {}, hung.process
                self.take(hung, now)
            self._waits_for_link = self._waits_for_link and hung is not None
            for slow in self._stragglers.poll():
                node = self.decider.node_of(slow.process)
                self.take(facts.Observed(node, self._finding(slow)), now)
        self.take(facts.Tick(), now)

    def _may_be_a_link(self, hung: facts.Hung) -> bool:
        """Whether a hang in which all wait is given time; says so once."""
        patience = self._options.patience
        if not hung.all_wait or hung.seconds >= patience:
            return False
        if not self._waits_for_link:
            self._waits_for_link = True
            fields = {"seen": hung.seen, "concluded": hung.concluded}
            fields["done"] = f"waits up to {patience:g} s for the link"
            self._log("waits", fields | {"seconds": round(hung.seconds, 3)})
        return True

    def _finding(self, slow: straggle.Straggler) -> Finding:
        first, last = slow.steps
        return Finding(
            "straggler",
            "note",
            "warn",
            f"process {slow.process}: own work {slow.ratio:.2f} times that of the others over steps"
            f" {first} to {last}, {100 * slow.costs:.0f}% of a step",
            slow.process,
        )

    def take(self, fact: facts.Fact, now: float) -> None:
        """Has `decide` take a fact, and carries out its actions."""
        # Progress counts before an end is judged.
        if isinstance(fact, facts.Ready | facts.AgentLost) and self.decider.ends_with(fact.node):
            self._look_for_checkpoint(1, now)
        actions = self.decider.take(fact, now)
        starts = any(isinstance(action, facts.Start) for action in actions)
        # Before the actions, since a start opens a ledger of its own.
        if self._ledger and (starts or self.decider.state != RunState.RUNNING):
            self._log_spent(self._ledger.close(now))
            self._ledger = None
        for action in actions:
            match action:
                case facts.CheckNodes(nodes):
                    self._check = NodeCheck(self._tickets, nodes, self._addresses, self._order, now)
                case facts.Start(number, nodes):
                    self._start(number, nodes, now)
                case facts.Command():
                    for node in self.decider.nodes:
                        self._order(node, [action.value])
                case facts.Disconnect(node):
                    self._order(node, ["drop"])
                case facts.LogEvent(kind, fields):
                    self._log(kind, fields)
                case facts.EndAll(code, text):
                    self.outcome = code, text

    def _start(self, number: int, nodes: tuple[int, ...], now: float) -> None:
        processes = self._options.rules.processes
        self._hangs.begin()
        self._stragglers = Stragglers(len(nodes) * processes)
        self._ledger = TimeLedger(now, self.decider.newest_checkpoint)
        self._step_reported, self._waits_for_link = -1, False
        address = join_address(self._addresses[nodes[0]], self._ports[nodes[0]])
        for slot, node in enumerate(nodes):
            first = slot * processes
            self._order(node, ["start", number, address, len(nodes) * processes, first])

    def _where_all_are(self) -> str:
        """The lines at which the processes are, that of the first silent one before the others."""
        processes_at: dict[str, list[int]] = {}
        for process, (how, line) in sorted(self._stacks.items()):
            processes_at.setdefault(f"{line} ({how})", []).append(process)

        def order(line: str) -> tuple[bool, int]:
            return self._hung_process not in processes_at[line], -len(processes_at[line])

        lines = sorted(processes_at, key=order)[:LINES]
        return "; ".join(f"{name_processes(processes_at[line])} at {line}" for line in lines)

    def _log(self, kind: str, fields: dict[str, Any]) -> None:
        event = events.RunEvent(kind, time.time(), **fields)
        self._keeper.add(event)
        if kind in ("log", "hardware") and event.group in ("note", "user"):
            return  # worth neither a call nor a line on the terminal, unless it explains an end
        if self.hook:
            self.hook.tell(event)
        self._print_line(f"aegis: {event.text()}")

    def _log_spent(self, fields: dict[str, Any] | None) -> None:
        """Writes down how the start's time was spent since the last such event."""
        if fields:
            self._keeper.add(events.RunEvent("spent", time.time(), **fields))

    def _look_for_checkpoint(self, seconds: float, now: float) -> None:
        """Says which checkpoint is the newest, as far as the disk has answered: what it answers later
        counts at the next look."""
        self._looked_at = now
        if not self._looks:  # a disk that hangs keeps one thread
            self._looks = True
            leaving.within(seconds, self._list_checkpoints)
        self.take(facts.CheckpointSeen(self._newest), now)

    def _list_checkpoints(self) -> None:
        with contextlib.suppress(OSError):
            self._newest = max(folders.steps_in(self._options.workdir / "checkpoints"), default=-1)
        self._looks = False


def _last_start(workdir: Path) -> int:
    """The number of this workdir's last start under an agent; 0 for none."""
    logs = workdir / events.FOLDER / "logs"
    names = [path.name.removeprefix("start-") for path in logs.glob("start-*")]
    return max((int(name) for name in names if name.isdecimal()), default=0)
