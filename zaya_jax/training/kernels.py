"""Looks up which kernels of ours the programs for a GPU have, and with which tiles.

The package's table says it, or what `pallas_kernels.tune` measured on this machine's card. All
processes of a run take what the first one has.
"""

import functools
from typing import Any

import jax

from pallas_kernels import chip, table
from zaya_jax import schedule
from zaya_jax.cluster import multihost
from zaya_jax.config import Config, UserError
from zaya_jax.parallel.spread import ALONE, Spread
from zaya_jax.training import recipe


def look_up(config: Config, device: jax.Device, together: bool = False) -> dict[str, Any] | None:
    """The tiles of the kernels that programs for this device have, {"kernels": {name: tile}}, and a
    line that says so; None on a CPU. From now on this process's programs have them.

    `together`: all processes call this, for one program.
    """
    here = chip.chip_of(device)
    if here.maker not in ("cuda", "rocm"):
        return None
    read = functools.partial(table.read_measured, here.kind)
    own, fault = multihost.broadcast_from_zero("tiles", read) if together else read()
    chip.use(here.kind, own)
    rows = dict(table.rows(here.architecture))
    for name, row in (own["tiles"] if own else {}).items():
        rows[name.split()[0]] = row  # measured for the variant that this machine uses
    taken = table.rows_of_operators(rows, here.taking(config.kernels).kernels)
    said = f"tiles: {table.counted(taken)}" if taken else f"kernels: XLA's on {here.kind}"
    if config.kernels == (chip.AUTO,) and not own and not table.has(here.architecture):
        said += ", for which no tiles were chosen"
        fault = fault or "python -m pallas_kernels.tune finds the tiles of this card"
    elif fault:
        fault += "; python -m pallas_kernels.tune measures again"
    said += f"; {fault}" if fault else ""
    return {"kernels": {name: row["tile"] for name, row in taken.items()}, "said": said}


def meta(found: dict[str, Any] | None) -> dict[str, Any]:
    """For a checkpoint's metadata."""
    return {"kernels": found["kernels"]} if found else {}


def notes(saved: dict[str, Any], found: dict[str, Any] | None, reached: int) -> list[str]:
    """The line of a start, and a note where a run goes on with other kernels or tiles than it
    had."""
    lines = [found["said"]] if found else []
    if reached and saved.get("kernels") != meta(found).get("kernels"):
        lines.append(
            "note: the kernels of ours, or their tiles, are not those that the run had until step"
            f" {reached}: it rounds differently from now on"
        )
    return lines


# ################################################################################################
# For `pallas_kernels.tune`
# ################################################################################################

MOST = 16_384  # tokens: more take longer (16.8M on an H100: no result in 45 s) and rank the same


def tuning_request(config: Config, devices: int) -> dict[str, Any]:
    """The sizes at which `tune` tries: a device's share of the model, in the phase that most tokens
    are of, or where the config's batch does not fit so few devices, one sequence at a time."""
    segment = max(
        schedule.make_plan(config).segments, key=lambda one: one.num_steps * one.tokens_per_step
    )
    try:
        here, spread, sequences, micro_batches = recipe.portion(config, segment, devices)
    except UserError:
        here, spread = schedule.phase_config(config, segment.phase), ALONE
        sequences = micro_batches = 1
    whole = min(here.data.seq_len, MOST)
    rows = max(sequences // micro_batches // (spread.data * spread.expert), 1)
    asked = {
        "batch": min(rows, max(MOST * spread.sequence_parts // whole, 1)),
        "length": whole // spread.sequence_parts,
        "whole": whole,
        "dtype": here.precision.compute,
        "operators": _operators(here, spread),
        "model": _share(here, spread),
        "windows": [],
    }
    if "hybrid_sliding" in here.model.kinds:
        asked["windows"] = [here.model.sliding_window]
    return asked


def _operators(here: Config, spread: Spread) -> list[str]:
    kinds, routed = set(here.model.kinds), here.model.model_type == "zaya"
    there = {
        "attention": bool(kinds - {"hybrid_linear"}),
        "linear_attention": "hybrid_linear" in kinds,
        # its kernels take no tokens of a neighbour
        "cca_mix": routed and spread.sequence_parts == 1,
        "grouped_mlp": routed,
    }
    return [name for name in chip.OPERATORS if there.get(name, True)]


def _share(here: Config, spread: Spread) -> dict[str, Any]:
    """The model's sizes on a device."""
    m = here.model
    experts = m.num_experts
    for axis in spread.expert_axes:
        experts = -(-experts // getattr(spread, axis))
    width = m.intermediate_size or m.moe_intermediate_size
    rounded = here.precision.weights == "compute"
    return {
        "num_attention_heads": max(m.num_attention_heads // spread.heads, 1),
        "num_key_value_heads": max(m.num_key_value_heads // spread.heads, 1),
        "moe_intermediate_size": max(width // spread.heads, 1),
        "num_experts": experts,
        "expert_weights": here.precision.compute if rounded else "float32",
        "head_dim": m.head_dim,
        "hidden_size": m.hidden_size,
        "router_hidden_size": m.router_hidden_size,
        "cca_time0": m.cca_time0,
        "cca_time1": m.cca_time1,
    }
