"""The mesh axis that splits each dim of a weight: one table from logical axes (`zaya.param_axes`)
to mesh axes.

    specs = sharding.param_specs(model, precision, spread)     a tree of PartitionSpecs like the parameters

Other dims are whole on every device: norms, biases and scales are small; CCA's key and value
projections, its convolutions and the router are 3% of ZAYA1's weights, and two key-value heads
could not be split further anyway. `check` refuses a mesh that does not divide a model, before
anything is compiled.
"""

import math
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import PartitionSpec

from zaya_jax.config import Config, Model, Precision, UserError
from zaya_jax.model import zaya
from zaya_jax.parallel.spread import FSDP_DIM, Spread, is_matrix

# The mesh axes that split the dims of each logical axis.
TABLE: dict[str, tuple[str, ...]] = {
    # Whole experts stay where they are: tokens are fewer bytes than matrices.
    "expert": ("expert",),
    # A head attends by itself; its columns of q and rows of o go with it.
    "heads": ("tensor",),
    # Gate and up columns and down rows of one expert channel go together; so do a dense MLP's.
    "mlp": ("tensor",),
    "width": ("tensor",),
}
TSP_TABLE: dict[str, tuple[str, ...]] = {
    # Experts do not travel. With the sequence, tokens are spread over tensor: each device has other
    # tokens there, so experts are spread over it too.
    "expert": ("expert", "tensor"),
    # Held in parts, sent to the devices that hold the tokens.
    "heads": ("tensor",),
    "width": ("tensor",),
}
FSDP_AXES = ("data",)  # of FSDP_DIM, which every matrix of a block has, and no table names


def param_specs(model: Model, precision: Precision, spread: Spread) -> Any:
    """A PartitionSpec for every weight, in the shape of the parameter tree."""
    return specs_of(zaya.param_axes(model, precision), spread)


def specs_of(axes: Any, spread: Spread) -> Any:
    """A PartitionSpec for every array of a tree of logical axes."""
    table = TSP_TABLE if spread.tsp else TABLE

    def spec(names):
        dims = []
        for name in names:
            split = table.get(name, ())
            if spread.fsdp and name == FSDP_DIM and is_matrix(names):
                split = FSDP_AXES
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
    for problem in _problems(config, spread, lengths or {}, where):
        raise UserError(problem)


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


def _problems(config: Config, spread: Spread, lengths: dict[str, int], where: str) -> Iterator[str]:
    """Everything that a spread cannot divide, each with a way out."""
    model = config.model
    if config.run.lora and spread.tensor > 1:
        yield (
            f"{where}.tensor={spread.tensor} with config.run.lora={config.run.lora}: LoRA does not"
            f" support tensor parallelism; give the devices to {where}.data (with fsdp), expert or"
            " context"
        )
    of_model = _problems_of_dense if model.model_type == "dense" else _problems_of_zaya
    yield from of_model(model, spread, where)
    if spread.fsdp:
        for problem in _not_divisible(model, "hidden_size", f"{where}.data", spread.data):
            yield f"{problem}, or set {where}.fsdp=False"
    for name, length in lengths.items():
        yield from _problems_of_length(model, spread, name, length, where)


def _problems_of_zaya(model: Model, spread: Spread, where: str) -> Iterator[str]:
    kv, tensor = model.num_key_value_heads, spread.tensor
    if spread.tsp:
        devices = spread.expert * tensor
        yield from _not_divisible(model, "num_experts", f"{where}.expert x tensor", devices)
    else:
        yield from _not_divisible(model, "num_experts", f"{where}.expert", spread.expert)
    yield from _not_divisible(model, "num_attention_heads", f"{where}.tensor", tensor)
    if kv % tensor and tensor % kv:
        yield (
            f"{where}.tensor={tensor} neither divides nor is a multiple of"
            f" model.num_key_value_heads={kv}; choose a divisor or a multiple of {kv}"
        )
    if not spread.tsp:
        yield from _not_divisible(model, "moe_intermediate_size", f"{where}.tensor", tensor)


def _problems_of_dense(model: Model, spread: Spread, where: str) -> Iterator[str]:
    for name in ("num_key_value_heads", "num_attention_heads", "intermediate_size"):
        yield from _not_divisible(model, name, f"{where}.tensor", spread.tensor)
    if spread.expert > 1:
        yield (
            f"{where}.expert={spread.expert}, but a dense model has no experts; set"
            f" {where}.expert=1"
        )
    if spread.tsp and spread.ring:
        yield (
            f"{where}.ring is set with {where}.tsp, but TSP gathers a dense model's keys and values"
            f" a few heads at a time; set {where}.ring=False"
        )


def _problems_of_length(
    model: Model, spread: Spread, name: str, length: int, where: str
) -> Iterator[str]:
    """Why a sequence of this length cannot be cut."""
    parts = spread.sequence_parts
    reach = 0 if model.model_type == "dense" else model.cca_time0 + model.cca_time1 - 2
    unit = 2 * parts * spread.head_shards
    fits = max(round(length / unit), -(-2 * parts * reach // unit), 1) * unit
    advice = f"set {name}={fits} (before the run starts), or use fewer devices"
    if parts > 1 and length % (2 * parts):
        axes = " x ".join(f"{where}.{axis}" for axis in spread.sequence_axes)
        yield f"{name}={length} does not divide into 2 x {parts} pieces ({axes} = {parts}); {advice}"
    if parts > 1 and length // (2 * parts) < reach:
        yield (
            f"{name}={length} over {parts} devices gives pieces of {length // (2 * parts)} tokens,"
            f" but the convolutions look {reach} tokens back; {advice}"
        )
    if length // parts % spread.head_shards:
        yield (
            f"{name}={length} over {parts} devices does not divide by"
            f" {where}.tensor={spread.tensor}, whose devices share its loss; {advice}"
        )


def _not_divisible(model: Model, name: str, axis: str, by: int) -> Iterator[str]:
    size = getattr(model, name)
    if size % by:
        yield (
            f"config.model.{name}={size} does not divide over {axis}={by}; give it a divisor of"
            f" {size}"
        )
