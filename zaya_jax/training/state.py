"""The training state: its parts, their places on a mesh, their first values. `snapshot` takes it to
checkpoints.

state = {"params", "optimizer", "balance"}      with `run.lora` params are adapters, and "frozen" the weights under them

Some params may be bfloat16 copies, whose float32 weights their owners have in "optimizer"
(`precision.weights`).

optimizer = states.build_optimizer(config, mesh)
state = states.init(config, optimizer, mesh)        or, of shapes and shardings alone, states.abstract(..)
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import chip
from zaya_jax.config import Config
from zaya_jax.hardware import host
from zaya_jax.model import lora, zaya
from zaya_jax.model.layer import Own
from zaya_jax.optim import balance, chain
from zaya_jax.optim.chain import Optimizer
from zaya_jax.parallel import sharding
from zaya_jax.parallel.mesh import devices_of_node
from zaya_jax.parallel.spread import Spread, spread_of

REPLICATED = PartitionSpec()


def build_optimizer(config: Config, mesh: Mesh) -> Optimizer:
    """The optimizer of a run, for weights as they lie on the mesh."""
    spread, rank, precision = spread_of(config.mesh, mesh.shape), config.run.lora, config.precision
    params = lora.abstract(config.model, rank) if rank else zaya.abstract(config.model, precision)
    # their products may have another format than `compute`
    if rank or isinstance(config.model, Own):
        precision = dataclasses.replace(precision, weights="float32")
    return chain.build(
        config.optim,
        precision,
        params,
        specs=trained_specs(config, spread),
        axes=dict(mesh.shape),
        node=devices_of_node(mesh),
        skip_update=config.run.skip_update,
        spike_deviations=config.run.spike_deviations,
    )


def specs(config: Config, optimizer: Optimizer, spread: Spread) -> dict[str, Any]:
    """How each part of the state lies on the mesh (a prefix of its tree)."""
    found = {
        "params": trained_specs(config, spread),
        "optimizer": optimizer.specs(),
        "balance": REPLICATED,
    }
    return found | frozen_specs(config, spread)


def trained_specs(config: Config, spread: Spread) -> Any:
    """How the weights that the optimizer moves lie on the mesh."""
    if config.run.lora:
        return sharding.specs_of(lora.param_axes(config.model), spread)
    return sharding.param_specs(config.model, config.precision, spread)


def frozen_specs(config: Config, spread: Spread) -> dict[str, Any]:
    """How the weights under adapters lie on the mesh; nothing without adapters."""
    return (
        {"frozen": sharding.param_specs(config.model, config.precision, spread)}
        if config.run.lora
        else {}
    )


def shardings(config: Config, optimizer: Optimizer, mesh: Mesh) -> dict[str, Any]:
    """How each part lies on the mesh, as shardings."""
    prefix = specs(config, optimizer, spread_of(config.mesh, mesh.shape))
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), prefix)


def _fresh(config: Config, optimizer: Optimizer, mesh: Mesh, params: Any = None) -> dict[str, Any]:
    key = jax.random.key(config.run.seed)
    if config.run.lora:
        params = lora.init(config.model, config.run.lora, key)
    else:
        params = params or zaya.init(config.model, key, config.precision)
        params = sharding.arrange(params, spread_of(config.mesh, mesh.shape).heads)
    params, kept = optimizer.layout.divided(params)
    return {
        "params": params,
        "optimizer": optimizer.init()._replace(weights=kept),
        "balance": balance.init(
            config.model.num_hidden_layers, config.model.num_experts, zaya.SKIP_BIAS
        ),
    }


def init(config: Config, optimizer: Optimizer, mesh: Mesh, params: Any = None) -> dict[str, Any]:
    """The state before the first step: a function of the seed alone, or of the given weights,
    whatever the mesh; without frozen weights."""
    fresh = functools.partial(_fresh, config, optimizer, mesh)
    with jax.default_matmul_precision(config.precision.matmul):
        options = host.for_one_call(chip.made_for(mesh))
        places = {
            name: x for name, x in shardings(config, optimizer, mesh).items() if name != "frozen"
        }
        return jax.jit(fresh, out_shardings=places, compiler_options=options)(params)


def abstract(config: Config, optimizer: Optimizer, mesh: Mesh) -> dict[str, Any]:
    """The state as ShapeDtypeStructs with their shardings: nothing is allocated."""
    shapes = jax.eval_shape(functools.partial(_fresh, config, optimizer, mesh))
    shapes |= {"frozen": lora.frozen(config.model, config.precision)} if config.run.lora else {}

    def placed(sharding, part):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), part
        )

    return jax.tree.map(placed, shardings(config, optimizer, mesh), shapes)


def bytes_per_device(x: Any) -> int:
    """The bytes of an array that one device holds."""
    return math.prod(x.sharding.shard_shape(tuple(x.shape))) * np.dtype(x.dtype).itemsize
