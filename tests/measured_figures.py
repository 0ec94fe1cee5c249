"""Measured figures, shared by tests."""

import dataclasses

from pallas_kernels.timing import Timing
from zaya_jax.hardware.measured import BUS, CollectiveTiming, Measured, MemoryCopy

NODE, NODES = 8, 4


def figures_of(**changes):
    of_cpu = Measured("cpu", "cpu", 8, 1, 1, "0.12.0", "2026-11-22T18:00:00+00:00")
    return dataclasses.replace(of_cpu, **changes)


def fabric_of(link, card, start, copies=4e12, **changes):
    """Figures of four nodes of eight devices: a link between each pair of a node and a card a
    device, in bytes a second, and the seconds that a step of a ring takes to start."""

    def timing(name, count, nodes, size):
        rate = card if nodes > 1 else link * (count - 1)
        return Timing(start * (count - 1) + size * BUS[name](count) / rate, 1e-9, 1e3, 5)

    sets = [(2, 1), (4, 1), (NODE, 1), (2, 2), (2 * NODE, 2), (NODES, NODES), (32, NODES)]
    timings = [
        CollectiveTiming(name, count, nodes, size, timing(name, count, nodes, size))
        for name in BUS
        for count, nodes in sets
        for size in (1 << bits for bits in range(10, 33, 2))
    ]
    size = 1 << 30
    copy = MemoryCopy(size, Timing(2 * size / copies, 1e-9, 1e3, 5))
    every = {"num_devices": NODE * NODES, "num_nodes": NODES, "copies": (copy,)}
    return figures_of(collectives=tuple(timings), **{**every, **changes})


FAST = fabric_of(link=400e9, card=40e9, start=1e-6)
SLOW = fabric_of(link=2e9, card=12e9, start=10e-6)
