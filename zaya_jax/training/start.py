"""Plans a start: its phases, mesh, optimizer, tokenizer and data, all checked before anything is
compiled.

The memory check uses a lower bound, weights and optimizer state: activations and gradients come on
top (`experiments.plan`).

Under low-rank updates (`run.lora`) frozen weights are read anew at each start. Checkpoints hold
adapters alone: they name the base, with its step, and have a mark of it, so another base is
refused.
"""

import dataclasses
import math
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax

from zaya_jax import trees
from zaya_jax.checkpoint import merged, partial
from zaya_jax.checkpoint.run.store import Store
from zaya_jax.checkpoint.source import ArraySource, SealedSource, model_differences
from zaya_jax.cluster import multihost
from zaya_jax.config import Config, UserError, fields
from zaya_jax.data import pipeline
from zaya_jax.hardware import sizing
from zaya_jax.model import zaya
from zaya_jax.text import tokenizers
from zaya_jax.training import fork, recipe
from zaya_jax.training import state as states
from zaya_jax.training.logs import say
from zaya_jax.training.recipe import PlacedPhase, Recipe
from zaya_jax.training.snapshot import Copies

Way = Literal["resumed", "imported", "forked", "initial weights", "fresh"]  # in which a run begins


@dataclasses.dataclass(frozen=True)
class PlannedStart:
    """A start after step `reached`, as it follows from config, devices and data."""

    reached: int
    recipe: Recipe
    phase: PlacedPhase  # of the next step, whose mesh this program has
    end: int  # the last step on this mesh
    setup: states.Setup
    state: Any  # its shapes and shardings: `states.abstract`
    tokenizer: tokenizers.Tokenizer
    stream: pipeline.Stream  # of this process's rows
    notes: list[str]


def plan_run(config: Config, folder: Path) -> tuple[Recipe, tokenizers.Tokenizer]:
    """The run's recipe, its config filled in by a fork and the tokenizer, and the tokenizer."""
    config = fork.settle(
        config, multihost.broadcast_from_zero("fork", lambda: fork.find(config, folder))
    )
    figures = sizing.figures_at(config.hardware.figures, jax.devices()[0].device_kind)
    mark = zlib.crc32(repr(figures).encode())
    if mark != multihost.broadcast_from_zero("figures of the machine", lambda: mark):
        raise UserError(
            f"config.hardware.figures={config.hardware.figures} is another file here than in"
            " process 0, and the processes' programs would differ; give one that all share"
        )
    tokenizer = tokenizers.load(config.data.tokenizer)
    return recipe.place(tokenizers.with_model_ids(config, tokenizer), jax.devices()), tokenizer


def plan_start(reached: int, run: Recipe, tokenizer: tokenizers.Tokenizer) -> PlannedStart:
    """The start after step `reached`; UserError where something is wrong."""
    if reached > run.last_step:
        raise UserError(
            f"config.run.num_steps={run.last_step}, but the run has already reached step {reached};"
            " give at least as many steps, or a new workdir"
        )
    notes = recipe.check(run, reached)
    first = min(reached + 1, run.last_step)
    here, end = run.phase_of_step(first), run.last_step_here(first)
    assert here.mesh is not None  # `recipe.check`
    setup = states.set_up(here.config, here.mesh, here.spread)
    state = states.abstract(here.config, setup)
    check_memory(here, state)
    stream = pipeline.train_stream(run.config, tokenizer, here.rows)
    return PlannedStart(
        reached, run, here, end, setup, state, tokenizer, stream, notes + stream.batches.notes
    )


def check_memory(here: PlacedPhase, state: Any) -> None:
    """UserError where weights and optimizer state are more than the memory of a device, if that is
    known."""
    devices = here.mesh.local_devices
    device, has = devices[0], bytes_of(devices[0])
    on_host = device.platform == "cpu"  # whose devices share the machine's memory
    needed = sum(states.bytes_per_device(x) for x in jax.tree.leaves(state)) * (
        len(devices) if on_host else 1
    )
    if has and needed > has:
        key = here.key("mesh")
        count = zaya.param_counts(here.config.model)["total"]
        where = "the machine" if on_host else f"each {device.device_kind}"
        raise UserError(
            f"the model of {count:,} parameters needs {needed / 2**30:,.1f} GiB for weights and"
            f" optimizer alone, {where} has {has / 2**30:,.1f} GiB; give a smaller config.model, or"
            f" spread it: more devices, {key}.fsdp=True, {key}.tensor or expert"
        )


