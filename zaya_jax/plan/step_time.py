"""Estimates the time of a step and accounts for each second: a roofline with stated shares of the
peaks and overlaps.

    found = step_time.estimate(case, clusters.CLUSTERS["mi300x_pollara"], rates.for_cluster(cluster))
    found.seconds, found.by_scope, found.by_kind, found.exposed

Products take the longer of their FLOPs at their rate and their bytes; all other kernels take their
bytes; and each launch adds its time. Collectives of the optimizer take their time on the links:
gradients stand wholly exposed, since the norm of all of them comes before any update; directions
run under the Newton–Schulz of other buckets, but for the largest one's. Fetches ahead of a layer
run under the layers; exchanges that a layer waits for do not.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from zaya_jax.hardware import chips
from zaya_jax.hardware.clusters import Cluster
from zaya_jax.plan import network, work
from zaya_jax.plan.case import StepCase
from zaya_jax.plan.rates import Rates

LINKS = "links"


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by purpose and by bottleneck."""

    by_scope: dict[str, float]  # of kernels; and "links", exposed
    by_kind: dict[str, float]  # products, HBM, launches, links
    links: dict[str, float]  # each kind of collective as long as it takes
    exposed: dict[str, float]  # the part of it that no kernel covers
    ideal: float  # of the FLOPs by the model's formula alone, at the chip's peak

    @property
    def seconds(self) -> float:
        """The time of the step."""
        return sum(self.by_scope.values())

    @property
    def mfu(self) -> float:
        """Useful FLOPs over the peak."""
        return self.ideal / self.seconds


class PartTime(NamedTuple):
    """Seconds of one part's kernels, by what takes them."""

    computing: float  # products, at their rate
    moving: float  # their bytes
    others: float  # the bytes of all other kernels
    launches: float

    @property
    def products(self) -> float:
        """A product computes while it reads and writes."""
        return max(self.computing, self.moving)

    @property
    def seconds(self) -> float:
        """The time of all."""
        return self.products + self.others + self.launches


def estimate(case: StepCase, cluster: Cluster, rates: Rates) -> StepTime:
    """The time of a case's step."""
    by_scope: dict[str, float] = {}
    by_kind = dict.fromkeys(("products", "HBM", "launches", LINKS), 0.0)
    packing = 0.0  # seconds: rows into buckets and out of them again
    for part in work.list_work(case):
        took = part_time(part, case, rates)
        if part.scope == "optimizer/exchange":  # its passes over HBM belong to its collectives
            packing = took.seconds
            continue
        # A product computes while it reads and writes: the longer of the two counts.
        by_kind["products" if took.computing >= took.moving else "HBM"] += took.products
        by_kind["HBM"] += took.others
        by_kind["launches"] += took.launches
        by_scope[part.scope] = by_scope.get(part.scope, 0.0) + took.seconds
    links, exposed = _communication(case, cluster, rates, packing, by_scope)
    by_scope[LINKS] = by_kind[LINKS] = sum(exposed.values())
    useful = chips.model_flops(case.model, case.config.data.seq_len) * case.tokens_per_device
    return StepTime(by_scope, by_kind, links, exposed, useful / _peak(case))


def part_time(part: work.ScopeWork, case: StepCase, rates: Rates) -> PartTime:
    """The time of one part's kernels on the case's chip."""
    chip = chips.CHIPS[case.chip]
    hbm = chip.bandwidth * rates.memory.value
    peak = chip.peaks["float32"] if part.kind == "float32" else _peak(case)
    return PartTime(
        part.flops / (peak * getattr(rates, part.kind).value),
        part.products / hbm,
        part.others / hbm,
        part.launches * rates.launch.value,
    )


def _peak(case: StepCase) -> float:
    """The chip's peak for most products."""
    peak = chips.peak_flops(case.chip, case.config.precision)
    assert peak
    return peak


def seconds_between(
    case: StepCase, cluster: Cluster, rates: Rates
) -> dict[str, tuple[float, float]]:
    """By rate the seconds of a step with that rate at its fast and at its slow end, and for "all"
    with all of them there."""
    groups = {name: [name] for name in rates.uncertain} | {"all": rates.uncertain}
    between = {}
    for what, names in groups.items():
        between[what] = (
            estimate(case, cluster, rates.at_ends(0, names)).seconds,
            estimate(case, cluster, rates.at_ends(1, names)).seconds,
        )
    return between


def _communication(
    case: StepCase, cluster: Cluster, rates: Rates, packing: float, by_scope: Mapping[str, float]
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of each kind of collective, and the part that nothing covers."""
    taken: dict[str, float] = {}
    longest = 0.0
    for flow in network.flows(case):
        seconds = flow.seconds(case, cluster, rates)
        taken[flow.what] = taken.get(flow.what, 0.0) + seconds
        if flow.what == network.UPDATES:
            longest = max(longest, seconds)
    if packing:
        for what in (network.GRADIENTS, network.UPDATES):
            taken[what] = max(taken.get(what, 0.0), packing / 2)
    exposed, overlap = dict(taken), rates.overlap.value
    if network.UPDATES in taken:
        others = max(taken[network.UPDATES] - longest, 0.0)
        exposed[network.UPDATES] -= overlap * min(others, by_scope["optimizer"])
    if network.PREFETCH in taken:
        layers = sum(by_scope.get(scope, 0.0) for scope in work.LAYER_SCOPES)
        rest = 1 - 1 / case.model.num_hidden_layers  # nothing runs during the first
        exposed[network.PREFETCH] -= overlap * min(taken[network.PREFETCH] * rest, layers)
    return taken, exposed
