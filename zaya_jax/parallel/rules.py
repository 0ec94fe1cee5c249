"""Which mesh axis each dim of a weight lies over: one table from logical axes (`zaya.param_axes`) to mesh axes.

    specs = rules.param_specs(model, precision, spread)     a tree of PartitionSpecs like the parameters

What no row names is whole on every device: norms, biases and scales are small; CCA's key and value projections, its
convolutions and the router are 3% of ZAYA1's weights, and two key-value heads would not go round more devices anyway.
`check` refuses, before anything is compiled, what a mesh cannot divide.
"""

from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from zaya_jax.config import Config, Model, Precision, UserError
from zaya_jax.model import zaya
from zaya_jax.parallel.spread import FSDP_DIM, Spread, is_matrix


class Rule(NamedTuple):
    """Dims of this logical axis lie over these mesh axes."""

    logical: str
    axes: tuple[str, ...]
    reason: str


TABLE = (
    Rule("expert", ("expert",), "whole experts stay where they are: tokens are fewer bytes than matrices"),
    Rule("heads", ("tensor",), "a head attends by itself; its columns of q and rows of o go with it"),
    Rule("mlp", ("tensor",), "gate and up columns and down rows of one expert channel go together"),
    Rule("width", ("tensor",), "the same of a dense model's MLP"),
)
TSP_TABLE = (  # tensor carries the sequence: experts are spread over it too, since each device has other tokens there
    Rule(
        "expert",
        ("expert", "tensor"),
        "experts do not travel; with the sequence, tokens are spread over tensor",
    ),
    Rule("heads", ("tensor",), "held in parts, sent round to the devices that hold the tokens"),
    Rule("width", ("tensor",), "a dense model's MLP: likewise"),
)
FSDP = Rule(FSDP_DIM, ("data",), "the one dim that every matrix of a block has, and no other rule names")


def table(spread: Spread) -> tuple[Rule, ...]:
    """The rows that hold for a spread."""
    return TSP_TABLE if spread.tsp else TABLE


def param_specs(model: Model, precision: Precision, spread: Spread) -> Any:
    """A PartitionSpec for every weight, in the shape of the parameter tree."""
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

    return jax.tree.map(spec, zaya.param_axes(model, precision), is_leaf=lambda x: isinstance(x, tuple))


def arrange(params: Any, parts: int, inverse: bool = False) -> Any:
    """A tree like the parameters with gate and up columns in the order in which a cut in `parts` keeps pairs together.

    [gate | up] becomes [gate 0 | up 0 | gate 1 | up 1 | ..]. It is how a run with split expert widths holds these
    matrices; checkpoints hold [gate | up].
    """

    def one(path, x):
        if parts == 1 or path[-1].key != "gate_up":
            return x
        shape = (parts, 2) if inverse else (2, parts)
        return x.reshape(*x.shape[:-1], *shape, -1).swapaxes(-2, -3).reshape(x.shape)

    return jax.tree_util.tree_map_with_path(one, params)


def check(config: Config, spread: Spread) -> None:
    """UserError where a dim of the model does not divide over its axis, with the nearest size that does."""
    model = config.model
    if model.model_type == "dense":
        _check_dense(model, spread)
        return
    if spread.tsp:
        axes = "expert x tensor"
    else:
        axes = "expert"
    experts = spread.expert * (spread.tensor if spread.tsp else 1)
    _divides("model.num_experts", model.num_experts, f"mesh.{axes}", experts)
    _divides("model.num_attention_heads", model.num_attention_heads, "mesh.tensor", spread.tensor)
    kv = model.num_key_value_heads
    if kv % spread.tensor and spread.tensor % kv:
        raise UserError(
            f"config.mesh.tensor={spread.tensor} neither divides nor is a multiple of model.num_key_value_heads={kv}; "
            f"set mesh.tensor to {_nearest(kv, spread.tensor)} or {kv * max(1, round(spread.tensor / kv))}"
        )
    if not spread.tsp:
        _divides("model.moe_intermediate_size", model.moe_intermediate_size, "mesh.tensor", spread.tensor)
    if spread.fsdp:
        _divides("model.hidden_size", model.hidden_size, "mesh.data (with mesh.fsdp)", spread.data)


def _check_dense(model: Model, spread: Spread) -> None:
    for name in ("num_key_value_heads", "num_attention_heads", "intermediate_size"):
        _divides(f"model.{name}", getattr(model, name), "mesh.tensor", spread.tensor)
    if spread.expert > 1:
        raise UserError(
            f"config.mesh.expert={spread.expert}, but a dense model has no experts; use mesh.data for it"
        )
    if spread.tsp and spread.ring:
        raise UserError(
            "config.mesh.ring is set with mesh.tsp, but a dense model's keys and values are gathered a few heads at a "
            "time there; leave mesh.ring off"
        )
    if spread.fsdp:
        _divides("model.hidden_size", model.hidden_size, "mesh.data (with mesh.fsdp)", spread.data)


def check_sequence(model: Model, spread: Spread, seq_len: int) -> None:
    """UserError where a sequence of this length cannot be cut as the spread asks."""
    parts = spread.sequence_parts
    if parts > 1 and seq_len % (2 * parts):
        axes = " x ".join(f"mesh.{axis}" for axis in spread.sequence_axes)
        raise UserError(
            f"config.data.seq_len={seq_len} does not divide into 2 x {parts} pieces ({axes} = {parts}); "
            f"set data.seq_len to {max(1, round(seq_len / (2 * parts))) * 2 * parts}"
        )
    reach = 0 if model.model_type == "dense" else model.cca_time0 + model.cca_time1 - 2
    if parts > 1 and seq_len // (2 * parts) < reach:
        raise UserError(
            f"config.data.seq_len={seq_len} over {parts} devices gives pieces of {seq_len // (2 * parts)} tokens, but "
            f"the convolutions look {reach} tokens back; set data.seq_len to at least {2 * parts * reach}"
        )
    if seq_len // parts % spread.heads:
        raise UserError(
            f"config.data.seq_len={seq_len} over {parts} devices does not divide by "
            f"config.mesh.tensor={spread.tensor}, whose devices share its loss; "
            f"set data.seq_len to a multiple of {2 * parts * spread.heads}"
        )


def _divides(name: str, size: int, by_name: str, by: int) -> None:
    if size % by:
        raise UserError(
            f"config.{name}={size} does not divide over config.{by_name}={by}; the nearest that does is "
            f"{_nearest(size, by)}"
        )


def _nearest(size: int, wanted: int) -> int:
    return min((d for d in range(1, size + 1) if size % d == 0), key=lambda d: (abs(d - wanted), d))
