"""Measures collectives over the devices of this run: each alone in a program, over messages of 1
KiB to GiBs.

Sizes and bandwidths are those of nccl-tests and rccl-tests (`measured.BUS`). Devices are taken in
sets: in one node 2, 4, ... and all of it; across nodes 2, 4, ... and all of these, with one device
of each and with all. A node is a host.
"""

import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import timing
from pallas_kernels.timing import Timing
from zaya_jax.cluster import multihost
from zaya_jax.compiled import hlo
from zaya_jax.hardware.measured import BUS, CollectiveTiming

LEAST, MOST, STEP = 1 << 10, 1 << 32, 4  # bytes of a message
SHARE = 4  # of a device's memory, one part in so many may be used
NUMBER = np.dtype(np.float32)  # of the arrays that are sent
AXIS = "devices"


class Group(NamedTuple):
    """A set of devices."""

    devices: tuple[Any, ...]
    num_nodes: int


class CollectiveKind(NamedTuple):
    """A collective: XLA's name for it, and one device's program; a device puts in all `bytes`, or
    one n-th."""

    hlo: str
    call: Callable[[jax.Array, int], jax.Array]
    puts_in_all: bool = True
    in_place: bool = False  # otherwise XLA, which sums in place, copies its argument first


KINDS = {
    "all-reduce": CollectiveKind("all-reduce", lambda x, n: lax.psum(x, AXIS), in_place=True),
    "reduce-scatter": CollectiveKind(
        "reduce-scatter", lambda x, n: lax.psum_scatter(x, AXIS, scatter_dimension=0, tiled=True)
    ),
    "all-gather": CollectiveKind(
        "all-gather", lambda x, n: lax.all_gather(x, AXIS, tiled=True), puts_in_all=False
    ),
    "all-to-all": CollectiveKind(
        "all-to-all", lambda x, n: lax.all_to_all(x, AXIS, 0, 0, tiled=True)
    ),
    "neighbour": CollectiveKind(
        "collective-permute",
        lambda x, n: lax.ppermute(x, AXIS, [(i, (i + 1) % n) for i in range(n)]),
    ),
    # JAX 0.12.0 takes a name alone for one axis per letter.
    "broadcast": CollectiveKind("collective-broadcast", lambda x, n: lax.pbroadcast(x, (AXIS,), 0)),
}
# XLA has no broadcast for CPUs: the sum that defines it takes its place.
BROADCAST_ON_CPU = CollectiveKind(
    "all-reduce", lambda x, n: lax.psum(jnp.where(lax.axis_index(AXIS) == 0, x, 0.0), AXIS)
)
assert KINDS.keys() == BUS.keys()


def nodes_of(devices: Sequence[Any]) -> list[int]:
    """Which node each device is in, counted from 0: processes on hosts of one name share one."""
    gathered = multihost.gather_to_zero("hosts", socket.gethostname())
    hosts = multihost.broadcast_from_zero("hosts of all", lambda: gathered)
    names = [hosts[device.process_index] for device in devices]
    order = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [order[name] for name in names]


def groups(devices: Sequence[Any], nodes: Sequence[int]) -> list[Group]:
    """The sets that are measured, smallest first; the first node's devices alone, then across."""
    of_node: list[list[Any]] = [[] for _ in range(max(nodes) + 1)]
    for device, node in zip(devices, nodes, strict=True):
        of_node[node].append(device)
    sets = [Group(tuple(of_node[0][:n]), 1) for n in _counts(len(of_node[0]))]
    for count in _counts(len(of_node)):
        for per_node in sorted({1, min(map(len, of_node))}):
            chosen = tuple(d for in_node in of_node[:count] for d in in_node[:per_node])
            sets.append(Group(chosen, count))
    return sets


def _counts(most: int) -> list[int]:
    """2, 4, 8, ... and the last."""
    powers = {1 << i for i in range(1, most.bit_length())}
    return sorted(powers | {most} - {0, 1})


def sizes(num_devices: int, room: int) -> Iterator[int]:
    """Bytes of messages that divide into one number for each device at least, and fit `room` with
    the results."""
    size = LEAST
    while size <= MOST and 2 * size <= room:
        whole = size - size % (num_devices * NUMBER.itemsize)
        if whole:
            yield whole
        size *= STEP


