"""Plans a start: its phases, mesh, optimizer, tokenizer and data, all checked before anything is
compiled.

The memory check uses a lower bound, weights and optimizer state: activations and gradients come on
top (`experiments.plan`).

Frozen weights, those under low-rank updates (`run.lora`) or those that a run on pairs begins with
(`run.preference`), are read again at each start. Checkpoints name them, with their step, and carry
a hash of them (their mark), so others are refused: as "base" where the checkpoint holds only
adapters, as "reference" beside whole weights.
"""

import dataclasses
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax

from zaya_jax import trees
from zaya_jax.checkpoint import few_bits, merged, partial
from zaya_jax.checkpoint.run.store import Store
from zaya_jax.checkpoint.source import ArraySource, SealedSource, model_differences
from zaya_jax.cluster import multihost
from zaya_jax.config import Config, UserError, fields
from zaya_jax.data import pipeline
from zaya_jax.model import own_parts, zaya
from zaya_jax.text import tokenizers
from zaya_jax.training import fork, unused
from zaya_jax.training import recipe as recipe_lib
from zaya_jax.training import state as states
from zaya_jax.training.logs import say
from zaya_jax.training.recipe import PlacedPhase, Recipe
from zaya_jax.training.snapshot import Snapshots

StartKind = Literal["resumed", "imported", "forked", "initial weights", "fresh"]


@dataclasses.dataclass(frozen=True)
class PlannedStart:
    """A start after step `reached`, as it follows from config, devices and data."""

    reached: int
    recipe: Recipe
    placed: PlacedPhase  # the next step's; this process has its mesh until it ends
    last_step_here: int  # on this mesh; another mesh needs another start
    setup: states.Setup
    abstract_state: Any  # shapes and shardings: `states.abstract`
    tokenizer: tokenizers.Tokenizer
    stream: pipeline.Stream  # of this process's rows
    notes: list[str]


def load_recipe(config: Config, folder: Path) -> tuple[Recipe, tokenizers.Tokenizer]:
    """Returns the run's recipe, with a config that a fork and the tokenizer fill in, and the
    tokenizer."""
    parent = multihost.broadcast_from_zero("fork", lambda: fork.resolve(config, folder))
    config = fork.fill_in(config, parent)
    tokenizer = tokenizers.load(config.data.tokenizer)
    config = tokenizers.with_model_ids(config, tokenizer)
    return recipe_lib.make_recipe(config, jax.devices()), tokenizer


def plan_start(reached: int, recipe: Recipe, tokenizer: tokenizers.Tokenizer) -> PlannedStart:
    """The start after step `reached`; UserError if something is wrong."""
    if reached > recipe.last_step:
        raise UserError(
            f"config.run.num_steps={recipe.last_step}, but the run has already reached step"
            f" {reached}; give at least as many steps, or a new workdir"
        )
    notes = recipe_lib.check(recipe, reached)
    first = min(reached + 1, recipe.last_step)
    placed = recipe.phase_of_step(first)
    assert placed.mesh is not None  # `recipe.check`
    setup = states.set_up(placed.config, placed.mesh, placed.spread)
    state = states.abstract(placed.config, setup)
    check_memory(placed, state)
    stream = pipeline.train_stream(recipe.config, tokenizer, placed.rows)
    return PlannedStart(
        reached,
        recipe,
        placed,
        recipe.last_step_here(first),
        setup,
        state,
        tokenizer,
        stream,
        notes
        + unused.notes_of_start(recipe, placed, setup.optimizer.rules, reached)
        + stream.batches.notes,
    )


def check_memory(placed: PlacedPhase, state: Any) -> None:
    """UserError if weights and optimizer state are more than the memory of a device, as far as that
    is known."""
    devices = placed.mesh.local_devices
    has = bytes_of(devices[0])
    needed = sum(states.bytes_per_device(x) for x in jax.tree.leaves(state))
    where = f"each {devices[0].device_kind}"
    if devices[0].platform == "cpu":  # these share the machine's memory
        needed *= len(devices)
        where = "the machine"
    if has and needed > has:
        key = placed.key("mesh")
        count = zaya.param_counts(placed.config.model)["total"]
        raise UserError(
            f"the model of {count:,} parameters needs {needed / 2**30:,.1f} GiB for weights and"
            f" optimizer alone, {where} has {has / 2**30:,.1f} GiB; give a smaller config.model, or"
            f" spread it: more devices, {key}.fsdp=True, {key}.tensor or expert"
        )


def bytes_of(device: jax.Device) -> int | None:
    """The memory of a device, of a CPU the machine's; None if unknown."""
    if device.platform == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return (device.memory_stats() or {}).get("bytes_limit")


