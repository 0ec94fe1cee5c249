"""Writes an agent's files and terminal output and runs its command, each in a thread, so that the
agent never waits.

    terminal = Terminal(); terminal.show(1, b"...")         the processes' output
    keeper = Keeper(workdir); keeper.append(name, data)     files below WORKDIR/aegis
    keeper.add(event)                                       the leader's events
    hook = Hook(["page-me", "--team=training"], print); hook.tell(event)

The hook's command gets each event as JSON on its standard input, and as ZAYA_EVENT (kind),
ZAYA_NODE, ZAYA_GROUP and ZAYA_TEXT. A command that fails never fails the run, but is said.
"""

import abc
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zaya_jax.cluster import events
from zaya_jax.cluster.leaving import BAD_INPUT

MOST = 1 << 24  # bytes that wait for a disk or a terminal; more are counted and dropped
SECONDS = 20.0  # that the hook's command may take
WAITING = 100  # events that wait for it; more are counted and dropped


class _Worker(abc.ABC):
    """A queue, and the thread that empties it. `lost` counts items that came while `most` were
    waiting, failed, or still wait at the end."""

    def __init__(self, name: str, most: int):
        self._most, self.lost = most, 0
        self._put_in, self._taken_out = 0, 0
        self._lock = threading.Lock()  # of _put_in; _taken_out is the worker's alone
        self._queue: queue.Queue[tuple[Any, int] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self, seconds: float = SECONDS) -> None:
        """Waits for the rest, for so long at most."""
        self._queue.put(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            self.lost += self._put_in - self._taken_out

    def _put(self, item: Any, size: int) -> None:
        with self._lock:
            if self._put_in - self._taken_out + size > self._most:
                self.lost += size
                return
            self._put_in += size
        self._queue.put((item, size))

    def _run(self) -> None:
        while entry := self._queue.get():
            item, size = entry
            self._do(item)
            self._taken_out += size

    @abc.abstractmethod
    def _do(self, item: Any) -> None:
        """Handles one, in the thread."""


class Terminal(_Worker):
    """Passes on the output of processes."""

    def __init__(self) -> None:
        self._gone = set[int]()
        super().__init__("terminal", MOST)  # starts the thread, so that all else comes first

    def show(self, fd: int, data: bytes) -> None:
        """Bytes for stdout (1) or stderr (2)."""
        self._put((fd, data), len(data))

    def _do(self, item: tuple[int, bytes]) -> None:
        fd, data = item
        rest = memoryview(data)
        while rest and fd not in self._gone:
            try:
                rest = rest[os.write(fd, rest) :]
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:
                self._gone.add(fd)  # its reader is gone; the run goes on


class Keeper(_Worker):
    """Writes below WORKDIR/aegis, from the run's first step on.

    Training refuses a folder that holds something else, and a refused start must leave nothing
    behind.
    """

    def __init__(self, workdir: Path):
        self._workdir = workdir
        self._accepted, self._closing = False, threading.Event()
        super().__init__("keeper", MOST)

    def append(self, name: str, data: bytes) -> None:
        """Adds to a file below aegis."""
        self._put((name, data), len(data))

    def add(self, event: events.RunEvent) -> None:
        """Adds a line to events.jsonl."""
        self.append(events.OF_AGENT, event.line().encode())

    def ended(self, code: int) -> None:
        """A process has ended: unless it refused the folder, a folder with a config is a run's."""
        self._accepted = self._accepted or code != BAD_INPUT

    def close(self, seconds: float = SECONDS) -> None:
        self._closing.set()
        super().close(seconds)

    def _run(self) -> None:
        config, closing = self._workdir / "config.json", False
        metrics = self._workdir / "metrics.jsonl"
        # os.path's, which takes a disk's error for a no: this thread must not end by it.
        exists = os.path.exists
        resumes = exists(config)
        # A training writes its figures from the first step on, when nothing can refuse it any more.
        while not (resumes or exists(metrics) or (self._accepted and exists(config))):
            if closing:
                return
            closing = self._closing.wait(0.2)
        super()._run()

    def _do(self, item: tuple[str, bytes]) -> None:
        name, data = item
        path = self._workdir / events.FOLDER / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.write(data)
        except OSError:  # a full disk: the terminal has it too
            self.lost += len(data)


class Hook(_Worker):
    """Runs a command at each event, and says when it first fails, and at the end how often."""

    def __init__(self, command: Sequence[str], say: Callable[[str], None]):
        self._command, self._say, self.failed = command, say, 0
        super().__init__("hook", WAITING)

    def tell(self, event: events.RunEvent) -> None:
        """Returns at once."""
        self._put(event, 1)

    def close(self, seconds: float = SECONDS) -> None:
        super().close(seconds)
        if self.failed or self.lost:
            missed = f"{self.lost} more came too fast for it"
            self._say(f"aegis: --command failed at {self.failed} events, and {missed}")

    def _do(self, item: events.RunEvent) -> None:
        words = {
            "ZAYA_EVENT": item.kind,
            "ZAYA_NODE": item.node,
            "ZAYA_GROUP": item.group,
            "ZAYA_TEXT": item.text(),  # without zero bytes, which no variable holds
        }
        try:
            subprocess.run(
                self._command,
                input=item.line().encode(),
                env=os.environ | words,
                timeout=SECONDS,
                check=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except (OSError, subprocess.SubprocessError) as error:
            self.failed += 1
            if self.failed == 1:  # once: a service that is down would say it at each event
                self._say(f"aegis: --command failed: {type(error).__name__}: {error}")
