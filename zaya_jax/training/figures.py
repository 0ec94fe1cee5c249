"""Reads the figures of each step one step late, so that no device waits, and hands them to files, terminal and guard.

figures.dispatched(now, of_the_step)     reads the figures of the step before
figures.read(more)                       reads the figures of this step, where something is due after it
with figures.outside_a_step(): ...       time that belongs to no step
"""

import collections
import contextlib
import math
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from zaya_jax import cli
from zaya_jax.checkpoint import retention
from zaya_jax.hardware.chips import model_flops, peak_flops
from zaya_jax.schedule import Step
from zaya_jax.training import logs, notes
from zaya_jax.training.metrics import PER_LAYER_EVERY, Writer, describe
from zaya_jax.training.pace import Pace
from zaya_jax.training.trackers import Trackers

STEPS = 100  # the newest so many count for the time that is left


class Figures:
    """The figures of one start; `unsound` updates in a row had no effect before it."""

    def __init__(self, begun: Any, unsound: int, pace: Pace, guard: Any, trackers: Trackers | None = None):
        """`begun` is the run's `Beginning`, `guard` the `aegis.guard.Guard` that sees them."""
        planned = begun.planned
        self._recipe, self._store, self._pace, self._guard = planned.recipe, begun.store, pace, guard
        self.writer = Writer(begun.workdir, planned.reached, trackers)
        self._first_step = planned.reached + 1
        self._seconds_per_token: collections.deque[float] = collections.deque(maxlen=STEPS)
        self.unsound = unsound  # updates in a row without effect, up to the last one
        self._pending: tuple[Step, Any, float | None] | None = None
        self._peak = peak_flops(jax.devices()[0].device_kind, planned.recipe.config.precision)
        self.begin()

    def begin(self) -> None:
        """Starts the clock of the first step."""
        self._clock = time.perf_counter()

    @contextlib.contextmanager
    def outside_a_step(self) -> Iterator[None]:
        """Leaves the time within out of the step's."""
        since = time.perf_counter()
        yield
        self._clock += time.perf_counter() - since

    def dispatched(self, now: Step, figures: Any) -> None:
        """Takes the figures of a step that has been dispatched, and reads those of the step before."""
        if self._pending:
            self.read()
        self._pace.mark("figures")
        # A CPU is done with the step by now, an accelerator when its figures have come.
        self._pending = (now, figures, self._lap() if figures["loss"].is_ready() else None)

    def read(self, more: dict[str, Any] | None = None) -> dict[str, float]:
        """Reads the pending figures and hands them on; gives those that a checkpoint is judged by."""
        assert self._pending is not None
        (now, found, seconds), self._pending = self._pending, None
        self._pace.mark("wait")
        found = nan_without_targets(jax.device_get(found))
        self._pace.mark("figures")
        seconds, tokens = seconds or self._lap(), now.tokens_after - now.tokens_before
        figures = {"tokens": now.tokens_after, **found, **(more or {})}
        figures |= {"step_seconds": seconds, "tokens_per_second": tokens / seconds}
        if self._peak:
            model = self._recipe.phases[now.phase_index].config.model
            flops = model_flops(model, now.phase.seq_len) * tokens
            figures["mfu"] = flops / seconds / self._peak / len(jax.devices())
        self.unsound = 0 if retention.sound(figures) else self.unsound + 1
        if now.number % PER_LAYER_EVERY and now.number not in (1, self._recipe.last_step):
            figures.pop("load", None)
        figures |= self._store.figures() | self._guard.figures(now.number)
        self._guard.see(now.number, now.phase_index, figures)
        self.writer.write(now.number, figures)
        if now.number > self._first_step:  # which is compiled; later programs' first steps leave a median as it is
            self._seconds_per_token.append(seconds / tokens)
        self._show(now.number, figures)
        return {name: float(found[name]) for name in retention.FIGURES}

    def _show(self, step: int, figures: dict[str, Any]) -> None:
        every, last = self._recipe.config.log.every, self._recipe.last_step
        if step % every == 0 or step in (self._first_step, last) or "eval/loss" in figures:
            logs.say(describe(step, last, figures, self._seconds_left(step)))

    def _seconds_left(self, step: int) -> float:
        """Seconds until the last step is done, evaluations not counted; infinite where no step's time is known."""
        plan = self._recipe.plan
        tokens = plan.tokens_of_step(self._recipe.last_step) - plan.tokens_of_step(step)
        if not tokens:
            return 0.0
        return statistics.median(self._seconds_per_token) * tokens if self._seconds_per_token else math.inf

    def close(self) -> None:
        """Reads the pending figures and writes all lines."""
        if self._pending:
            with contextlib.suppress(Exception):
                self.read()
        self.writer.close()

    def drop(self) -> None:
        """Closes the files without the figures that are not read yet."""
        self._pending = None
        self.close()

    def _lap(self) -> float:
        """Seconds since the last lap."""
        last, self._clock = self._clock, time.perf_counter()
        return self._clock - last


def nan_without_targets(figures: dict) -> dict:
    """The figures, with a loss of nan where the batch had no target and its sums are all zero."""
    if figures["loss"] == figures["z"] == 0:
        return figures | {"loss": np.nan, "target_tokens": 0.0}
    return figures


def final_code(figures: dict, unsound: int, steps: int) -> int:
    """The exit code of a run of so many steps, by its last figures and the updates without effect before its end."""
    finite = all(np.isfinite(figures.get(name, 0.0)) for name in ("loss", "eval/loss", "grad_norm"))
    if finite and unsound < steps:
        return cli.DONE
    what = notes.without_effect(unsound) if unsound else "the loss of the last step is not finite"
    logs.say(f"error: {what}; see loss and grad_norm in metrics.jsonl")
    return cli.UNHEALTHY
