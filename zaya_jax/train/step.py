"""The training step and the evaluation step: pure functions of (state, batch), jitted and donated.

    state = {"params", "optimizer", "balance"}; batch = a dict of arrays [micro-batches, sequences, S]

The whole step runs inside one `shard_map` over the mesh: each device accumulates the gradient of its own sequences
over the micro-batches, and the optimizer then sums it over devices once, whatever their number. The loss is the mean
over all real targets of the global batch, however these are spread over micro-batches and devices.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zaya_jax.config import Config, Model
from zaya_jax.model import zaya
from zaya_jax.model.loss import cross_entropy
from zaya_jax.optim import balance
from zaya_jax.optim.chain import Optimizer
from zaya_jax.parallel.mesh import BATCH_SPEC
from zaya_jax.parallel.spread import AXES

REPLICATED = PartitionSpec()


def state_specs(optimizer: Optimizer) -> dict[str, Any]:
    """How each part of the state lies on the mesh (a prefix of its tree)."""
    return {"params": REPLICATED, "optimizer": optimizer.specs(), "balance": REPLICATED}


def state_shardings(mesh: Mesh, optimizer: Optimizer) -> dict[str, Any]:
    """The same as shardings."""
    is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), state_specs(optimizer), is_leaf=is_spec)


def init_state(config: Config, optimizer: Optimizer, mesh: Mesh) -> dict[str, Any]:
    """The state before the first step: a function of the seed alone, whatever the mesh."""

    def init():
        return {
            "params": zaya.init(config.model, jax.random.key(config.run.seed), config.precision),
            "optimizer": optimizer.init(),
            "balance": balance.init(config.model.num_hidden_layers, config.model.num_experts, zaya.SKIP_BIAS),
        }

    with jax.default_matmul_precision(config.precision.matmul):
        return jax.jit(init, out_shardings=state_shardings(mesh, optimizer))()


def make_loss(config: Config, model: Model) -> Callable:
    """loss(params, bias, micro-batch, total) → (loss / total, (cross entropy, log² Z, tokens a class)).

    `total` is the number of real targets that the mean is taken over.
    """
    z_weight = config.optim.z_loss

    def loss_fn(params, bias, batch, total):
        out = zaya.apply(
            model, params, bias, batch["tokens"], precision=config.precision,
            segments=batch["segment_ids"], positions=batch["positions"], remat=config.remat,
        )  # fmt: skip
        loss, z = cross_entropy(
            out.hidden.reshape(-1, model.hidden_size),
            params["embed"]["embedding"],
            params["head"]["bias"] if model.lm_head_bias else None,
            batch["targets"].reshape(-1),
            batch["loss_mask"].reshape(-1),
            dtype=config.precision.compute,
            z_weight=z_weight,
        )
        loss, z = loss / total, z / total
        return loss, (loss - z_weight * z, z, out.counts)

    return loss_fn


def make_train_step(config: Config, model: Model, optimizer: Optimizer, mesh: Mesh) -> Callable:
    """step(state, batch, lr) → (state, figures); the state is donated, the figures are scalars and [L, ..] arrays."""
    loss_fn = make_loss(config, model)

    def step(state, batch, lr):
        params, bias = state["params"], state["balance"].bias
        total = jnp.maximum(jax.lax.psum(jnp.sum(batch["loss_mask"]), AXES), 1.0)
        gradient = jax.grad(loss_fn, has_aux=True)

        if batch["tokens"].shape[0] == 1:
            micro = jax.tree.map(lambda x: x[0], batch)
            grads, sums = gradient(params, bias, micro, total)
        else:

            def accumulate(carry, micro):
                return jax.tree.map(jnp.add, carry, gradient(params, bias, micro, total)), None

            first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)
            zero = jax.tree.map(
                lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(gradient, params, bias, first, total)
            )
            (grads, sums), _ = jax.lax.scan(accumulate, zero, batch)

        loss, z, counts = jax.lax.psum(sums, AXES)
        updates, opt_state = optimizer.update(grads, state["optimizer"], params, lr=lr)
        figures = dict(opt_state.figures)
        new_balance, load = balance.update(
            state["balance"], counts, lr=config.balance.lr, b1=config.balance.b1, b2=config.balance.b2,
            dead_after=config.balance.dead_after, enabled=config.balance.enabled, keep=figures["skipped"] == 0,
        )  # fmt: skip
        figures |= load | {"loss": loss, "z": z, "target_tokens": total, "lr": lr}
        state = {
            "params": optax.apply_updates(params, updates),
            "optimizer": opt_state,
            "balance": new_balance,
        }
        return state, figures

    return _on_mesh(config, mesh, step, (state_specs(optimizer), BATCH_SPEC, REPLICATED), donate=(0,))


def make_eval_step(config: Config, model: Model, optimizer: Optimizer, mesh: Mesh) -> Callable:
    """step(state, batch) → (summed loss, number of targets) over all devices."""
    loss_fn = make_loss(config, model)

    def step(state, batch):
        def add(carry, micro):
            _, (loss, _, _) = loss_fn(state["params"], state["balance"].bias, micro, 1.0)
            return (carry[0] + loss, carry[1] + jnp.sum(micro["loss_mask"])), None

        zero = jnp.zeros(())
        sums, _ = jax.lax.scan(add, (zero, zero), batch)
        return jax.lax.psum(sums, AXES)

    return _on_mesh(config, mesh, step, (state_specs(optimizer), BATCH_SPEC), out=REPLICATED)


def _on_mesh(config: Config, mesh: Mesh, step: Callable, in_specs: tuple, donate=(), out=None) -> Callable:
    out_specs = (in_specs[0], REPLICATED) if out is None else out

    def precise(*args):
        with jax.default_matmul_precision(config.precision.matmul):
            return step(*args)

    # Without the check of replicated values, gradients of replicated weights stay partial sums, as the optimizer wants.
    mapped = jax.shard_map(precise, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped, donate_argnums=donate)


def put_batch(mesh: Mesh, batch: dict, micro_batches: int) -> dict[str, jax.Array]:
    """A process's rows of a global batch as global arrays [micro-batches, sequences, S] on the mesh."""
    sharding = NamedSharding(mesh, BATCH_SPEC)

    def put(x):
        x = x.reshape(micro_batches, -1, x.shape[-1])
        return jax.make_array_from_process_local_data(sharding, x)

    return {name: put(x) for name, x in batch.items()}
