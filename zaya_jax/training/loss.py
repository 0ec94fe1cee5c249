"""What a step minimizes: the cross entropy of tokens, or of pairs of answers (`preference`).

Of an `Objective`, a step and an evaluation sum the `value` over micro-batches and devices, and the
`count` of what it is a mean over.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.cross_entropy import cross_entropy
from zaya_jax import trees
from zaya_jax.config import Config, Model
from zaya_jax.model import zaya
from zaya_jax.model.placement import TokenRows
from zaya_jax.model.scan_hooks import PLAIN, ScanHooks
from zaya_jax.parallel.devices import MeshDevices
from zaya_jax.parallel.spread import NO_SPREAD, Spread, gather_over_data, share_of_tokens


@dataclasses.dataclass(frozen=True)
class Objective:
    """What a run minimizes, as a mean over the global batch."""

    unit: str  # what it is the mean over, as a figure's name
    count: Callable[[dict], jax.Array]  # a device's micro-batches → its number of these
    value: Callable  # see `make_loss`


def loss_of_tokens(config: Config, spread: Spread) -> Objective:
    """The cross entropy of all targets."""
    return Objective(
        "target_tokens",
        lambda batch: jnp.sum(batch["loss_mask"]),
        make_loss(config, config.model, spread),
    )


def make_pass(config: Config, model: Model, spread: Spread) -> Callable:
    """run(params, bias, micro-batch, hooks, frozen) → (the parameters outside the layers, the
    output).

    With `frozen` weights, params are their adapters (`model.lora`), or None.
    """
    axes = zaya.param_axes(model, config.precision)

    def run(
        params: Any, bias: jax.Array, batch: dict, hooks: ScanHooks = PLAIN, frozen: Any = None
    ) -> tuple[dict, zaya.Output]:
        if frozen:
            adapters = trees.flat(params["layers"], "/") if params else {}
            hooks = dataclasses.replace(hooks, beside=adapters | trees.flat(frozen["scales"], "/"))
            params = frozen["params"]
        if spread.fsdp:
            params = whole_outside(params, axes)
        rows = TokenRows(batch["tokens"], batch["segment_ids"], batch["positions"])
        out = zaya.apply(
            model,
            params,
            bias,
            rows,
            precision=config.precision,
            remat=config.remat,
            devices=MeshDevices(spread),
            hooks=hooks,
        )
        return params, out

    return run


def make_loss(config: Config, model: Model, spread: Spread = NO_SPREAD) -> Callable:
    """value(params, bias, micro-batch, total, hooks, frozen) → (loss, (its parts, sums over
    tokens)).

    The parts are the cross entropy `loss` and `z`, the mean of log² Z; like the loss itself, which
    adds them, they are divided by `total`, the number of real targets. The sums have a row for each
    layer: `counts`, its tokens of each class, and what its modules declare (`TokenSum`). On a mesh
    each device returns its share of all of them. `hooks` say where layers find weights and where
    gradients go (`model.scan_hooks`). With `frozen` weights, params are their adapters
    (`model.lora`).
    """
    z_weight = config.optim.z_loss
    run = make_pass(config, model, spread)

    def value(params, bias, batch, total, hooks=PLAIN, frozen=None):
        params, out = run(params, bias, batch, hooks, frozen)
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
        parts = {"loss": loss - z_weight * z, "z": z}
        return loss, (parts, {"counts": out.counts, **out.sums})

    return value


def whole_outside(params: dict, axes: dict) -> dict:
    """With fsdp: gathers all weights but those of the layers, which gather their own, one after the
    other."""
    outer = {name: part for name, part in params.items() if name != "layers"}
    names = {name: axes[name] for name in outer}
    return {**jax.tree.map(gather_over_data, outer, names), "layers": params["layers"]}
