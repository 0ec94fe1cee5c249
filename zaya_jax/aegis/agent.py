"""One agent per node: it runs the node's processes; that of node 0 leads all.

    code = agent.run(plan, task, place)     until the run has ended, or cannot go on

Members hold a line to the leader (`wire`). A member whose line breaks is a lost node; a leader whose line breaks ends
its members, and with them their processes, so that a scheduler can start all of them again.
"""

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from zaya_jax.aegis import wire
from zaya_jax.aegis.keeping import Keeper, Terminal
from zaya_jax.aegis.leader import Leader, Plan
from zaya_jax.aegis.node import Node, Task
from zaya_jax.cluster.place import LostProcess, Place

TURN = 0.1  # seconds
SLEPT = 3.0  # a turn that took so long: this agent stood still
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
HEARTBEAT = 60.0
FAREWELL = 5.0  # seconds for last words


class Agent:
    """What leading and other agents have in common."""

    def __init__(self, plan: Plan, task: Task, place: Place | None, heartbeat: float = HEARTBEAT):
        self.plan, self.task, self.place, self.heartbeat = plan, task, place, heartbeat
        self.selector = selectors.DefaultSelector()
        self.keeper, self.terminal = Keeper(task.workdir), Terminal()
        self.node = Node(task, self.selector, self.keeper, self.terminal, self.tell)
        self.end: tuple[int, str] | None = None
        self._signals: list[int] = []
        self._asleep, self._wake = socket.socketpair()

    def run(self) -> int:
        """Until the end; what the system had set for signals is set again then."""
        for end in (self._asleep, self._wake):
            end.setblocking(False)
        self.selector.register(self._asleep, selectors.EVENT_READ, self._woken)
        # A terminal that closes is no reason to stop where somebody has said so (nohup).
        heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._signal) for number in heeded}
        fd = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        try:
            self.begin()
            last = time.monotonic()
            while self.end is None:
                for key, _ in self.selector.select(TURN):
                    key.data()
                now = time.monotonic()
                if now - last > SLEPT:
                    self.slept(now - last)
                last = now
                while self._signals:
                    self.tell(["asked", signal.Signals(self._signals.pop(0)).name])
                self.node.turn(now)
                self.due(now)
        finally:
            self.node.close()
            signal.set_wakeup_fd(fd)
            for number, handler in before.items():
                signal.signal(number, handler)
        self.farewell()
        code, text = self.end
        if code and text:
            self.say(f"aegis: node {self.place.index if self.place else 0} ends with {code}: {text}")
        self.keeper.close(FAREWELL)
        self.terminal.close(FAREWELL)
        if self.keeper.lost or self.keeper.lost_events or self.terminal.lost:
            lost = f"{self.keeper.lost:,} bytes and {self.keeper.lost_events} events for aegis/"
            lost += f", and {self.terminal.lost:,} bytes for the terminal were not written"
            print(f"aegis: {lost}: there was more than disk or terminal took", file=sys.stderr)
        self.selector.close()
        return code

    def say(self, line: str) -> None:
        """A line for the person who looks on."""
        self.terminal.show(2, line.encode() + b"\n")

    def _signal(self, number: int, frame: Any) -> None:
        self._signals.append(number)

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._asleep.recv(1 << 10)

    # What differs

    def begin(self) -> None:
        """Before the first turn."""
        raise NotImplementedError

    def tell(self, message: list) -> None:
        """To the leader."""
        raise NotImplementedError

    def due(self, now: float) -> None:
        """Once a turn."""
        raise NotImplementedError

    def slept(self, seconds: float) -> None:
        """This agent stood still."""
        self.tell(["slept", seconds])

    def farewell(self) -> None:
        """After the last turn."""

    def obey(self, message: list) -> None:
        """What the leader orders."""
        kind, *rest = message
        if kind == "start":
            self.node.start(*rest)
        elif kind in ("ask", "kill", "collect", "check", "link"):
            getattr(self.node, kind)(*rest)


