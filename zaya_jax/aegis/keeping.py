"""Writes an agent's files and terminal output in separate threads, so that a slow disk or terminal does not block it.

    terminal = Terminal(); terminal.show(1, b"...")         the processes' output
    keeper = Keeper(workdir); keeper.append(name, data)     files below WORKDIR/aegis
    keeper.event(event)                                     the leader's events

Nothing is written before the run's first step: training refuses a folder that holds something else, and a refused start
must leave nothing behind.
"""

import collections
import dataclasses
import os
import queue
import threading
import time
from pathlib import Path
from typing import Any

from zaya_jax.aegis import events

MOST = 1 << 24  # bytes that wait; more than these are counted and dropped


class Terminal:
    """Passes on the output of processes."""

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[int, bytes] | None] = queue.Queue()
        self._waits, self.lost, self._gone = 0, 0, set[int]()
        self._thread = threading.Thread(target=self._run, name="terminal", daemon=True)
        self._thread.start()

    def show(self, number: int, data: bytes) -> None:
        """Bytes for stdout (1) or stderr (2)."""
        if self._waits > MOST:
            self.lost += len(data)
            return
        self._waits += len(data)
        self._queue.put((number, data))

    def close(self, seconds: float) -> None:
        """Waits so long at most for the rest to be shown."""
        self._queue.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        while item := self._queue.get():
            number, data = item
            rest = memoryview(data)
            while rest and number not in self._gone:
                try:
                    rest = rest[os.write(number, rest) :]
                except BlockingIOError:
                    time.sleep(0.05)
                except OSError:
                    self._gone.add(number)  # its reader is gone; the run goes on
            self._waits -= len(data)


class Keeper:
    """Writes below WORKDIR/aegis as soon as the workdir is a run's."""

    def __init__(self, workdir: Path):
        self._workdir, self.folder = workdir, workdir / events.FOLDER
        self._log = events.Log(workdir, "agent")
        self._queue: queue.Queue[tuple[str, Any, Any] | None] = queue.Queue()
        self._held: collections.deque[tuple[str, Any, Any]] = collections.deque()
        self._waits, self.lost, self.lost_events = 0, 0, 0
        self._is_run = False
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)
        self._thread.start()

    def append(self, name: str, data: bytes) -> None:
        """Adds to a file below aegis."""
        self._put("append", name, data)

    def event(self, event: events.Event) -> None:
        """Adds a line to events.jsonl."""
        self._put("event", "", event)

    def ended(self, code: int) -> None:
        """A process has ended: unless it refused to begin, the folder is a run's if it looks like one."""
        self._queue.put(("ended", "", code))

    def close(self, seconds: float) -> None:
        """Waits so long at most for the rest to be written."""
        self._queue.put(None)
        self._thread.join(seconds)

    def _put(self, what: str, name: str, data: Any) -> None:
        if what == "append":
            if self._waits + len(data) > MOST:
                self.lost += len(data)
                return
            self._waits += len(data)
        self._queue.put((what, name, data))

    def _run(self) -> None:
        self._is_run = (self._workdir / "config.json").exists()
        while True:
            try:
                item = self._queue.get(timeout=0.5)
            except queue.Empty:
                item = ("", "", None)
            if item is None:
                return
            if item[0] == "ended":
                refused = item[2] == 2
                self._is_run = self._is_run or (not refused and (self._workdir / "config.json").exists())
            elif item[0]:
                self._held.append(item)
            # It writes its figures from the first step on, when nothing can refuse it any more.
            self._is_run = self._is_run or (self._workdir / "metrics.jsonl").exists()
            while self._is_run and self._held:
                what, name, data = self._held.popleft()
                self._waits -= len(data) if what == "append" else 0
                try:
                    self._do(what, name, data)
                except OSError:  # a full disk: the terminal has it too
                    self.lost += len(data) if what == "append" else 0
                self.lost_events = self._log.lost

    def _do(self, what: str, name: str, data: Any) -> None:
        if what == "event":
            given = {field.name: getattr(data, field.name) for field in dataclasses.fields(data)}
            self._log.add(given.pop("kind"), **given)
            return
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(data)
