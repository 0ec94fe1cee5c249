"""The device mesh of a run, from the axis sizes of its config.

Axes are `data`, `expert`, `context` and `tensor`. A batch's sequences lie on (data, expert); everything else of the
state is replicated, but for the optimizer's, which is spread over all devices (ZeRO-1).
"""

import math

import jax
from jax.sharding import AxisType, Mesh, PartitionSpec

from zaya_jax import config
from zaya_jax.config import UserError
from zaya_jax.parallel.spread import AXES

BATCH_AXES = ("data", "expert")
BATCH_SPEC = PartitionSpec(None, BATCH_AXES)  # [micro-batches, sequences, S]


def make_mesh(sizes: config.Mesh, devices: list | None = None) -> Mesh:
    """The mesh over all devices; UserError where the axis sizes don't multiply to their number."""
    devices = jax.devices() if devices is None else devices
    unsupported = [axis for axis in AXES[1:] if getattr(sizes, axis) != 1] + ["fsdp"] * sizes.fsdp
    if unsupported:
        raise UserError(
            f"config.mesh.{unsupported[0]}={getattr(sizes, unsupported[0])} is not supported yet; "
            "only mesh.data spreads a run, leave the other axes at 1 and fsdp off"
        )
    others = math.prod(getattr(sizes, axis) for axis in AXES[1:])
    data = len(devices) // others if sizes.data == -1 else sizes.data
    if data < 1 or data * others != len(devices):
        raise UserError(
            f"config.mesh has data x expert x context x tensor = {sizes.data} x {sizes.expert} x {sizes.context} x "
            f"{sizes.tensor}, but there are {len(devices)} devices; set mesh.data={len(devices) // others} or -1"
        )
    shape = (data, sizes.expert, sizes.context, sizes.tensor)
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def check_batch(mesh: Mesh, sequences: int, micro_batches: int) -> None:
    """UserError unless every micro-batch divides over the devices that share it."""
    shards = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    micro = sequences // micro_batches
    if micro % shards:
        raise UserError(
            f"a micro-batch of {micro} sequences does not divide over {shards} devices (mesh data x expert); "
            f"set data.micro_batch to {max(micro // shards, 1) * shards}, or the mesh to a divisor of {micro}"
        )
