"""The shares of a chip's and a network's peak that a program reaches: one table, each number with its source.

Peaks are the vendors' (`hardware.chips`, `hardware.clusters`). Figures that `experiments.characterize` measured take
the place of these shares. Numbers marked "assumed" should be measured first.
"""

import dataclasses
import os
from pathlib import Path

from zaya_jax.config import UserError
from zaya_jax.hardware import chips
from zaya_jax.hardware.clusters import Cluster
from zaya_jax.hardware.measure import figures as figures_lib
from zaya_jax.hardware.roofline import LAUNCH

ASSUMED = "assumed"
AMD = "AMD's own measurements, 708 of 1,307 TFLOP/s in bfloat16 (ROCm blog on max-achievable FLOPs)"
SEMIANALYSIS = "SemiAnalysis, December 2024: some 720 of 989 TFLOP/s in bfloat16"
ZAYA1 = "ZAYA1 on MI300X, arXiv:2511.17127: 4.33 of 5.3 TB/s"
MODELLED = f"{ASSUMED}: half of what the kernels' inner loops are modelled at"


@dataclasses.dataclass(frozen=True)
class Rate:
    """A share of a peak, or the seconds of a launch."""

    value: float
    source: str


@dataclasses.dataclass(frozen=True)
class Rates:
    """All of one cluster."""

    products: Rate  # large dense products, of the peak for bfloat16
    grouped: Rate  # the experts'
    attention: Rate  # products of scores, in kernels of our own; linear attention's
    # The router's, of the float32 peak: a quarter of XF32's, which the bound of `hardware.roofline` allows them.
    float32: Rate
    memory: Rate  # of the HBM's bandwidth
    inside: Rate  # of a node's links, for a collective
    across: Rate  # of the cards between nodes
    overlap: Rate = Rate(0.8, f"{ASSUMED}: of what could run under kernels, whose memory and units it shares")
    launch: Rate = Rate(LAUNCH, "assumed, as `hardware.roofline` does")

    def table(self) -> list[tuple[str, float, str]]:
        """A row for each: name, value, source."""
        return [(f.name, *dataclasses.astuple(getattr(self, f.name))) for f in dataclasses.fields(self)]


def _amd(memory: Rate) -> Rates:
    return Rates(
        Rate(0.54, AMD), Rate(0.36, f"{ASSUMED}: two thirds of dense"), Rate(0.2, MODELLED),
        Rate(0.5, ASSUMED), memory, Rate(0.7, f"{ASSUMED}: RCCL inside a node"),
        Rate(0.8, f"{ASSUMED}: RCCL on Pollara"),
    )  # fmt: skip


def _nvidia() -> Rates:
    return Rates(
        Rate(0.73, SEMIANALYSIS), Rate(0.45, f"{ASSUMED}: two thirds of dense"),
        Rate(0.25, MODELLED),
        Rate(0.5, ASSUMED), Rate(0.9, ASSUMED), Rate(0.8, f"{ASSUMED}: NCCL inside a node"),
        Rate(0.85, f"{ASSUMED}: NCCL on InfiniBand"),
    )  # fmt: skip


DEFAULTS = {
    "mi300x": _amd(Rate(4.33 / 5.3, ZAYA1)),
    "mi355x": _amd(Rate(0.82, f"{ASSUMED}: as MI300X, {ZAYA1}")),
    "h200": _nvidia(),
    "h100": _nvidia(),
}


def for_cluster(cluster: Cluster, figures: str | os.PathLike = "") -> Rates:
    """The shares for a cluster; UserError where measured figures are of another chip."""
    rates = DEFAULTS[cluster.chip]
    if not figures:
        return rates
    path = Path(figures)
    path = path / "all.json" if path.is_dir() else path
    found = figures_lib.load(path)
    name = chips.named(found.device)
    if name != cluster.chip:
        raise UserError(
            f"--figures={figures} are of {found.num_devices} x {found.device}, the cluster has {cluster.chip}; "
            "give figures of that chip"
        )
    return dataclasses.replace(rates, **_measured(found, cluster))


def _measured(found: figures_lib.Figures, cluster: Cluster) -> dict[str, Rate]:
    """The shares that figures give."""
    chip = chips.CHIPS[cluster.chip]
    source, result = f"measured on {found.num_devices} x {found.device}, {found.date[:10]}", {}
    for name, starts in (("products", "dense"), ("grouped", "grouped")):
        rates = [p.rate for p in found.products if p.name.startswith(starts) and p.dtype == "bfloat16"]
        if rates:
            result[name] = Rate(max(rates) / chip.peaks["bfloat16"], source)
    if memory := found.memory_bandwidth():
        result["memory"] = Rate(memory / chip.bandwidth, source)
    for c in found.collectives:
        if c.name in ("reduce-scatter", "all-gather") and c.num_devices > 1:
            each = c.num_devices // c.num_nodes  # devices of a node
            group = [node * cluster.node + i for node in range(c.num_nodes) for i in range(each)]
            name, share = ("inside" if c.num_nodes == 1 else "across", c.bus_bandwidth / cluster.bandwidth(group))
            result[name] = Rate(max(share, result[name].value if name in result else 0.0), source)
    return result
