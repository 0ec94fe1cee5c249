"""Starts a node's processes, follows their output and heartbeats, and ends them, for the node's
agent.

    node = Node(options, selector, keeper, terminal, tell)
    node.start(number, address, count, first)   its part of a start: processes first, first + 1, ... of count
    node.poll(now)                              reports changes; called often
    node.save(), node.kill(), node.dump_stacks()
    node.check(number), node.link(number, coordinator, index)   its part of the check before a start

`tell` gets lists as they go over a line: ["exited", start, process, code], ["ready", port],
["views", start, [...]], ["finding", {...}], ["stacks", start, [[process, how, line], ...]], ["checked",
number, [{...}], port], ["linked", number, wrong].
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
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from zaya_jax.aegis import log_rules, machine, preflight, stacks, watch
from zaya_jax.aegis.decide import Rules
from zaya_jax.aegis.hang import View
from zaya_jax.aegis.keeping import Keeper, Terminal
from zaya_jax.cluster import beats
from zaya_jax.cluster.events import Finding

BEATS_PERIOD = 0.25  # seconds
WATCH_PERIOD = 5.0  # seconds between two looks at the hardware
LONGEST_LINE = 1 << 16  # bytes; a longer one is taken in pieces
LAST_WAIT = 10.0  # seconds for killed processes to be gone, before the agent ends without them
PIPE = 1 << 18  # bytes; Linux gives a pipe 64 KiB


@dataclasses.dataclass(frozen=True)
class SupervisorOptions:
    """The options of a supervised run, and the command of its processes."""

    rules: Rules
    workdir: Path
    command: Sequence[str] = ()
    patience: float = 0.0  # seconds that all may wait for a link that comes back
    hook: Sequence[str] = ()  # a command that is run at each event


@dataclasses.dataclass
class Process:
    """One of the run's processes here."""

    index: int
    popen: subprocess.Popen
    started: float
    # Of stdout (1) and stderr (2).
    partial_lines: dict[int, bytes] = dataclasses.field(default_factory=lambda: {1: b"", 2: b""})
    laps: int = 0  # how many were reported

    @property
    def pipes(self) -> dict[int, Any]:
        """Its output, by stream."""
        return {1: self.popen.stdout, 2: self.popen.stderr}


