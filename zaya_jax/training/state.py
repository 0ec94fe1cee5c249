"""The training state: its parts, their places on a mesh, their first values, and the arrays that checkpoints hold.

    state = {"params", "optimizer", "balance"}

    optimizer = states.build_optimizer(config, mesh)
    state = states.init(config, optimizer, mesh)        or, of shapes and shardings alone, states.abstract(..)
    arrays = states.arrays(optimizer, state)            what a checkpoint holds; back by states.with_arrays(..)
    holding = states.held(optimizer, mesh, arrays, heads)

A checkpoint's arrays are logical: one for each weight, and for each of its moments, whatever the mesh. The run's own
differ (ZeRO-1's buckets, gate and up columns in pairs), and `held` says where in these the logical ones lie.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zaya_jax import trees
from zaya_jax.checkpoint import boxes, layout
from zaya_jax.checkpoint.boxes import HeldBox, Holding
from zaya_jax.config import Config
from zaya_jax.model import zaya
from zaya_jax.optim import balance, chain
from zaya_jax.optim.chain import Optimizer
from zaya_jax.parallel import sharding
from zaya_jax.parallel.spread import Spread, spread_of

REPLICATED = PartitionSpec()


def build_optimizer(config: Config, mesh: Mesh) -> Optimizer:
    """The optimizer of a run, for weights as they lie on the mesh."""
    spread = spread_of(config.mesh, mesh.shape)
    return chain.build(
        config.optim, config.precision, zaya.abstract(config.model, config.precision),
        specs=sharding.param_specs(config.model, config.precision, spread), axes=dict(mesh.shape),
        skip_update=config.run.skip_update, spike_deviations=config.run.spike_deviations,
    )  # fmt: skip


########################################################################################################################
# On a mesh
########################################################################################################################


def specs(config: Config, optimizer: Optimizer, spread: Spread) -> dict[str, Any]:
    """How each part of the state lies on the mesh (a prefix of its tree)."""
    params = sharding.param_specs(config.model, config.precision, spread)
    return {"params": params, "optimizer": optimizer.specs(), "balance": REPLICATED}


def shardings(config: Config, optimizer: Optimizer, mesh: Mesh) -> dict[str, Any]:
    """How each part lies on the mesh, as shardings."""
    is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
    prefix = specs(config, optimizer, spread_of(config.mesh, mesh.shape))
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), prefix, is_leaf=is_spec)


def init(config: Config, optimizer: Optimizer, mesh: Mesh) -> dict[str, Any]:
    """The state before the first step: a function of the seed alone, whatever the mesh."""
    parts = spread_of(config.mesh, mesh.shape).heads

    def init():
        params = zaya.init(config.model, jax.random.key(config.run.seed), config.precision)
        return {
            "params": sharding.arrange(params, parts),
            "optimizer": optimizer.init(),
            "balance": balance.init(config.model.num_hidden_layers, config.model.num_experts, zaya.SKIP_BIAS),
        }

    with jax.default_matmul_precision(config.precision.matmul):
        return jax.jit(init, out_shardings=shardings(config, optimizer, mesh))()


def abstract(config: Config, optimizer: Optimizer, mesh: Mesh) -> dict[str, Any]:
    """The state as ShapeDtypeStructs with their shardings: nothing is allocated."""
    shapes = jax.eval_shape(functools.partial(init, config, optimizer, mesh))

    def placed(sharding, part):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), part)

    return jax.tree.map(placed, shardings(config, optimizer, mesh), shapes)


def bytes_per_device(x: Any) -> int:
    """The bytes of an array that one device holds."""
    return math.prod(x.sharding.shard_shape(tuple(x.shape))) * np.dtype(x.dtype).itemsize


########################################################################################################################
# In checkpoints
########################################################################################################################


def arrays(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a state that a checkpoint holds, as it lies."""
    return {
        "params": state["params"],
        "optimizer": optimizer.arrays(state["optimizer"]),
        "balance": state["balance"]._asdict(),
    }


def with_arrays(optimizer: Optimizer, found: Mapping[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
    """The inverse: a state with these arrays; `figures` are those of no step."""
    return {
        "params": found["params"],
        "optimizer": optimizer.with_arrays(found["optimizer"], figures),
        "balance": balance.State(**found["balance"]),
    }


def held(optimizer: Optimizer, mesh: Mesh, like: Any, heads: int) -> Holding:
    """Where the checkpoint's arrays lie in those of `arrays`; the experts' width lies on `heads` devices."""
    leaves, devices = trees.flat(like), list(mesh.devices.flat)
    shapes = {weight.path: weight.shape for weight in optimizer.layout.weights}
    logical, parts = {}, []
    buckets = {
        f"optimizer.{kind}.{bucket}": (kind, bucket)
        for kind, found in like["optimizer"].items()
        if kind in chain.KINDS
        for bucket in found
    }
    for leaf, x in leaves.items():
        if leaf not in buckets:
            logical[leaf] = x
            parts += boxes.parts_of(leaf, x)
            continue
        kind, bucket = buckets[leaf]
        for h in optimizer.layout.held(bucket):
            name = f"optimizer.{kind}.{h.weight.replace('/', '.')}"
            logical[name] = jax.ShapeDtypeStruct(shapes[h.weight], x.dtype)
            parts.append(HeldBox(name, h.box, leaf, devices[h.device], h.place))
    return Holding(logical, leaves, [p for part in parts for p in _paired(part, logical[part.name].shape, heads)])


def _paired(part: HeldBox, shape: tuple[int, ...], heads: int) -> list[HeldBox]:
    """Cuts a part of the gate and up columns in two where a run holds them in pairs (`sharding.arrange`)."""
    if heads == 1 or part.name.split(".")[-1] != "gate_up":
        return [part]
    found, width, columns = [], shape[-1] // (2 * heads), part.box[-1]
    for block in range(columns.start // width, -(-columns.stop // width)):
        begin, end = max(columns.start, block * width), min(columns.stop, (block + 1) * width)
        moved = (block % 2 * heads + block // 2) * width - block * width
        box = (*part.box[:-1], slice(begin + moved, end + moved))
        inner = layout.within((*part.box[:-1], slice(begin, end)), part.box)
        found.append(dataclasses.replace(part, box=box, outer=part.box, inner=inner))
    return found
