"""The training step and the evaluation step: pure functions of (state, batch), jitted and donated.

    state = that of `train.state`; batch = a dict of arrays [micro-batches, sequences, S]

The whole step runs inside one `shard_map` over the mesh: each device accumulates the gradient of its own sequences
over the micro-batches, and the optimizer then sums it over devices once, whatever their number. The loss is the mean
over all real targets of the global batch, however these are spread over micro-batches and devices.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from pallas_kernels import chip
from pallas_kernels.cross_entropy import cross_entropy
from pallas_kernels.grouped_mlp import routes, unwritten
from zaya_jax import trees
from zaya_jax.config import Config, Model
from zaya_jax.model import zaya
from zaya_jax.model.experts import Stacks
from zaya_jax.optim import balance
from zaya_jax.optim.by_layer import ByLayer
from zaya_jax.optim.chain import Optimizer
from zaya_jax.parallel import spread as spread_lib
from zaya_jax.parallel.context import zigzag
from zaya_jax.parallel.mesh import batch_spec, rows_of_process
from zaya_jax.parallel.placements import Over
from zaya_jax.parallel.spread import ALONE, AXES, Spread, gather_over_data, share_of_tokens
from zaya_jax.train import state as states
from zaya_jax.train.state import REPLICATED


def make_loss(config: Config, model: Model, spread: Spread = ALONE) -> Callable:
    """loss(params, bias, micro-batch, total) → (loss / total, (cross entropy, log² Z, tokens a class)).

    `total` is the number of real targets that the mean is taken over. On a mesh the loss is the sum over devices, and
    counts are of a device's tokens.
    """
    z_weight = config.optim.z_loss
    axes = zaya.param_axes(model, config.precision)

    def loss_fn(params, bias, batch, total, stacks=None, leaving=zaya.NONE):
        params = whole_outside(params, axes) if spread.fsdp else params
        out = zaya.apply(
            model, params, bias, batch["tokens"], precision=config.precision, devices=Over(spread),
            segments=batch["segment_ids"], positions=batch["positions"], remat=config.remat,
            stacks=stacks, leaving=leaving,
        )  # fmt: skip
        with jax.named_scope("head"):
            loss, z = cross_entropy(
                share_of_tokens(out.hidden.reshape(-1, model.hidden_size), spread),
                params["embed"]["embedding"],
                params["head"]["bias"] if model.lm_head_bias else None,
                share_of_tokens(batch["targets"].reshape(-1), spread),
                share_of_tokens(batch["loss_mask"].reshape(-1), spread),
                dtype=config.precision.compute,
                z_weight=z_weight,
            )
            loss, z = loss / total, z / total
        return loss, (loss - z_weight * z, z, out.counts)

    return loss_fn


def whole_outside(params: dict, axes: dict) -> dict:
    """With fsdp: whole weights but for the layers', which gather theirs themselves, one after the other."""
    outer = {name: part for name, part in params.items() if name != "layers"}
    names = {name: axes[name] for name in outer}
    return {**jax.tree.map(gather_over_data, outer, names), "layers": params["layers"]}


def make_train_step(
    config: Config, model: Model, optimizer: Optimizer, mesh: Mesh, hook: Callable | None = None
) -> Callable:
    """step(state, batch, lr) → (state, figures); the state is donated, the figures are scalars and [L, ..] arrays.

    `hook` is given each device's gradients before they are summed: faults on purpose (`aegis.faults`).
    """
    spread = spread_lib.of(config.mesh, mesh.shape)
    loss_fn = make_loss(config, model, spread)

    def step(state, batch, lr):
        params, bias = state["params"], state["balance"].bias
        total = jnp.maximum(jax.lax.psum(jnp.sum(batch["loss_mask"]), spread.token_axes), 1.0)
        one = batch["tokens"].shape[0] == 1
        # Experts whose kernels write gradients in the layers' places are no part of what is differentiated.
        apart = model.model_type == "zaya" and in_place(spread)
        params, experts = _apart(params) if apart else (params, None)
        by_layer = optimizer.layout.by_layer if one else {}
        stacks = experts and _stacks(experts, by_layer, add=not one)

        def loss_of(params, micro, leaving=zaya.NONE):
            return loss_fn(_together(params, experts), bias, micro, total, stacks, leaving)

        if one:
            micro = jax.tree.map(lambda x: x[0], batch)
            grads, sums = gradients(loss_of, by_layer, params, micro)
        else:
            # Each layer's gradient is added where the sum lies: there is no second set, as large as the weights.
            others = jax.tree.map(lambda w: jax.new_ref(jnp.zeros_like(w)), params)

            def accumulate(carry, micro):
                pull: Any
                _, pull, sums = jax.vjp(lambda w: loss_of(w, micro), params, has_aux=True)
                pull.with_refs(others)(jnp.ones(()))
                return jax.tree.map(jnp.add, carry, sums), None

            first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)
            like = jax.eval_shape(loss_of, params, first)[1]
            zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
            sums, _ = jax.lax.scan(accumulate, zero, batch)
            grads = jax.tree.map(jax.freeze, others)
        grads = _together(grads, jax.tree.map(jax.freeze, stacks.gradients) if stacks else None)
        params = _together(params, experts)
        grads = hook(grads) if hook else grads

        loss, z = jax.lax.psum(sums[:2], AXES)
        counts = jax.lax.psum(sums[2], spread.token_axes)
        with jax.named_scope("optimizer"):
            new_params, opt_state = optimizer.apply(grads, state["optimizer"], params, lr=lr)
        figures = dict(opt_state.figures)
        with jax.named_scope("balance"):
            new_balance, load = balance.update(
                state["balance"], counts, lr=config.balance.lr, b1=config.balance.b1, b2=config.balance.b2,
                dead_after=config.balance.dead_after, enabled=config.balance.enabled, keep=figures["skipped"] == 0,
            )  # fmt: skip
        figures |= load if model.model_type == "zaya" else {}  # one MLP for all tokens is no load
        figures |= {"loss": loss, "z": z, "target_tokens": total, "lr": lr}
        state = {
            "params": new_params,
            "optimizer": opt_state,
            "balance": new_balance,
        }
        return state, figures

    in_specs = (states.specs(config, optimizer, spread), batch_spec(spread), REPLICATED)
    return on_mesh(config, mesh, step, in_specs, donate=(0,))


