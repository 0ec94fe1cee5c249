"""Starts a node's processes, follows their output and heartbeats, and ends them, for the node's
agent.

    node = Node(plan, selector, keeper, terminal, tell)
    node.start(number, address, count, first)   its part of a start: processes first, first + 1, ... of count
    node.turn(now)                              reports changes; called often
    node.ask(), node.kill(), node.collect()
    node.check(number), node.link(number, coordinator, index)   its part of the check before a start

`tell` gets lists as they go over a line: ["exited", start, process, code], ["ready", port],
["views", start, [...]], ["finding", {...}], ["stacks", start, {process: [how, line]}], ["checked",
number, [{...}], port], ["linked", number, bandwidth, wrong].
"""

import contextlib
import dataclasses
import functools
import os
import queue
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zaya_jax.aegis import log_rules, machine, preflight, stacks, watch
from zaya_jax.aegis.decide import Rules
from zaya_jax.aegis.hang import View
from zaya_jax.aegis.keeping import Keeper, Terminal
from zaya_jax.cluster import beats
from zaya_jax.cluster.events import Finding

LOOK = 0.25  # seconds between two looks at the beats
WATCH = 5.0  # seconds between two looks at the hardware
LINE = 1 << 16  # bytes; a longer one is taken in pieces
PIPE = 1 << 18  # bytes; Linux gives a pipe 64 KiB
ROOT = "ZAYA_WATCH_ROOT"  # the variable: the root of the watched files in place of /, for tests


@dataclasses.dataclass(frozen=True)
class Plan:
    """The options of a supervised run, and the command of its processes."""

    rules: Rules
    workdir: Path
    command: Sequence[str] = ()
    exclude_stragglers: bool = False
    patience: float = 0.0  # seconds that all may wait alike for a link that comes back
    hook: Sequence[str] = ()  # a command that is run at each event


@dataclasses.dataclass
class Process:
    """One of the run's processes here."""

    index: int
    popen: subprocess.Popen
    started: float
    rest: dict[int, bytes] = dataclasses.field(default_factory=lambda: {1: b"", 2: b""})
    laps: int = 0  # how many were reported

    @property
    def pipes(self) -> dict[int, Any]:
        """Its output, by stream."""
        return {1: self.popen.stdout, 2: self.popen.stderr}


