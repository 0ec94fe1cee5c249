"""The time of a step, each second of it accounted for: a roofline with stated shares of the peaks, and what overlaps.

    found = step.of(case, clusters.CLUSTERS["mi300x_pollara"], rates.of(cluster))
    found.seconds, found.by_scope, found.by_kind, found.exposed

Products take the longer of their FLOPs at their rate and their bytes; all other kernels take their bytes; and no scope
is faster than its launches. Collectives of the optimizer are what they take on the links: gradients stand wholly
exposed, since the norm of all of them comes before any update; directions run under the Newton–Schulz of other buckets,
but for the largest one's. What a layer fetches ahead runs under the layers, what it waits for does not.
"""

import dataclasses
from collections.abc import Mapping

from zaya_jax.hardware import chips
from zaya_jax.hardware.clusters import Cluster
from zaya_jax.plan import network, traffic
from zaya_jax.plan.case import Case
from zaya_jax.plan.rates import Rates

LINKS = "links"


@dataclasses.dataclass(frozen=True)
class Step:
    """Seconds of a step, and what they are for."""

    by_scope: dict[str, float]  # of kernels; and "links", exposed
    by_kind: dict[str, float]  # products, HBM, launches, links
    links: dict[str, float]  # each kind of collective as long as it takes
    exposed: dict[str, float]  # and what of that nothing covers
    parts: tuple[tuple[traffic.Part, float], ...]  # with its seconds
    overlapped: float  # seconds saved if gradients travelled while the last micro-batch's backward pass runs
    flops: float  # useful ones of a device, by the model's formula
    peak: float  # the chip's, for most products

    @property
    def seconds(self) -> float:
        """Of the step."""
        return sum(self.by_scope.values())

    @property
    def mfu(self) -> float:
        """Useful FLOPs over the peak."""
        return self.flops / self.seconds / self.peak

    @property
    def hbm_bytes(self) -> float:
        """HBM traffic."""
        return sum(part.bytes for part, _ in self.parts)

    @property
    def launches(self) -> float:
        """Kernels."""
        return sum(part.launches for part, _ in self.parts)


def of(case: Case, cluster: Cluster, rates: Rates) -> Step:
    """The time of a case's step."""
    peaks, bandwidth = chips.of_kind(chips.PEAKS, case.chip), chips.of_kind(chips.BANDWIDTH, case.chip)
    assert peaks is not None and bandwidth is not None, case.chip
    wide = case.here.precision.compute == "float32"
    best = peaks["tf32" if wide and case.here.precision.matmul != "highest" else case.here.precision.compute]
    hbm = bandwidth * rates.memory.value
    by_scope: dict[str, float] = {}
    by_kind = dict.fromkeys(("products", "HBM", "launches", LINKS), 0.0)
    parts = []
    for part in traffic.parts(case):
        peak = peaks["float32"] if part.kind == "float32" else best
        computing, moving = part.flops / (peak * getattr(rates, part.kind).value), part.products / hbm
        others, starting = part.others / hbm, part.launches * rates.launch.value
        seconds = max(max(computing, moving) + others, starting)
        by_kind["products"] += computing if computing >= moving else 0.0
        by_kind["HBM"] += others + (moving if moving > computing else 0.0)
        by_kind["launches"] += max(starting - max(computing, moving) - others, 0.0)
        by_scope[part.scope] = by_scope.get(part.scope, 0.0) + seconds
        parts.append((part, seconds))
    # The exchange's own passes over HBM are what its collectives do while they send.
    own = by_scope.pop("optimizer/exchange", 0.0)
    by_kind["HBM"] -= own if own else 0.0
    found = network.flows(case)
    taken: dict[str, float] = {}
    longest = 0.0
    for flow in found:
        seconds = flow.seconds(case, cluster, rates)
        taken[flow.what] = taken.get(flow.what, 0.0) + seconds
        longest = max(longest, seconds) if flow.what == network.DIRECTIONS else longest
    if own:  # rows into buckets and out of them again
        by_scope["optimizer"] = by_scope.get("optimizer", 0.0)
        taken[network.GRADIENTS] = max(taken.get(network.GRADIENTS, 0.0), own / 2)
        taken[network.DIRECTIONS] = max(taken.get(network.DIRECTIONS, 0.0), own / 2)
    exposed = _exposed(case, taken, by_scope, longest, rates.overlap.value)
    by_scope[LINKS] = by_kind[LINKS] = sum(exposed.values())
    useful = chips.model_flops(case.model, case.here.data.seq_len) * case.tokens_per_device
    return Step(
        by_scope,
        by_kind,
        taken,
        exposed,
        tuple(parts),
        _overlapped(case, exposed, parts, rates.overlap.value),
        useful,
        best,
    )


def _exposed(
    case: Case, taken: Mapping[str, float], by_scope: Mapping[str, float], longest: float, overlap: float
) -> dict[str, float]:
    exposed = dict(taken)
    if network.DIRECTIONS in taken:
        others = taken[network.DIRECTIONS] - longest
        exposed[network.DIRECTIONS] -= overlap * min(max(others, 0.0), by_scope.get("optimizer", 0.0))
    if network.FETCHING in taken:
        layers = sum(by_scope.get(name, 0.0) for name in ("cca", "attention", "router", "experts", "mlp"))
        rest = 1 - 1 / case.model.num_hidden_layers  # nothing runs beside the first
        exposed[network.FETCHING] -= overlap * min(taken[network.FETCHING] * rest, layers)
    return exposed


def _overlapped(case: Case, exposed: Mapping[str, float], parts: list, overlap: float) -> float:
    """A layer's gradient is whole when its last backward pass is over; all but the last layer's could then travel, and
    the table's, which is whole at the very end, could not."""
    gradients = exposed.get(network.GRADIENTS, 0.0)
    numbers, layers = case.numbers, case.model.num_hidden_layers
    waiting = {**numbers, "layers": numbers["layers"] - case.leaving}
    share = waiting["layers"] / sum(waiting.values()) * (1 - 1 / layers)
    backward = sum(seconds for part, seconds in parts if part.stage in (traffic.BACKWARD, traffic.AGAIN))
    return overlap * min(gradients * share, backward / case.micro_batches)