def bytes_of(device: jax.Device) -> int | None:
    """The memory of a device, of a CPU the machine's; None where it is not known."""
    if device.platform == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return (device.memory_stats() or {}).get("bytes_limit")


def free_bytes_of(device: jax.Device) -> int | None:
    """The memory of a device that is not in use, of a CPU half of the machine's; None where it is
    not known."""
    has = bytes_of(device)
    if has is None or device.platform == "cpu":
        return has and has // 2
    return has - device.memory_stats()["bytes_in_use"]


def first_state(
    way: Way,
    planned: PlannedStart,
    parent: fork.Parent | None,
    meta: dict[str, Any],
    store: Store,
    copies: Copies,
    open_weights: Callable[[str], ArraySource],
) -> tuple[Any, dict[str, Any]]:
    """The state before the first step, by the way in which the run begins, and metadata for all its
    saves.

    `meta`: of the checkpoint that it starts from; `parent`: of a fork; `open_weights` of a model's name.
    """
    run = planned.recipe.config.run
    if way == "resumed":
        state = store.restore(planned.reached, copies.like, copies.held, copies.place)
    elif parent:  # forked
        state = copies.place(parent.load(copies.like, copies.held))
    elif way == "initial weights" and not run.lora:
        source = open_weights(run.init_from)
        with fields.naming("config.run.init_from"):  # before anything is compiled
            partial.require_fit(source, copies.held.weights().arrays)
        state = copies.with_weights_of(_fresh(planned), source.restore)
        say(f"begins from {source.name}{source.warning}")
        _say_what_differs(source, planned)
    elif way == "imported":  # weights and biases, no optimizer yet
        state = copies.with_weights_of(_fresh(planned), SealedSource(store.root / "0").restore)
    else:
        state = _fresh(planned)
    if not run.lora:
        return state, {}
    base = open_weights(meta["base"]["name"] if meta else run.init_from)
    if not meta:
        _say_what_differs(base, planned)
    return state, put_frozen_under(state, planned.state, base, meta)


def _say_what_differs(source: ArraySource, planned: PlannedStart) -> None:
    """Says by which keys the weights are another function here than where they come from."""
    if changed := model_differences(source.model, planned.phase.config.model):
        say(f"note: {source.name} is of another model: {'; '.join(changed)}")


def _fresh(planned: PlannedStart) -> Any:
    return states.init(planned.phase.config, planned.setup)


def put_frozen_under(
    state: dict[str, Any], like: Any, base: ArraySource, meta: dict[str, Any]
) -> dict[str, Any]:
    """Adds the frozen weights to a state, and before its first step the base's balancing biases.

    `like` is the whole state (`state.abstract`), `meta` the checkpoint's that the state comes from,
    or empty. Gives the part of the metadata that names the base.
    """
    wanted = {"params": like["frozen"], "balance": {"bias": like["balance"].bias}}
    with fields.naming("config.run.init_from"):
        partial.require_fit(base, trees.flat(wanted))
    mark = multihost.broadcast_from_zero(
        "mark", lambda: merged.require_same_base(base, meta, "this run")
    )
    found = base.restore(wanted)
    state["frozen"] = found["params"]
    if not meta:
        state["balance"] = state["balance"]._replace(bias=found["balance"]["bias"])
    count, of = (
        sum(math.prod(x.shape) for x in jax.tree.leaves(like[part]))
        for part in ("params", "frozen")
    )
    say(
        f"trains {count:,} numbers of low-rank updates over {base.name}{base.warning}, {of:,}"
        " frozen ones"
    )
    # a name that means the same step from any folder
    name = str(base.location)
    if "://" not in name:
        name = str(Path(name).absolute())
    if base.workdir:
        name += f"@{base.step}"
    return {"base": {"name": name, "mark": mark}}