def in_place(spread: Spread) -> bool:
    """Whether kernels read the experts of a layer, and write their gradients, where all layers' lie."""
    return routes() and not (spread.fsdp or spread.tsp or spread.expert_axes)


def _apart(params: dict) -> tuple[dict, dict]:
    """Parameters without the experts, and these."""
    layers = dict(params["layers"])
    return params | {"layers": layers}, layers.pop("experts")


def _together(params: dict, experts: dict | None) -> dict:
    """The inverse."""
    return params if experts is None else params | {"layers": params["layers"] | {"experts": experts}}


def _stacks(experts: dict, by_layer: dict[str, ByLayer], add: bool) -> Stacks:
    """All layers' experts, with places for their gradients or, where these leave layer by layer, a device's shares."""
    ways = {name: by_layer.get(f"layers/experts/{name}") for name in experts}
    if all(ways.values()):
        refs = {name: jax.new_ref(jnp.zeros(way.shape)) for name, way in ways.items() if way}
        return Stacks(experts, refs, add, {name: way.share for name, way in ways.items() if way})
    fresh = jnp.zeros_like if add else unwritten
    return Stacks(experts, jax.tree.map(lambda w: jax.new_ref(fresh(w)), experts), add)


def gradients(loss_of: Callable, by_layer: dict[str, Any], params: dict, micro: dict) -> tuple[Any, Any]:
    """The gradients and the sums; of weights in `by_layer` the shares of each layer's, reduced as they leave it."""
    flat = trees.flat(params, "/")
    slots = {path: jnp.zeros(way.shape) for path, way in by_layer.items() if path in flat}

    def loss(wanted, slots):
        leaving = {path.removeprefix("layers/"): (by_layer[path].share, x) for path, x in slots.items()}
        return loss_of(trees.nested(flat | wanted, "/"), micro, leaving)

    wanted = {path: x for path, x in flat.items() if path not in slots}
    (found, shares), sums = jax.grad(loss, (0, 1), has_aux=True)(wanted, slots)
    return trees.nested(found | shares, "/"), sums


def make_eval_step(config: Config, model: Model, optimizer: Optimizer, mesh: Mesh) -> Callable:
    """step(state, batch) → (summed loss, number of targets) over all devices."""
    spread = spread_lib.of(config.mesh, mesh.shape)
    loss_fn = make_loss(config, model, spread)

    def step(state, batch):
        def add(carry, micro):
            _, (loss, _, _) = loss_fn(state["params"], state["balance"].bias, micro, 1.0)
            return (carry[0] + loss, carry[1] + jnp.sum(micro["loss_mask"])), None

        zero = jnp.zeros(())
        (loss, count), _ = jax.lax.scan(add, (zero, zero), batch)
        return jax.lax.psum(loss, AXES), jax.lax.psum(count, spread.token_axes)

    return on_mesh(
        config, mesh, step, (states.specs(config, optimizer, spread), batch_spec(spread)), out=REPLICATED
    )


def on_mesh(config: Config, mesh: Mesh, step: Callable, in_specs: tuple, donate=(), out=None) -> Callable:
    """A function of one device's parts as a program for the whole mesh."""
    out_specs = (in_specs[0], REPLICATED) if out is None else out
    target = chip.made_for(mesh).taking(config.kernels)

    def precise(*args):
        with chip.making(target), jax.default_matmul_precision(config.precision.matmul):
            return step(*args)

    # Without the check of replicated values, gradients of replicated weights stay partial sums, as the optimizer wants.
    mapped = jax.shard_map(precise, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped, donate_argnums=donate)


def put_batch(mesh: Mesh, batch: dict, micro_batches: int, spread: Spread = ALONE) -> dict[str, jax.Array]:
    """A process's rows of a global batch (`mesh.rows_of_process`) as global arrays [micro-batches, sequences, S].

    Each process's rows are a part of every micro-batch. A sequence that is cut over devices lies in zig-zag order.
    """
    part, parts = rows_of_process(mesh)
    sharding = NamedSharding(mesh, batch_spec(spread))

    def put(x):
        if spread.sequence_parts > 1:
            x = x[:, zigzag(x.shape[1], spread.sequence_parts)]
        x = x.reshape(micro_batches, -1, x.shape[-1])
        own = part * x.shape[1]

        def piece(index):
            rows = index[1].indices(x.shape[1] * parts)
            return x[index[0], rows[0] - own : rows[1] - own, index[2]]

        return jax.make_array_from_callback((x.shape[0], x.shape[1] * parts, x.shape[2]), sharding, piece)

    return {name: put(x) for name, x in batch.items()}
