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
from typing import Any, NamedTuple

import numpy as np

from zaya_jax.config import Guard

LEVEL = 32
WINDOW = 128
SETTLE = 64
# A normal distribution's standard deviation over its median distance from the median.
ROBUST = 1.4826
# Deviations below this fraction of the level are noise, however steady the figure was.
LEAST = np.array([0.005, 0.25])
FIGURES = ("loss", "grad_norm")


class Spike(NamedTuple):
    """A spike from step `began` to `step`; a figure that was too high in that, and its value."""

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
            f"({self.value:.4g} in step {self.step}; before, the median was {self.median:.4g})"
        )


class Spikes:
    """The test, with all that it remembers."""

    def __init__(self, settings: Guard, state: dict[str, Any] | None = None):
        state = state or {}
        self._settings = settings
        self._phase: int = state.get("phase", -1)
        # Pairs of loss and norm: of the last normal steps, and of their residuals.
        self._normal: list[list[float]] = state.get("normal", [])
        self._residuals: list[list[float]] = state.get("residuals", [])
        # The streak so far: how many more of its steps were high than normal, and its steps.
        self._ahead: int = state.get("ahead", 0)
        self._steps: int = state.get("steps", 0)

    @property
    def suspicious(self) -> bool:
        """Whether a streak of high steps is under way: a spike that is found later may have begun
        before now."""
        return self._ahead > 0

    def state(self) -> dict[str, Any]:
        """Numbers for JSON; copies, since a save writes them while steps go on."""
        return {
            "phase": self._phase,
            "normal": [*self._normal],
            "residuals": [*self._residuals],
            "ahead": self._ahead,
            "steps": self._steps,
        }

    def add(self, step: int, phase: int, loss: float, norm: float) -> Spike | None:
        """Takes a step's figures; returns the spike that they complete, if they do."""
        if not self._settings.spike_steps:
            return None
        if phase != self._phase:
            self._phase = phase
            self._normal, self._residuals, self._ahead, self._steps = [], [], 0, 0
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
            self._ahead = max(self._ahead - 1, 0)
            self._steps += 1
            if not self._ahead:
                self._steps = 0  # the streak is over
            return None
        self._ahead, self._steps = self._ahead + 1, self._steps + 1
        if self._ahead < self._settings.spike_steps:
            return None
        which = int(pair[0] <= limits[0])  # the loss, unless only the norm is too high
        began, high = step - self._steps + 1, (self._steps + self._ahead) // 2
        return Spike(began, step, FIGURES[which], pair[which], float(levels[which]), high)

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
        deviation = np.maximum(ROBUST * distance, LEAST * abs(levels))
        return levels + self._settings.spike_deviations * deviation
