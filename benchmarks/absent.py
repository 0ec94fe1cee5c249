"""A function compiled for one chip that is not here (`zaya_jax.hardware.targets`), as one of its
devices runs it."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zaya_jax.compiled import buffers
from zaya_jax.hardware import targets


def alone(name: str, f: Callable) -> Callable:
    """The function with whole arguments and results on one device of a kind."""
    return jax.shard_map(
        f,
        mesh=mesh_of_one(name),
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )


def compiled(name: str, f: Callable, *like: Any) -> jax.stages.Compiled:
    """That function, compiled for arguments of these shapes and number formats."""
    whole = NamedSharding(mesh_of_one(name), PartitionSpec())
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), like)
    with buffers.uncached():
        # XLA's default, which the tests' XLA_FLAGS turn down: at 0 a kernel of 76 registers takes
        # 168 and spills 98.
        options: Any = {"xla_backend_optimization_level": 3}
        return jax.jit(alone(name, f)).lower(*placed).compile(compiler_options=options)


@functools.cache
def mesh_of_one(name: str) -> Mesh:
    """One device of a kind."""
    return Mesh(np.array(targets.devices(name, 1)), ("device",))