class Leading(Agent):
    """The agent of node 0."""

    def begin(self) -> None:
        """Opens the door to the others."""
        now = time.monotonic()
        self._early: list[list] | None = []
        self._lines: dict[int, wire.Line] = {}
        self._told = now
        host, self._server = "localhost", None
        if self.place:
            host, port = self.place.coordinator.rsplit(":", 1)
            host = host.strip("[]")
            self._server = wire.listen(int(port))
            self._door = wire.Door(
                wire.key_of(os.environ), wire.digest_of(_said(self)), self.plan.rules.agents
            )
            self.selector.register(self._server, selectors.EVENT_READ, self._open)
        self.leader = Leader(self.plan, self.keeper, self.say, self._order, now)
        self.leader.came(0, socket.gethostname(), host, now)
        self.node.ready()

    def tell(self, message: list) -> None:
        """Of its own node."""
        self.leader.hear(0, message, time.monotonic())

    def due(self, now: float) -> None:
        """Asks for signs of life, and drops who gives none."""
        for line in self._door.due(now) if self._server else ():
            self._drop(line)
        if now - self._told > min(self.heartbeat / 10, 1.0):
            self._told = now
            for line in self._lines.values():
                line.say()
        for line in list(self._lines.values()):
            line.flush()
            if now - line.heard > self.heartbeat:
                self._drop(line, f"its agent is silent for {self.heartbeat:g} s")
        self.leader.turn(now)
        self.end = self.leader.end

    def slept(self, seconds: float) -> None:
        """Nobody is blamed for that time."""
        now = time.monotonic()
        self.leader.woke(seconds, now)
        for line in self._lines.values():
            line.heard = now

    def farewell(self) -> None:
        """All others end with the same code."""
        assert self.end
        for line in self._lines.values():
            line.say("end", *self.end)
        until = time.monotonic() + FAREWELL
        while any(line.waiting for line in self._lines.values()) and time.monotonic() < until:
            for line in self._lines.values():
                line.flush()
            time.sleep(0.02)
        for line in self._lines.values():
            line.close()
        if self._server:
            self._server.close()
        self.leader.close()

    def _order(self, node: int, message: list) -> None:
        if node == 0:
            self.obey(message)
        elif node in self._lines and message == ["drop"]:
            self._drop(self._lines[node], "it did not answer")
        elif node in self._lines:
            self._lines[node].say(*message)

    def _open(self) -> None:
        assert self._server
        with contextlib.suppress(OSError):
            line = self._door.open(self._server.accept()[0])
            self.selector.register(line.connection, selectors.EVENT_READ, lambda: self._hear(line))

    def _hear(self, line: wire.Line) -> None:
        messages, now = line.read(), time.monotonic()
        try:
            for message in messages or ():
                if line.node is None:
                    self._door.hear(line, message)
                    self._welcome(line, now)
                else:
                    self.leader.hear(line.node, message, now)
        except (ValueError, TypeError, KeyError, AssertionError):
            messages = None  # no agent speaks so
        if messages is None:
            self._drop(line, "its agent is gone: killed, crashed, or the connection is cut")

    def _welcome(self, line: wire.Line, now: float) -> None:
        assert line.node is not None
        if line.node in self._lines:  # it was started again before its old line was seen to be dead
            self._drop(self._lines[line.node], "its agent came again")
        self._lines[line.node] = line
        address = line.connection.getpeername()[0].removeprefix("::ffff:")
        self.leader.came(line.node, line.greeting[0], address, now)

    def _drop(self, line: wire.Line, why: str = "") -> None:
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(line.connection)
        line.close()
        if line in self._door.strangers:
            self._door.strangers.remove(line)
        if line.node is not None and self._lines.get(line.node) is line:
            del self._lines[line.node]
            self.leader.lost(line.node, why, time.monotonic())


class Member(Agent):
    """The agent of any other node."""

    def begin(self) -> None:
        """Finds the leader."""
        assert self.place
        self._line: wire.Line | None = None
        key, digest = wire.key_of(os.environ), wire.digest_of(_said(self))
        try:
            self._line = wire.call(
                self.place.coordinator, self.place.index, digest, key, self.plan.rules.join
            )
        except LostProcess as error:
            self.end = 1, str(error)
            return
        self.selector.register(self._line.connection, selectors.EVENT_READ, self._hear)
        self.node.ready()

    def tell(self, message: list) -> None:
        """Over the line."""
        if self._line:
            self._line.say(*message)

    def due(self, now: float) -> None:
        """A leader that is silent is lost."""
        if self._line:
            self._line.flush()
            if now - self._line.heard > self.heartbeat:
                self.end = 1, f"the leader is silent for {self.heartbeat:g} s"

    def slept(self, seconds: float) -> None:
        """Then the leader was not silent."""
        if self._line:
            self._line.heard = time.monotonic()
            self.tell(["slept", seconds])

    def farewell(self) -> None:
        """Hangs up."""
        if self._line:
            self._line.close()

    def _hear(self) -> None:
        assert self._line
        messages = self._line.read()
        for kind, *rest in messages or ():
            if kind == "end":
                self.end = rest[0], rest[1]
            else:
                self.obey([kind, *rest])
        if messages is None and self.end is None:
            self.selector.unregister(self._line.connection)
            self.end = 1, "the leader is gone: killed, crashed, or the connection is cut"


def run(plan: Plan, task: Task, place: Place | None, heartbeat: float = HEARTBEAT) -> int:
    """An agent's life; its exit code."""
    kind: Callable[..., Agent] = Leading if place is None or place.index == 0 else Member
    return kind(plan, task, place, heartbeat).run()


def _said(agent: Agent) -> list[str]:
    """What must be the same for all agents."""
    rules = agent.plan.rules
    # The interpreter's path may differ from node to node; what is run may not.
    return [*agent.task.command[1:], str(agent.task.processes), str(rules.nodes), str(rules.agents)]
