"""Runs one agent per node, which starts the node's processes; the agent of node 0 leads the others.

    code = agent.run(plan, rank)     until the run has ended, or cannot go on

Members hold a connection to the leader (`cluster.lines`), which sends heartbeats that idle agents
answer too. A member whose connection breaks is a lost node. Members that lose their leader end with
their processes, so that a scheduler can start all of them again.
"""

import abc
import hashlib
import json
import selectors
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zaya_jax.aegis import facts
from zaya_jax.aegis.keeping import Keeper, Terminal
from zaya_jax.aegis.leader import Leader
from zaya_jax.aegis.node import Node, Plan
from zaya_jax.cluster import leaving, lines
from zaya_jax.cluster.rank import LostProcess, Rank, split_address

TURN = 0.1  # seconds
SLEPT = 3.0  # a turn that took so long: this agent stood still
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
FAREWELL = 5.0  # seconds for last words
GONE = "gone: killed, crashed, the connection is cut, or it sent what is no message"


class _AskedToStop(Exception):
    """A signal came while there was no leader to tell."""


class Agent(abc.ABC):
    """The part that the leading agent and members share."""

    def __init__(self, plan: Plan, rank: Rank | None, heartbeat: float):
        self.plan, self.rank, self.heartbeat = plan, rank, heartbeat
        self.selector = selectors.DefaultSelector()
        self.keeper, self.terminal = Keeper(plan.workdir), Terminal()
        self.node = Node(plan, self.selector, self.keeper, self.terminal, self.tell)
        self.digest = _digest(plan)
        differs = (
            "it has another command or another zaya_jax; start all agents with the same of both"
        )
        agents = plan.rules.agents
        self.door = lines.Door(
            self.selector, self.digest, agents, differs, self.came, self.hear, self.lost
        )
        self.end: tuple[int, str] | None = None
        self._signals: list[int] = []
        self._searches = False  # for its leader: there is nobody to tell of a signal

    def run(self) -> int:
        """Runs to the end; from then on signals change nothing."""
        for number in SIGNALS:
            # Under nohup a terminal that closes is no reason to stop.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._signal)
        try:
            self.begin()
            last = time.monotonic()
            while self.end is None:
                for key, _ in self.selector.select(TURN):
                    key.data()
                now = time.monotonic()
                if now - last > SLEPT:  # it stood still, so that no other was silent in that time
                    self.door.forgive(now)
                    self.tell(["slept", now - last])
                last = now
                while self._signals:
                    self.tell(["asked", signal.Signals(self._signals.pop(0)).name])
                self.node.turn(now)
                self.due(now)
        finally:
            self.node.close()
        self.farewell()
        code, text = self.end
        if code and text:
            self.say(f"aegis: node {self.rank.index if self.rank else 0} ends with {code}: {text}")
        self.keeper.close(FAREWELL)
        self.terminal.close(FAREWELL)
        if self.keeper.lost or self.keeper.log.lost or self.terminal.lost:
            lost = f"{self.keeper.lost:,} bytes and {self.keeper.log.lost} events for aegis/"
            lost += f", and {self.terminal.lost:,} bytes for the terminal were not written"
            leaving.complain(f"aegis: {lost}: there was more than disk or terminal took")
        self.selector.close()
        return code

    def say(self, line: str) -> None:
        """Prints a line for the operator."""
        self.terminal.show(2, line.encode() + b"\n")

    def _signal(self, number: int, frame: Any) -> None:
        if self._searches:
            raise _AskedToStop(signal.Signals(number).name)
        self._signals.append(number)

    # What differs

    @abc.abstractmethod
    def begin(self) -> None:
        """Before the first turn."""

    @abc.abstractmethod
    def tell(self, message: list) -> None:
        """To the leader."""

    @abc.abstractmethod
    def due(self, now: float) -> None:
        """Once a turn."""

    def came(self, line: lines.Line, before: lines.Line | None) -> None:  # noqa: B027
        """Another agent is there."""

    @abc.abstractmethod
    def hear(self, line: lines.Line, message: list) -> None:
        """A message of another agent."""

    @abc.abstractmethod
    def lost(self, line: lines.Line, why: str = GONE) -> None:
        """Another agent is gone."""

    def farewell(self) -> None:
        """After the last turn."""
        for line in list(self.door.known.values()):
            self.door.drop(line)

    def obey(self, message: list) -> None:
        """Carries out an order of the leader."""
        kind, *rest = message
        if kind in ("start", "ask", "kill", "collect", "check", "link"):
            getattr(self.node, kind)(*rest)


