"""Runs processes that compute batches ahead: each has its own part of this process's rows, in every
batch.

So each bundle is read by one worker, and any number of workers can share the rows. They send
batches, counters and log lines through pipes, which leave nothing behind however a process ends. A
worker is a program of its own: it imports only the modules that reading needs, and nothing of the
program that started it.
"""

import contextlib
import logging
import logging.handlers
import multiprocessing
import os
import pathlib
import queue
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from zaya_jax.config import StorageError
from zaya_jax.data.prepared_store import Counters

# The training decides when a worker ends, by closing the pipe.
PROGRAM = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
from zaya_jax.data import workers
workers.worker_main({pipe})
"""
_log = logging.getLogger(__name__)


class Workers:
    """The batches from a step on, each put together from the workers' parts of it; to be read one
    after another."""

    def __init__(self, batches: Any, count: int, step: int, ahead: int) -> None:
        self._next, self._length = step, len(batches)
        self._pipes: list[Connection] = []
        self._processes: list[subprocess.Popen] = []
        self._counters = [Counters() for _ in range(count)]
        root = str(pathlib.Path(__file__).resolve().parents[2])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)])}
        for _ in range(count):
            ours, theirs = multiprocessing.Pipe()
            self._pipes.append(ours)
            # -P keeps the folder that this program runs in off its path.
            program = PROGRAM.format(pipe=theirs.fileno())
            command = [sys.executable, "-P", "-c", program]
            with theirs:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment
                )
            self._processes.append(process)
        # Sent when all have been started, so that they import at the same time.
        for index, pipe in enumerate(self._pipes):
            with contextlib.suppress(ConnectionError):  # it has ended: `_receive` says how
                pipe.send((batches.for_worker(index, count), step, ahead))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        assert step == self._next  # pipes have no other order
        self._next += 1
        parts = [self._receive(index) for index in range(len(self._pipes))]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _receive(self, index: int) -> dict[str, np.ndarray]:
        try:
            batch, self._counters[index], log_lines = self._pipes[index].recv()
        except (EOFError, OSError):  # OSError: it ended in the middle of a batch
            code = self._processes[index].wait()
            raise StorageError(
                f"data worker {index} ended with code {code} (out of memory?); start the same"
                " command again, perhaps with a smaller data.workers"
            ) from None
        for line in log_lines:
            line.msg = f"worker {index}: {line.msg}"
            _log.handle(line)
        if isinstance(batch, Exception):
            raise batch
        return batch

    def counters(self) -> Counters:
        """Counts of reading in all workers, up to the last batch."""
        return sum(self._counters, Counters())

    def close(self) -> None:
        """End the workers."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.wait()


def worker_main(descriptor: int) -> None:
    """In a worker: computes its part of each batch, a few ahead of the last one sent, until the
    reader is gone."""
    pipe = Connection(descriptor)
    try:
        batches, first_step, ahead = pipe.recv()
    except (EOFError, ConnectionError):
        os._exit(0)
    log_lines: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    logger = logging.getLogger("zaya_jax")
    logger.addHandler(logging.handlers.QueueHandler(log_lines))
    logger.setLevel(logging.INFO)
    ready: queue.Queue[Any] = queue.Queue(ahead)

    def compute() -> None:
        step = first_step
        batch: Any = None
        while not isinstance(batch, Exception):
            try:
                batch = batches[step]
            except Exception as error:
                batch = error
            new_lines = [log_lines.get() for _ in range(log_lines.qsize())]
            ready.put((batch, batches.counters(), new_lines))
            step += 1

    threading.Thread(target=compute, daemon=True).start()
    batch = None
    try:
        while not isinstance(batch, Exception):
            batch, counters, new_lines = ready.get()
            pipe.send((batch, counters, new_lines))
    except ConnectionError:
        os._exit(0)  # the training has gone on without us, or has ended
