"""Lists the collectives of a step with their bytes, their groups, and the kernels that can hide
them.

Bytes of the optimizer's exchange are the layout's own (`optim.zero`); those of layers follow from
`zaya_jax.parallel`.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterator

from zaya_jax.hardware.clusters import Cluster
from zaya_jax.optim.zero.grid import Grid
from zaya_jax.parallel import dispatch
from zaya_jax.parallel.mesh import across_nodes
from zaya_jax.plan import work
from zaya_jax.plan.case import StepCase, itemsize
from zaya_jax.plan.rates import Rates

# whose messages pass every device of the group
RINGS = ("reduce-scatter", "all-gather", "all-reduce")
GRADIENTS, UPDATES, BLOCKING, PREFETCH = "gradients", "updates", "blocking", "prefetch"


@dataclasses.dataclass(frozen=True)
class Flow:
    """Collectives of one kind over one kind of group."""

    # GRADIENTS and UPDATES: the optimizer's; BLOCKING: a layer waits for it; PREFETCH: under
    # layers
    what: str
    kind: str
    wire: float  # bytes that a device sends in a step
    axes: tuple[str, ...]
    times: float  # how many there are
    group: tuple[int, ...] = ()  # the devices of one of them, if not all along the axes

    def seconds(self, case: StepCase, cluster: Cluster, rates: Rates) -> float:
        """On the links of its group; a ring's messages pass each device once."""
        sizes, across = tuple(case.axes.items()), case.spread.across
        bandwidth, devices, nodes = _links(sizes, self.axes, self.group, cluster, across)
        share = rates.intra_node if nodes == 1 else rates.inter_node
        latency = cluster.latency
        if self.kind in RINGS:
            latency = nodes * cluster.latency + (devices - nodes) * rates.ring.value
        return self.wire / (bandwidth * share.value) + self.times * latency


