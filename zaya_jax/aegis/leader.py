"""Leads all agents from that of node 0: takes their messages, asks `decide`, and sends orders.

    leader = Leader(plan, keeper, say, order)
    leader.hear(node, message, now)     a message of an agent; `node.Node` lists them
    leader.take(fact, now)              a fact that is no message
    leader.turn(now)                    called often
    leader.end                          once it is decided: (exit code, words)

`order(node, message)` carries ["start", number, address, count, first], ["ask"], ["kill"],
["collect"], ["drop"] or an order of `preflight.Checking` to a node's agent.
"""

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zaya_jax.aegis import facts, straggle
from zaya_jax.aegis.accounts import Spending
from zaya_jax.aegis.decide import Decider
from zaya_jax.aegis.hang import Hangs, View
from zaya_jax.aegis.keeping import Hook, Keeper
from zaya_jax.aegis.node import Plan
from zaya_jax.aegis.preflight import Checking
from zaya_jax.aegis.straggle import Stragglers
from zaya_jax.checkpoint import writing
from zaya_jax.cluster import beats, events, lines
from zaya_jax.cluster.events import Finding
from zaya_jax.cluster.rank import join_address

PROGRESS = 1.0  # seconds between two looks for a newer checkpoint
LONGEST_SLEEP = 3600.0  # seconds for which an agent that stood still is waited for in a check
NAMED = 8  # processes whose lines an event has
FINDING = {
    "name": str,
    "group": frozenset(events.CLASSES),
    "action": frozenset(events.ACTIONS),
    "seen": str,
    "process": int,
    "device": str,
}
SECTION, MARK = frozenset(("", *beats.SECTIONS)), frozenset(beats.MARKS)
# The fields of each message of an agent (`node`); any other drops its sender.
FIELDS = {
    "ready": (range(1, 2**16),),
    "views": (int, [(int, SECTION, int, MARK, float, float, str, [(int, float, float, float)])]),
    "exited": (int, int, range(-64, 256)),
    "finding": (FINDING,),
    "checked": (int, [FINDING], range(1, 2**16)),
    "linked": (int, float, str),
    "stacks": (int, dict),
    "asked": (frozenset(("SIGTERM", "SIGINT", "SIGHUP")),),
    "slept": (float,),
}


