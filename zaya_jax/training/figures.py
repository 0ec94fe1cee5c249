"""The figures of each step: read one step late, so that no device waits, written to files and
trackers, and shown.

    figures.take(now, of_the_step)           reads and records the figures of the step before
    now, of_the_step = figures.pop()         reads those of this step, if something is due after it,
    figures.record(now, all_figures)         and records them with what was measured then

Figures are the same in all processes; process 0 writes and shows them.
"""

import collections
import contextlib
import json
import math
import os
import re
import statistics
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zaya_jax.checkpoint.run import retention
from zaya_jax.cluster import leaving
from zaya_jax.cluster.multihost import is_writer
from zaya_jax.hardware.chips import model_flops, peak_flops
from zaya_jax.schedule import Step
from zaya_jax.training import notes
from zaya_jax.training.logs import say
from zaya_jax.training.pace import Pace
from zaya_jax.training.trackers import Trackers

ETA_STEPS = 100  # the last steps, from which the remaining time is estimated
# Bytes of lines that a kill may lose. The steps after the checkpoint write them again.
BUFFER = 1 << 16
LINE_START = re.compile(rb'\{"step": (\d+)[,}]')
# Of pairs, on the terminal (`training.preference`).
SHOWN = {"rewards/accuracies": "accuracy", "rewards/margins": "margin"}
# Steps between full expert loads in the files; the entropy is there every step.
PER_LAYER_EVERY = 10


class Figures:
    """The figures of one start, and `unsound`: how many updates in a row had no effect, up to the
    last one."""

    def __init__(self, opened: Any, unsound: int, pace: Pace, guard: Any, trackers: Trackers):
        """`opened` is the `run.OpenedRun`, `guard` the `guard.guard.Guard` that judges the
        figures."""
        planned = opened.planned
        self.unsound = unsound
        self.writer, self._trackers = Writer(opened.workdir, planned.reached), trackers
        self._recipe, self._store = planned.recipe, opened.store
        self._pace, self._guard = pace, guard
        self._first_step = planned.reached + 1
        self._seconds_per_token: collections.deque[float] = collections.deque(maxlen=ETA_STEPS)
        # A step that was dispatched, its figures, and its seconds or None if it is not over yet.
        self._pending: tuple[Step, Any, float | None] | None = None
        self._peak = peak_flops(jax.devices()[0].device_kind, planned.recipe.config.precision)

    def take(self, now: Step, figures: Any) -> None:
        """Takes the figures of a step that was dispatched, then reads and records those of the step
        before."""
        if self._pending:
            self.record(*self.pop())
        self._pace.mark("figures")
        # A CPU has ended the step by now; on an accelerator it ends when its figures are there.
        seconds = self._pace.end_step() if figures["loss"].is_ready() else None
        self._pending = now, figures, seconds

    def pop(self) -> tuple[Step, dict[str, Any]]:
        """Waits for the figures of the last step; returns (the step, its figures)."""
        assert self._pending is not None
        (now, figures, seconds), self._pending = self._pending, None
        self._pace.mark("wait")
        figures = {"tokens": now.tokens_after, **jax.device_get(figures)}
        self._pace.mark("figures")
        seconds = seconds or self._pace.end_step()
        if figures.get("target_tokens", figures.get("pairs")) == 0:
            figures["loss"] = np.nan  # the batch had nothing to learn
        tokens = now.sequences * now.phase.seq_len
        figures |= {"step_seconds": seconds, "tokens_per_second": tokens / seconds}
        if self._peak:
            model = self._recipe.phases[now.phase_index].config.model
            flops = model_flops(model, now.phase.seq_len) * tokens
            figures["mfu"] = flops / seconds / self._peak / len(jax.devices())
        return now, figures

    def record(self, now: Step, figures: dict[str, Any]) -> None:
        """Judges a step's figures, with what was measured after it, then writes and shows them.

        From here on `unsound` counts the step, and the guard has seen it.
        """
        self.unsound = 0 if retention.is_sound(figures) else self.unsound + 1
        if now.number % PER_LAYER_EVERY and now.number not in (1, self._recipe.last_step):
            figures.pop("load", None)
        figures = figures | self._store.figures()
        self._guard.record_step(now.number, now.phase_index, figures)
        self.write(now.number, figures)
        # The first step includes compilation. Later ones that do are too rare to move the median.
        if now.number > self._first_step:
            self._seconds_per_token.append(1 / figures["tokens_per_second"])
        self._show(now.number, figures)

    def write(self, step: int, figures: dict[str, Any]) -> None:
        """Hands a step's figures, numbers and arrays of numbers, to metrics.jsonl and the
        trackers."""
        plain = {name: np.asarray(value).tolist() for name, value in figures.items()}
        self.writer.write(step, plain)
        self._trackers.write(step, scalars(plain))

    def _show(self, step: int, figures: dict[str, Any]) -> None:
        every, last = self._recipe.config.log.every, self._recipe.last_step
        if step % every == 0 or step in (self._first_step, last) or "eval/loss" in figures:
            say(describe(step, last, figures, self._seconds_left(step)))

    def _seconds_left(self, step: int) -> float:
        """Seconds until the last step is done, without evaluations; infinite if no step's time is
        known yet."""
        plan = self._recipe.plan
        tokens = plan.tokens_of_step(self._recipe.last_step) - plan.tokens_of_step(step)
        if not tokens:
            return 0.0
        if not self._seconds_per_token:
            return math.inf
        return statistics.median(self._seconds_per_token) * tokens

    def close(self) -> None:
        """Reads the pending figures and writes all lines."""
        if self._pending:
            with contextlib.suppress(Exception):
                self.record(*self.pop())
        self.writer.close()

    def drop(self) -> None:
        """Closes the files without the figures that are not read yet."""
        self._pending = None
        self.close()


