"""Waiting for what another process or thread does."""

import time
from collections.abc import Callable
from typing import Any


def until(condition: Callable[[], Any], seconds: float = 60, note=lambda: "") -> Any:
    """The first true result of the condition; fails, with the note, if none comes in time."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"nothing within {seconds} s {note()}"
        time.sleep(0.01)
    return found
