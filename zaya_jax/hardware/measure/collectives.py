"""Measures collectives over the devices of this run: each alone in a program, over messages of 1 KiB to GiBs.

Sizes and bandwidths are those of nccl-tests and rccl-tests (`figures.BUS`). Devices are taken in sets: in one node 2,
4, ... and all of it; across nodes 2, 4, ... and all of these, with one device of each and with all. A node is a host.
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

from zaya_jax.cluster import multihost
from zaya_jax.hardware import hlo
from zaya_jax.hardware.measure import timing
from zaya_jax.hardware.measure.figures import BUS, Collective
from zaya_jax.hardware.measure.timing import Timing

LEAST, MOST, STEP = 1 << 10, 1 << 32, 4  # bytes of a message
SHARE = 4  # of a device's memory, one part in so many may be used
NUMBER = np.dtype(np.float32)  # of what is sent; the values are small whole numbers, whose sums are exact
AXIS = "devices"


class Group(NamedTuple):
    """A set of devices."""

    devices: tuple[Any, ...]
    num_nodes: int


class Kind(NamedTuple):
    """A collective: XLA's name for it, and what one device does; a device puts in all `bytes`, or one n-th."""

    hlo: str
    call: Callable[[jax.Array, int], jax.Array]
    puts_in_all: bool = True
    in_place: bool = False  # otherwise XLA, which sums in place, copies its argument first


KINDS = {
    "all-reduce": Kind("all-reduce", lambda x, n: lax.psum(x, AXIS), in_place=True),
    "reduce-scatter": Kind("reduce-scatter", lambda x, n: lax.psum_scatter(x, AXIS, scatter_dimension=0, tiled=True)),
    "all-gather": Kind("all-gather", lambda x, n: lax.all_gather(x, AXIS, tiled=True), puts_in_all=False),
    "broadcast": Kind("collective-broadcast", lambda x, n: lax.pbroadcast(x, (AXIS,), 0)),
    "all-to-all": Kind("all-to-all", lambda x, n: lax.all_to_all(x, AXIS, 0, 0, tiled=True)),
    "neighbour": Kind("collective-permute", lambda x, n: lax.ppermute(x, AXIS, [(i, (i + 1) % n) for i in range(n)])),
}
assert KINDS.keys() == BUS.keys()
# XLA has no broadcast on CPUs: programs sum what is zero everywhere but at the root.
ON_HOST = KINDS | {
    "broadcast": Kind("all-reduce", lambda x, n: lax.psum(jnp.where(lax.axis_index(AXIS) == 0, x, 0), AXIS))
}


def nodes_of(devices: Sequence[Any]) -> list[int]:
    """Which node each device is in, counted from 0: processes on hosts of one name share one."""
    given = multihost.to_first("hosts", socket.gethostname())
    hosts = multihost.from_first("hosts of all", lambda: given)
    names = [hosts[device.process_index] for device in devices]
    order = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [order[name] for name in names]


def groups(devices: Sequence[Any], nodes: Sequence[int]) -> list[Group]:
    """The sets that are measured, smallest first; the first node's devices alone, then across."""
    of_node = [[d for d, n in zip(devices, nodes, strict=True) if n == node] for node in range(max(nodes) + 1)]
    found = [Group(tuple(of_node[0][:n]), 1) for n in _counts(len(of_node[0]))]
    for count in _counts(len(of_node)):
        for per_node in sorted({1, min(len(own) for own in of_node)}):
            chosen = tuple(d for own in of_node[:count] for d in own[:per_node])
            found.append(Group(chosen, count))
    return found


def _counts(most: int) -> list[int]:
    """2, 4, 8, ... and the last."""
    return sorted({1 << i for i in range(1, most.bit_length()) if 1 << i <= most} | ({most} - {0, 1}))


def sizes(num_devices: int, room: int) -> Iterator[int]:
    """Bytes of messages that divide into one number for each device at least, and fit `room` with what comes out."""
    size = LEAST
    while size <= MOST and 2 * size <= room:
        whole = size - size % (num_devices * NUMBER.itemsize)
        if whole:
            yield whole
        size *= STEP


def measure_collectives(
    devices: Sequence[Any], nodes: Sequence[int], room: int, seconds: float, say: Callable[[str], None]
) -> tuple[Collective, ...]:
    """Every collective on every set of devices, in all processes together; each counts the slowest one's time.

    A series ends where a call takes longer than `seconds`, or messages no longer fit.
    """
    found: list[Collective] = []
    for group in groups(devices, nodes):
        for name in KINDS:
            series = list(_series(name, group, room, seconds))
            found += series
            best = max(series, key=lambda c: c.bus_bandwidth, default=None)
            if best:
                where = "in one node" if group.num_nodes == 1 else f"over {group.num_nodes} nodes"
                say(
                    f"{name}, {best.num_devices} devices {where}: "
                    f"{series[0].seconds.median * 1e6:,.0f} µs for {series[0].bytes:,} B; "
                    f"bus {best.bus_bandwidth / 1e9:,.2f} GB/s for {best.bytes / 2**20:,.3g} MiB, "
                    f"{len(series)} sizes to {series[-1].bytes / 2**20:,.3g} MiB"
                )
    return tuple(found)