class Leader:
    def __init__(
        self,
        plan: Plan,
        keeper: Keeper,
        say: Callable[[str], None],
        order: Callable[[int, list], None],
        now: float,
    ):
        self._plan, self._keeper, self._say, self._order = plan, keeper, say, order
        self.decider = Decider(plan.rules, now)
        # those of an agent before this one keep their logs
        self.decider.number = _starts(plan.workdir)
        self._hangs = Hangs()
        self._stragglers: Stragglers | None = None
        self._addresses: dict[int, str] = {}  # by which others reach a node
        self._ports: dict[int, int] = {}
        self._asked: set[int] = set()
        self._checking: Checking | None = None
        self._awaited: facts.Hung | None = None  # a wait that all share, as when a link is away
        self._tickets = itertools.count(1)  # of the orders of checks
        self._stacks: dict[int, list[str]] = {}
        self._spending: Spending | None = None
        self.hook = Hook(plan.hook) if plan.hook else None
        # the process that hangs; of how many the stacks are awaited
        self._first = self._collecting = -1
        self._newest = -1
        self._questions: queue.SimpleQueue[threading.Event] = queue.SimpleQueue()
        self._told_step = -1
        self.end: tuple[int, str] | None = None
        threading.Thread(target=self._progress, name="progress", daemon=True).start()
        self._look_for_checkpoint(5, now)  # from which the first start begins

    def came(self, node: int, host: str, address: str, now: float) -> None:
        self._addresses[node] = address
        self.take(facts.Came(node, host), now)

    def hear(self, node: int, message: list, now: float) -> None:
        """Takes an agent's message; of an earlier start's nothing."""
        kind, *rest = message
        if not lines.fits(rest, FIELDS.get(kind)):
            raise lines.OddMessage
        number = self.decider.number
        if kind == "ready":
            (self._ports[node],) = rest
            self.take(facts.Ready(node), now)
        elif kind == "views" and rest[0] == number:
            views = [View(*view) for view in rest[1]]
            self._views(node, [v for v in views if self.decider.node_of(v.process) == node], now)
        elif kind == "exited" and rest[0] == number:
            if self.decider.state == "running":  # its last save counts
                self._look_for_checkpoint(PROGRESS, now)
            if self.decider.node_of(rest[1]) == node:
                self.take(facts.Exited(node, *rest[1:]), now)
        elif kind == "finding":
            self.take(facts.Found(node, Finding(**rest[0])), now)
        elif kind in ("checked", "linked"):
            if self._checking:
                self._checking.hear(node, message)
        elif kind == "stacks" and rest[0] == number:
            self._stacks |= {
                int(p): stack
                for p, stack in rest[1].items()
                if p.isdecimal() and lines.fits(stack, (str, str))
            }
            if len(self._stacks) >= self._collecting:
                self.take(facts.Collected(self._where()), now)
        elif kind == "asked":
            again = node in self._asked
            if again or not self._asked:  # a scheduler tells all agents at once
                self.take(facts.Asked(rest[0]), now)
            self._asked.add(node)
        elif kind == "slept":
            self._hangs.woke(now)
            if self._checking:
                self._checking.woke(min(rest[0], LONGEST_SLEEP))

    def turn(self, now: float) -> None:
        """Looks for progress, for hanging processes and for slow ones."""
        self.take(facts.Saved(self._newest), now)
        if self._checking and (unfit := self._checking.turn(now)) is not None:
            seconds, self._checking = now - self._checking.begun, None
            self.take(facts.Checked(tuple(unfit), seconds), now)
        if self.decider.state in ("running", "leaving"):
            found = self._hangs.find(now)
            if not self._wait_out(found) and found:
                self._stacks, self._first = {}, found.process
                self.take(found, now)
            for slow in self._stragglers.look() if self._stragglers else ():
                self.take(facts.Found(slow.node, self._finding(slow)), now)
        self.take(facts.Tick(), now)

    def _wait_out(self, found: facts.Hung | None) -> bool:
        """Whether a hang that all share is given time; reports when that begins, and when it has
        ended well."""
        before, patience = self._awaited, self._plan.patience
        if before and (found is None or found.seconds < before.seconds):
            words = {"concluded": "a link or a device was away", "done": "it goes on"}
            self._event("waited", words | {"seconds": round(before.seconds, 3)})
            before = None
        waits = found is not None and found.alike and found.seconds < patience
        self._awaited = found if waits else None
        if found and waits and not before:
            done = f"waits up to {patience:g} s for the link"
            words = {"seen": found.seen, "concluded": found.concluded, "done": done}
            self._event("waits", words | {"seconds": round(found.seconds, 3)})
        return waits

    def _views(self, node: int, views: list[View], now: float) -> None:
        self._hangs.heard(node, views, now)
        for view in views:
            for step, whole, own, _ in view.laps:
                if self._stragglers:
                    self._stragglers.add(view.process, int(step), whole, own)
            if view.process == 0 and view.section and self._spending:
                self._spent(self._spending.see(view.section, view.step, now))
        step = self._hangs.step()
        if step >= 0 and step != self._told_step:
            self._told_step = step
            self.take(facts.Stepped(step), now)

    def _finding(self, slow: straggle.Straggler) -> Finding:
        return Finding(
            "straggler",
            "note",
            "exclude" if self._plan.exclude_stragglers else "warn",
            f"process {slow.process}: own work {slow.ratio:.2f} times that of the others over steps"
            f" {slow.steps[0]} to {slow.steps[1]}, {100 * slow.costs:.0f}% of a step",
            slow.process,
        )

    def take(self, fact: facts.Fact, now: float) -> None:
        """Has `decide` take a fact, and carries out its actions."""
        actions = self.decider.take(fact, now)
        begins = any(isinstance(action, facts.Start) for action in actions)
        if self._spending and (begins or self.decider.state not in ("running", "leaving")):
            self._spent(self._spending.end(now))
            self._spending = None
        for action in actions:
            match action:
                case facts.Check(nodes):
                    self._checking = Checking(
                        self._tickets, nodes, self._addresses, self._order, now
                    )
                case facts.Start(number, nodes):
                    self._spending = Spending(now, self._newest)
                    self._start(number, nodes)
                case facts.Order():
                    self._collecting = self._plan.rules.processes * len(self.decider.nodes)
                    for node in self.decider.nodes:
                        self._order(node, [action.value])
                case facts.Drop(node):
                    self._order(node, ["drop"])
                case facts.Say(kind, given):
                    self._event(kind, given)
                case facts.End(code, text):
                    self.end = code, text

    def _start(self, number: int, nodes: tuple[int, ...]) -> None:
        each = self._plan.rules.processes
        self._hangs.begin()
        self._awaited = None
        self._told_step = -1
        self._stragglers = Stragglers([node for node in nodes for _ in range(each)])
        address = join_address(self._addresses[nodes[0]], self._ports[nodes[0]])
        for place, node in enumerate(nodes):
            self._order(node, ["start", number, address, len(nodes) * each, place * each])

    def _where(self) -> str:
        """The lines at which the processes are, the first silent one before the others."""
        first = self._stacks.get(self._first)
        places = [f"process {self._first} is at {first[1]} ({first[0]})"] if first else []
        others: dict[str, list[int]] = {}
        for process, (_, line) in sorted(self._stacks.items()):
            if process != self._first:
                others.setdefault(line, []).append(process)
        for line, processes in sorted(others.items(), key=lambda item: -len(item[1]))[:3]:
            named = ", ".join(map(str, processes[:NAMED])) + (
                " ..." if len(processes) > NAMED else ""
            )
            places.append(f"{named} at {line}")
        return "; ".join(places)

    def _event(self, kind: str, given: dict[str, Any]) -> None:
        event = events.Event(kind, time.time(), **given)
        self._keeper.add(event)
        if kind in ("log", "hardware") and event.group in ("note", "user"):
            return  # worth neither a call nor a line on the terminal, unless it explains an end
        if self.hook:
            self.hook.tell(event)
        self._say(f"aegis: {event.text()}")

    def _spent(self, given: dict[str, Any] | None) -> None:
        """Writes down how the start's time was spent since the last such event."""
        if given:
            self._keeper.add(events.Event("spent", time.time(), **given))

    def _look_for_checkpoint(self, seconds: float, now: float) -> None:
        """Has the thread look, and waits for its answer; not for ever, since the disk may hang."""
        answered = threading.Event()
        self._questions.put(answered)
        answered.wait(seconds)
        self.take(facts.Saved(self._newest), now)

    def _progress(self) -> None:
        """The newest whole checkpoint; a thread's work, since the disk may hang."""
        while self.end is None:
            question = None
            with contextlib.suppress(queue.Empty):
                question = self._questions.get(timeout=PROGRESS)
            with contextlib.suppress(OSError):
                self._newest = max(writing.steps_in(self._plan.workdir / "checkpoints"), default=-1)
            if question:
                question.set()


def _starts(workdir: Path) -> int:
    """How many starts this workdir has seen under an agent."""
    named = (
        path.name.removeprefix("start-")
        for path in (workdir / events.FOLDER / "logs").glob("start-*")
    )
    return max((int(number) for number in named if number.isdecimal()), default=0)