def free_bytes_of(device: jax.Device) -> int | None:
    """The memory of a device that is not in use, of a CPU half of the machine's; None if
    unknown."""
    has = bytes_of(device)
    if has is None:
        return None
    return has - (device.memory_stats() or {}).get("bytes_in_use", has // 2)


def first_state(
    kind: StartKind,
    planned: PlannedStart,
    parent: fork.Parent | None,
    meta: dict[str, Any],
    store: Store,
    snapshots: Snapshots,
    open_weights: Callable[[str], ArraySource],
) -> tuple[Any, dict[str, Any]]:
    """Returns the state before the first step, and how the metadata of its saves names the frozen
    weights.

    `meta` is that of the checkpoint that the run resumes or forks from, `parent` a fork's.
    `open_weights` opens a model by its name (`pytorch.any_model`, which imports this package).
    """
    run = planned.recipe.config.run

    def open_same(name: str) -> ArraySource:
        with fields.naming(f"config.run.init_from={name}"):
            source = open_weights(name)
        model = planned.recipe.config.model
        own_parts.require_same_source(model, source.meta(), name, run.changed_source, say)
        return source

    if kind == "resumed":
        state = store.restore(
            planned.reached, snapshots.abstract, snapshots.locations, snapshots.to_state
        )
    elif parent:  # forked
        state = snapshots.to_state(parent.load(snapshots.abstract, snapshots.locations))
    elif kind == "initial weights" and not run.lora:
        state = _with_initial_weights(planned, snapshots, open_same(run.init_from))
    elif kind == "imported":
        state = _with_imported_weights(planned, snapshots, store.root / "0")
    else:
        state = _initial_state(planned)
    if "frozen" not in planned.abstract_state:
        return state, {}
    role = "base" if run.lora else "reference"
    named = meta[role] if meta else {}  # by the checkpoint that it resumes from
    base = open_same(named["name"] if named else run.init_from)
    if run.lora and not named:
        _say_what_differs(base, planned)
    named = _add_frozen(state, planned, base, named)
    _say_what_is_frozen(state, planned, base)
    return state, {role: named}


def _with_initial_weights(planned: PlannedStart, snapshots: Snapshots, source: ArraySource) -> Any:
    with fields.naming("config.run.init_from"):  # before anything is compiled
        partial.require_fit(source, snapshots.locations.weights().arrays)
    state = snapshots.with_weights_of(_initial_state(planned), source.restore)
    say(f"begins from {source.name}{source.warning}")
    _say_what_differs(source, planned)
    return state


def _with_imported_weights(planned: PlannedStart, snapshots: Snapshots, folder: Path) -> Any:
    """With the weights and balancing biases of step 0, which has no optimizer."""
    run = planned.recipe.config.run
    if run.init_from and not run.takes_pairs:  # which are compared with its answers
        say(
            f"note: config.run.init_from={run.init_from} has no effect: the run begins with the"
            f" weights in {folder}"
        )
    return snapshots.with_weights_of(_initial_state(planned), SealedSource(folder).restore)


def _say_what_is_frozen(state: dict[str, Any], planned: PlannedStart, base: ArraySource) -> None:
    run = planned.recipe.config.run
    if run.lora:
        in_few_bits = "" if run.base == "compute" else f", experts in {run.base}"
        frozen = _size(zaya.abstract(planned.recipe.config.model))
        say(
            f"training {_size(state['params']):,} parameters of low-rank updates on top of"
            f" {base.name}{base.warning} ({frozen:,} frozen{in_few_bits})"
        )
    if run.takes_pairs:
        say(f"answers are compared with those of {base.name}{base.warning}")


def _say_what_differs(source: ArraySource, planned: PlannedStart) -> None:
    """Reports model keys whose values differ from the model that the weights were trained with, and
    another tokenizer than theirs."""
    if changed := model_differences(source.model, planned.placed.config.model):
        say(f"note: {source.name} was trained with another model config: {'; '.join(changed)}")
    if source.meta().get("tokenizer") not in (None, planned.tokenizer.sha256):
        say(
            f"note: {source.name} was trained with another tokenizer than config.data.tokenizer,"
            " whose ids may mean other text to it"
        )


def _initial_state(planned: PlannedStart) -> Any:
    return states.init(planned.placed.config, planned.setup)


def _add_frozen(
    state: dict[str, Any], planned: PlannedStart, base: ArraySource, named: dict[str, Any]
) -> dict[str, Any]:
    """Adds the frozen weights to a state, and before its first step the base's balancing biases.

    `named` is how the checkpoint that the state comes from names the base; empty without one.
    Returns how this run's checkpoints name it.
    """
    abstract, config = planned.abstract_state, planned.recipe.config
    balance = {"bias": abstract["balance"].bias}
    with fields.naming("config.run.init_from"):
        weights = {"params": zaya.abstract(config.model), "balance": balance}
        partial.require_fit(base, trees.flat(weights))
    saved = {"base": named} if named else {}
    mark = multihost.broadcast_from_zero(
        "mark", lambda: merged.require_same_base(base, saved, "this run")
    )
    source = few_bits.FewBits(base, config.run.base)
    weights = source.restore({**abstract["frozen"], "balance": balance})
    state["frozen"] = {name: weights[name] for name in abstract["frozen"]}
    if not named:
        state["balance"] = state["balance"]._replace(bias=weights["balance"]["bias"])
    name = str(base.location)
    if "://" not in name:
        name = str(Path(base.location).absolute())  # means the same from any folder
    if base.workdir:
        name += f"@{base.step}"
    return {"name": name, "mark": mark, "form": config.run.base}


def _size(tree: Any) -> int:
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))
