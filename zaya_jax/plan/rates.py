"""The shares of a chip's and a network's peak that a program reaches: one table, each number with
its source.

Peaks are the vendors' (`hardware.chips`, `hardware.clusters`). An assumed rate that decides a step
has a fast and a slow end around its likely value; the plan's range follows from them. Figures that
`experiments.characterize` measured take the place of these rates; those marked "assumed" should be
measured first.
"""

import collections
import dataclasses
import os
from collections.abc import Iterable, Iterator

from zaya_jax.hardware import chips, measured, sizing
from zaya_jax.hardware.clusters import Cluster

ASSUMED = "assumed"
AMD = "AMD's own measurements, 708 of 1,307 TFLOP/s in bfloat16 (ROCm blog on max-achievable FLOPs)"
H100 = "measured on one H100 (benchmarks/gpu.md)"
ZAYA1 = "ZAYA1 on MI300X, arXiv:2511.17127: 4.33 of 5.3 TB/s"
HALF = f"{ASSUMED}: half of dense; fast: two thirds"
MODELLED = (
    f"{ASSUMED}; fast: half of what a model of the kernels' inner loops gave, since withdrawn"
)


@dataclasses.dataclass(frozen=True)
class Rate:
    """A number with its source: a share of a peak, seconds, hours, or bytes a second."""

    value: float  # the likely one
    source: str
    fast_slow: tuple[float, float] | None = (
        None  # of a fast and of a slow step; None where `value` is all that is known
    )


@dataclasses.dataclass(frozen=True)
class Rates:
    """The rates of one cluster."""

    products: Rate  # large dense products, of the peak for bfloat16
    grouped: Rate  # the experts'
    attention: Rate  # products of scores, in kernels of our own; linear attention's
    # The router's, of the float32 peak: a quarter of XF32's, which the bound of a compiled program
    # allows them.
    float32: Rate
    memory: Rate  # of the HBM's bandwidth
    intra_node: Rate  # of a node's links, for a collective
    inter_node: Rate  # of the cards between nodes
    overlap: Rate = Rate(
        0.6,
        f"{ASSUMED}: of the time under kernels. A layer's reduce-scatter is awaited in the same"
        " turn of the loop: 3.4 ms of kernels cover 5.5",
        (0.8, 0.5),
    )
    ring: Rate = Rate(
        2.1e-6,
        "seconds of a ring's step inside a node: RCCL's constants for gfx942 (tuning.cc); fast:"
        " trees and the like",
        (0.0, 3e-6),
    )
    launch: Rate = Rate(
        3.5e-6, f"{ASSUMED}: seconds between one kernel and the next", (1.75e-6, 5.25e-6)
    )

    @property
    def uncertain(self) -> list[str]:
        """The rates that have ends."""
        return [name for name, rate in vars(self).items() if rate.fast_slow]

    def rows(self) -> Iterator[tuple[str, float, str]]:
        """Each rate's name, value and source, for a table."""
        for name, rate in vars(self).items():
            source = rate.source
            if rate.fast_slow:
                source += "; fast {:.3g}, slow {:.3g}".format(*rate.fast_slow)
            yield name, rate.value, source

    def at_ends(self, end: int, names: Iterable[str]) -> "Rates":
        """These rates at their fast (0) or slow (1) end, the others as they are."""
        rates = vars(self)
        return dataclasses.replace(
            self, **{n: Rate(rates[n].fast_slow[end], rates[n].source) for n in names}
        )


_ROWS = {  # on MI300X with Pollara, and on Hopper with InfiniBand
    "products": (Rate(0.54, AMD), Rate(0.83, H100)),
    "grouped": (Rate(0.27, HALF, (0.36, 0.19)), Rate(0.27, H100, (0.3, 0.25))),
    "attention": (Rate(0.15, MODELLED, (0.2, 0.1)), Rate(0.27, H100, (0.29, 0.25))),
    "float32": (
        Rate(0.5, ASSUMED),
        Rate(1.5, f"{ASSUMED}: as three products of TF32, each at 0.6 of that peak"),
    ),
    "memory": (Rate(4.33 / 5.3, ZAYA1), Rate(0.8, H100)),
    "intra_node": (
        Rate(0.7, f"{ASSUMED}: RCCL inside a node"),
        Rate(0.8, f"{ASSUMED}: NCCL inside a node"),
    ),
    "inter_node": (
        Rate(0.72, f"{ASSUMED}: RCCL on Pollara, with kernels running", (0.8, 0.62)),
        Rate(0.78, f"{ASSUMED}: NCCL on InfiniBand, with kernels running", (0.85, 0.7)),
    ),
}
_MI300X, _HOPPER = (
    Rates(**{name: rates[maker] for name, rates in _ROWS.items()}) for maker in (0, 1)
)
_MI355X = dataclasses.replace(_MI300X, memory=Rate(0.82, f"{ASSUMED}: as MI300X, {ZAYA1}"))
DEFAULTS = {"mi300x": _MI300X, "mi355x": _MI355X, "h200": _HOPPER, "h100": _HOPPER}


def for_cluster(cluster: Cluster, figures: str | os.PathLike = "") -> Rates:
    """The shares for a cluster; UserError where measured figures are of another chip."""
    rates = DEFAULTS[cluster.chip]
    measurements = sizing.figures_at(os.fspath(figures), cluster.chip)
    return dataclasses.replace(rates, **_measured(measurements, cluster)) if measurements else rates


def _measured(figures: measured.Measured, cluster: Cluster) -> dict[str, Rate]:
    """The shares that figures give."""
    chip = chips.CHIPS[cluster.chip]
    shares: dict[str, list[float]] = collections.defaultdict(list)  # of each the best counts
    for product in figures.products:
        if product.dtype == "bfloat16":
            name = "products" if product.name == "dense" else "grouped"
            shares[name].append(product.rate / chip.peaks["bfloat16"])
    if memory := figures.memory_bandwidth():
        shares["memory"].append(memory / chip.bandwidth)
    if step := figures.ring_step():
        shares["ring"].append(step)
    for c in figures.collectives:
        if c.name in ("reduce-scatter", "all-gather") and c.num_devices > 1:
            each = c.num_devices // c.num_nodes  # devices of a node
            group = [node * cluster.node + i for node in range(c.num_nodes) for i in range(each)]
            name = "intra_node" if c.num_nodes == 1 else "inter_node"
            shares[name].append(c.bus_bandwidth / cluster.bandwidth(group))
    source = f"measured on {figures.num_devices} x {figures.device}, {figures.date[:10]}"
    return {name: Rate(max(found), source) for name, found in shares.items()}
