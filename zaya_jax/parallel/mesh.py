"""The device mesh of a run, from the axis sizes of its config.

Axes are `data`, `expert`, `context` and `tensor`. A batch's sequences are split over (data,
expert), their tokens over context; `sharding` splits weights. The optimizer's state is spread over
all axes that a weight leaves (ZeRO-1).
"""

import itertools
import math
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from zaya_jax import config
from zaya_jax.config import UserError
from zaya_jax.parallel.spread import AXES, Spread

BATCH_AXES = ("data", "expert")


def make_mesh(sizes: config.Mesh, devices: list | None = None, where: str = "config.mesh") -> Mesh:
    """The mesh over all devices; UserError if the sizes (from the group `where`) don't multiply to
    their number."""
    devices = jax.devices() if devices is None else devices
    shape = shape_of(sizes, len(devices), where)
    if sizes.across and shape["context"] > 1:
        order = across_nodes(shape, _node_size(devices), where)
        devices = [devices[index] for index in order]
    axis_types = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(tuple(shape.values()), AXES, axis_types=axis_types, devices=devices)


def shape_of(sizes: config.Mesh, devices: int | None, where: str = "config.mesh") -> dict[str, int]:
    """The axis sizes on this many devices; with None, on the fewest possible."""
    for axis in AXES:
        size = getattr(sizes, axis)
        if size < 1 and not (axis == "data" and size == -1):
            rest = ", or -1 for all that the other axes leave" if axis == "data" else ""
            raise UserError(f"{where}.{axis}={size} must be at least 1{rest}")
    others = math.prod(getattr(sizes, axis) for axis in AXES[1:])
    data = sizes.data
    if data == -1:
        data = 1 if devices is None else devices // others
    if devices is not None and (data < 1 or data * others != devices):
        way_out = f"set {where}.data={devices // others} or -1"
        if devices % others:
            way_out = f"expert x context x tensor must divide {devices}, with {where}.data=-1"
        raise UserError(
            f"{where} has data x expert x context x tensor = {sizes.data} x {sizes.expert} x"
            f" {sizes.context} x {sizes.tensor}, but there are {devices} devices;"
            f" {way_out}"
        )
    return {"data": data, **{axis: getattr(sizes, axis) for axis in AXES[1:]}}


def across_nodes(shape: Mapping[str, int], node: int, where: str = "config.mesh") -> list[int]:
    """The devices in the order of a mesh whose context axis goes over nodes of so many."""
    context, tensor = shape["context"], shape["tensor"]
    nodes = math.prod(shape.values()) // node
    if nodes % context or node % tensor:
        raise UserError(
            f"{where}.across is set with context={context} and tensor={tensor}, but there are"
            f" {nodes} nodes of {node} devices; context must divide their number, and tensor their"
            f" size, or leave {where}.across out"
        )
    numbers = np.arange(nodes * node).reshape(nodes // context, context, node // tensor, tensor)
    return numbers.swapaxes(1, 2).reshape(-1).tolist()


def devices_of_node(mesh: Mesh | AbstractMesh) -> int:
    """The number of devices of a node; 1 unless all nodes have as many, one after the other in the
    mesh's order.

    XLA tells the hosts of GPUs apart as slices; where it does not, each process counts as one.
    """
    # an abstract one has no devices
    return 1 if isinstance(mesh, AbstractMesh) else _node_size(list(mesh.devices.flat))


def _node_size(devices: list) -> int:
    places = [(getattr(d, "slice_index", 0), d.process_index) for d in devices]
    several_hosts = len({host for host, _ in places}) > 1
    nodes = [host if several_hosts else process for host, process in places]
    lengths = [len(list(run)) for _, run in itertools.groupby(nodes)]
    one_run_each = len(lengths) == len(set(nodes))
    return lengths[0] if one_run_each and len(set(lengths)) == 1 else 1


def batch_spec(spread: Spread) -> PartitionSpec:
    """The sharding of a batch's arrays, [micro-batches, sequences, S]."""
    return PartitionSpec(None, BATCH_AXES, spread.sequence_axes or None)


def rows_of_process(mesh: Mesh, process: int | None = None) -> tuple[int, int]:
    """(i, n): a process has the i-th of n equal parts of a batch's sequences; several may have the
    same part."""
    process = jax.process_index() if process is None else process
    groups = mesh.devices.reshape(mesh.shape["data"] * mesh.shape["expert"], -1)
    mine = [
        row for row, group in enumerate(groups) if any(d.process_index == process for d in group)
    ]
    if not mine:
        raise UserError(f"process {process} has no device of the mesh; give it one")
    size, first = len(mine), mine[0]
    if len(groups) % size or first % size or mine != list(range(first, first + size)):
        raise UserError(
            f"process {process}'s rows of the batch, {mine} of {len(groups)}, are not one"
            " contiguous, equal part; choose mesh sizes such that a process's devices are a whole"
            " number of data x expert rows, or a part of one"
        )
    return first // size, len(groups) // size
