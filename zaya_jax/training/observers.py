"""Objects of the caller that look at a run while it trains: `zaya_jax.train(.., observers=[..])`.

class Picture:
    every = 100

    def after_step(self, number, state, figures):
        ...
"""

from collections.abc import Mapping
from typing import Any, Protocol


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