class Node:
    def __init__(
        self,
        options: SupervisorOptions,
        selector: selectors.BaseSelector,
        keeper: Keeper,
        terminal: Terminal,
        tell: Callable[[list], None],
    ):
        self._options, self._selector = options, selector
        self._keeper, self._terminal = keeper, terminal
        self._tell = tell
        # A file in memory, to which the processes of a start write their beats.
        self._beats = os.fdopen(os.memfd_create("beats"), "w+b")
        self.processes: dict[int, Process] = {}
        self._start_number, self._views_sent_at = 0, 0.0
        self._done: queue.SimpleQueue[list] = queue.SimpleQueue()  # messages of threads
        self._matcher = log_rules.Matcher()
        self._numa = machine.gpu_numa_nodes(machine.root())
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def ready(self) -> None:
        """Says that nothing runs here, and names a free port."""
        self._tell(["ready", _free_port()])

    def check(self, number: int) -> None:
        """Begins to test this node."""

        def run_check() -> list:
            findings = preflight.check(len(self._numa) or None, machine.root())
            return ["checked", number, list(map(dataclasses.asdict, findings)), _free_port()]

        self._run_in_thread(run_check)

    def link(self, number: int, coordinator: str, index: int) -> None:
        """Begins to try the link to another node."""
        self._run_in_thread(lambda: ["linked", number, preflight.link(coordinator, index)])

    def start(self, number: int, address: str, count: int, first: int) -> None:
        self._start_number = number
        self._matcher = log_rules.Matcher()  # each start counts its lines anew
        self._beats.truncate(0)  # nothing is left of the start before
        self._beats.truncate(count * beats.SIZE)
        for i in range(self._options.rules.processes):
            index = first + i
            variables = {
                "JAX_COORDINATOR_ADDRESS": address,
                "JAX_NUM_PROCESSES": str(count),
                "JAX_PROCESS_ID": str(index),
                beats.VARIABLE: f"/proc/{os.getpid()}/fd/{self._beats.fileno()}",
                "PYTHONUNBUFFERED": "1",
            }
            gpus, near = machine.part_of_gpus(self._numa, i, self._options.rules.processes)
            variables |= gpus
            popen = subprocess.Popen(
                [*machine.die_with_parent_prefix(), *near, *self._options.command],
                env={**machine.nccl_timeouts(self._options.patience), **os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            process = self.processes[index] = Process(index, popen, time.monotonic())
            for stream, pipe in process.pipes.items():
                os.set_blocking(pipe.fileno(), False)
                read = functools.partial(self._read_output, process, stream, pipe)
                self._selector.register(pipe, selectors.EVENT_READ, read)

    def save(self) -> None:
        """Has the run save and stop: one signal to each process, since a second one would end it
        without saving."""
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.popen.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kills the processes here with all that they started, stopped ones too."""
        for process in self.processes.values():
            _kill_group(process.popen)

    def dump_stacks(self) -> None:
        """Begins to collect the stacks of all processes here."""
        logs = self._options.workdir / "logs"
        targets = {
            i: stacks.StackTarget(p.popen.pid, logs / f"process-{i:05d}.log")
            for i, p in self.processes.items()
        }
        self._run_in_thread(functools.partial(self._dump_stacks, self._start_number, targets))

    def poll(self, now: float) -> None:
        """Reports ended processes, where the others are, and the findings of threads.

        The order matters: how far a process came, and what it printed last, explain its end; when
        all have ended, the node is ready.
        """
        ended = [p for p in self.processes.values() if p.popen.poll() is not None]
        if ended:
            self._tell_views(ended)
        for process in ended:
            _kill_group(process.popen)  # with children that it left behind
            for stream, pipe in process.pipes.items():
                self._read_output(process, stream, pipe, ended=True)
            del self.processes[process.index]
            self._keeper.ended(process.popen.returncode)
            self._tell(["exited", self._start_number, process.index, process.popen.returncode])
        if ended and not self.processes:
            self.ready()
        if self.processes and now - self._views_sent_at >= BEATS_PERIOD:
            self._views_sent_at = now
            self._tell_views(self.processes.values())
        with contextlib.suppress(queue.Empty):
            while True:
                self._tell(self._done.get_nowait())

    def close(self) -> None:
        """Leaves nothing behind but what outlives a kill, in a driver or at a disk that hangs."""
        self.kill()
        until = time.monotonic() + LAST_WAIT
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.popen.wait(max(until - time.monotonic(), 0.0))
        self._beats.close()

    def _tell_views(self, processes: Iterable[Process]) -> None:
        views = [self._view(process, time.monotonic()) for process in processes]
        self._tell(["views", self._start_number, views])

    def _view(self, process: Process, now: float) -> View:
        state = stacks.state(process.popen.pid)
        beat = beats.read(f"/proc/self/fd/{self._beats.fileno()}", process.index)
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

    def _read_output(self, process: Process, stream: int, pipe: Any, ended: bool = False) -> None:
        """Takes a process's output. After its end that is no more than a pipe holds: a child of its
        own that left its group, and has the pipe too, may print for ever."""
        if pipe.closed:
            return
        close = ended
        for _ in range(PIPE // LONGEST_LINE if ended else 1):
            try:
                data = os.read(pipe.fileno(), LONGEST_LINE)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                close = True
                break
            self._terminal.show(stream, data)
            self._keeper.append(
                f"logs/start-{self._start_number:03d}/process-{process.index:05d}.log", data
            )
            *lines, partial = (process.partial_lines[stream] + data).split(b"\n")
            if len(partial) > LONGEST_LINE:
                lines.append(partial)
                partial = b""
            process.partial_lines[stream] = partial
            for line in lines:
                self._match(process.index, stream, line)
        if close:
            self._match(process.index, stream, process.partial_lines[stream])
            self._selector.unregister(pipe)
            pipe.close()

    def _match(self, process: int, stream: int, line: bytes) -> None:
        if line:
            for finding in self._matcher.feed(process, line.decode(errors="replace"), stream):
                self._tell(["finding", dataclasses.asdict(finding)])

    def _run_in_thread(self, work: Callable[[], list]) -> None:
        """Does some work in a thread; its message is told once it ends. An error there is printed,
        and the leader finds that it has no answer."""
        threading.Thread(target=lambda: self._done.put(work()), daemon=True).start()

    def _put_finding(self, finding: Finding) -> None:
        self._done.put(["finding", dataclasses.asdict(finding)])

    def _dump_stacks(self, number: int, targets: dict[int, stacks.StackTarget]) -> list:
        collected = stacks.collect(targets)
        for process, stack in collected.items():
            self._keeper.append(
                f"stacks/start-{number:03d}/process-{process:05d}.txt",
                f"{stack.how}\n{stack.text}".encode(),
            )
        return ["stacks", number, [[p, s.how, s.line] for p, s in collected.items()]]

    def _watch(self) -> None:
        root = machine.root()
        watchers, kernel = watch.Watchers(root), log_rules.Kernel(root)
        missing = machine.missing_cards(os.environ, root)
        if missing:
            self._put_finding(Finding("network cards missing", "distributed", "note", missing))
        while True:
            for finding in [*watchers.poll(), *kernel.poll()]:
                self._put_finding(finding)
            time.sleep(WATCH_PERIOD)


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def _kill_group(popen: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(popen.pid, signal.SIGKILL)
