"""Runs one agent per node, which starts the node's processes; the agent of node 0 leads the others.

    code = Agent(options, rank, heartbeat).run()     until the run has ended, or cannot go on

Members hold a connection to the leading agent (`cluster.connections`), which sends heartbeats that
idle agents answer too. A member whose connection breaks is a lost node. Members that lose their
leader end with their processes, so that a scheduler can start all of them again.

    processes -> Node -> Agent -> connection -> leading Agent -> Leader -> Decider
    processes <- Node <- Agent <- connection <- leading Agent <- Leader <-
"""

import hashlib
import json
import selectors
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from zaya_jax.aegis import facts
from zaya_jax.aegis.keeping import Keeper, Terminal
from zaya_jax.aegis.leader import Leader
from zaya_jax.aegis.node import Node, SupervisorOptions
from zaya_jax.cluster import leaving
from zaya_jax.cluster.connections import Connection, Hub
from zaya_jax.cluster.rank import LostProcess, Rank, split_address

POLL = 0.1  # seconds
SLEPT = 3.0  # a poll that took so long: this agent stood still
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
FAREWELL = 5.0  # seconds for last words
GONE = "gone: it was killed or crashed, the connection broke, or it sent an invalid message"
DIFFERS = "it has another command or another zaya_jax; start all agents with the same of both"
ORDERS = ("start", "save", "kill", "dump_stacks", "check", "link")  # methods of `Node`


