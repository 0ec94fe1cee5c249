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
from zaya_jax.config import Config
from zaya_jax.model import zaya
from zaya_jax.model.placement import Devices, TokenRows
from zaya_jax.model.scan_hooks import PLAIN, ScanHooks
from zaya_jax.parallel.devices import MeshDevices
from zaya_jax.parallel.spread import Spread, gather_over_data, share_of_tokens


@dataclasses.dataclass(frozen=True)
class Objective:
    """What a run minimizes, as a mean over the global batch.

    value(params, bias, micro-batch, total, hooks, frozen) → (loss, (its parts, sums over tokens)).
    The loss and its parts are divided by `total`, the number of what they are a mean over. The sums
    have a row for each layer: `counts`, its tokens of each class, and what its modules declare
    (`TokenSum`). On a mesh each device returns its share of all of them. `hooks` say where layers
    find weights and where gradients go (`model.scan_hooks`). With `frozen` weights, params are
    their adapters (`model.lora`).
    """

    unit: str  # what it is the mean over, as a figure's name
    count: Callable[[dict], jax.Array]  # a device's micro-batches → its number of these
    value: Callable


def loss_of_tokens(config: Config, spread: Spread) -> Objective:
    """The cross entropy of all real targets, `loss`, and `optim.z_loss` times the mean of log² Z,
    `z`."""
    model, z_weight = config.model, config.optim.z_loss

    def value(params, bias, batch, total, hooks=PLAIN, frozen=None):
        params, out = run_model(config, spread, params, bias, batch, hooks=hooks, frozen=frozen)
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

    return Objective("target_tokens", lambda batch: jnp.sum(batch["loss_mask"]), value)


def run_model(
    config: Config,
    spread: Spread,
    params: Any,
    bias: jax.Array,
    batch: dict,
    *,
    hooks: ScanHooks = PLAIN,
    frozen: Any = None,
    devices: Devices | None = None,
    trace: bool = False,
) -> tuple[dict, zaya.Output]:
    """(the parameters outside the layers, the output) of a micro-batch, inside a program.

    With `frozen` weights, params are their adapters (`model.lora`), or None.
    """
    if frozen:
        adapters = trees.flat(params["layers"], "/") if params else {}
        hooks = dataclasses.replace(hooks, beside=adapters | trees.flat(frozen["scales"], "/"))
        params = frozen["params"]
    if spread.fsdp:  # layers gather their own, one after the other
        axes = zaya.param_axes(config.model, config.precision)
        outside = {name: part for name, part in params.items() if name != "layers"}
        names = {name: axes[name] for name in outside}
        params = params | jax.tree.map(gather_over_data, outside, names)
    out = zaya.apply(
        config.model,
        params,
        bias,
        TokenRows(batch["tokens"], batch["segment_ids"], batch["positions"]),
        precision=config.precision,
        remat=config.remat,
        devices=devices or MeshDevices(spread),
        hooks=hooks,
        trace=trace,
    )
    return params, out
