"""Writes a run's figures: metrics.jsonl, TensorBoard and trackers every step, and lines on the terminal.

Figures are the same in all processes; process 0 writes and shows them.
"""

import contextlib
import json
import math
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tensorboardX import SummaryWriter

from zaya_jax.cluster import leaving
from zaya_jax.cluster.multihost import is_writer
from zaya_jax.config import UserError
from zaya_jax.training.logs import say
from zaya_jax.training.trackers import Trackers

BUFFER = 1 << 16  # bytes of lines that a kill may lose; they come again with the steps after the checkpoint
STEP = re.compile(rb'\{"step": (\d+)[,}]')  # as a line begins
PER_LAYER_EVERY = 10  # steps between full expert loads in the files; the entropy is there every step


class Writer:
    """Appends a step's figures to the workdir's files; on resume first drops those after the restored step."""

    def __init__(self, workdir: Path, restored_step: int, trackers: Trackers | None = None):
        self.path, self.last_step, self._trackers = workdir / "metrics.jsonl", restored_step, trackers
        self._writes = is_writer()
        if not self._writes:
            return
        try:
            dropped = keep_until(self.path, restored_step or -1) if self.path.exists() else 0  # step 0 comes again
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written ({error.strerror}); it must be a file that can, or not be there"
            ) from None
        if dropped:
            say(f"{self.path}: its last {dropped:,} bytes, from after step {restored_step}, are dropped")
        self._lines, self._failing = b"", ""
        self._lock = threading.RLock()  # the end may come in another thread
        # A queue that the thread no longer empties would block the training when it is full.
        purge = restored_step + 1 if restored_step else None
        self._events = SummaryWriter(str(workdir), purge_step=purge, max_queue=20_000)
        leaving.before(self.close)

    def write(self, step: int, figures: dict[str, Any]) -> None:
        """Writes a step's figures, numbers and arrays of numbers. A full disk costs no line of metrics.jsonl."""
        self.last_step = step
        if not self._writes:
            return
        plain = {name: _plain(value) for name, value in figures.items()}
        single = scalars(plain)
        if self._trackers:
            self._trackers.write(step, single)
        with self._lock:
            self._lines += json.dumps({"step": step, **plain}).encode() + b"\n"
            if len(self._lines) > BUFFER:
                self._write_lines()
        if not self._events_are_written():
            return
        for name, value in single.items():
            self._events.add_scalar(name, value, step)

    def flush(self) -> None:
        """Hands everything to the operating system, before a checkpoint that counts on it."""
        if self._writes:
            with self._lock:
                self._write_lines()
                self._if_events_are_written(self._events.flush)

    def close(self) -> None:
        """Flushes and closes the files, once."""
        if not self._writes:
            return
        with self._lock:
            if self._file.closed:
                return
            leaving.forget(self.close)
            self.flush()
            if self._lines:
                count = self._lines.count(b"\n")
                say(f"warning: the last {count} lines of {self.path} could not be written and are lost")
            self._file.close()
            self._if_events_are_written(self._events.close)

    def _write_lines(self) -> None:
        """Lets training go on where the file cannot be written, and says so when that begins and when it ends."""
        failing = ""
        try:
            while self._lines:
                self._lines = self._lines[self._file.write(self._lines) :]
        except OSError as error:
            failing = error.strerror or str(error)
        if failing != self._failing:
            warning = f"warning: {self.path} cannot be written ({failing}); training goes on, lines are kept"
            say(warning if failing else "metrics are written again")
        self._failing = failing

    def _events_are_written(self) -> bool:
        """Whether TensorBoard's thread goes on: it ends at its first error, and nothing is drawn until a new start."""
        return self._events.file_writer.event_writer._worker.is_alive()

    def _if_events_are_written(self, function: Callable[[], None]) -> None:
        if self._events_are_written():
            with contextlib.suppress(OSError):
                function()


def scalars(figures: dict[str, Any]) -> dict[str, float]:
    """The figures as single numbers: of one per layer the mean and the least."""
    found: dict[str, float] = {}
    for name, value in figures.items():
        if isinstance(value, float | int):
            found[name] = value
        elif value and isinstance(value[0], float):
            found |= {f"{name}/mean": float(np.mean(value)), f"{name}/least": float(np.min(value))}
    return found


def _plain(value: Any) -> Any:
    value = np.asarray(value)
    return value.item() if value.ndim == 0 else value.tolist()


def keep_until(path: Path, step: int) -> int:
    """Drops all lines after those of `step`, and the half line that a kill has left; gives the number of bytes dropped.

    Cutting is one operation: killed at any time, the file is as it was or as it is to be. A damaged line before the
    last good one stays; the report counts it.
    """
    kept = end = 0
    with path.open("rb+") as file:
        for line in file:
            end += len(line)
            found = STEP.match(line)
            if not found or not line.endswith(b"\n"):
                continue
            if int(found[1]) > step:
                break
            kept = end
        size = file.seek(0, os.SEEK_END)
        file.truncate(kept)
    return size - kept


def describe(step: int, last: int, figures: dict[str, Any], eta: float) -> str:
    """step | loss | lr | time per step | tokens per second | load | eta, on one line."""
    parts = [
        f"step {step:>{len(str(last))}}/{last}",
        f"loss {float(figures['loss']):.4f}",
        f"lr {float(figures['lr']):.2e}",
        f"{1e3 * figures['step_seconds']:.0f} ms",
        f"{figures['tokens_per_second']:,.0f} tok/s",
    ]
    if "mfu" in figures:
        parts.append(f"mfu {100 * figures['mfu']:.1f}%")
    if "load_entropy" in figures:
        parts.append(f"load {float(np.mean(figures['load_entropy'])):.3f}")
    if "eval/loss" in figures:
        parts.append(f"held-out {figures['eval/loss']:.4f}")
    return " | ".join([*parts, f"eta {duration(eta)}"])


def duration(seconds: float) -> str:
    """2h03m, 4m05s or 12s."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
