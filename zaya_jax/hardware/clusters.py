"""Describes clusters for plans: the links between their chips, with the source of each number.

Rates are bytes per second of one device in one direction, as the vendors state them;
`experiments.characterize` measures the share that a program reaches.
"""

import collections
import dataclasses
from collections.abc import Sequence

GB = 1e9


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Nodes of equal chips, joined by links inside and by a network card a device between them."""

    chip: str  # a name in `chips.CHIPS`
    node: int  # devices
    inside: float  # all links of a device to the others of its node
    card: float  # a device's share of its node's network
    latency: float  # seconds before the first byte of a message to another node
    storage: float  # of the shared file system, all nodes together: bytes per second
    source: str

    def of_devices(self, count: int) -> "Cluster":
        """The cluster of so many of its devices, in nodes of equal size: 12 are two nodes of
        six."""
        divisors = (n for n in range(min(self.node, count), 0, -1) if count % n == 0)
        return dataclasses.replace(self, node=next(divisors))

    def bandwidth(self, members: Sequence[int]) -> float:
        """The rate at which each of these devices can send in a collective over all of them.

        Where several devices of a node take part, each stretch of a ring between nodes has a card
        of its own.
        """
        of_node = collections.Counter(member // self.node for member in members)
        if len(of_node) == 1:
            return self.inside
        return min(self.inside, self.card * min(of_node.values()))


CLUSTERS = {
    "mi300x_pollara": Cluster(
        "mi300x",
        8,
        448 * GB,
        50 * GB,
        8e-6,
        200 * GB,
        "MI300X platform data sheet: seven Infinity Fabric links of 64 GB/s to the others; Pollara"
        " 400: 400 Gb/s a device; latency and storage assumed",
    ),
    "mi355x_pollara": Cluster(
        "mi355x",
        8,
        537.6 * GB,
        50 * GB,
        8e-6,
        200 * GB,
        "MI355X platform data sheet: seven Infinity Fabric links of 76.8 GB/s; Pollara 400; the"
        " rest assumed",
    ),
} | {
    f"{chip}_ib": Cluster(
        chip,
        8,
        450 * GB,
        50 * GB,
        5e-6,
        200 * GB,
        f"HGX {chip.upper()} data sheet: NVLink 900 GB/s both ways; InfiniBand NDR 400 Gb/s a"
        " device; latency and storage assumed",
    )
    for chip in ("h200", "h100")
}


def of_chip(name: str) -> Cluster:
    """The first cluster of a chip."""
    return next(cluster for cluster in CLUSTERS.values() if cluster.chip == name)
