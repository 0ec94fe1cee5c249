"""The mesh axis that splits each dim of a weight: one table from logical axes (`zaya.param_axes`)
to mesh axes.

    specs = sharding.param_specs(model, precision, spread)     a tree of PartitionSpecs like the parameters

Other dims are whole on every device: norms, biases and scales are small; CCA's key and value
projections, its convolutions and the router are 3% of ZAYA1's weights, and two key-value heads
could not be split further anyway. `check` refuses a mesh that does not divide a model, before
anything is compiled.
"""

import math
from typing import Any

import jax
from jax.sharding import PartitionSpec

from zaya_jax.config import Config, Model, Precision, UserError
from zaya_jax.model import zaya
from zaya_jax.parallel.spread import FSDP_DIM, TENSOR, Spread, is_matrix


def axes_that_split(spread: Spread) -> dict[str, tuple[str, ...]]:
    """The mesh axes that split the dims of each logical axis."""
    return {
        # Whole experts stay where they are: tokens are fewer bytes than matrices.
        "expert": spread.expert_axes,
        # A head attends by itself; its columns of q and rows of o go with it. With TSP they lie in
        # parts, and are sent to the devices that have the tokens.
        "heads": (TENSOR,),
        # Gate and up columns and down rows of one expert channel go together; so do a dense MLP's.
        # TSP cuts no expert.
        "mlp": () if spread.tsp else (TENSOR,),
        "width": (TENSOR,),
    }


def param_specs(model: Model, precision: Precision, spread: Spread) -> Any:
    """A PartitionSpec for every weight, in the shape of the parameter tree."""
    return specs_of(zaya.param_axes(model, precision), spread)


def specs_of(axes: Any, spread: Spread) -> Any:
    """A PartitionSpec for every array of a tree of logical axes."""
    table = axes_that_split(spread)

    def spec(names):
        dims = []
        for name in names:
            split = table.get(name, ())
            if spread.fsdp and name == FSDP_DIM and is_matrix(names):
                split = ("data",)
            split = tuple(axis for axis in split if getattr(spread, axis) > 1)
            dims.append(split[0] if len(split) == 1 else split or None)
        return PartitionSpec(*dims) if any(dims) else PartitionSpec()

    return jax.tree.map(spec, axes, is_leaf=lambda x: isinstance(x, tuple))


def check(
    config: Config,
    spread: Spread,
    *,
    lengths: dict[str, int] | None = None,
    where: str = "config.mesh",
) -> None:
    """UserError if model or sequences do not divide over their axes.

    `lengths` are sequence lengths by their config keys, `where` is the group of the sizes.
    """
    model = config.model
    if config.run.lora and spread.tensor > 1:
        raise UserError(
            f"{where}.tensor={spread.tensor} with config.run.lora={config.run.lora}: LoRA does not"
            f" support tensor parallelism; give the devices to {where}.data (with fsdp), expert or"
            " context"
        )
    check_kind = _check_dense if model.model_type == "dense" else _check_zaya
    check_kind(model, spread, where)
    if spread.fsdp:
        other = f", or set {where}.fsdp=False"
        _check_divides(model, "hidden_size", f"{where}.data", spread.data, other)
    for name, length in (lengths or {}).items():
        _check_length(model, spread, name, length, where)


def check_batch(
    spread: Spread,
    sizes: tuple[int, ...],
    micro_batch: int,
    *,
    where: str = "config.mesh",
    name: str = "config.data.micro_batch",
) -> None:
    """UserError unless every micro-batch of steps of these sizes divides over the devices that
    share it."""
    shards, common = spread.data * spread.expert, math.gcd(*sizes)
    if micro_batch % shards == 0:
        return
    problem = (
        f"a micro-batch of {micro_batch} sequences ({name}) does not divide over {shards} devices "
        f"(data x expert of {where})"
    )
    fits = [m for m in range(shards, common + 1, shards) if common % m == 0]
    if fits:
        nearest = min(fits, key=lambda m: (abs(m - micro_batch), m))
        raise UserError(f"{problem}; set {name}={nearest}")
    raise UserError(
        f"{problem}, and neither does a step's batch of {common} sequences; choose data x expert to"
        f" divide {common}"
    )


def _check_zaya(model: Model, spread: Spread, where: str) -> None:
    kv, tensor = model.num_key_value_heads, spread.tensor
    if spread.tsp:
        devices = spread.expert * tensor
        _check_divides(model, "num_experts", f"{where}.expert x tensor", devices)
    else:
        _check_divides(model, "num_experts", f"{where}.expert", spread.expert)
    _check_divides(model, "num_attention_heads", f"{where}.tensor", tensor)
    if kv % tensor and tensor % kv:
        raise UserError(
            f"{where}.tensor={tensor} neither divides nor is a multiple of"
            f" model.num_key_value_heads={kv}; choose a divisor or a multiple of {kv}"
        )
    _check_divides(model, "moe_intermediate_size", f"{where}.tensor", spread.head_shards)


def _check_dense(model: Model, spread: Spread, where: str) -> None:
    for name in ("num_key_value_heads", "num_attention_heads", "intermediate_size"):
        _check_divides(model, name, f"{where}.tensor", spread.tensor)
    if spread.expert > 1:
        raise UserError(
            f"{where}.expert={spread.expert}, but a dense model has no experts; set"
            f" {where}.expert=1"
        )
    if spread.tsp and spread.ring:
        raise UserError(
            f"{where}.ring is set with {where}.tsp, but TSP gathers a dense model's keys and values"
            f" a few heads at a time; set {where}.ring=False"
        )


def _check_length(model: Model, spread: Spread, name: str, length: int, where: str) -> None:
    """UserError if a sequence of this length cannot be cut."""
    parts, shards = spread.sequence_parts, spread.head_shards
    reach = 0 if model.model_type == "dense" else model.cca_time0 + model.cca_time1 - 2
    least = 2 * parts * reach
    in_pieces = parts == 1 or (length % (2 * parts) == 0 and length >= least)
    if in_pieces and length // parts % shards == 0:
        return
    unit = 2 * parts * shards
    fits = max(round(length / unit), -(-least // unit), 1) * unit
    raise UserError(
        f"{name}={length} does not divide into 2 x {parts} pieces of at least {reach} tokens, which"
        f" the convolutions look back, and each device's over {shards} that share its loss"
        f" ({where}.context={spread.context}, tensor={spread.tensor}); set {name}={fits} (before the"
        " run starts), or use fewer devices"
    )


def _check_divides(model: Model, name: str, axis: str, by: int, other: str = "") -> None:
    size = getattr(model, name)
    if size % by:
        raise UserError(
            f"config.model.{name}={size} does not divide over {axis}={by}; give it a divisor of"
            f" {size}{other}"
        )
