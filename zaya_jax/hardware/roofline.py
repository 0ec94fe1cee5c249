"""Bounds the time of a compiled step: caches aside, no chip of the kind runs these kernels one by one any faster.

A kernel takes the longest of its products at the chip's peak for their format, its bytes at the HBM's bandwidth, and
LAUNCH, which the shortest kernels take. A collective takes the time to send its bytes over the links of its group; the
part that the kernels between its start and its end do not cover is exposed.
"""

import dataclasses
import math
from collections.abc import Sequence

from zaya_jax.hardware import chips
from zaya_jax.hardware.clusters import Cluster
from zaya_jax.hardware.hlo import Collective
from zaya_jax.hardware.kernels import GpuKernel, Program

# Seconds from one kernel's start to the next one's, where they do next to nothing; an assumption.
LAUNCH = 3e-6


@dataclasses.dataclass(frozen=True)
class Bound:
    """Seconds of a step, by the bound of each kernel."""

    compute: float
    memory: float
    launches: float
    links: float  # exposed
    hidden: float  # of links, under kernels: no part of the sum

    @property
    def seconds(self) -> float:
        """The time of the step."""
        return self.compute + self.memory + self.launches + self.links

    @property
    def binds(self) -> str:
        """The largest part."""
        parts = {"compute": self.compute, "HBM": self.memory, "launches": self.launches, "links": self.links}
        return max(parts, key=lambda name: parts[name])


def bound(
    program: Program, collectives: Sequence[Collective], kind: str, cluster: Cluster | None, matmul: str = "default"
) -> Bound | None:
    """The bound on a chip of this kind (JAX's device_kind) in a cluster; None where its rates are not known."""
    name = chips.named(kind)
    if name is None or cluster is None:
        return None
    peaks, bandwidth = chips.CHIPS[name].peaks, chips.CHIPS[name].bandwidth
    wide = peaks["float32" if matmul == "highest" else "tf32"]
    totals = dict.fromkeys(("compute", "memory", "launches"), 0.0)

    def seconds(k: GpuKernel) -> tuple[str, float]:
        computing, moving = k.flops / (wide if k.wide else peaks["bfloat16"]), k.bytes / bandwidth
        return max(("compute", computing), ("memory", moving), ("launches", LAUNCH), key=lambda one: one[1])

    for k in program.kernels:
        if not k.collective:
            what, time = seconds(k)
            totals[what] += k.times * time
    exposed = hidden = 0.0
    by_name = {k.name: k for k in program.kernels}
    for c in collectives:
        slowest = min(map(cluster.bandwidth, c.groups), default=math.inf)  # of the groups, or pairs
        time = c.wire_bytes / slowest + cluster.latency
        under = program.kernels[slice(*program.under.get(c.name, (0, 0)))]
        times = by_name[c.name].times if c.name in by_name else 1.0
        if not times:  # in a loop that does not turn, as a rule: experts' further rounds
            continue
        cover = sum(seconds(k)[1] * k.times / times for k in under if not k.collective)
        hidden += times * min(cover, time)
        exposed += times * max(time - cover, 0.0)
    return Bound(**totals, links=exposed, hidden=hidden)
