"""Detects a lasting rise of the loss or the gradient norm, from the same figures in all processes.

    spikes = Spikes(config.guard, meta.get("spikes"))      as it stood at a checkpoint
    spike = spikes.add(step, phase, loss, norm)            for each step, in order; a Spike, or None
    spikes.state()                                         for the next checkpoint

A step is *high* if its loss or its gradient norm is not finite, or lies more than
`spike_deviations` robust standard deviations above the level. The level is the median of the last
LEVEL steps that were not high; they are called normal. A normal step's residuals are its distances
from the level at that step, so a loss that falls or rises slowly does not count as deviating. The
robust standard deviation is 1.4826 times the median distance of the last WINDOW residuals from
their median, but at least a fraction (LEAST) of the level.

High steps count up and normal ones down, not below 0. A count of `spike_steps` is a spike: that
many high steps in a row, or that many more than normal ones. It began with the first high step that
counted. Fewer are noise, or are mended by skipping single updates (`optim.skip`).

High steps never enter the level: otherwise a row of them would soon look normal. A permanently
higher level is therefore a spike, unless a new phase began.

Nothing is high before SETTLE steps were seen, and each phase starts afresh, since its losses are
those of other text or lengths.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from zaya_jax.config import Guard

LEVEL = 32
WINDOW = 128
SETTLE = 64
# A normal distribution's standard deviation over its median distance from the median.
ROBUST = 1.4826
# Deviations below this fraction of the level are noise, however steady the figure was.
LEAST = {"loss": 0.005, "grad_norm": 0.25}


class Spike(NamedTuple):
    """A spike from step `began` to `step`: the figure that rose most, with its greatest value."""

    began: int
    step: int
    figure: str
    value: float
    median: float
    high: int  # of these steps

    def __str__(self) -> str:
        steps = self.step - self.began + 1
        many = f"{self.high} of {steps} steps" if self.high < steps else f"{steps} steps in a row"
        return (
            f"{self.figure} was too high in {many}, from step {self.began} on "
            f"(up to {self.value:.4g}; before, the median was {self.median:.4g})"
        )


class _Streak(NamedTuple):
    """The count so far: `high` of `steps` steps were high, `ahead` more than were normal."""

    ahead: int = 0
    steps: int = 0
    high: int = 0
    top_loss: float | None = -1e38  # the greatest of the high steps; None: not finite
    top_norm: float | None = -1e38

    def add_high(self, pair: Sequence[float]) -> "_Streak":
        """Counts a high step with this loss and norm."""
        tops: list[float | None] = []
        for top, value in zip((self.top_loss, self.top_norm), pair, strict=True):
            if top is None or not math.isfinite(value):
                tops.append(None)
            else:
                tops.append(max(top, value))
        return _Streak(self.ahead + 1, self.steps + 1, self.high + 1, *tops)

    def add_normal(self) -> "_Streak":
        """Counts a normal step, which may end the streak."""
        if self.ahead <= 1:
            return _Streak()
        return self._replace(ahead=self.ahead - 1, steps=self.steps + 1)


class Spikes:
    """The test, with all that it remembers."""

    def __init__(self, settings: Guard, state: dict[str, Any] | None = None):
        state = state or {}
        self._settings = settings
        self._phase: int = state.get("phase", -1)
        # Pairs of loss and norm: of the last normal steps, and of their residuals.
        self._normal: list[list[float]] = state.get("usual", [])
        self._residuals: list[list[float]] = state.get("off", [])
        self._streak = _Streak(*state.get("high", []))

    @property
    def suspicious(self) -> bool:
        """Whether a streak of high steps is under way: a spike that is found later may have begun
        before now."""
        return self._streak.ahead > 0

    def state(self) -> dict[str, Any]:
        """Numbers for JSON, None for one that is not finite; copies, since a save writes them while
        steps go on."""
        return {  # under the names that earlier versions gave them
            "phase": self._phase,
            "usual": [*self._normal],
            "off": [*self._residuals],
            "high": [*self._streak],
        }

    def add(self, step: int, phase: int, loss: float, norm: float) -> Spike | None:
        """Takes a step's figures; returns the spike that they complete, if they do."""
        if not self._settings.spike_steps:
            return None
        if phase != self._phase:
            self._phase = phase
            self._normal, self._residuals, self._streak = [], [], _Streak()
        pair = [float(loss), float(norm)]
        finite = all(map(math.isfinite, pair))
        if len(self._residuals) < SETTLE - LEVEL:
            if finite:
                self._add_normal(pair)
            return None
        levels = self._levels()
        limits = self._limits(levels)
        if finite and (np.array(pair) <= limits).all():
            self._add_normal(pair)
            self._streak = self._streak.add_normal()
            return None
        self._streak = self._streak.add_high(pair)
        if self._streak.ahead < self._settings.spike_steps:
            return None
        return self._spike(step, levels, limits)

    def _add_normal(self, pair: list[float]) -> None:
        if len(self._normal) == LEVEL:
            residual = np.array(pair) - self._levels()
            self._residuals = [*self._residuals, residual.tolist()][-WINDOW:]
        self._normal = [*self._normal, pair][-LEVEL:]

    def _levels(self) -> np.ndarray:  # of loss and norm
        return np.median(self._normal, 0)

    def _limits(self, levels: np.ndarray) -> np.ndarray:
        """The loss and the norm above which a step is high."""
        residuals = np.array(self._residuals)
        distance = np.median(abs(residuals - np.median(residuals, 0)), 0)
        deviation = np.maximum(ROBUST * distance, np.array([*LEAST.values()]) * abs(levels))
        return levels + self._settings.spike_deviations * deviation

    def _spike(self, step: int, levels: np.ndarray, limits: np.ndarray) -> Spike:
        worst = (-math.inf, "", 0.0, 0.0)
        tops = (self._streak.top_loss, self._streak.top_norm)
        by_figure = zip(LEAST, tops, levels.tolist(), limits.tolist(), strict=True)
        for name, top, level, limit in by_figure:
            value = math.inf if top is None else top
            over = (value - level) / (limit - level) if limit > level else math.inf
            worst = max(worst, (over, name, value, level))
        began = step - self._streak.steps + 1
        return Spike(began, step, *worst[1:], self._streak.high)
