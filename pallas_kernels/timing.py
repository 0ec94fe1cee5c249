"""Times a program: warmed up, repeated, the median with its spread.

On an accelerator a sample is several calls in a row, and only the last is awaited, as in a training
loop. A short program then takes as long as the host needs to start it. On a CPU every call is
waited for: its devices are threads that would get in each other's way.
"""

import math
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

LEAST, MOST = 5, 100  # samples, whatever the time
SAMPLE = 2e-3  # seconds of a sample, where calls may queue
QUEUE = 64  # calls of a sample at most


class Timing(NamedTuple):
    """Seconds of one call: the median of the samples, and the 10th and 90th of 100."""

    median: float
    low: float
    high: float
    samples: int


class Course(NamedTuple):
    """So many samples of so many calls."""

    samples: int
    calls: int


def warm_up(call: Callable[[], Any]) -> float:
    """Calls it twice; the seconds of the second time."""
    jax.block_until_ready(call())
    begin = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - begin


def course(once: float, seconds: float, queue: bool) -> Course:
    """As many samples as fit `seconds`, LEAST to MOST, where a call takes `once`."""
    calls = min(QUEUE, math.ceil(SAMPLE / max(once, 1e-9))) if queue else 1
    samples = int(seconds / max(once * calls, 1e-9))
    return Course(min(max(samples, LEAST), MOST), calls)


def sample(call: Callable[[], Any], how: Course) -> Timing:
    """Times the samples of a course."""
    taken = []
    for _ in range(how.samples):
        begin = time.perf_counter()
        for _ in range(how.calls - 1):
            call()
        jax.block_until_ready(call())
        taken.append((time.perf_counter() - begin) / how.calls)
    low, median, high = (float(v) for v in np.percentile(taken, (10, 50, 90)))
    return Timing(median, low, high, how.samples)


def time_call(call: Callable[[], Any], seconds: float, queue: bool) -> Timing:
    """Warms up and times work of one process alone."""
    return sample(call, course(warm_up(call), seconds, queue))


def knee[Size: (int, float)](
    points: Iterable[tuple[Size, float]], share: float = 0.8
) -> Size | None:
    """Of (size, rate): the least size whose rate is at least `share` of the best; None without
    points."""
    found = list(points)
    best = max((rate for _, rate in found), default=0.0)
    return min((size for size, rate in found if rate >= share * best), default=None)
