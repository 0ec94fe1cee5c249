"""Finds the keys that a config sets and that nothing in the run reads.

None is refused: a config file may set a key for another one to be given on the command line. A
start names them, and says why they have no effect. Keys at their defaults were not asked for, and
are left out.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from zaya_jax import schedule
from zaya_jax.config import Config, fields, shown
from zaya_jax.optim.chain import WeightRule
from zaya_jax.training.recipe import PlacedPhase, Recipe

# Keys, or groups of them; why they have no effect; whether that holds for a config.
type Row = tuple[tuple[str, ...], str, Callable[[Config], bool]]


def _value(key: str, c: Config) -> Any:
    return functools.reduce(getattr, key.split("."), c)


def _is_replaced(key: str, name: str, c: Config) -> bool:
    """Whether each phase has a value of its own for a key, and they are not all the key's."""
    values = [getattr(phase, name) for phase in c.schedule.phases]
    return all(values) and not {*values} <= {_value(key, c)}


def _path_is_replaced(c: Config) -> bool:
    """Whether mixtures take the place of `data.path`, and none of them has folders below it."""
    mixtures = [phase.mixture or c.data.mixture for phase in c.schedule.phases]
    mixtures = mixtures or [c.data.mixture]
    below = any(source.startswith(c.data.path) for sources in mixtures for source in sources)
    return all(mixtures) and not below


LEAVES = tuple(fields.leaves(Config))
OF_PHASES = "each of schedule.phases has its own"
TABLE: tuple[Row, ...] = (
    (("run.beta",), "run.preference is none", lambda c: not c.run.takes_pairs),
    (
        ("run.spike_deviations",),
        "run.skip_update is not spike (guard.spike_deviations is about going back)",
        lambda c: c.run.skip_update != "spike",
    ),
    (
        ("run.changed_source",),
        "the config names no model.layer and no model.router",
        lambda c: not c.model.layer and not c.model.router,
    ),
    (
        (
            "optim.momentum",
            "optim.nesterov",
            "optim.muon_scale",
            "optim.newton_schulz",
            "optim.newton_schulz_steps",
            "precision.newton_schulz",
            "precision.momentum",
        ),
        "optim.name is adamw",
        lambda c: c.optim.name == "adamw",
    ),
    # A layer of one's own may read any key of the model.
    (
        (
            "model.moe_intermediate_size",
            "model.router_hidden_size",
            "model.cca_time0",
            "model.cca_time1",
            "precision.router",
            "balance.lr",
            "balance.b1",
            "balance.b2",
            "balance.dead_after",
        ),
        "model.model_type is dense",
        lambda c: c.model.model_type == "dense" and not c.model.layer,
    ),
    (
        ("model.intermediate_size",),
        "model.model_type is not dense",
        lambda c: c.model.model_type != "dense" and not c.model.layer,
    ),
    (
        ("model.sliding_window",),
        "none of model.layer_types is hybrid_sliding",
        lambda c: "hybrid_sliding" not in c.model.kinds and not c.model.layer,
    ),
    (
        ("precision.matmul",),
        "precision.compute is bfloat16",
        lambda c: c.precision.compute == "bfloat16",
    ),
    (
        ("guard.spike_deviations", "guard.rollbacks"),
        "guard.spike_steps is 0",
        lambda c: not c.guard.spike_steps,
    ),
    (
        ("eval.tasks_every", "eval.tasks_limit", "eval.tasks_path"),
        "eval.tasks names none",
        lambda c: not c.eval.tasks,
    ),
    (("eval.every", "checkpoint.keep_best"), "eval.windows is 0", lambda c: not c.eval.windows),
    (
        ("checkpoint.keep_best",),
        "no step before the last is a multiple of both eval.every and checkpoint.every_steps",
        lambda c: math.lcm(c.eval.every, c.checkpoint.every_steps) >= c.run.num_steps,
    ),
    (
        ("schedule.final_lr_fraction",),
        "schedule.decay_fraction is 0",
        lambda c: not c.schedule.decay_fraction and not c.schedule.decay_steps,
    ),
    (
        ("schedule.decay_fraction",),
        "schedule.decay_steps takes its place",
        lambda c: bool(c.schedule.decay_steps),
    ),
    (("data.path",), "mixtures take its place", _path_is_replaced),
    (
        ("schedule.decay_fraction", "schedule.final_lr_fraction"),
        f"{OF_PHASES} lr",
        lambda c: bool(c.schedule.phases) and all(phase.lr for phase in c.schedule.phases),
    ),
    # A file's phases may take their rates from it.
    (
        ("optim.lr",),
        OF_PHASES,
        lambda c: (
            _is_replaced("optim.lr", "lr", c)
            and all(phase.lr != c.optim.lr for phase in c.schedule.phases)
        ),
    ),
    *(
        ((key,), OF_PHASES, functools.partial(_is_replaced, key, name))
        for name, key in {**schedule.RUN_WIDE_KEYS, "mixture": "data.mixture"}.items()
    ),
)


def notes(config: Config) -> list[str]:
    """A line for each reason for which keys of a config have no effect; a key is named once."""
    given = {
        key: f"config.{key}={shown(_value(key, config))}"
        for key, field in LEAVES
        if _value(key, config) != field.default
    }
    found: dict[str, list[str]] = {}
    for keys, because, holds in TABLE:
        groups = tuple(f"{key}." for key in keys)
        named = [key for key in given if f"{key}.".startswith(groups) and holds(config)]
        found.setdefault(because, []).extend(given.pop(key) for key in named)
    return [_sentence(named, because) for because, named in found.items() if named]


def notes_of_start(
    recipe: Recipe, placed: PlacedPhase, rules: Mapping[str, WeightRule], reached: int
) -> list[str]:
    """`notes`, and lines on what has no effect in a start after step `reached`, on these devices,
    with these rules of weights."""
    lines, mesh, profile = notes(recipe.config), placed.config.mesh, recipe.config.log.profile
    asked = [name for name in ("fsdp", "tsp", "ring", "across") if getattr(mesh, name)]
    switches = [name for name in asked if not getattr(placed.spread, name)]
    if switches:
        named = [f"{placed.key('mesh')}.{name}=True" for name in switches]
        lines.append(_sentence(named, "the axis that it is about has one device here"))
    patterns = {rule.pattern for rule in rules.values()}
    rows = [row for row in recipe.config.optim.rows if row.rpartition("=")[0] not in patterns]
    if rows:
        lines.append(_sentence([f"config.optim.rows={tuple(rows)}"], "no weight has such a path"))
    if profile and not reached < int(profile.partition(":")[0]) <= recipe.last_step:
        steps = f"this start has steps {reached + 1} to {recipe.last_step}"
        lines.append(_sentence([f"config.log.profile={profile}"], steps))
    return [f"note: {line}" for line in lines]


def _sentence(named: list[str], because: str) -> str:
    return f"{', '.join(named)} {'has' if len(named) == 1 else 'have'} no effect: {because}"
