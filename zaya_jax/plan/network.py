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
    """All flows of a step."""
    all_flows = [*_early_gradient_sums(case), *_exchange(case), *_layers(case), *_fetches(case)]
    return [flow for flow in all_flows if flow.wire]


def _early_gradient_sums(case: StepCase) -> Iterator[Flow]:
    """The sums of gradients that leave with their layer: the compiler makes one of a layer's, or
    one for each level."""
    ways = list(case.early_buckets.values())
    if not ways:
        return
    first = ways[0]  # all have its axes and levels
    left = sum(4.0 * way.layers * way.padded for way in ways)
    for groups in first.levels:
        group = tuple(groups[0].tolist()) if len(groups) > 1 else ()
        wire = left * (1 - 1 / groups.shape[1])
        yield Flow(PREFETCH, "reduce-scatter", wire, first.bucket.replica_axes, first.layers, group)
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
            yield Flow(
                GRADIENTS, "all-to-all", 4.0 * way.stages * way.buffer_size, axes, way.stages
            )
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
    model, spread, arrays = case.model, case.spread, work.array_bytes(case)
    number, again = itemsize(case.config.precision.compute), work.recomputes(case)
    layers = case.micro_batches * model.num_hidden_layers  # of all micro-batches
    linear = case.micro_batches * case.linear_layers
    if spread.sequence_parts > 1:
        axes, others = spread.sequence_axes, spread.sequence_parts - 1
        keys_and_values = 2 * arrays["v2"] * others
        passes = (layers - linear) * (2 + again)
        if spread.ring:
            yield _flow(PREFETCH, "neighbour", keys_and_values, axes, passes)
        else:
            yield _flow(BLOCKING, "all-gather", keys_and_values, axes, passes)
        states = case.sequences_per_device * model.num_key_value_heads
        state4 = 4.0 * states * model.head_dim * (model.head_dim + 1) * others
        yield _flow(BLOCKING, "all-gather", state4, axes, 2 * linear)
        # Two columns of the stream, from the part before.
        edge = 2.0 * case.sequences_per_device * number * model.hidden_size
        yield _flow(BLOCKING, "neighbour", edge, axes, 4 * layers)
    if spread.head_shards > 1:
        cut = (spread.head_shards - 1) / spread.head_shards
        # a sum after each block, forward and backward
        yield _flow(
            BLOCKING, "all-reduce", 2 * arrays["x2"] * cut, ("tensor",), (4 + again) * layers
        )
    if spread.expert_axes and model.model_type == "zaya":
        group = math.prod(case.axes[axis] for axis in spread.expert_axes)
        rows = dispatch.slot_rows(case.tokens, group) * (group - 1)
        passes = 6 if again else 4
        each = number * rows * model.hidden_size
        yield _flow(BLOCKING, "all-to-all", each, spread.expert_axes, passes * layers)


def _fetches(case: StepCase) -> Iterator[Flow]:
    """Weights that come ahead of a layer, and their gradients behind it."""
    spread, again = case.spread, work.recomputes(case)
    number = itemsize(case.config.precision.compute)
    layers = case.micro_batches * case.model.num_hidden_layers  # of all micro-batches
    layer4 = 4.0 * sum(case.layer_numel.values())
    if spread.fsdp:
        axes, cut = ("data",), (spread.data - 1) / spread.data
        once = layer4 * number / 4
        if again:
            once += layer4
        table4 = 4.0 * case.model.vocab_size * case.model.hidden_size
        wire = layers * once * cut
        yield Flow(PREFETCH, "all-gather", wire, axes, layers * (1 + again))
        yield _flow(PREFETCH, "reduce-scatter", layer4 * cut, axes, layers)
        yield _flow(BLOCKING, "all-gather", table4 * cut, axes, case.micro_batches)
        yield _flow(BLOCKING, "reduce-scatter", table4 * cut, axes, case.micro_batches)
    if spread.tsp:
        travels = case.layer_numel[case.mixer] + case.layer_numel.get("mlp", 0.0)
        passes = layers * (2 + again)
        yield _flow(PREFETCH, "broadcast", number * travels, ("tensor",), passes)


def _flow(what: str, kind: str, each: float, axes: tuple[str, ...], times: int) -> Flow:
    """So many collectives, in each of which a device sends `each` bytes."""
    return Flow(what, kind, times * each, axes, times)
