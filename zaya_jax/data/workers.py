"""Processes that compute batches ahead: each has its own part of this process's rows, of every batch.

So a bundle is read by one worker, like it is by one process, and any number of workers may share the rows. They hand
over through pipes, which leave nothing behind however a process ends, with their counters and log lines.
"""

import logging
import multiprocessing
import queue
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from zaya_jax.config import StorageError

_log = logging.getLogger(__name__)


class Workers(Iterator[dict[str, np.ndarray]]):
    """The batches from a step on, each put together from the workers' parts of it."""

    def __init__(self, batches: Any, count: int, step: int, ahead: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        self._counters = [dict.fromkeys(batches.counters(), 0) for _ in range(count)]
        for index in range(count):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(
                target=_work, args=(theirs, batches.part(index, count), step, ahead), daemon=True,
                name=f"data-{index}",
            )  # fmt: skip
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __next__(self) -> dict[str, np.ndarray]:
        parts = [self._receive(index) for index in range(len(self._pipes))]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _receive(self, index: int) -> dict[str, np.ndarray]:
        try:
            batch, self._counters[index], lines = self._pipes[index].recv()
        except (EOFError, ConnectionError):
            self._processes[index].join(5)
            raise StorageError(
                f"data worker {index} ended with code {self._processes[index].exitcode} (out of memory?); start the "
                "same command again, perhaps with a smaller data.workers"
            ) from None
        for level, line in lines:
            _log.log(level, "worker %d: %s", index, line)
        if isinstance(batch, Exception):
            raise batch
        return batch

    def counters(self) -> dict[str, int]:
        """What reading has met in all workers, up to the last batch."""
        return {name: sum(held[name] for held in self._counters) for name in self._counters[0]}

    def close(self) -> None:
        """End the workers."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()


class _Lines(logging.Handler):
    """Keeps what is logged until it is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.put((record.levelno, record.getMessage()))

    def take(self) -> list[tuple[int, str]]:
        return [self.lines.get() for _ in range(self.lines.qsize())]


def _work(pipe: Connection, batches: Any, step: int, ahead: int) -> None:
    """In a worker: computes its part of each batch, a few ahead of what was sent, until nobody listens."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the training decides when it ends, and closes the pipe
        signal.signal(number, signal.SIG_IGN)
    handler = _Lines()
    logging.getLogger().addHandler(handler)
    logging.getLogger("zaya_jax").setLevel(logging.INFO)
    ready: queue.Queue[Any] = queue.Queue(ahead)

    def compute() -> None:
        at = step
        while True:
            try:
                batch: Any = batches[at]
            except Exception as error:
                batch = error
            ready.put((batch, batches.counters(), handler.take()))
            if isinstance(batch, Exception):
                return
            at += 1

    threading.Thread(target=compute, daemon=True).start()
    try:
        while True:
            item = ready.get()
            pipe.send(item)
            if isinstance(item[0], Exception):
                return
    except (BrokenPipeError, ConnectionError):
        return  # the training has gone on without us, or has ended