class Leading(Agent):
    """The agent of node 0."""

    def begin(self) -> None:
        """Opens the door to the others."""
        now, host = time.monotonic(), "localhost"
        if self.rank:
            host, port = split_address(self.rank.coordinator)
            way = "give another in JAX_COORDINATOR_ADDRESS, or as JAX_COORDINATOR_PORT under Slurm"
            self.door.open(port, "the agents'", way)
        self.leader = Leader(self.plan, self.keeper, self.say, self._order, now)
        self.leader.came(0, socket.gethostname(), host, now)
        self.node.ready()

    def tell(self, message: list) -> None:
        self.leader.hear(0, message, time.monotonic())

    def due(self, now: float) -> None:
        """Asks for signs of life, and drops an agent that gives none."""
        self.door.turn(now, min(self.heartbeat / 10, 1.0))
        for index, line in list(self.door.known.items()):
            silent = now - line.heard
            if silent > self.heartbeat or self.leader.decider.gives_up(index, silent):
                self.lost(line, f"silent for {silent:.0f} s")
        self.leader.turn(now)
        self.end = self.leader.end

    def farewell(self) -> None:
        """All others end with the same code."""
        assert self.end
        for line in self.door.known.values():
            line.say("end", *self.end)
        self.door.see_off(FAREWELL)
        super().farewell()
        self.door.shut()
        if self.leader.hook:
            self.leader.hook.close()

    def came(self, line: lines.Line, before: lines.Line | None) -> None:
        """Takes its place where it was started again before its old line was seen to be dead."""
        assert line.index is not None
        if before:
            self.lost(before, "there again")
        self.leader.came(line.index, line.name, line.address, time.monotonic())

    def hear(self, line: lines.Line, message: list) -> None:
        assert line.index is not None
        self.leader.hear(line.index, message, time.monotonic())

    def lost(self, line: lines.Line, why: str = GONE) -> None:
        self.door.drop(line)
        self.leader.take(facts.Lost(line.index or 0, f"its agent is {why}"), time.monotonic())

    def _order(self, node: int, message: list) -> None:
        line = self.door.known.get(node)
        if node == 0:
            self.obey(message)
        elif line and message == ["drop"]:
            self.lost(line, "without an answer")
        elif line:
            line.say(*message)


class Member(Agent):
    """The agent of any other node."""

    def begin(self) -> None:
        """Finds the leader; a signal ends the search at once."""
        assert self.rank
        address, index, rules = self.rank.coordinator, self.rank.index, self.plan.rules
        try:
            self._searches = True
            line = lines.call(address, index, self.digest, rules.join, "node")
        except _AskedToStop as asked:
            self.end = leaving.PREEMPTED, f"{asked} while it looked for its leader"
            return
        except LostProcess as error:
            self.end = 1, str(error)
            return
        finally:
            self._searches = False
        self.door.known[0] = line
        self.door.attend(line)
        self.node.ready()

    def tell(self, message: list) -> None:
        for line in self.door.known.values():
            line.say(*message)

    def due(self, now: float) -> None:
        """A leader that is silent is lost."""
        for line in self.door.known.values():
            line.flush()
            if now - line.heard > self.heartbeat:
                self.end = 1, f"the leader is silent for {self.heartbeat:g} s"

    def hear(self, line: lines.Line, message: list) -> None:
        kind, *rest = message
        if kind == "end":
            self.end = rest[0], rest[1]
        else:
            self.obey(message)

    def lost(self, line: lines.Line, why: str = GONE) -> None:
        """Ends with its processes, unless it was told how to end."""
        self.end = self.end or (1, f"the leader is {why}")


def run(plan: Plan, rank: Rank | None, heartbeat: float) -> int:
    """Runs this node's agent to its end; returns the exit code."""
    kind: Callable[..., Agent] = Leading if rank is None or rank.index == 0 else Member
    return kind(plan, rank, heartbeat).run()


def _digest(plan: Plan) -> str:
    """A hash of the command and of zaya_jax, which must be the same for all agents."""
    rules = plan.rules
    # The interpreter's path may differ from node to node; the command may not.
    said = [*plan.command[1:], str(rules.processes), str(rules.nodes), str(rules.agents)]
    package = Path(__file__).parents[1]
    code = [path.read_text() for path in sorted(package.rglob("*.py"))]
    code += [path.read_text() for path in sorted(package.rglob("*.toml"))]
    return hashlib.sha256(json.dumps(said + code).encode()).hexdigest()[:16]
