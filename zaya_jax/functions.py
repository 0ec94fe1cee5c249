"""The model as pure functions, for custom training loops; `zaya_jax.library` builds on them.

    params, balance = init(config, seed)
    logits = apply(config, params, balance, ids)
    value, grads = jax.value_and_grad(loss, argnums=1)(config, params, balance, ids, labels)

Parameters are a plain tree of arrays, the same on every mesh: weights as checkpoints hold them.
With `mesh` the functions run on all its devices, in the way that `config.mesh` says (fsdp, tsp,
ring). A batch that the mesh does not divide is padded, and the padding removed again. Letters: B
batch, S sequence, L layers, E experts, V vocab.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import chip
from pallas_kernels.attention import MASKED, softmax_scale
from pallas_kernels.attention.reference import mask_of
from zaya_jax.config import Config, UserError, shown
from zaya_jax.config import Mesh as Sizes
from zaya_jax.hardware import host
from zaya_jax.model import decode, zaya
from zaya_jax.model.placement import Devices, Placement
from zaya_jax.optim import chain
from zaya_jax.parallel import sharding
from zaya_jax.parallel.context import natural, zigzag
from zaya_jax.parallel.devices import over_mesh
from zaya_jax.parallel.mesh import BATCH_AXES
from zaya_jax.parallel.spread import AXES, NO_SPREAD, Spread, spread_of
from zaya_jax.training.loss import loss_of_tokens, run_model

IGNORED = -100  # a label that counts for nothing
REPLICATED = PartitionSpec()

Ids = Int[Array, "B S"]  # and labels and segments of them
Biases = Float[Array, "L E1"]  # which balance the experts


def init(config: Config, seed: int = 0, mesh: Mesh | None = None) -> tuple[dict, Biases]:
    """(parameters, balancing biases) as a run with this `run.seed` begins; on a mesh each device
    makes its own part.

    >>> params, balance = zj.init(model.config, seed=0)
    >>> params["embed"]["embedding"].shape, balance.shape
    ((264, 16), (2, 3))
    """
    if not isinstance(seed, int | np.integer) or not 0 <= seed < 2**32:
        raise UserError(f"seed={shown(seed)} must be a whole number from 0 to below {2**32}")
    with jax.default_matmul_precision(config.precision.matmul):
        target = chip.current() if mesh is None else chip.made_for(mesh)
        return _fresh(essence(config, mesh), mesh, target)(np.uint32(seed))


@functools.cache
def _fresh(config: Config, mesh: Mesh | None, target: chip.Chip) -> Callable:
    def fresh(seed: Array) -> tuple[dict, Biases]:
        params = zaya.init(config.model, jax.random.key(seed), config.precision)
        return params, zaya.init_balance(config.model)

    placed = None if mesh is None else shardings(config, mesh)
    places = placed and (placed["params"], placed["balance"]["bias"])
    return jax.jit(fresh, out_shardings=places, compiler_options=host.compiler_options(target))


def shardings(config: Config, mesh: Mesh) -> dict[str, Any]:
    """Where parameters and balancing biases lie on a mesh."""
    specs = sharding.param_specs(config.model, config.precision, spread_of(config.mesh, mesh.shape))
    params = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    return {"params": params, "balance": {"bias": NamedSharding(mesh, REPLICATED)}}


def apply(
    config: Config,
    params: dict,
    balance: Biases,
    ids: Ids,
    *,
    segments: Ids | None = None,
    mesh: Mesh | None = None,
) -> Float[Array, "B S V"]:
    """Next-token logits in float32. Tokens see those of their own segment; segment 0 is padding.

    >>> logits = jax.jit(zj.apply, static_argnums=0)(model.config, model.params, model.balance, ids)
    >>> logits.shape, bool(np.allclose(logits, model.logits(ids), atol=1e-5))
    ((2, 7, 264), True)
    """
    return forward(config, params, balance, ids, segments=segments, mesh=mesh)["logits"]


def forward(
    config: Config,
    params: dict,
    balance: Biases,
    ids: Ids,
    *,
    segments: Ids | None = None,
    mesh: Mesh | None = None,
    trace: bool = False,
    attention: bool = False,
) -> dict[str, Array]:
    """`logits`; with `trace` the residual stream after each layer and experts' outputs [L, B, S,
    D], router's logits and p [L, B, S, E + 1]; with `attention` heads' weights of tokens [L, B, H,
    S, S] (one device, no linear ones).
    """
    model, precision = config.model, config.precision
    spread = _spread(config, mesh)
    devices = _RecordingDevices() if attention else None

    def run(params: dict, balance: Biases, batch: dict[str, Any]) -> dict[str, Array]:
        params, out = run_model(
            config, spread, params, balance, batch, devices=devices, trace=trace
        )
        results = {"logits": zaya.logits(model, params, out.hidden, precision)}
        # a cut sequence's chunks are rows inside
        shape = (model.num_hidden_layers, *batch["tokens"].shape, -1)
        for name in ("hidden_states", "router_logits", "expert_outputs"):
            value = getattr(out, name)
            if value is not None:
                results[name] = value.reshape(shape)
        if trace and out.router_logits is not None:
            results["router_probs"] = jax.nn.softmax(results["router_logits"], axis=-1)
        return results | (out.cache or {})

    sequences = (BATCH_AXES, spread.sequence_axes or None)
    specs = {"logits": PartitionSpec(*sequences)}
    if trace:
        names = ["hidden_states"]
        if model.model_type == "zaya":
            names += ["router_logits", "router_probs", "expert_outputs"]
        specs |= dict.fromkeys(names, PartitionSpec(None, *sequences))
    batch = _batch(config, spread, ids, segments)
    results = _on(config, mesh, run, specs, params, balance, batch)
    if mesh is None:
        return results
    # Without the padding, and on devices that share a sequence in its own order.
    rows, columns = ids.shape
    order = natural(batch["tokens"].shape[1], spread.sequence_parts)
    for name, x in results.items():
        if spread.sequence_parts > 1:
            x = jnp.take(x, order, axis=-2)
        results[name] = x[..., :rows, :columns, :]
    return results


def loss(
    config: Config,
    params: dict,
    balance: Biases,
    ids: Ids,
    labels: Ids,
    *,
    segments: Ids | None = None,
    shifted: bool = False,
    mesh: Mesh | None = None,
) -> Float[Array, ""]:
    """Mean cross entropy in nats, without `optim.z_loss`. Labels stand at their own tokens, as ids
    do; -100 counts for nothing.

    With `shifted` a label stands at the token before it, as a training batch's targets do. Without,
    the label of a segment's first token counts for nothing.

    >>> value, grads = jax.value_and_grad(zj.loss, argnums=1)(model.config, model.params, model.balance, ids, ids)
    >>> jax.tree.structure(grads) == jax.tree.structure(model.params)
    True
    """
    plain = dataclasses.replace(config, optim=dataclasses.replace(config.optim, z_loss=0.0))
    return training_loss(
        plain, params, balance, ids, labels, segments=segments, shifted=shifted, mesh=mesh
    )[0]


def training_loss(
    config: Config,
    params: dict,
    balance: Biases,
    ids: Ids,
    labels: Ids,
    *,
    segments: Ids | None = None,
    shifted: bool = False,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, ""], Biases]:
    """(What a training step minimizes, `optim.z_loss` included; each layer's tokens of each class,
    for `zj.balance`).

    >>> value, counts = zj.training_loss(model.config, model.params, model.balance, ids, ids)
    >>> counts.sum(-1).tolist()
    [14.0, 14.0]
    """
    spread = _spread(config, mesh)
    objective = loss_of_tokens(config, spread)

    def run(params: dict, balance: Biases, batch: dict[str, Any]) -> tuple[Array, Array]:
        def summed(x: Array, axes: tuple[str, ...]) -> Array:
            return x if mesh is None else jax.lax.psum(x, axes)

        targets = summed(objective.count(batch), spread.token_axes)
        value, (_, sums) = objective.value(params, balance, batch, jnp.maximum(targets, 1.0))
        return summed(value, AXES), summed(sums["counts"], spread.token_axes)

    batch = _batch(config, spread, ids, segments, to_targets(labels, segments, shifted))
    return _on(config, mesh, run, (REPLICATED, REPLICATED), params, balance, batch)


def optimizer(config: Config, rows: Mapping[str, str] | None = None) -> chain.Optimizer:
    """Muon and AdamW as `config.optim` says, for one device: `init()`, then `apply(grads, state,
    params, lr=lr)` gives new parameters and the new state.

    `rows` say how weights of one's own layers are trained: a pattern of their paths, and "muon" or
    "adamw".

    >>> zj.optimizer(model.config, {"layers/router/mine/.*": "muon"}).init().figures["grad_norm"]
    Array(0., dtype=float32)
    """
    more_rows = tuple(f"{pattern}={method}" for pattern, method in (rows or {}).items())
    return chain.build(
        dataclasses.replace(config.optim, rows=config.optim.rows + more_rows),
        config.precision,
        zaya.abstract(config.model, config.precision),
        skip_update=config.run.skip_update,
        spike_deviations=config.run.spike_deviations,
    )


def scores(
    config: Config,
    params: dict,
    balance: Biases,
    ids: Ids,
    labels: Ids,
    *,
    segments: Ids | None = None,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, "B S"], Bool[Array, "B S"]]:
    """Each label's log-probability in nats, and whether it is the likeliest; labels stand at the
    token before.

    Logits exist for a chunk of tokens at a time. Labels below 0 give 0 and False.

    >>> log_probs, likeliest = zj.scores(model.config, model.params, model.balance, ids[:, :-1], ids[:, 1:])
    >>> bool(np.allclose(-log_probs.mean(), model.loss(ids, ids), atol=1e-5)), likeliest.shape
    (True, (2, 6))
    """
    model, precision = config.model, config.precision
    spread = _spread(config, mesh)

    def run(params: dict, balance: Biases, batch: dict[str, Any]) -> tuple[Array, Array]:
        params, out = run_model(config, spread, params, balance, batch)
        hidden, targets = out.hidden.reshape(-1, model.hidden_size), batch["targets"].reshape(-1)
        by_token = zaya.scores(model, params, hidden, targets, precision)
        log_probs, likeliest = (x.reshape(batch["tokens"].shape) for x in by_token)
        counted = batch["loss_mask"] > 0
        return jnp.where(counted, log_probs, 0.0), counted & likeliest

    batch = _batch(config, spread, ids, segments, labels)
    specs = (PartitionSpec(BATCH_AXES, spread.sequence_axes or None),) * 2
    results = _on(config, mesh, run, specs, params, balance, batch)
    if spread.sequence_parts > 1:
        results = [x[:, natural(x.shape[1], spread.sequence_parts)] for x in results]
    return tuple(x[: ids.shape[0], : ids.shape[1]] for x in results)


def lens(config: Config, params: dict, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
    """The logits of a residual stream after any layer."""
    with jax.default_matmul_precision(config.precision.matmul):
        return zaya.logit_lens(config.model, params, hidden, config.precision)


def to_targets(labels: Any, segments: Any, shifted: bool, xp: Any = jnp) -> Any:
    """Labels at the token before their own, -100 for those that do not count; `xp` is NumPy for
    arrays on the host."""
    if not shifted:
        labels = xp.pad(labels[:, 1:], ((0, 0), (0, 1)), constant_values=IGNORED)
        if segments is not None:
            after = xp.pad(segments[:, 1:], ((0, 0), (0, 1)))
            labels = xp.where(segments == after, labels, IGNORED)
    return labels if segments is None else xp.where(segments > 0, labels, IGNORED)


def _spread(config: Config, mesh: Mesh | None) -> Spread:
    return NO_SPREAD if mesh is None else spread_of(config.mesh, mesh.shape)


def _on(
    config: Config,
    mesh: Mesh | None,
    run: Callable,
    out_specs: Any,
    params: dict,
    balance: Biases,
    batch: dict[str, Any],
) -> Any:
    """run(params, balance, batch), on a mesh with each device's own parts."""
    target = chip.made_for(params if mesh is None else mesh).taking(config.kernels)
    spread = _spread(config, mesh)
    of_params = sharding.param_specs(config.model, config.precision, spread)
    of_batch = PartitionSpec(BATCH_AXES, spread.sequence_axes or None)
    in_specs = of_params, REPLICATED, of_batch
    mapped = over_mesh(run, config.precision, target, mesh, in_specs, out_specs)
    return mapped(params, balance, batch)


