"""Measures how fast a device copies its memory: a pass over arrays of 1 MiB to a share of what there is."""

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import timing
from zaya_jax.hardware.measure.results import MemoryCopy


def copied(x: jax.Array) -> jax.Array:
    """Reads and writes each number once, in a pass that no compiler leaves out."""
    return -x


def room(device: Any, sharing: int = 1) -> int:
    """Bytes of a device's memory that are free, or of the machine's for a CPU, which so many devices share."""
    if device.platform == "cpu":
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // sharing
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit", 1 << 30) - stats.get("bytes_in_use", 0)


def sizes(free: int) -> list[int]:
    """Bytes of an array, 1 MiB to 4 GiB; two arrays take a quarter of the free memory at most."""
    return [1 << bits for bits in range(20, 33) if 8 << bits <= free]


def measure_copies(device: Any, seconds: float, say: Callable[[str], None]) -> tuple[MemoryCopy, ...]:
    """Copies of every size on one device, up to the first whose call takes longer than `seconds`."""
    found: list[MemoryCopy] = []
    for size in sizes(room(device)):
        with jax.default_device(device):
            x = jax.jit(lambda: (jnp.arange(size // 4) % 7).astype(jnp.float32))()  # noqa: B023
        compiled = jax.jit(copied).lower(x).compile()
        taken = timing.time_call(lambda: compiled(x), seconds, device.platform != "cpu")  # noqa: B023
        found.append(MemoryCopy(size, taken))
        if taken.median > seconds:
            break
    said = (f"{s.bandwidth / 1e9:,.1f} GB/s at {s.bytes / 2**20:,.0f} MiB" for s in found[::3])
    say(f"memory copied: {', '.join(said)}")
    return tuple(found)
