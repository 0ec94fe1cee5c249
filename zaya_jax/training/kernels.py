"""Chooses the tiles with which the GPU kernels of ours are compiled.

They come from the package's table, or are those that `pallas_kernels.tune` measured on this
machine's card. All processes of a run take what the first one has.
"""

import functools
from typing import Any, NamedTuple

import jax

from pallas_kernels import chip, table
from zaya_jax import schedule
from zaya_jax.cluster import multihost
from zaya_jax.config import Config, UserError
from zaya_jax.parallel.spread import NO_SPREAD, Spread
from zaya_jax.training import recipe


class Tiles(NamedTuple):
    """The tiles of this process's kernels, by name, and a line about them; empty on a CPU."""

    kernels: dict[str, Any]
    summary: str


def choose_tiles(config: Config, device: jax.Device, collective: bool = False) -> Tiles:
    """Chooses and installs the tiles that this process's programs have from now on.

    With `collective` all processes call this together and take the tiles of process 0, since they
    compile one program.
    """
    target = chip.chip_of(device)
    if target.maker not in ("cuda", "rocm"):
        return Tiles({}, "")
    read = functools.partial(table.read_measured, target.kind)
    measured, fault = multihost.broadcast_from_zero("tiles", read) if collective else read()
    chip.use(target.kind, measured)
    rows = dict(table.rows(target.architecture))
    if measured:
        for variant, row in measured["tiles"].items():
            operator = variant.split()[0]
            rows[operator] = row  # the variant that this machine uses
    taken = table.rows_of_operators(rows, target.taking(config.kernels).kernels)
    summary = [f"tiles: {table.counted(taken)}" if taken else f"kernels: XLA's on {target.kind}"]
    if config.kernels == (chip.AUTO,) and not measured and not table.has(target.architecture):
        summary[0] += ", for which no tiles were chosen"
        summary.append(fault or "python -m pallas_kernels.tune finds the tiles of this card")
    elif fault:
        summary += [fault, "python -m pallas_kernels.tune measures again"]
    return Tiles({name: row["tile"] for name, row in taken.items()}, "; ".join(summary))


# ################################################################################################
# For `pallas_kernels.tune`
# ################################################################################################

MOST_TOKENS = 16_384  # more take longer (16.8M on an H100: no result in 45 s) and rank the same


def tuning_request(config: Config, devices: int) -> dict[str, Any]:
    """The sizes at which `tune` tries: a device's part of the model, in the phase with the most
    tokens; one sequence at a time if the config's batch does not fit so few devices."""
    segments = schedule.make_plan(config).segments
    longest = max(segments, key=lambda segment: segment.num_steps * segment.tokens_per_step)
    try:
        phase_config, spread, sequences, micro_batches = recipe.place_segment(
            config, longest, devices
        )
    except UserError:
        phase_config, spread = schedule.phase_config(config, longest.phase), NO_SPREAD
        sequences = micro_batches = 1
    whole = min(phase_config.data.seq_len, MOST_TOKENS)
    rows = max(sequences // micro_batches // (spread.data * spread.expert), 1)
    most_rows = max(MOST_TOKENS * spread.sequence_parts // whole, 1)
    model = phase_config.model
    return {
        "batch": min(rows, most_rows),
        "length": whole // spread.sequence_parts,
        "whole": whole,
        "dtype": phase_config.precision.compute,
        "operators": _operators(phase_config, spread),
        "model": _sizes_on_device(phase_config, spread),
        "windows": [model.sliding_window] if "hybrid_sliding" in model.kinds else [],
    }


def _operators(config: Config, spread: Spread) -> list[str]:
    kinds = set(config.model.kinds)
    routed = config.model.model_type == "zaya"
    used = {
        "attention": bool(kinds - {"hybrid_linear"}),
        "linear_attention": "hybrid_linear" in kinds,
        # its kernels take no tokens of a neighbour
        "cca_mix": routed and spread.sequence_parts == 1,
        "grouped_mlp": routed,
    }
    return [name for name in chip.OPERATORS if used.get(name, True)]


def _sizes_on_device(config: Config, spread: Spread) -> dict[str, Any]:
    """The model's sizes on a device."""
    m = config.model
    experts = m.num_experts
    for axis in spread.expert_axes:
        experts = -(-experts // getattr(spread, axis))
    width = m.intermediate_size or m.moe_intermediate_size
    rounded = config.precision.weights == "compute"
    return {
        "num_attention_heads": max(m.num_attention_heads // spread.head_shards, 1),
        "num_key_value_heads": max(m.num_key_value_heads // spread.head_shards, 1),
        "moe_intermediate_size": max(width // spread.head_shards, 1),
        "num_experts": experts,
        "expert_weights": config.precision.compute if rounded else "float32",
        "head_dim": m.head_dim,
        "hidden_size": m.hidden_size,
        "router_hidden_size": m.router_hidden_size,
        "cca_time0": m.cca_time0,
        "cca_time1": m.cca_time1,
        "num_hidden_layers": m.num_hidden_layers,
    }
