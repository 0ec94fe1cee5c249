"""The training step, which donates its state, and the evaluation step: jitted pure functions of
state and batch.

    state = that of `training.state`; batch = a dict of arrays [micro-batches, sequences, S]

The whole step runs inside one `shard_map` over the mesh: each device accumulates the gradient of
its own sequences over the micro-batches, and it is summed over devices once: by the optimizer, or
layer by layer in the backward pass (`training.gradients`); with fsdp, over `data` in the backward
pass of each micro-batch. The loss (`training.loss`) is the mean over all real targets of the global
batch, however these are spread.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from pallas_kernels import chip
from pallas_kernels.grouped_mlp import takes_unsorted_rows
from zaya_jax.config import Config
from zaya_jax.hardware import host
from zaya_jax.model import zaya
from zaya_jax.model.layer import Layer
from zaya_jax.optim import balance
from zaya_jax.parallel.context import zigzag
from zaya_jax.parallel.devices import over_mesh
from zaya_jax.parallel.mesh import batch_spec, rows_of_process
from zaya_jax.parallel.spread import AXES, NO_SPREAD, Spread
from zaya_jax.training.gradients import gradients
from zaya_jax.training.loss import Objective, loss_of_tokens
from zaya_jax.training.preference import loss_of_pairs
from zaya_jax.training.state import REPLICATED, Setup

# By run.preference.
OBJECTIVES = {"none": loss_of_tokens, "dpo": loss_of_pairs}


def objective_of(config: Config, spread: Spread) -> Objective:
    """What a run with this config minimizes."""
    return OBJECTIVES[config.run.preference](config, spread)


def make_train_step(config: Config, setup: Setup, inject: Callable | None = None) -> Callable:
    """step(state, batch, lr) → (state, figures); the state is donated, the figures are scalars and
    [L, ..] arrays.

    `inject` changes each device's gradients as `gradients` returns them: a test's faults
    (`tools.faults`).
    """
    model, spread, optimizer = config.model, setup.spread, setup.optimizer
    loss, adapted = objective_of(config, spread), bool(config.run.lora)

    def step(state, batch, lr):
        params, bias, frozen = state["params"], state["balance"].bias, state.get("frozen")
        # Kernels that take unsorted rows index the stacked experts of all layers: each device must
        # hold every expert, at its full embedding width. (The tensor axis may split the inner
        # width.) A layer of the user's own may compute with other weights than those in the stacks.
        divided = spread.fsdp or spread.tsp or spread.expert_axes
        takes_stacks = takes_unsorted_rows() and zaya.layer_class(model) is Layer
        in_place = takes_stacks and not divided and not adapted
        count = jax.lax.psum(loss.count(batch), spread.token_axes)
        total = jnp.maximum(count, 1.0)

        def loss_of(params, micro, hooks):
            return loss.value(params, bias, micro, total, hooks, frozen)

        ways = {} if adapted else optimizer.layout.by_layer
        copy_dtypes = optimizer.layout.copy_dtypes
        grads, (parts, sums) = gradients(loss_of, params, batch, ways, in_place, copy_dtypes)
        if inject:
            grads = inject(grads)

        parts = jax.lax.psum(parts, AXES)
        sums = jax.lax.psum(sums, spread.token_axes)
        counts = sums.pop("counts")
        tokens = jnp.sum(counts, axis=1)  # the same in each layer
        means = {name: x / jnp.maximum(tokens, 1.0) for name, x in sums.items()}
        with jax.named_scope("optimizer"):
            new_params, opt_state = optimizer.apply(grads, state["optimizer"], params, lr=lr)
        figures = dict(opt_state.figures)
        with jax.named_scope("balance"):
            new_balance, load = balance.update(
                state["balance"],
                counts,
                lr=config.balance.lr,
                b1=config.balance.b1,
                b2=config.balance.b2,
                dead_after=config.balance.dead_after,
                enabled=config.balance.enabled,
                keep=figures["skipped"] == 0,
            )
        if model.model_type == "zaya":  # a dense model has no experts
            figures |= load
        figures |= parts | means | {loss.unit: count, "lr": lr}
        state = {**state, "params": new_params, "optimizer": opt_state, "balance": new_balance}
        return state, figures

    in_specs = (setup.specs, batch_spec(spread), REPLICATED)
    return on_mesh(config, setup.mesh, step, in_specs, donate=(0,))


def make_eval_step(config: Config, setup: Setup) -> Callable:
    """step(state, batch) → (the sums of the loss's parts, by name, and the number of what they are
    means over) over all devices."""
    spread = setup.spread
    loss = objective_of(config, spread)

    def step(state, batch):
        def sums(micro):
            bias, frozen = state["balance"].bias, state.get("frozen")
            _, (parts, _) = loss.value(state["params"], bias, micro, 1.0, frozen=frozen)
            return parts, loss.count(micro)

        parts, count = jax.tree.map(lambda x: x.sum(0), jax.lax.map(sums, batch))
        return jax.lax.psum(parts, AXES), jax.lax.psum(count, spread.token_axes)

    in_specs = (setup.specs, batch_spec(spread))
    return on_mesh(config, setup.mesh, step, in_specs, out=REPLICATED)


def on_mesh(
    config: Config, mesh: Mesh, step: Callable, in_specs: tuple, donate=(), out=None
) -> Callable:
    """Turns a function of one device's parts into a program for the whole mesh."""
    out_specs = (in_specs[0], REPLICATED) if out is None else out
    target = chip.made_for(mesh).taking(config.kernels)
    mapped = over_mesh(step, config.precision, target, mesh, in_specs, out_specs)
    options = host.compiler_options(target)
    return jax.jit(mapped, donate_argnums=donate, compiler_options=options)


def put_batch(
    mesh: Mesh, batch: dict, micro_batches: int, spread: Spread = NO_SPREAD
) -> dict[str, jax.Array]:
    """A process's rows of a global batch (`mesh.rows_of_process`) as global arrays [micro-batches,
    sequences, S].

    Each process's rows are a part of every micro-batch. A sequence that is cut over devices lies in
    zig-zag order.
    """
    part, parts = rows_of_process(mesh)
    sharding = NamedSharding(mesh, batch_spec(spread))

    def put(x):
        if spread.sequence_parts > 1:
            x = x[:, zigzag(x.shape[1], spread.sequence_parts)]
        x = x.reshape(micro_batches, -1, x.shape[-1])
        first_row = part * x.shape[1]

        def piece(index):
            rows = index[1].indices(x.shape[1] * parts)
            return x[index[0], rows[0] - first_row : rows[1] - first_row, index[2]]

        return jax.make_array_from_callback(
            (x.shape[0], x.shape[1] * parts, x.shape[2]), sharding, piece
        )

    return {name: put(x) for name, x in batch.items()}
