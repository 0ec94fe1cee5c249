"""Whether the loss or the gradient has gone up for good: a robust test on recorded figures, the same in all processes.

    spikes = Spikes(config.guard, meta.get("spikes"))      as it stood at a checkpoint
    spike = spikes.add(step, phase, loss, norm)            of each step, in order; a Spike, or None
    spikes.state()                                         for the next checkpoint

A step is *high* if its loss or its gradient norm lies more than `spike_deviations` robust standard deviations above the
level, the median of the last LEVEL steps that were not high, or is not finite. What deviates is a step from its own
level, over the last WINDOW such steps: a loss that falls, or slowly rises, is no deviation. A robust standard deviation
is 1.4826 times the median distance of these from their median, but at least a share (LEAST) of the level. `spike_steps`
high steps in a row are a spike, which began with the first of them. Fewer are noise, or what leaving out single updates
mends (`optim.skip`).

Nothing is high before SETTLE steps were seen, and each phase begins anew: its losses are of other text or lengths.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from zaya_jax.config import Guard

LEVEL = 32
WINDOW = 128
SETTLE = 64
ROBUST = 1.4826  # a normal distribution's standard deviation over its median distance from the median
LEAST = {"loss": 0.005, "grad_norm": 0.25}  # below it a deviation is taken for noise, however steady it was


class Spike(NamedTuple):
    """What was seen: the steps from the first high one to the last, and of the worse figure the greatest value."""

    began: int
    step: int
    figure: str
    value: float
    median: float

    def __str__(self) -> str:
        return (
            f"{self.figure} was too high in {self.step - self.began + 1} steps in a row, from step {self.began} on "
            f"(up to {self.value:.4g}; before, the median was {self.median:.4g})"
        )


class Spikes:
    """The test, with all that it remembers."""

    def __init__(self, settings: Guard, state: dict[str, Any] | None = None):
        state = state or {}
        self._settings = settings
        self._phase: int = state.get("phase", -1)
        self._usual: list[list[float]] = [list(pair) for pair in state.get("usual", [])]
        self._off: list[list[float]] = [list(pair) for pair in state.get("off", [])]
        self._high: list[list[float | None]] = [list(pair) for pair in state.get("high", [])]

    @property
    def suspicious(self) -> bool:
        """Whether the last step was high."""
        return bool(self._high)

    def state(self) -> dict[str, Any]:
        """Numbers alone, for JSON: of what is not finite, None. Copies, since a save writes them while steps go on."""
        return {"phase": self._phase, "usual": [*self._usual], "off": [*self._off], "high": [*self._high]}

    def add(self, step: int, phase: int, loss: float, norm: float) -> Spike | None:
        """A step's figures; the spike that they complete, if they do."""
        if not self._settings.spike_steps:
            return None
        if phase != self._phase:
            self._phase, self._usual, self._off, self._high = phase, [], [], []
        pair = [float(loss), float(norm)]
        whole = all(map(math.isfinite, pair))
        if len(self._off) < SETTLE - LEVEL:
            if whole:
                self._add(pair)
            return None
        limits = self._limits()
        if whole and all(value <= limit for value, (_, limit) in zip(pair, limits, strict=True)):
            for loss_then, norm_then in self._high:  # it was noise: a part of what is usual
                if loss_then is not None and norm_then is not None:
                    self._add([loss_then, norm_then])
            self._high = []
            self._add(pair)
            return None
        self._high.append([value if math.isfinite(value) else None for value in pair])
        if len(self._high) < self._settings.spike_steps:
            return None
        return self._spike(step, limits)

    def _add(self, pair: list[float]) -> None:
        if len(self._usual) == LEVEL:
            off = [value - level for value, level in zip(pair, self._levels(), strict=True)]
            self._off = [*self._off, off][-WINDOW:]
        self._usual = [*self._usual, pair][-LEVEL:]

    def _levels(self) -> list[float]:
        return [_median(values) for values in zip(*self._usual, strict=True)]

    def _limits(self) -> list[tuple[float, float]]:
        """Of each figure its level and what is too high."""
        found = []
        of_figure = zip(LEAST, self._levels(), zip(*self._off, strict=True), strict=True)
        for name, level, off in of_figure:
            middle = _median(off)
            distance = _median([abs(value - middle) for value in off])
            deviation = max(ROBUST * distance, LEAST[name] * abs(level))
            found.append((level, level + self._settings.spike_deviations * deviation))
        return found

    def _spike(self, step: int, limits: Sequence[tuple[float, float]]) -> Spike:
        worst = (-math.inf, "", 0.0, 0.0)
        for name, values, (median, limit) in zip(LEAST, zip(*self._high, strict=True), limits, strict=True):
            top = max(math.inf if value is None else value for value in values)
            over = (top - median) / (limit - median) if limit > median else math.inf
            worst = max(worst, (over, name, top, median))
        return Spike(step - len(self._high) + 1, step, *worst[1:])


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
