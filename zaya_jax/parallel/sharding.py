"""The mesh axis that splits each dim of a weight: one table from logical axes (`zaya.param_axes`)
to mesh axes.

    specs = sharding.param_specs(model, precision, spread)     a tree of PartitionSpecs like the parameters

Other dims are whole on every device: norms, biases and scales are small; CCA's key and value
projections, its convolutions and the router are 3% of ZAYA1's weights, and two key-value heads
could not be split further anyway. `check` refuses a mesh that does not divide a model, before
anything is compiled.
"""

import math
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from zaya_jax.config import Config, Model, Precision, UserError
from zaya_jax.model import zaya
from zaya_jax.parallel.spread import FSDP_DIM, Spread, is_matrix


class Rule(NamedTuple):
    """These mesh axes split the dims of this logical axis."""

    logical: str
    axes: tuple[str, ...]
    reason: str


TABLE = (
    Rule(
        "expert",
        ("expert",),
        "whole experts stay where they are: tokens are fewer bytes than matrices",
    ),
    Rule(
        "heads", ("tensor",), "a head attends by itself; its columns of q and rows of o go with it"
    ),
    Rule("mlp", ("tensor",), "gate and up columns and down rows of one expert channel go together"),
    Rule("width", ("tensor",), "the same of a dense model's MLP"),
)
TSP_TABLE = (
    # tensor carries the sequence: experts are spread over it too, because each device has other
    # tokens there
    Rule(
        "expert",
        ("expert", "tensor"),
        "experts do not travel; with the sequence, tokens are spread over tensor",
    ),
    Rule("heads", ("tensor",), "held in parts, sent to the devices that hold the tokens"),
    Rule("width", ("tensor",), "a dense model's MLP: the same"),
)
FSDP = Rule(
    FSDP_DIM, ("data",), "the one dim that every matrix of a block has, and no other rule names"
)


def table(spread: Spread) -> tuple[Rule, ...]:
    """The rows that apply to a spread."""
    return TSP_TABLE if spread.tsp else TABLE


def param_specs(model: Model, precision: Precision, spread: Spread) -> Any:
    """A PartitionSpec for every weight, in the shape of the parameter tree."""
    return specs_of(zaya.param_axes(model, precision), spread)


def specs_of(axes: Any, spread: Spread) -> Any:
    """A PartitionSpec for every array of a tree of logical axes."""
    rules = {rule.logical: rule.axes for rule in table(spread)}

    def spec(names):
        dims = []
        matrix = is_matrix(names)
        for name in names:
            axes = rules.get(name or "", ())
            axes = FSDP.axes if matrix and spread.fsdp and name == FSDP.logical else axes
            axes = tuple(axis for axis in axes if getattr(spread, axis) > 1)
            dims.append(axes if len(axes) > 1 else axes[0] if axes else None)
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
            f"{where}.tensor={spread.tensor} with config.run.lora={config.run.lora}: low-rank"
            f" updates are of whole matrices; give the devices to {where}.data (with fsdp), expert"
            " or context"
        )
    found = (
        _misfit_of_dense(model, spread)
        if model.model_type == "dense"
        else _misfit_of_zaya(model, spread)
    )
    for name, length in (lengths or {}).items():
        found = found or _misfit_of_sequence(model, spread, name, length)
    if found is not None:
        raise UserError(found.replace("{mesh}", where))


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
        raise UserError(
            f"{problem}; set {name}={min(fits, key=lambda m: (abs(m - micro_batch), m))}"
        )
    raise UserError(f"{problem}, nor do steps of {common}; let data x expert divide {common}")


def _misfit_of_zaya(model: Model, spread: Spread) -> str | None:
    """The first thing that a spread cannot divide, with {mesh} for the config's group, and a way
    out."""
    kv, heads = model.num_key_value_heads, model.num_attention_heads
    whole = spread.expert * (spread.tensor if spread.tsp else 1)
    found = _undivided(
        "num_experts", model.num_experts, "expert x tensor" if spread.tsp else "expert", whole
    )
    found = found or _undivided("num_attention_heads", heads, "tensor", spread.tensor)
    if not found and kv % spread.tensor and spread.tensor % kv:
        return (
            f"{{mesh}}.tensor={spread.tensor} neither divides nor is a multiple of"
            f" model.num_key_value_heads={kv}; give it one of these"
        )
    if not found and not spread.tsp:
        found = _undivided(
            "moe_intermediate_size", model.moe_intermediate_size, "tensor", spread.tensor
        )
    return found or _misfit_of_fsdp(model, spread)


def _misfit_of_dense(model: Model, spread: Spread) -> str | None:
    for name in ("num_key_value_heads", "num_attention_heads", "intermediate_size"):
        found = _undivided(name, getattr(model, name), "tensor", spread.tensor)
        if found:
            return found
    if spread.expert > 1:
        return (
            f"{{mesh}}.expert={spread.expert}, but a dense model has no experts; set"
            " {mesh}.expert=1"
        )
    if spread.tsp and spread.ring:
        return (
            "{mesh}.ring is set with {mesh}.tsp, but a dense model's keys and values are gathered a"
            " few heads at a time there; set {mesh}.ring=False"
        )
    return _misfit_of_fsdp(model, spread)


def _misfit_of_fsdp(model: Model, spread: Spread) -> str | None:
    found = (
        _undivided("hidden_size", model.hidden_size, "data", spread.data) if spread.fsdp else None
    )
    return found and f"{found}, or set {{mesh}}.fsdp=False"


def _misfit_of_sequence(model: Model, spread: Spread, name: str, length: int) -> str | None:
    """Why a sequence of this length cannot be cut."""
    parts = spread.sequence_parts
    reach = 0 if model.model_type == "dense" else model.cca_time0 + model.cca_time1 - 2
    if parts > 1 and length % (2 * parts):
        axes = " x ".join(f"{{mesh}}.{axis}" for axis in spread.sequence_axes)
        text = f"{name}={length} does not divide into 2 x {parts} pieces ({axes} = {parts})"
    elif parts > 1 and length // (2 * parts) < reach:
        text = (
            f"{name}={length} over {parts} devices gives pieces of {length // (2 * parts)} tokens,"
            f" but the convolutions look {reach} tokens back"
        )
    elif length // parts % spread.heads:
        text = (
            f"{name}={length} over {parts} devices does not divide by"
            f" {{mesh}}.tensor={spread.tensor}, whose devices share its loss"
        )
    else:
        return None
    unit = 2 * parts * spread.heads
    fits = max(round(length / unit), -(-2 * parts * reach // unit), 1) * unit
    return f"{text}; before the first step of it set {name}={fits}, or give fewer devices"


def _undivided(name: str, size: int, axis: str, by: int) -> str | None:
    if size % by == 0:
        return None
    return (
        f"config.model.{name}={size} does not divide over {{mesh}}.{axis}={by}; give it a divisor"
        f" of {size}"
    )