class Node:
    def __init__(
        self,
        plan: Plan,
        selector: selectors.BaseSelector,
        keeper: Keeper,
        terminal: Terminal,
        tell: Callable[[list], None],
    ):
        self._plan, self._tell, self._selector, self._keeper, self._terminal = (
            plan,
            tell,
            selector,
            keeper,
            terminal,
        )
        # a file in memory, to which the processes of this start write their beats
        self._memory = -1
        self.processes: dict[int, Process] = {}
        self._number, self._looked = 0, 0.0
        self._done: queue.SimpleQueue[list] = queue.SimpleQueue()  # messages of threads
        self._matcher = log_rules.Matcher()
        self._numa = machine.gpus(os.environ)
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def ready(self) -> None:
        """Says that nothing runs here, and names a free port."""
        self._tell(["ready", _port()])

    def check(self, number: int) -> None:

        def tried() -> list:
            found = preflight.check(len(self._numa) or None, os.environ.get(ROOT, "/"))
            return ["checked", number, [dataclasses.asdict(finding) for finding in found], _port()]

        self._begin(tried)

    def link(self, number: int, coordinator: str, index: int) -> None:
        """Begins to try the link to another node."""
        self._begin(lambda: ["linked", number, *preflight.link(coordinator, index)])

    def start(self, number: int, address: str, count: int, first: int) -> None:
        # each start counts its lines anew
        self._number, self._matcher = (number, log_rules.Matcher())
        self._forget_beats()
        self._memory = os.memfd_create("beats")
        os.truncate(self._memory, count * beats.SIZE)
        for i in range(self._plan.rules.processes):
            index = first + i
            variables = {
                "JAX_COORDINATOR_ADDRESS": address,
                "JAX_NUM_PROCESSES": str(count),
                "JAX_PROCESS_ID": str(index),
                beats.VARIABLE: f"/proc/{os.getpid()}/fd/{self._memory}",
                "PYTHONUNBUFFERED": "1",
            }
            gpus, near = machine.part_of_gpus(self._numa, i, self._plan.rules.processes)
            variables |= gpus
            popen = subprocess.Popen(
                [*machine.ends_with_this(), *near, *self._plan.command],
                env={**machine.time_outs(self._plan.patience), **os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            process = self.processes[index] = Process(index, popen, time.monotonic())
            for stream, pipe in process.pipes.items():
                os.set_blocking(pipe.fileno(), False)
                hear = functools.partial(self._hear, process, stream, pipe)
                self._selector.register(pipe, selectors.EVENT_READ, hear)

    def ask(self) -> None:
        """Has the run save and stop: one signal to each process, since a second one would end it
        without saving."""
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.popen.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kills the processes here with all that they started, stopped ones too."""
        for process in self.processes.values():
            _kill_group(process.popen)

    def collect(self) -> None:
        """Begins to collect the stacks of all processes here."""
        logs = self._plan.workdir / "logs"
        targets = {
            i: stacks.Target(p.popen.pid, logs / f"process-{i:05d}.log")
            for i, p in self.processes.items()
        }
        self._begin(functools.partial(self._collect, self._number, targets))

    def turn(self, now: float) -> None:
        """Reports ended processes, where the others are, and the findings of threads."""
        ended = [p for p in self.processes.values() if p.popen.poll() is not None]
        if ended:  # how far they had come
            self._tell(["views", self._number, [self._view(p, time.monotonic()) for p in ended]])
        for process in ended:
            _kill_group(process.popen)  # with children that it left behind
            for stream, pipe in process.pipes.items():
                self._hear(process, stream, pipe, last=True)
            del self.processes[process.index]
            self._keeper.ended(process.popen.returncode)
            self._tell(["exited", self._number, process.index, process.popen.returncode])
        if ended and not self.processes:
            self.ready()
        if self.processes and now - self._looked >= LOOK:
            self._looked = now
            self._tell(
                [
                    "views",
                    self._number,
                    [self._view(p, time.monotonic()) for p in self.processes.values()],
                ]
            )
        with contextlib.suppress(queue.Empty):
            while True:
                self._tell(self._done.get_nowait())

    def close(self) -> None:
        """Leaves nothing behind."""
        self.kill()
        for process in self.processes.values():
            process.popen.wait()
        self._forget_beats()

    def _forget_beats(self) -> None:
        if self._memory >= 0:
            os.close(self._memory)
        self._memory = -1

    def _view(self, process: Process, now: float) -> View:
        state = stacks.state(process.popen.pid)
        beat = beats.read(f"/proc/self/fd/{self._memory}", process.index)
        if beat is None:
            age = now - process.started
            return View(process.index, "", 0, "", age, age, state)
        # Counted, since steps may begin again at an earlier one.
        unreported = min(max(beat.lapped - process.laps, 0), len(beat.laps))
        laps = beat.laps[len(beat.laps) - unreported :]
        process.laps = beat.lapped
        # Its words for the time are CLOCK_MONOTONIC's, as ours: ages mean the same on another
        # machine.
        return View(
            process.index,
            beat.section,
            beat.step,
            beat.mark,
            now - beat.since,
            now - beat.pulse,
            state,
            laps,
        )

    def _hear(self, process: Process, stream: int, pipe: Any, last: bool = False) -> None:
        """Takes a process's output. After its end that is no more than a pipe holds: a child of its
        own that left its group, and has the pipe too, may print for ever."""
        if pipe.closed:
            return
        for _ in range(PIPE // LINE if last else 1):
            try:
                data = os.read(pipe.fileno(), LINE)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                last = True
                break
            self._terminal.show(stream, data)
            self._keeper.append(
                f"logs/start-{self._number:03d}/process-{process.index:05d}.log", data
            )
            *lines, rest = (process.rest[stream] + data).split(b"\n")
            process.rest[stream] = b"" if len(rest) > LINE else rest
            for line in [*lines, rest] if len(rest) > LINE else lines:
                self._match(process.index, stream, line)
        if last:
            self._match(process.index, stream, process.rest[stream])
            self._selector.unregister(pipe)
            pipe.close()

    def _match(self, process: int, stream: int, line: bytes) -> None:
        if line:
            for finding in self._matcher.feed(process, line, stream):
                self._tell(["finding", dataclasses.asdict(finding)])

    def _begin(self, work: Callable[[], list]) -> None:
        """Does some work in a thread; its message, or its error, is told once it ends."""

        def run() -> None:
            try:
                self._done.put(work())
            except Exception as error:
                words = f"{type(error).__name__}: {error}"
                finding = Finding("agent's own error", "distributed", "warn", words)
                self._done.put(["finding", dataclasses.asdict(finding)])

        threading.Thread(target=run, daemon=True).start()

    def _collect(self, number: int, targets: dict[int, stacks.Target]) -> list:
        found = stacks.collect(targets)
        for process, stack in found.items():
            self._keeper.append(
                f"stacks/start-{number:03d}/process-{process:05d}.txt",
                f"{stack.how}\n{stack.text}".encode(),
            )
        return ["stacks", number, {p: [s.how, s.line] for p, s in found.items()}]

    def _watch(self) -> None:
        root = os.environ.get(ROOT, "/")
        watchers, kernel = watch.Watchers(root), log_rules.Kernel(root)
        if words := machine.missing_cards(os.environ, root):
            finding = Finding("network cards missing", "distributed", "note", words)
            self._done.put(["finding", dataclasses.asdict(finding)])
        while True:
            for finding in [*watchers.look(), *kernel.look()]:
                self._done.put(["finding", dataclasses.asdict(finding)])
            time.sleep(WATCH)


def _port() -> int:
    """A free one."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def _kill_group(popen: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(popen.pid, signal.SIGKILL)