def measure_collectives(
    devices: Sequence[Any],
    nodes: Sequence[int],
    room: int,
    seconds: float,
    say: Callable[[str], None],
) -> tuple[CollectiveTiming, ...]:
    """Every collective on every set of devices, in all processes together; each counts the slowest
    one's time.

    A series ends where a call takes longer than `seconds`, or messages no longer fit.
    """
    timings: list[CollectiveTiming] = []
    for group in groups(devices, nodes):
        for name in KINDS:
            series = list(_series(name, group, room, seconds))
            timings += series
            if series:
                best = max(series, key=lambda c: c.bus_bandwidth)
                say(
                    f"{name}, {best.num_devices} devices in {group.num_nodes} node(s): "
                    f"{series[0].seconds.median * 1e6:,.0f} µs for {series[0].bytes:,} B; "
                    f"bus {best.bus_bandwidth / 1e9:,.2f} GB/s for {best.bytes / 2**20:,.3g} MiB"
                )
    return tuple(timings)


def _series(name: str, group: Group, room: int, seconds: float) -> Iterator[CollectiveTiming]:
    """One collective by size. A process without a device of the set takes part in decisions alone,
    which process 0 takes: it has a device in every set."""
    queue = group.devices[0].platform != "cpu"
    mine = any(d.process_index == jax.process_index() for d in group.devices)
    n = len(group.devices)
    for size in sizes(n, room):
        call = _program(name, group, size) if mine else None
        local_course = timing.course(timing.warm_up(call), seconds, queue) if call else None
        course = timing.Course(*multihost.broadcast_from_zero("course", lambda: local_course))  # noqa: B023
        taken = timing.sample(call, course) if call else None
        all_taken = multihost.gather_to_zero("timing", taken)
        longest = max(tuple(t) for t in all_taken if t) if all_taken else None
        slowest = Timing(*multihost.broadcast_from_zero("slowest", lambda: longest))  # noqa: B023
        yield CollectiveTiming(name, n, group.num_nodes, size, slowest)
        if slowest.median > seconds:
            return


def _program(name: str, group: Group, size: int) -> Callable[[], jax.Array]:
    """The compiled collective on its input."""
    on_cpu = group.devices[0].platform == "cpu"
    kind = BROADCAST_ON_CPU if name == "broadcast" and on_cpu else KINDS[name]
    compiled, like = compile_one(name, kind, group.devices, size)
    x = jax.jit(lambda: jnp.ones(like.shape, like.dtype), out_shardings=like.sharding)()

    def call() -> jax.Array:
        nonlocal x
        out = compiled(x)
        # sums of sums, infinite in the end: an addition takes as long
        x = out if kind.in_place else x
        return out

    return call


def compile_one(
    name: str, kind: CollectiveKind, devices: Sequence[Any], size: int
) -> tuple[Any, jax.ShapeDtypeStruct]:
    """A collective alone in a program, and its argument; RuntimeError where the compiler made
    anything else of it."""
    n, numbers = len(devices), size // NUMBER.itemsize
    mesh = Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))
    like = jax.ShapeDtypeStruct(
        (numbers * n if kind.puts_in_all else numbers,),
        NUMBER,
        sharding=NamedSharding(mesh, P(AXIS)),
    )
    over = jax.shard_map(
        lambda x: kind.call(x, n), mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False
    )
    compiled = jax.jit(over, donate_argnums=(0,) if kind.in_place else ()).lower(like).compile()
    collectives = hlo.collectives(compiled)
    # A permute's text names pairs, no groups.
    made = [
        (c.kind, n if c.kind == "collective-permute" else c.group_size, c.bytes)
        for c in collectives
    ]
    if made != [(kind.hlo, n, size)]:
        words = ", ".join(f"{k} of {b} bytes over {g}" for k, g, b in made) or "no collective"
        raise RuntimeError(
            f"{name} of {size} bytes over {n} devices became {words}, expected one {kind.hlo}"
        )
    return compiled, like
