"""Settles which kernels of ours the programs of this process have on a GPU: those that
`pallas_kernels.trial` found.

The sizes are those of a device in the phase that most of the run's tokens are of; a run keeps its
verdict from start to start, in kernels.json, as long as chip, driver, JAX, kernels and sizes stay
the same. Of several processes one of each kind of device tries, and all take what all of these
found.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pallas_kernels import chip, trial
from zaya_jax import schedule
from zaya_jax.cluster import multihost
from zaya_jax.config import Config, UserError
from zaya_jax.parallel.spread import ALONE, Spread
from zaya_jax.training import recipe
from zaya_jax.training.workdir import KERNELS

FIND: dict[str, Any] = {}  # further arguments of `trial.find`, for tests
# tokens of a trial: more take longer (16.8M tokens on an H100: no result in 45 s) and rank the same
MOST = 16_384


def settle(config: Config, folder: Path | None = None, at_once: int = 0) -> dict[str, Any] | None:
    """The record of the trial, whose verdict `chip.settle` is given; None where there is nothing to
    choose.

    `at_once` sequences are for one process alone on one device; without it, those of a training
    step are meant.
    """
    if config.kernels[0] not in chip.OPEN or not trial.may_be_here():
        return None
    index, count = multihost.place()
    if at_once or count == 1:
        record = _find(config, folder, at_once, count)
    else:
        kinds = multihost.to_first("cards", trial.cards()) or []
        trying = multihost.from_first(
            "who tries", lambda: [kinds.index(kind) for kind in dict.fromkeys(kinds)]
        )
        found = (
            multihost.to_first(
                "kernels", _find(config, folder, 0, count) if index in trying else None
            )
            or []
        )
        record = multihost.from_first("verdict", lambda: agreed([one for one in found if one]))
    if record:
        chip.settle(record["kernels"])
    return record


def _find(
    config: Config, folder: Path | None, at_once: int, processes: int
) -> dict[str, Any] | None:
    def ask(here: dict) -> dict | None:
        try:
            return request(config, 1 if at_once else processes * here["devices"], at_once)
        except UserError:  # the start itself says it
            return None

    known = [record] if folder and (record := trial.read(folder / KERNELS)) else []
    try:
        return trial.find(ask, again=config.kernels == ("try",), known=known, **FIND)
    except OSError as error:  # no process, no disk
        return {"kernels": [], "rows": [], "kind": "this device", "note": f"no trial: {error}"}


def agreed(records: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The record of all kinds of devices: the first's, with the kernels that each of them found."""
    if not records:
        return None
    own = [
        word for word in records[0]["kernels"] if all(word in other["kernels"] for other in records)
    ]
    kind = ", ".join(dict.fromkeys(record["kind"] for record in records))
    return {**records[0], "kernels": own, "taken_on": kind}


def request(config: Config, devices: int, at_once: int = 0) -> dict[str, Any]:
    """What `trial` is asked: a device's share of the model, in the phase that most tokens are
    of."""
    segment = max(
        schedule.make_plan(config).segments, key=lambda one: one.num_steps * one.tokens_per_step
    )
    if at_once:
        here, spread, rows = schedule.phase_config(config, segment.phase), ALONE, at_once
    else:
        here, spread, sequences, micro_batches = recipe.portion(config, segment, devices)
        rows = max(sequences // micro_batches // (spread.data * spread.expert), 1)
    length = here.data.seq_len
    rows = min(rows, max(MOST * spread.sequence_parts // length, 1))
    asked = {
        "batch": rows,
        "length": length // spread.sequence_parts,
        "whole": length,
        "dtype": here.precision.compute,
        "operators": _operators(here, spread),
        "model": _share(here, spread),
    }
    if "hybrid_sliding" in here.model.kinds:
        asked["windows"] = [here.model.sliding_window]
    if here.precision.newton_schulz != "compute":
        asked["dtypes"] = {"newton_schulz": here.precision.newton_schulz}
    return asked


def _operators(here: Config, spread: Spread) -> list[str]:
    kinds, routed = set(here.model.kinds), here.model.model_type == "zaya"
    there = {
        "attention": bool(kinds - {"hybrid_linear"}),
        "linear_attention": "hybrid_linear" in kinds,
        # its kernels take no tokens of a neighbour
        "cca_mix": (routed and spread.sequence_parts == 1),
        "grouped_mlp": routed,
        "newton_schulz": here.optim.name == "muon",
    }
    return [name for name in chip.OPERATORS if there.get(name, True)]


def _share(here: Config, spread: Spread) -> dict[str, int]:
    """The model's sizes on a device."""
    m = here.model
    experts = m.num_experts
    for axis in spread.expert_axes:
        experts = -(-experts // getattr(spread, axis))
    return {
        "num_attention_heads": max(m.num_attention_heads // spread.heads, 1),
        "num_key_value_heads": max(m.num_key_value_heads // spread.heads, 1),
        "moe_intermediate_size": max(
            (m.intermediate_size or m.moe_intermediate_size) // spread.heads, 1
        ),
        "num_experts": experts,
        "head_dim": m.head_dim,
        "hidden_size": m.hidden_size,
        "vocab_size": m.vocab_size,
        "head_parts": spread.heads,
        "router_hidden_size": m.router_hidden_size,
        "cca_time0": m.cca_time0,
        "cca_time1": m.cca_time1,
    }


def meta(record: dict[str, Any] | None) -> dict[str, Any]:
    """For a checkpoint's metadata."""
    return {"kernels": record["kernels"]} if record else {}


def notes(saved: dict[str, Any], record: dict[str, Any] | None, reached: int) -> list[str]:
    """The record in a line, and a note where a run goes on with other kernels than it had."""
    found = [trial.words(record)] if record else []
    before, now = saved.get("kernels"), meta(record).get("kernels")
    if reached and before != now:
        was, here = (
            "not tried" if names is None else ", ".join(names) or "none" for names in (before, now)
        )
        found.append(
            f"note: kernels of ours were {was} until step {reached}, now {here}: the run rounds"
            " differently from now on"
        )
    return found
