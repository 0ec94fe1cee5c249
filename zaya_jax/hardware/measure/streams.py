"""Measures how fast a device reads and writes its memory: a pass over arrays of 1 MiB to a share of that memory."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from zaya_jax.hardware.measure import timing
from zaya_jax.hardware.measure.results import MOVED, MemoryPass

LEAST, MOST = 1 << 20, 1 << 32  # bytes of an array

PASSES: dict[str, Callable] = {
    "copy": lambda x, y, c: -x,  # a pass that no compiler leaves out
    "read": lambda x, y, c: jnp.sum(x),
    "write": lambda x, y, c: jnp.full_like(x, c),
    "add": lambda x, y, c: x + y,
}
assert PASSES.keys() == MOVED.keys()


def room(device: Any, sharing: int = 1) -> int:
    """Bytes of a device's memory that are free, or of the machine's for a CPU, which so many devices share."""
    if device.platform == "cpu":
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // sharing
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit", 1 << 30) - stats.get("bytes_in_use", 0)


def sizes(free: int) -> Iterator[int]:
    """Bytes of an array; three arrays take a quarter of the free memory at most."""
    size = LEAST
    while size <= MOST and 3 * size <= free // 4:
        yield size
        size *= 2


def measure_streams(device: Any, seconds: float, say: Callable[[str], None]) -> tuple[MemoryPass, ...]:
    """Every pass over every size on one device. A series ends where a call takes longer than `seconds`."""
    found: list[MemoryPass] = []
    for name in PASSES:
        series = list(_series(name, device, seconds))
        found += series
        if series:
            rates = (f"{s.bandwidth / 1e9:,.1f} GB/s at {s.bytes / 2**20:,.0f} MiB" for s in series[::3])
            say(f"memory {name}: {', '.join(rates)}")
    return tuple(found)


def _series(name: str, device: Any, seconds: float) -> Iterator[MemoryPass]:
    for size in sizes(room(device)):
        with jax.default_device(device):
            x = jax.jit(lambda: (jnp.arange(size // 4) % 7).astype(jnp.float32))()  # noqa: B023
            y = x + 2
            c = jnp.float32(3)
        compiled = jax.jit(PASSES[name], keep_unused=True).lower(x, y, c).compile()
        taken = timing.time_call(lambda: compiled(x, y, c), seconds, device.platform != "cpu")  # noqa: B023
        yield MemoryPass(name, size, taken)
        if taken.median > seconds:
            return