class Agent:
    """A node's agent. That of node 0 has a `leader`, to which it speaks without a connection."""

    def __init__(self, options: SupervisorOptions, rank: Rank | None, heartbeat: float):
        self.options, self.rank, self.heartbeat = options, rank, heartbeat
        self.index = rank.index if rank else 0
        self.leader: Leader | None = None
        self.outcome: tuple[int, str] | None = None  # the exit code and the reason
        self.selector = selectors.DefaultSelector()
        self.keeper, self.terminal = Keeper(options.workdir), Terminal()
        self.node = Node(options, self.selector, self.keeper, self.terminal, self._tell_leader)
        self.hub = Hub(
            self.selector,
            _digest(options),
            options.rules.agents,
            DIFFERS,
            self._connected,
            self._received,
            self._lost,
        )
        self._signals: list[int] = []
        self._connecting = self.index > 0  # to its leader: there is nobody to tell of a signal

    def run(self) -> int:
        """Runs to the end and returns the exit code; from then on signals change nothing."""
        for signum in SIGNALS:
            # Under nohup a terminal that closes is no reason to stop.
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, self._signal)
        try:
            if self.index == 0:
                self._lead()
            else:
                self._find_leader()
            last = time.monotonic()
            while self.outcome is None:
                for key, _ in self.selector.select(POLL):
                    key.data()
                now = time.monotonic()
                if now - last > SLEPT:  # it stood still, so that no other was silent in that time
                    self.hub.reset_silence(now)
                    self._tell_leader(["slept", now - last])
                last = now
                # A wish to stop goes first, since it explains the exits that follow from it.
                while self._signals:
                    self._tell_leader(["asked", signal.Signals(self._signals.pop(0)).name])
                self.node.poll(now)
                self._check_silence(now)
                if self.leader:
                    self.leader.poll(now)
                    self.outcome = self.leader.outcome
        finally:
            self.node.close()
        self._hang_up(*self.outcome)
        code, text = self.outcome
        if code and text:
            self.print_line(f"aegis: node {self.index} ends with {code}: {text}")
        self.keeper.close(FAREWELL)
        self.terminal.close(FAREWELL)
        if self.keeper.lost or self.terminal.lost:
            line = (
                f"aegis: {self.keeper.lost:,} bytes for aegis/ and {self.terminal.lost:,} for the"
                " terminal were not written: the disk or terminal could not keep up"
            )
            leaving.within(FAREWELL, lambda: leaving.complain(line))  # the terminal may hang
        self.selector.close()
        return code

    def print_line(self, line: str) -> None:
        """Prints a line for the operator."""
        self.terminal.show(2, line.encode() + b"\n")

    def _signal(self, signum: int, frame: Any) -> None:
        if self._connecting:
            name = signal.Signals(signum).name
            leaving.complain(f"aegis: node {self.index}: {name} while it looked for its leader")
            sys.exit(leaving.PREEMPTED)
        self._signals.append(signum)

    def _lead(self) -> None:
        now = time.monotonic()
        host = "localhost"
        if self.rank:
            host, port = split_address(self.rank.coordinator)
            hint = "give another in JAX_COORDINATOR_ADDRESS, or as JAX_COORDINATOR_PORT under Slurm"
            self.hub.listen(port, "the agents'", hint)
        self.leader = Leader(self.options, self.keeper, self.print_line, self._order, now)
        self.leader.agent_connected(0, socket.gethostname(), host, now)
        self.node.ready()

    def _find_leader(self) -> None:
        """Connects to it, however late it starts; a signal ends the search at once."""
        assert self.rank
        seconds = self.options.rules.join
        try:
            self.hub.call(self.rank.coordinator, self.index, seconds, "node")
        except LostProcess as error:
            self.outcome = leaving.FAILED, str(error)
            return
        self._connecting = False
        self.node.ready()

    def _tell_leader(self, message: list) -> None:
        if self.leader:
            self.leader.receive(0, message, time.monotonic())
        elif 0 in self.hub.by_index:
            self.hub.by_index[0].send(*message)

    def _order(self, node: int, message: list) -> None:
        connection = self.hub.by_index.get(node)
        if node == 0:
            self._execute(message)  # but "drop": the leader's own node has no connection to cut
        elif connection and message == ["drop"]:
            self._lost(connection, "without an answer")
        elif connection:
            connection.send(*message)

    def _execute(self, message: list) -> None:
        kind, *arguments = message
        if kind in ORDERS:
            getattr(self.node, kind)(*arguments)

    def _check_silence(self, now: float) -> None:
        """Asks for signs of life; an agent that gives none is lost."""
        if self.leader:
            self.hub.poll(now, min(self.heartbeat / 10, 1.0))
        for connection in list(self.hub.by_index.values()):
            connection.flush()
            silent = now - connection.last_heard
            lost = silent > self.heartbeat
            if self.leader and connection.index is not None:
                lost = lost or self.leader.decider.gives_up(connection.index, silent)
            if lost:
                self._lost(connection, f"silent for {silent:.0f} s")

    def _connected(self, connection: Connection, before: Connection | None) -> None:
        """A member has called. `before`: it was started again before its old connection was seen to
        be dead."""
        assert self.leader and connection.index is not None
        if before:
            self._lost(before, "there again")
        now = time.monotonic()
        self.leader.agent_connected(connection.index, connection.host, connection.address, now)

    def _received(self, connection: Connection, message: list) -> None:
        if self.leader:
            self.leader.receive(connection.index or 0, message, time.monotonic())
        elif message[0] == "end":
            self.outcome = message[1], message[2]
        else:
            self._execute(message)

    def _lost(self, connection: Connection, why: str = GONE) -> None:
        """An agent is gone: a lost node; without its leader this one ends."""
        self.hub.hang_up(connection)
        if self.leader:
            fact = facts.AgentLost(connection.index or 0, f"its agent is {why}")
            self.leader.take(fact, time.monotonic())
        else:
            self.outcome = self.outcome or (leaving.FAILED, f"the leader is {why}")

    def _hang_up(self, code: int, text: str) -> None:
        """After the last poll; all members end with the leader's code."""
        if self.leader:
            for connection in self.hub.by_index.values():
                connection.send("end", code, text)
            self.hub.wait_for_hangups(FAREWELL)
            if self.leader.hook:
                self.leader.hook.close()
        for connection in list(self.hub.by_index.values()):
            self.hub.hang_up(connection)
        self.hub.stop_listening()


def _digest(options: SupervisorOptions) -> str:
    """A hash of the command and of zaya_jax, which must be the same for all agents."""
    rules = options.rules
    package = Path(__file__).parents[1]
    # The interpreter's path may differ from node to node; the command may not.
    parts = [*options.command[1:], str(rules.processes), str(rules.nodes), str(rules.agents)]
    for suffix in ("py", "toml"):
        parts += [path.read_text() for path in sorted(package.rglob(f"*.{suffix}"))]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
