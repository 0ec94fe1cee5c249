"""The device mesh of a run, from the axis sizes of its config.

Axes are `data`, `expert`, `context` and `tensor`. A batch's sequences lie on (data, expert), the tokens of each on
context; `rules` says how weights lie. The optimizer's state is spread over all axes that a weight leaves (ZeRO-1).
"""

import math

import jax
from jax.sharding import AxisType, Mesh, PartitionSpec

from zaya_jax import config
from zaya_jax.config import UserError
from zaya_jax.parallel.spread import AXES, Spread

BATCH_AXES = ("data", "expert")


def make_mesh(sizes: config.Mesh, devices: list | None = None) -> Mesh:
    """The mesh over all devices; UserError where the axis sizes don't multiply to their number."""
    devices = jax.devices() if devices is None else devices
    for axis in AXES:
        size = getattr(sizes, axis)
        if size < 1 and not (axis == "data" and size == -1):
            raise UserError(f"config.mesh.{axis}={size} is no number of devices; give at least 1")
    others = math.prod(getattr(sizes, axis) for axis in AXES[1:])
    data = len(devices) // others if sizes.data == -1 else sizes.data
    if data < 1 or data * others != len(devices):
        raise UserError(
            f"config.mesh has data x expert x context x tensor = {sizes.data} x {sizes.expert} x {sizes.context} x "
            f"{sizes.tensor}, but there are {len(devices)} devices; {_way_out(sizes, len(devices), others)}"
        )
    shape = (data, sizes.expert, sizes.context, sizes.tensor)
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def _way_out(sizes: config.Mesh, devices: int, others: int) -> str:
    if devices % others == 0:
        return f"set mesh.data={devices // others} or -1"
    fits = [n for n in range(1, devices + 1) if devices % n == 0]
    nearest = min(fits, key=lambda n: (abs(n - others), n))
    return f"expert x context x tensor = {others} must divide {devices}, as {nearest} does"


def batch_spec(spread: Spread) -> PartitionSpec:
    """How the arrays of a batch lie, [micro-batches, sequences, S]."""
    return PartitionSpec(None, BATCH_AXES, spread.sequence_axes or None)


def rows_of_process(mesh: Mesh, process: int | None = None) -> tuple[int, int]:
    """(i, n): a process holds the i-th of n equal parts of a batch's sequences; several may hold the same part."""
    process = jax.process_index() if process is None else process
    groups = mesh.devices.reshape(mesh.shape["data"] * mesh.shape["expert"], -1)
    mine = [row for row, group in enumerate(groups) if any(d.process_index == process for d in group)]
    size, first = len(mine), mine[0]
    if len(groups) % size or first % size or mine != list(range(first, first + size)):
        raise UserError(
            f"process {process} would hold rows {mine} of {len(groups)} of a batch, not one of equal parts; "
            "choose mesh sizes such that a process's devices are a whole number of data x expert rows, or a part of one"
        )
    return first // size, len(groups) // size


def check_batch(mesh: Mesh, sequences: int, micro_batches: int) -> None:
    """UserError unless every micro-batch divides over the devices that share it."""
    shards = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    micro = sequences // micro_batches
    if micro % shards:
        raise UserError(
            f"a micro-batch of {micro} sequences does not divide over {shards} devices (mesh data x expert); "
            f"set data.micro_batch to {max(micro // shards, 1) * shards}, or the mesh to a divisor of {micro}"
        )
