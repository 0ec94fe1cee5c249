"""Writes a profile of a few steps: jax.profiler's trace, which TensorBoard and Perfetto open;
docs/howto/profile.md."""

from pathlib import Path
from typing import Any

import jax

from zaya_jax.cluster.multihost import is_writer
from zaya_jax.config import fields
from zaya_jax.training.logs import say


class Profile:
    """Traces the steps that `log.profile` names, in the process that writes the run's files."""

    def __init__(self, wanted: str, workdir: Path):
        first, _, count = wanted.partition(":")
        self._first, self._workdir = int(first or 0), workdir
        self._end, self._going = self._first + int(count or 1), False

    def before_step(self, number: int, state: Any) -> None:
        """Starts or stops the trace, where that is due, after all that was dispatched is done."""
        if is_writer() and number == self._first:
            jax.block_until_ready(state)
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # every call of Python would fill the trace
            try:
                jax.profiler.start_trace(self._workdir, profiler_options=options)
                self._going = True
            except Exception as error:
                say(f"warning: no profile ({fields.first_line(error)})")
        elif self._going and number == self._end:
            jax.block_until_ready(state)
            self.stop()

    def stop(self) -> None:
        """Writes what is traced, if a trace is going on."""
        if self._going:
            self._going = False
            try:
                jax.profiler.stop_trace()
                say(f"profile written: {self._workdir / 'plugins' / 'profile'}")
            except Exception as error:
                say(f"warning: no profile ({fields.first_line(error)})")
