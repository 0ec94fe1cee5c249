"""Objects of the caller that look at a run while it trains: `zaya_jax.train(.., observers=[..])`.

class Picture:
    every = 100

    def after_step(self, number, state, figures):
        ...
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from zaya_jax.training.pace import Pace


class Observer(Protocol):
    """A caller's object that looks at a run after every `every` steps: for a custom evaluation, a
    picture, an early stop."""

    every: int

    def after_step(self, number: int, state: dict, figures: dict) -> Mapping[str, Any] | None:
        """Called in all processes, with the state after step `number` and the step's figures.

        What it returns, numbers or arrays, is added to the figures of the step, but replaces none of
        them; it must be the same in all processes. Raising `EndRun` ends the run. Keep no reference
        to the state: the next step reuses its memory.
        """


class EndRun(Exception):
    """Raised by an observer: the run saves, and ends with code 0 and this reason."""


class Observers:
    """The observers of one start, and the reason for which one of them ends the run."""

    def __init__(self, observers: Sequence[Observer], pace: Pace):
        self._observers, self._pace = observers, pace
        self.end_reason = ""

    def are_due(self, number: int) -> bool:
        """Whether one is called after step `number`."""
        return any(number % observer.every == 0 for observer in self._observers)

    def figures(self, number: int, state: dict, figures: dict) -> dict[str, Any]:
        """Calls those that are due, and returns their figures, which never affect rollbacks or exit
        codes."""
        observed: dict[str, Any] = {}
        for observer in self._observers:
            if number % observer.every == 0:
                self._pace.begin("evaluate", number, id(observer))  # its first call may compile
                try:
                    observed |= observer.after_step(number, state, observed | figures) or {}
                except EndRun as end:
                    self.end_reason = str(end) or "no reason given"
        return observed
