"""Shows how far a program has come."""

import io
import sys
from typing import Any

from tqdm import tqdm

EVERY = 60.0  # seconds between lines in a log


class Progress(tqdm):
    """A bar at a terminal; elsewhere a line a minute, since a log keeps all of them."""

    def __init__(self, **options: Any) -> None:
        self._in_log = not sys.stderr.isatty()
        if self._in_log:
            every = {"mininterval": EVERY, "maxinterval": EVERY, "delay": EVERY, "miniters": 1}
            options |= {"file": io.StringIO(), **every}
        super().__init__(unit_scale=True, dynamic_ncols=not self._in_log, **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Shows the bar; "" removes it."""
        if not self._in_log:
            super().display(msg, pos)
        elif msg is None:
            print(self, file=sys.stderr, flush=True)