def _series(name: str, group: Group, room: int, seconds: float) -> Iterator[Collective]:
    """One collective by size. A process without a device of the set takes part in what is decided, and no more."""
    host = group.devices[0].platform == "cpu"
    kind = (ON_HOST if host else KINDS)[name]
    mine = any(d.process_index == jax.process_index() for d in group.devices)
    n = len(group.devices)
    for number, size in enumerate(sizes(n, room)):
        call = _program(name, kind, group, size, check=number == 0) if mine else None
        own = timing.course(timing.warm_up(call), seconds, not host) if call else None
        how = timing.Course(*_from_first("course", own))
        taken = timing.sample(call, how) if call else None
        all_taken = multihost.to_first("timing", taken)
        longest = max(tuple(t) for t in all_taken if t) if all_taken else None
        slowest = Timing(*_from_first("slowest", longest))
        yield Collective(name, kind.hlo, n, group.num_nodes, size, slowest)
        if slowest.median > seconds:
            return


def _from_first(name: str, own: tuple | None) -> list:
    """The tuple of process 0, which has a device in every set."""
    return multihost.from_first(name, lambda: own)


def _program(name: str, kind: Kind, group: Group, size: int, check: bool) -> Callable[[], jax.Array]:
    """The compiled collective on its input; `check`: compares what it gives."""
    n = len(group.devices)
    compiled, like = compile_one(name, kind, group.devices, size)
    own = like.shape[0] // n
    ranks = jax.jit(lambda: jnp.arange(n), out_shardings=like.sharding)()
    x = jax.jit(_over_devices(lambda rank: _values(rank, jnp.arange(own), jnp), like.sharding.mesh))(ranks)
    if check:
        out = compiled(x)
        _check(name, out, n, own, list(group.devices))
        x = out if kind.in_place else x

    def call() -> jax.Array:
        nonlocal x
        out = compiled(x)
        x = out if kind.in_place else x  # sums of sums, infinite in the end: an addition takes as long
        return out

    return call


def compile_one(name: str, kind: Kind, devices: Sequence[Any], size: int) -> tuple[Any, jax.ShapeDtypeStruct]:
    """A collective alone in a program, and its argument; RuntimeError where the compiler made anything else of it."""
    n, numbers = len(devices), size // NUMBER.itemsize
    mesh = Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))
    like = jax.ShapeDtypeStruct(
        (numbers * n if kind.puts_in_all else numbers,), NUMBER, sharding=NamedSharding(mesh, P(AXIS))
    )
    program = jax.jit(_over_devices(lambda x: kind.call(x, n), mesh), donate_argnums=(0,) if kind.in_place else ())
    compiled = program.lower(like).compile()
    found = hlo.collectives(compiled)
    # A permute's text names pairs, no groups.
    made = [(c.kind, n if c.kind == "collective-permute" else c.group_size, c.bytes) for c in found]
    if made != [(kind.hlo, n, size)]:
        words = ", ".join(f"{k} of {b} bytes over {g}" for k, g, b in made) or "no collective"
        raise RuntimeError(f"{name} of {size} bytes over {n} devices became {words}, expected one {kind.hlo}")
    return compiled, like


def _over_devices(f: Callable, mesh: Mesh) -> Callable:
    return jax.shard_map(f, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)


def _values(rank: Any, index: Any, numpy: Any) -> Any:
    """The numbers that a device puts in: others on every device and in every place."""
    return ((rank * 7 + index * 3 + index // 11) % 13).astype(numpy.float32)


def _check(name: str, out: jax.Array, n: int, own: int, devices: list) -> None:
    """Compares every number that lies here with NumPy's."""
    x = _values(np.arange(n)[:, None], np.arange(own)[None, :], np)
    for shard in out.addressable_shards:
        rank = devices.index(shard.device)
        if not np.array_equal(np.asarray(shard.data), _expected(name, x, rank)):
            raise RuntimeError(f"{name} over {n} devices gave wrong numbers on device {rank}")


def _expected(name: str, x: np.ndarray, rank: int) -> np.ndarray:
    """The numbers that a device gets, where all put in x [devices, numbers]."""
    n = len(x)
    match name:
        case "all-reduce":
            return x.sum(0)
        case "reduce-scatter":
            return x.sum(0).reshape(n, -1)[rank]
        case "all-gather":
            return x.reshape(-1)
        case "broadcast":
            return x[0]
        case "all-to-all":
            return x.reshape(n, n, -1)[:, rank].reshape(-1)
    return x[(rank - 1) % n]  # neighbour


def start_seconds(devices: Sequence[Any], seconds: float) -> float:
    """The time of a program that does next to nothing on all devices: no message can be faster here."""
    mesh = Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))
    x = jax.jit(lambda: jnp.zeros(len(devices), jnp.float32), out_shardings=NamedSharding(mesh, P(AXIS)))()
    compiled = jax.jit(lambda x: -x).lower(x).compile()
    once = timing.warm_up(lambda: compiled(x))
    queue = devices[0].platform != "cpu"
    how = timing.Course(*_from_first("start", timing.course(once, seconds, queue)))
    return timing.sample(lambda: compiled(x), how).median