def _batch(
    config: Config, spread: Spread, ids: Ids, segments: Ids | None, labels: Ids | None = None
) -> dict[str, Any]:
    """A micro-batch as a training step gets it; on a mesh padded until the mesh divides it."""
    rows, columns = ids.shape
    if segments is None and spread != NO_SPREAD:
        segments = jnp.ones_like(ids)
    positions = None if segments is None else _positions(segments)
    batch: dict[str, Any] = {"tokens": ids, "segment_ids": segments, "positions": positions}
    if labels is not None:
        counted = labels >= 0
        batch["targets"] = jnp.where(counted, labels, 0)
        batch["loss_mask"] = counted.astype(jnp.float32)
    if spread == NO_SPREAD:
        return batch
    parts, shards = spread.sequence_parts, spread.data * spread.expert
    unit, shortest = spread.head_shards, columns
    if parts > 1:
        unit *= 2 * parts
        if config.model.model_type == "zaya":
            # a chunk must hold what convolutions look back
            reach = config.model.cca_time0 + config.model.cca_time1 - 2
            shortest = max(columns, 2 * parts * reach)
    more_rows = -rows % shards
    more_columns = shortest + -shortest % unit - columns
    batch = {name: jnp.pad(x, ((0, more_rows), (0, more_columns))) for name, x in batch.items()}
    if parts > 1:
        order = zigzag(columns + more_columns, parts)
        batch = {name: x[:, order] for name, x in batch.items()}
    return batch