def final_code(figures: dict, unsound: int, steps: int) -> int:
    """Judges the end of a run by its last figures and the number of updates without effect before
    it; says what is wrong, and returns the exit code."""
    finite = all(np.isfinite(figures.get(name, 0.0)) for name in ("loss", "eval/loss", "grad_norm"))
    if finite and unsound < steps:
        return leaving.DONE
    what = notes.no_effect_line(unsound) if unsound else "the loss of the last step is not finite"
    say(f"error: {what}; see loss and grad_norm in metrics.jsonl")
    return leaving.UNHEALTHY


# ################################################################################################
# Files and lines
# ##################################################################################################


class Writer:
    """Appends each step's figures to metrics.jsonl; on resume it first drops the lines after the
    restored step. Other processes than the first write them nowhere."""

    def __init__(self, workdir: Path, restored_step: int):
        self.path = workdir / "metrics.jsonl"
        # A start from step 0 may have a line of step 0, and writes it again.
        if is_writer() and (dropped := truncate_after(self.path, restored_step or -1)):
            say(
                f"{self.path}: its last {dropped:,} bytes, from after step {restored_step}, are"
                " dropped"
            )
        self._file = (self.path if is_writer() else Path(os.devnull)).open("ab", buffering=0)
        self._lines, self._failing = b"", ""
        self._lock = threading.RLock()  # the end may come in another thread
        leaving.before(self.close)

    def write(self, step: int, figures: dict[str, Any]) -> None:
        """Writes a line. A full disk costs none."""
        with self._lock:
            # `step` comes first in the line, and no observer's figure of that name replaces it.
            line = {"step": step} | figures | {"step": step}
            self._lines += json.dumps(line).encode() + b"\n"
            if len(self._lines) > BUFFER:
                self._write_lines()

    def flush(self) -> None:
        """Hands everything to the operating system, before a checkpoint that counts on it."""
        with self._lock:
            self._write_lines()

    def close(self) -> None:
        """Flushes and closes the file, once."""
        with self._lock:
            if self._file.closed:
                return
            leaving.forget(self.close)
            self.flush()
            if self._lines:
                count = self._lines.count(b"\n")
                say(
                    f"warning: the last {count} lines of {self.path} could not be written and are"
                    " lost"
                )
            self._file.close()

    def _write_lines(self) -> None:
        """Lets training continue if the file cannot be written, and says so when that begins and
        when it ends."""
        failing = ""
        try:
            while self._lines:
                self._lines = self._lines[self._file.write(self._lines) :]
        except OSError as error:
            failing = error.strerror or str(error)
        if failing and failing != self._failing:
            say(
                f"warning: {self.path} cannot be written ({failing}); training continues, and its"
                " lines wait in memory"
            )
        if self._failing and not failing:
            say("metrics are written again")
        self._failing = failing


def scalars(figures: dict[str, Any]) -> dict[str, float]:
    """The figures as single numbers: the mean and the least of those that each layer has."""
    numbers: dict[str, float] = {}
    for name, value in figures.items():
        if isinstance(value, float | int):
            numbers[name] = value
        elif value and isinstance(value[0], float | int):
            numbers[f"{name}/mean"] = float(np.mean(value))
            numbers[f"{name}/least"] = float(np.min(value))
    return numbers


def truncate_after(path: Path, step: int) -> int:
    """Drops all lines after those of `step`, and the half line that a kill has left; returns the
    number of bytes dropped.

    Cutting is one operation: killed at any time, the file is as it was or as it is to be. A damaged
    line before the last good one stays; the report counts it.
    """
    if not path.exists():
        return 0
    keep_bytes = end = 0
    with path.open("rb+") as file:
        for line in file:
            end += len(line)
            match = LINE_START.match(line)
            if not match or not line.endswith(b"\n"):
                continue
            if int(match[1]) > step:
                break
            keep_bytes = end
        size = file.seek(0, os.SEEK_END)
        file.truncate(keep_bytes)
    return size - keep_bytes


def describe(step: int, last: int, figures: dict[str, Any], eta: float) -> str:
    """step | loss | lr | time per step | tokens per second | load | eta, on one line."""
    parts = [
        f"step {step:>{len(str(last))}}/{last}",
        f"loss {float(figures['loss']):.4f}",
        *(f"{name} {float(figures[key]):.3f}" for key, name in SHOWN.items() if key in figures),
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
    # The warning about it is on the terminal only if process 0 has read it.
    if figures.get("data/corrupt"):
        parts.append(f"damaged {figures['data/corrupt']:.0f}")
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
