"""Where a run's figures go: metrics.jsonl and TensorBoard every step, one dense line or a progress bar for people.

Figures are the same in all processes; process 0 writes and shows them.
"""

import json
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tensorboardX import SummaryWriter
from tqdm import tqdm

from zaya_jax.checkpoint import lock
from zaya_jax.cluster import leaving
from zaya_jax.cluster.multihost import is_writer
from zaya_jax.config import StorageError, UserError
from zaya_jax.train.logs import note, say

BUFFER = 1 << 16  # bytes of lines that a kill may lose; they come again with the steps after the checkpoint
BLOCK = 1 << 20  # bytes that a resumed run reads at a time, from the end
MAX_LINE_BYTES = 1 << 26  # as the report's: more is no line
BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
PER_LAYER_EVERY = 10  # steps between full expert loads in the files; the entropy is there every step


class Writer:
    """Appends a step's figures to the workdir's files; on resume first drops those after the restored step."""

    def __init__(self, workdir: Path, restored_step: int):
        self.path, self.last_step = workdir / "metrics.jsonl", restored_step
        self._writes = is_writer()
        if not self._writes:
            return
        try:
            dropped = keep_until(self.path, restored_step) if self.path.exists() else 0
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written ({error.strerror}); it must be a file that can, or not be there"
            ) from None
        if dropped:
            say(f"{self.path}: its last {dropped:,} bytes, from after step {restored_step}, are dropped")
        self._lines, self._failing = b"", ""
        self._lock = threading.RLock()  # the end may come in another thread
        self._workdir, self._purge = workdir, restored_step + 1 if restored_step else None
        self._events: SummaryWriter | None = None
        self._open_events()
        leaving.before(self.close)

    def write(self, step: int, figures: dict[str, Any]) -> None:
        """One step's figures: numbers and arrays of numbers. A full disk costs none of the lines of metrics.jsonl."""
        self.last_step = step
        if not self._writes:
            return
        plain = {name: _plain(value) for name, value in figures.items()}
        with self._lock:
            self._lines += json.dumps({"step": step, **plain}).encode() + b"\n"
            if len(self._lines) > BUFFER:
                self._try(self._write_lines)
        if self._events is None or not self._events.file_writer.event_writer._worker.is_alive():
            return  # its thread ends at the first error
        for name, value in plain.items():
            if isinstance(value, float | int):
                self._events.add_scalar(name, value, step)
            elif value and isinstance(value[0], float):
                self._events.add_scalar(f"{name}/mean", float(np.mean(value)), step)
                self._events.add_scalar(f"{name}/least", float(np.min(value)), step)

    def flush(self) -> None:
        """Hands everything to the operating system, before a checkpoint that counts on it."""
        if self._writes:
            with self._lock:
                self._try(self._write_lines, self._flush_events)

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
            if self._events is not None:
                self._try(self._events.close)

    def _try(self, *functions: Callable[[], None]) -> None:
        """The training goes on without its figures, and says so when that begins and when it ends."""
        failing = ""
        for function in functions:
            try:
                function()
            except OSError as error:
                failing = error.strerror or str(error)
        if failing != self._failing:
            self._failing = failing
            say(
                f"warning: metrics cannot be written ({failing}: {self._workdir}); training goes on, lines are kept"
                if failing
                else "metrics are written again"
            )

    def _write_lines(self) -> None:
        if self._lines:
            try:
                lock.keep(self._workdir)  # lines of two runs would stand between each other
            except UserError as error:
                self._lines = b""
                raise StorageError(str(error)) from None
        while self._lines:
            self._lines = self._lines[self._file.write(self._lines) :]

    def _flush_events(self) -> None:
        if self._events is not None and self._events.file_writer.event_writer._worker.is_alive():
            self._events.flush()
        else:
            self._open_events()

    def _open_events(self) -> None:
        self._events = None
        if threading.excepthook is not _in_a_thread:
            _others.append(threading.excepthook)
            threading.excepthook = _in_a_thread
        # A queue that the thread no longer empties would block the training when it is full.
        self._events = SummaryWriter(str(self._workdir), purge_step=self._purge, max_queue=20_000)


_others: list[Callable[[Any], Any]] = []


def _in_a_thread(args: Any) -> None:
    """TensorBoard's thread ends at the first error of the disk: `flush` sees that, says so and starts another."""
    if not (type(args.thread).__module__.startswith("tensorboardX") and isinstance(args.exc_value, OSError)):
        _others[-1](args)


def _plain(value: Any) -> Any:
    value = np.asarray(value)
    return value.item() if value.ndim == 0 else value.tolist()


def keep_until(path: Path, step: int) -> int:
    """Drops lines of later steps, and what a kill or a power cut has left after them; how many bytes that was.

    Reads the end alone, a block at a time, back to a line of `step` or before: late in a long run there are gigabytes.
    It looks at one block at least, so that steps that are there twice are cut where they come first. Cutting is one
    operation: killed at any time, the file is as it was or as it is to be. A damaged line before the last good one
    stays; the report counts it.
    """
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        last, enough = 0, False
        for end, line in _lines_backwards(file, size):
            if enough and end <= size - BLOCK:
                break
            found = _step_of(line)
            if found is not None:
                enough = found <= step
                last = (last or end) if enough else 0
        file.truncate(last)
    return size - last


def _lines_backwards(file: BinaryIO, size: int) -> Iterator[tuple[int, bytes]]:
    """(where it ends, the line) of all lines that a newline ends, the last one first; b"" for one that is too long."""
    # Of the line whose begin is not read yet; end 0: nothing has ended it.
    end, rest, too_long = 0, b"", False
    while size:
        begin = max(size - BLOCK, 0)
        file.seek(begin)
        first, *others = file.read(size - begin).split(b"\n")
        for part in reversed(others):
            if end:
                yield end, b"" if too_long else part + rest
            size -= len(part)
            end, rest, too_long = size, b"", False
            size -= 1  # the newline
        too_long |= len(rest) + len(first) > MAX_LINE_BYTES
        rest = b"" if too_long or not end else first + rest
        size = begin
    if end:
        yield end, b"" if too_long else rest


def _step_of(line: bytes) -> float | None:
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int | float) and not isinstance(step, bool) else None


class Console:
    """The line a person reads: a progress bar on a terminal, otherwise a line every few steps."""

    def __init__(self, first: int, last: int, every: int, eta: Callable[[int], float]):
        self.last, self.every = last, every
        self._first, self._eta = first, eta
        self._bar: tqdm | None = None
        if sys.stderr.isatty() and is_writer():  # the bar's own estimate would count compiling
            self._bar = tqdm(total=last, initial=first, unit="step", dynamic_ncols=True, bar_format=BAR)

    def step(self, step: int, figures: dict[str, Any]) -> None:
        """Shows a step."""
        line = describe(step, self.last, figures, self._eta(step))
        shown = step % self.every == 0 or step in (self.last, self._first + 1) or "eval/loss" in figures
        if self._bar is not None:
            line_without, _, eta = line.rpartition(" | ")
            self._bar.set_description_str(line_without, refresh=False)
            self._bar.set_postfix_str(eta, refresh=False)
            self._bar.update(1)
            if shown:
                note(line)
        elif shown:
            say(line)

    def say(self, text: str) -> None:
        """A line of its own."""
        if self._bar is not None:
            self._bar.write(text)
            note(text)
        else:
            say(text)

    def close(self) -> None:
        """Leaves the terminal as it was."""
        if self._bar is not None:
            self._bar.close()


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