@functools.lru_cache(maxsize=4096)
def _links(
    sizes: tuple[tuple[str, int], ...],
    axes: tuple[str, ...],
    group: tuple[int, ...],
    cluster: Cluster,
    across: bool,
) -> tuple[float, int, int]:
    """The rate of a device in a collective along these axes, and the devices and nodes of its
    group."""
    grid = Grid(dict(sizes))
    cluster = cluster.of_devices(grid.num_devices)
    chosen = tuple(axis for axis in grid.names if axis in axes)
    others = tuple(axis for axis in grid.names if axis not in axes)
    group = group or tuple(grid.device_groups(others, chosen)[0].tolist())
    if across:
        order = across_nodes(dict(sizes), cluster.node)
        group = tuple(order[place] for place in group)
    return cluster.bandwidth(group), len(group), len({device // cluster.node for device in group})


def flows(case: StepCase) -> list[Flow]:
    """All of a step."""
    found = [*_early_gradient_sums(case), *_exchange(case), *_layers(case), *_fetches(case)]
    return [flow for flow in found if flow.wire]


def _early_gradient_sums(case: StepCase) -> Iterator[Flow]:
    """The sums of gradients that leave with their layer: the compiler makes one of a layer's, or
    one for each level."""
    ways = list(case.early_buckets.values())
    left = sum(4.0 * way.layers * way.padded for way in ways)
    for groups in ways[0].levels if ways else ():
        group = tuple(groups[0].tolist()) if len(groups) > 1 else ()
        wire = left * (1 - 1 / groups.shape[1])
        yield Flow(
            PREFETCH, "reduce-scatter", wire, ways[0].bucket.replica_axes, ways[0].layers, group
        )
        left -= wire


def _exchange(case: StepCase) -> Iterator[Flow]:
    layout = case.layout
    if not layout.sharded:
        return
    scattered: dict[tuple[str, ...], float] = collections.defaultdict(float)
    summed: dict[tuple[str, ...], float] = collections.defaultdict(float)
    for name in layout.methods:
        kinds = case.exchange_bytes(name)
        axes = layout.bucket_of[name].replica_axes
        group = math.prod(case.axes[axis] for axis in axes)
        cut = (group - 1) / max(group, 1)
        if way := case.early_buckets.get(name):
            yield Flow(GRADIENTS, "all-to-all", 4.0 * way.sent, axes, way.stages)
        else:
            scattered[axes] += kinds["reduce-scatter"] * cut
        yield Flow(UPDATES, "all-gather", kinds["all-gather"] * cut, axes, 1)
        summed[axes] += kinds["all-reduce"] * 2 * cut
        yield Flow(GRADIENTS, "all-to-all", float(kinds["all-to-all"]), ("data",), 2)
        yield Flow(GRADIENTS, "exchange", float(kinds["exchange"]), tuple(case.axes), 8)
    for axes, wire in scattered.items():  # the compiler makes one of all that have the same group
        yield Flow(GRADIENTS, "reduce-scatter", wire, axes, 1)
    for axes, wire in summed.items():
        yield Flow(GRADIENTS, "all-reduce", wire, axes, 1)


def _layers(case: StepCase) -> Iterator[Flow]:
    """Collectives that a layer waits for."""
    m, s, mb = case.model, case.spread, case.micro_batches
    layers, have = m.num_hidden_layers, work.array_bytes(case)
    again = work.recomputes(case)
    if s.sequence_parts > 1:
        parts, softmax = s.sequence_parts, layers - case.linear_layers
        gathered = 2 * have["v2"] * (parts - 1)  # keys and values of all others
        passes = 2 + again
        kind, what = ("neighbour", PREFETCH) if s.ring else ("all-gather", BLOCKING)
        yield Flow(
            what, kind, mb * softmax * passes * gathered, s.sequence_axes, mb * softmax * passes
        )
        state = (
            4.0
            * case.sequences_per_device
            * m.num_key_value_heads
            * m.head_dim
            * (m.head_dim + 1)
            * (parts - 1)
        )
        linear = mb * case.linear_layers * 2
        yield Flow(BLOCKING, "all-gather", linear * state, s.sequence_axes, linear)
        # Two columns of the stream, from the part before.
        edge = (
            case.sequences_per_device
            * 2.0
            * itemsize(case.config.precision.compute)
            * m.hidden_size
        )
        yield Flow(BLOCKING, "neighbour", mb * layers * 4 * edge, s.sequence_axes, mb * layers * 4)
    if s.head_shards > 1:
        passes = (4 + again) * mb * layers  # a sum after each block, forward and backward
        yield Flow(
            BLOCKING,
            "all-reduce",
            passes * have["x2"] * 2 * (s.head_shards - 1) / s.head_shards,
            ("tensor",),
            passes,
        )
    if s.expert_axes and m.model_type == "zaya":
        group = math.prod(getattr(s, axis) for axis in s.expert_axes)
        rows = dispatch.slot_rows(case.tokens, group) * group
        each = itemsize(case.config.precision.compute) * rows * m.hidden_size * (group - 1) / group
        passes = mb * layers * (6 if again else 4)
        yield Flow(BLOCKING, "all-to-all", passes * each, s.expert_axes, passes)


def _fetches(case: StepCase) -> Iterator[Flow]:
    """Weights that come ahead of a layer, and their gradients behind it."""
    s, mb, layers = case.spread, case.micro_batches, case.model.num_hidden_layers
    again = work.recomputes(case)
    layer4, compute = 4.0 * sum(case.layer_numel.values()), itemsize(case.config.precision.compute)
    if s.fsdp:
        cut = (s.data - 1) / s.data
        once = layer4 * compute / 4 + (layer4 if again else 0)
        yield Flow(
            PREFETCH, "all-gather", mb * layers * once * cut, ("data",), mb * layers * (1 + again)
        )
        yield Flow(PREFETCH, "reduce-scatter", mb * layers * layer4 * cut, ("data",), mb * layers)
        table = 4.0 * case.model.vocab_size * case.model.hidden_size * cut
        yield Flow(BLOCKING, "all-gather", mb * table, ("data",), mb)
        yield Flow(BLOCKING, "reduce-scatter", mb * table, ("data",), mb)
    if s.tsp:
        travels = (
            4.0 * (case.layer_numel[case.mixer] + case.layer_numel.get("mlp", 0.0)) * compute / 4
        )
        passes = mb * layers * (2 + again)
        yield Flow(PREFETCH, "broadcast", passes * travels, ("tensor",), passes)
