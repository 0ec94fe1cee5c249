"""Writes each process's own log: workdir/logs/process-00000.log and so on, with times, warnings and
errors.

Only process 0 writes to the terminal and metrics.jsonl. If a run hangs, `kill -USR1 PID` dumps the
stacks of all threads to the log.
"""

import faulthandler
import logging
import os
import signal
import socket
import sys
from pathlib import Path

import jax

from zaya_jax.cluster import leaving, multihost

_log = logging.getLogger("zaya_jax")
_file: logging.FileHandler | None = None


def open_log(workdir: Path) -> None:
    """Opens this process's file, or appends to it. A later run in the same process replaces it."""
    global _file
    before, folder = _file, workdir / "logs"
    folder.mkdir(exist_ok=True)
    # On a full disk the file lacks lines, which the terminal has.
    logging.raiseExceptions = False
    _file = logging.FileHandler(folder / f"process-{jax.process_index():05d}.log", encoding="utf-8")
    _file.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s"))
    _file.addFilter(
        lambda record: record.levelno >= logging.WARNING or record.name.startswith(_log.name)
    )
    assert _file.stream is not None  # it opens at once
    faulthandler.register(signal.SIGUSR1, file=_file.stream.fileno(), all_threads=True)
    for logger in (_log, logging.getLogger()):  # ours hands no record on to the other
        logger.addHandler(_file)
        if before:
            logger.removeHandler(before)
            before.close()
    _log.addHandler(_TERMINAL)
    _log.setLevel(logging.INFO)
    _log.info(
        "process %d of %d, pid %d on %s, jax %s, devices %s, XLA_FLAGS %s",
        jax.process_index(),
        jax.process_count(),
        os.getpid(),
        socket.gethostname(),
        jax.__version__,
        [d.id for d in jax.local_devices()],
        os.environ.get("XLA_FLAGS", ""),
    )


def say(message: str) -> None:
    """Writes a line to every process's file, and to the terminal of process 0. If either fails, the
    run continues."""
    _log.info(message)
    if multihost.is_writer():
        _print(message)


def _print(line: str) -> None:
    try:
        print(line, flush=True)
    except OSError:  # a full disk, or a reader that has gone: the file has it
        leaving.silence(sys.stdout)


class _Terminal(logging.Handler):
    """Shows this package's warnings (data that is read again, padded, repeated) on the terminal of
    process 0."""

    def emit(self, record: logging.LogRecord) -> None:
        """Prints a warning."""
        if multihost.is_writer():
            _print(f"warning: {record.getMessage()}")


_TERMINAL = _Terminal(logging.WARNING)
