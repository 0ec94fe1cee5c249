"""Detects a lasting rise of the loss or the gradient norm, from the same figures in all processes.

    spikes = Spikes(config.guard, meta.get("spikes"))      as it stood at a checkpoint
    spike = spikes.add(step, phase, loss, norm)            of each step, in order; a Spike, or None
    spikes.state()                                         for the next checkpoint

A step is *high* if its loss or its gradient norm lies more than `spike_deviations` robust standard
deviations above the level, the median of the last LEVEL steps that were not high, or is not finite.
Each step is compared with its own level, over the last WINDOW such steps: a loss that falls, or
slowly rises, is no deviation. A robust standard deviation is 1.4826 times the median distance of
these from their median, but at least a share (LEAST) of the level.

High steps count up and others down, not below 0. At `spike_steps` there is a spike, which began
with the first that counted: so many high steps in a row, or so many more than others. Fewer are
noise, or leaving out single updates mends them (`optim.skip`). A high step never raises the level:
nine in ten, taken in with the tenth, made all others usual. A higher level for good is a spike, or
another phase.

Nothing is high before SETTLE steps were seen, and each phase begins anew: its losses are of other
text or lengths.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from zaya_jax.config import Guard

LEVEL = 32
WINDOW = 128
SETTLE = 64
ROBUST = (
    1.4826  # a normal distribution's standard deviation over its median distance from the median
)
# below it a deviation is taken for noise, however steady it was
LEAST = {"loss": 0.005, "grad_norm": 0.25}


class Spike(NamedTuple):
    """A spike: the steps from the first high one to the last, and of the worse figure the greatest
    value."""

    began: int
    step: int
    figure: str
    value: float
    median: float
    high: int = 0  # of these steps; 0: all

    def __str__(self) -> str:
        steps = self.step - self.began + 1
        many = (
            f"{steps} steps in a row"
            if self.high in (0, steps)
            else f"{self.high} of {steps} steps"
        )
        return (
            f"{self.figure} was too high in {many}, from step {self.began} on "
            f"(up to {self.value:.4g}; before, the median was {self.median:.4g})"
        )


class _High(NamedTuple):
    """The count so far: of `steps` steps `high` were high, `ahead` more than others; their greatest
    figures."""

    ahead: int = 0
    steps: int = 0
    high: int = 0
    loss: float | None = -1e38  # None: not finite
    norm: float | None = -1e38

    def more(self, pair: Sequence[float]) -> "_High":
        tops = [
            None if top is None or not math.isfinite(value) else max(top, value)
            for top, value in zip(self[3:], pair, strict=True)
        ]
        return _High(self.ahead + 1, self.steps + 1, self.high + 1, *tops)

    def less(self) -> "_High":
        return (
            self._replace(ahead=self.ahead - 1, steps=self.steps + 1) if self.ahead > 1 else _High()
        )


class Spikes:
    """The test, with all that it remembers."""

    def __init__(self, settings: Guard, state: dict[str, Any] | None = None):
        state = state or {}
        self._settings = settings
        self._phase: int = state.get("phase", -1)
        self._usual: list[list[float]] = [list(pair) for pair in state.get("usual", [])]
        self._off: list[list[float]] = [list(pair) for pair in state.get("off", [])]
        self._high = _High(*state.get("high", []))

    @property
    def suspicious(self) -> bool:
        """Whether the last steps count as high: a spike that is found later may have begun before
        now."""
        return self._high.ahead > 0

    def state(self) -> dict[str, Any]:
        """Numbers for JSON, None for one that is not finite; copies, since a save writes them while
        steps go on."""
        return {
            "phase": self._phase,
            "usual": [*self._usual],
            "off": [*self._off],
            "high": [*self._high],
        }

    def add(self, step: int, phase: int, loss: float, norm: float) -> Spike | None:
        """A step's figures; the spike that they complete, if they do."""
        if not self._settings.spike_steps:
            return None
        if phase != self._phase:
            self._phase, self._usual, self._off, self._high = phase, [], [], _High()
        pair = [float(loss), float(norm)]
        whole = all(map(math.isfinite, pair))
        if len(self._off) < SETTLE - LEVEL:
            if whole:
                self._add(pair)
            return None
        limits = self._limits()
        if whole and all(value <= limit for value, (_, limit) in zip(pair, limits, strict=True)):
            self._add(pair)
            self._high = self._high.less()
            return None
        self._high = self._high.more(pair)
        if self._high.ahead < self._settings.spike_steps:
            return None
        return self._spike(step, limits)

    def _add(self, pair: list[float]) -> None:
        if len(self._usual) == LEVEL:
            off = [value - level for value, level in zip(pair, self._levels(), strict=True)]
            self._off = [*self._off, off][-WINDOW:]
        self._usual = [*self._usual, pair][-LEVEL:]

    def _levels(self) -> list[float]:
        return [statistics.median(values) for values in zip(*self._usual, strict=True)]

    def _limits(self) -> list[tuple[float, float]]:
        """The level and the limit of each figure."""
        found = []
        of_figure = zip(LEAST, self._levels(), zip(*self._off, strict=True), strict=True)
        for name, level, off in of_figure:
            middle = statistics.median(off)
            distance = statistics.median(abs(value - middle) for value in off)
            deviation = max(ROBUST * distance, LEAST[name] * abs(level))
            found.append((level, level + self._settings.spike_deviations * deviation))
        return found

    def _spike(self, step: int, limits: Sequence[tuple[float, float]]) -> Spike:
        worst = (-math.inf, "", 0.0, 0.0)
        for name, value, (median, limit) in zip(LEAST, self._high[3:], limits, strict=True):
            top = math.inf if value is None else value
            over = (top - median) / (limit - median) if limit > median else math.inf
            worst = max(worst, (over, name, top, median))
        return Spike(step - self._high.steps + 1, step, *worst[1:], self._high.high)