def _positions(segments: Ids) -> Ids:
    """Each token's index in its segment."""
    place = jnp.broadcast_to(jnp.arange(segments.shape[1]), segments.shape)
    begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
    return place - jax.lax.cummax(jnp.where(begins, place, 0), axis=1)


# ################################################################################################
# Attention's weights
# ##################################################################################################


@dataclasses.dataclass(frozen=True)
class _RecordingPlacement(Placement):
    """Whole sequences whose layers hand out attention's weights, by the operator's definition."""

    def _softmax(self, q: Array, k: Array, v: Array) -> tuple[jax.Array, dict]:
        out, _ = super()._softmax(q, k, v)
        (batch, length, heads, channels), num_kv = q.shape, k.shape[2]
        grouped = q.reshape(batch, length, num_kv, heads // num_kv, channels)
        scores = jnp.einsum("bqkgc,bjkc->bkgqj", grouped, k, preferred_element_type=jnp.float32)
        ids = self.visible
        mask = mask_of(length, length, 0, 0, self.window, length, ids, ids)
        scores = jnp.where(mask, scores * softmax_scale(channels), MASKED)
        weights = jnp.where(mask, jax.nn.softmax(scores, axis=-1), 0.0)
        seen = {"attention": weights.reshape(batch, heads, length, length)}
        return out, seen | {"queries": q, "keys": k, "values": v}


class _RecordingDevices(Devices):
    """One device whose layers hand out attention's weights."""

    def sequences(
        self, length: int, segments: Array | None, mask: Array | None, weights: Any
    ) -> Placement:
        return _RecordingPlacement(segments, mask, weights)


# ################################################################################################
# For callers outside a program
# ##################################################################################################


def roomy(rows: int, columns: int, longest: int) -> tuple[int, int]:
    """One of a few shapes, with room for these rows and columns: each shape is a program, which
    takes seconds to compile.

    Rows are a power of two, columns one of decode.SHORT_PIECES or at most a third more, and at most
    `longest`.
    """
    width = next(
        (size for size in decode.SHORT_PIECES if columns <= size),
        rounded(columns, decode.SHORT_PIECES[-1]),
    )
    return power_of_two(rows), min(width, longest)


def rounded(length: int, shortest: int) -> int:
    """The next of `shortest` (a power of two), 3/2 of it, 2, 3, 4, 6, ... times it: at most a third
    is padding."""
    above = power_of_two(max(length, shortest))
    between = above * 3 // 4
    return between if length <= between and above > shortest else above


def power_of_two(number: int) -> int:
    """The least power of two that is not below this number; at least 1."""
    return 1 << max(number - 1, 0).bit_length()


def essence(config: Config, mesh: Mesh | None) -> Config:
    """The part of a config that the programs here depend on, so that models equal in it share their
    programs."""
    return Config(
        model=config.model,
        precision=config.precision,
        kernels=config.kernels,
        remat=config.remat,
        mesh=Sizes() if mesh is None else config.mesh,
    )


jitted = {
    "lens": jax.jit(lens, static_argnames=("config",)),
    "forward": jax.jit(forward, static_argnames=("config", "mesh", "trace", "attention")),
    "scores": jax.jit(scores, static_argnames=("config", "mesh")),
    "loss": jax.jit(loss, static_argnames=("config", "mesh", "shifted")),
    "loss_and_grads": jax.jit(
        jax.value_and_grad(loss, argnums=1), static_argnames=("config", "mesh", "shifted")
    ),
}
