"""How long a run still takes, from the steps that were trained and the evaluations that were made.

A step counts by its tokens, since a ramp's last steps may have sixteen times those of its first. Left out are steps
that waited for a compiler: the first of a program, and the first with another shape of batch. Its compiling may stand
in the time of the step before, whose figures an accelerator gives only after the next one is dispatched, so that one
is left out too. What saves and slow moments add to single steps leaves a median as it is.
"""

import collections
import math
import statistics

from zaya_jax.schedule import Plan

STEPS = 100  # the newest so many count


class Remaining:
    """The seconds that are left after a step; infinite as long as nothing tells."""

    def __init__(self, plan: Plan, reached: int, last_step: int, eval_every: int):
        self._plan, self._last, self._every = plan, last_step, eval_every
        self._compile = {reached + 1, *(segment.first_step for segment in plan.segments)}
        self._per_token: collections.deque[float] = collections.deque(maxlen=STEPS)
        self._evaluated: set[int] = set()
        self._evaluation = 0.0

    def step(self, number: int, seconds: float) -> None:
        """What a step took."""
        if not self._compile & {number, number + 1}:
            tokens = self._plan.tokens_of_step(number) - self._plan.tokens_of_step(number - 1)
            self._per_token.append(seconds / tokens)

    def evaluation(self, phase_index: int, seconds: float) -> None:
        """What an evaluation took; a phase's first one compiles, and reads the held-out text."""
        if phase_index in self._evaluated:
            self._evaluation = seconds
        self._evaluated.add(phase_index)

    def after(self, number: int) -> float:
        """Seconds until the last step and its evaluation are done."""
        if number == self._last:
            return 0.0
        if not self._per_token:
            return math.inf
        tokens = self._plan.tokens_of_step(self._last) - self._plan.tokens_of_step(number)
        evaluations = -(-self._last // self._every) - number // self._every
        return statistics.median(self._per_token) * tokens + self._evaluation * evaluations
