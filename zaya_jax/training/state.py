"""The training state: its parts, their places on a mesh, their first values. `snapshot` takes it to
checkpoints.

state = {"params", "optimizer", "balance"}      with `run.lora` params are adapters, and "frozen"
                                                the weights under them (`lora.abstract_base`)
                                                with only `run.preference` "frozen" are the first weights

Some params may be bfloat16 copies, whose float32 weights their owners have in "optimizer"
(`precision.weights`).

setup = states.set_up(config, mesh)        the optimizer, and how the state lies
state = states.init(config, setup)         or, only its shapes and shardings, states.abstract(..)
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
from zaya_jax.hardware import host, sizing
from zaya_jax.model import lora, zaya
from zaya_jax.model.own_parts import CustomModel
from zaya_jax.optim import balance, chain
from zaya_jax.optim.chain import Optimizer
from zaya_jax.parallel import sharding
from zaya_jax.parallel.mesh import devices_of_node
from zaya_jax.parallel.spread import Spread, spread_of

REPLICATED = PartitionSpec()


@dataclasses.dataclass(frozen=True)
class Setup:
    """What the training, evaluation and replay steps on a mesh share."""

    mesh: Mesh
    spread: Spread  # how the work is divided over the axes of the mesh
    optimizer: Optimizer
    specs: dict[str, Any]  # how each part of the state lies on the mesh (a prefix of its tree)

    @property
    def shardings(self) -> dict[str, Any]:
        """`specs` as shardings on the mesh."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.specs)


def set_up(config: Config, mesh: Mesh, spread: Spread | None = None) -> Setup:
    """The optimizer of a run, for weights as they lie on the mesh; by default the mesh is used as
    `config.mesh` says."""
    spread, precision = spread or spread_of(config.mesh, mesh.shape), config.precision
    specs = {"params": sharding.param_specs(config.model, precision, spread)}
    if config.run.lora:
        params = lora.abstract(config.model, config.run.lora)
        adapters = sharding.specs_of(lora.param_axes(config.model), spread)
        base = lora.base_axes(config.model, precision, config.run.base)
        specs = {"params": adapters, "frozen": sharding.specs_of(base, spread)}
    else:
        params = zaya.abstract(config.model, precision)
        if config.run.takes_pairs:
            specs["frozen"] = {"params": specs["params"], "scales": {}}
    # their products may have another format than `compute`
    if config.run.lora or isinstance(config.model, CustomModel):
        precision = dataclasses.replace(precision, weights="float32")
    optimizer = chain.build(
        config.optim,
        precision,
        params,
        specs=specs["params"],
        axes=dict(mesh.shape),
        node=devices_of_node(mesh),
        two_levels_under=sizing.two_levels_under(config),
        skip_update=config.run.skip_update,
        spike_deviations=config.run.spike_deviations,
    )
    specs |= {"optimizer": optimizer.specs(), "balance": REPLICATED}
    return Setup(mesh, spread, optimizer, specs)


def _initial_state(config: Config, setup: Setup, params: Any = None) -> dict[str, Any]:
    key = jax.random.key(config.run.seed)
    if config.run.lora:
        params = lora.init(config.model, config.run.lora, key)
    else:
        params = params or zaya.init(config.model, key, config.precision)
    params, master_weights = setup.optimizer.layout.split_master_weights(params)
    return {
        "params": params,
        "optimizer": setup.optimizer.init()._replace(weights=master_weights),
        "balance": balance.init(
            config.model.num_hidden_layers, config.model.num_experts, zaya.SKIP_BIAS
        ),
    }


def init(config: Config, setup: Setup, params: Any = None) -> dict[str, Any]:
    """The state before the first step: a function only of the seed, or of the given weights,
    whatever the mesh; without frozen weights."""
    make = functools.partial(_initial_state, config, setup)
    with jax.default_matmul_precision(config.precision.matmul):
        options = host.compiler_options(chip.made_for(setup.mesh))
        shardings = {name: x for name, x in setup.shardings.items() if name != "frozen"}
        return jax.jit(make, out_shardings=shardings, compiler_options=options)(params)


def abstract(config: Config, setup: Setup) -> dict[str, Any]:
    """The state as ShapeDtypeStructs with their shardings: nothing is allocated."""
    shapes = jax.eval_shape(functools.partial(_initial_state, config, setup))
    if config.run.lora:
        shapes["frozen"] = lora.abstract_base(config.model, config.precision, config.run.base)
    elif config.run.takes_pairs:
        # in the formats in which a pass would read them: it gives the same bits
        model, precision = config.model, config.precision
        weights = zaya.abstract(model, precision)
        cast = functools.partial(zaya.cast_for_products, model, precision=precision)
        shapes["frozen"] = {"params": jax.eval_shape(cast, weights)[0], "scales": {}}

    def with_sharding(sharding, part):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), part
        )

    return jax.tree.map(with_sharding, setup.shardings, shapes)


def bytes_per_device(x: Any) -> int:
    """The bytes of an array that one device holds."""
    return math.prod(x.sharding.shard_shape(tuple(x.shape))) * np.dtype(x.dtype).itemsize
