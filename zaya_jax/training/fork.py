"""Forks: a run that continues from another run's checkpoint with a config of its own, by
`run.fork=FOLDER@STEP`.

    config = fill_in(config, resolve(config, workdir))   adds the step, and how many tokens had been seen there
    parent = Parent(config, tokenizer)                   its files are checked; UserError if its tokenizer is another
    parent.meta, parent.load(abstract, locations)        the fork's first state; UserError if it does not fit

Weights, optimizer, balancing and the data's position are the parent's, and its steps and tokens are
counted on. The parent is only read, and its lock is not touched, so it may be running. The fork's
first save is of the state that it took over, so from then on it is a run like any other, and no
longer needs the parent.
"""

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

from zaya_jax import config as config_lib
from zaya_jax import schedule
from zaya_jax.checkpoint.boxes import Locations
from zaya_jax.checkpoint.source import SealedSource, misfit
from zaya_jax.config import Config, UserError, fields
from zaya_jax.data import pipeline
from zaya_jax.model import own_parts
from zaya_jax.schedule import Plan
from zaya_jax.text.tokenizers import Tokenizer
from zaya_jax.training.logs import say
from zaya_jax.training.workdir import changed_keys, flat

# Keys that a fork does not share with its parent.
NOT_INHERITED = (
    "run.changed_source",
    "run.fork",
    "run.fork_step",
    "run.fork_tokens",
    "run.init_from",
)


def resolve(config: Config, workdir: Path) -> list | None:
    """Returns [FOLDER@STEP, step, tokens] of the fork's parent, as recorded in the workdir, or else
    as the parent stands now."""
    asked = config.run.fork
    if not asked:
        return None
    # Without a readable record the fork has not begun.
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        run = json.loads((workdir / "config.json").read_text(encoding="utf-8"))["run"]
        name, step = run["fork"], run["fork_step"]
        if step and asked in (name, name.rpartition("@")[0]):
            return [name, step, run["fork_tokens"]]
    source, meta = _open(asked)
    return [f"{source.location}@{source.step}", source.step, meta["tokens"]]


def fill_in(config: Config, parent: list | None) -> Config:
    """The config with the results of `resolve`; UserError if it leaves the fork no step."""
    if parent is None:
        return config
    name, step, tokens = parent
    if config.run.num_steps <= step:
        raise UserError(
            f"config.run.num_steps={config.run.num_steps}, but run.fork={name} has reached step"
            f" {step}; steps are counted from the start of the parent run: give more"
        )
    run = dataclasses.replace(config.run, fork=name, fork_step=step, fork_tokens=tokens)
    return dataclasses.replace(config, run=run)


class Parent:
    """The checkpoint that a fork begins with."""

    def __init__(self, config: Config, tokenizer: Tokenizer):
        self._name = config.run.fork
        self._source, meta = _open(self._name)
        if meta["tokenizer"] != tokenizer.sha256:
            raise UserError(
                f"config.data.tokenizer={config.data.tokenizer!r} is not the one of"
                f" run.fork={self._name}, so its ids mean other text; give that run's, which is in"
                " its folder as tokenizer/"
            )
        allowed = config.run.changed_source
        own_parts.require_same_source(config.model, meta, self._name, allowed, say)
        self._config = config_lib.check(meta["config"])
        before, after = config_lib.to_dict(self._config), config_lib.to_dict(config)
        changed = {
            key: [was, now]
            for key, was, now in changed_keys(flat(before), flat(after))
            if key not in NOT_INHERITED
        }
        self._changes = [
            f"config.{key} {was!r} there, {now!r} here" for key, (was, now) in changed.items()
        ]
        folder = str(self._source.location)
        from_here = {
            "folder": folder if "://" in folder else str(Path(folder).absolute()),
            "run": self._source.run,
            "step": meta["step"],
            "tokens": meta["tokens"],
            "changed": changed,
        }
        self.meta = {
            "step": meta["step"],
            "tokens": meta["tokens"],
            "data": pipeline.forked(meta["data"]),
            "config": config_lib.to_dict(config),
            "metrics": meta.get("metrics") or {},
            "kernels": meta.get("kernels"),  # a note says so if the fork has others
            "lineage": [from_here, *meta.get("lineage", [])],
        }

    def note(self, plan: Plan) -> str:
        """Says which state the fork begins with and which keys differ; `plan` is the fork's."""
        step, changes = self.meta["step"], [*self._changes]
        # a parent that was stopped at once has no such step
        with contextlib.suppress(UserError, ValueError):
            was = schedule.make_plan(self._config).step(step).lr
            now = plan.step(step + 1).lr
            changes.append(
                f"learning rate {was:.6g} at step {step} there, {now:.6g} at step {step + 1} here"
            )
        return (
            f"note: fork of {self._name} ({step} steps, {self.meta['tokens']:,} tokens):"
            f" {'; '.join(changes)}"
        )

    def load(self, abstract: Any, locations: Locations) -> Any:
        """A copy of the whole state (`training.snapshot`), laid out as these ShapeDtypeStructs with
        shardings say."""
        if odd := misfit(self._source.arrays, locations.arrays):
            of_arrays = [x for x in self._changes if x.startswith(("config.model", "config.optim"))]
            raise UserError(
                f"config.run.fork={self._name} does not fit: {odd} ({'; '.join(of_arrays)});"
                " restore what differs, or begin with only its weights, by config.run.init_from"
            )
        return self._source.restore(abstract, locations)


def _open(name: str) -> tuple[SealedSource, dict[str, Any]]:
    """A parent's checkpoint and its metadata."""
    with fields.naming(f"config.run.fork={name}"):
        source = SealedSource(name)
    meta = source.meta()
    if not {"step", "tokens", "data", "config", "tokenizer"} <= meta.keys() or not meta["tokens"]:
        raise UserError(
            f"config.run.fork={name} is of a run that has not been trained; begin with its weights"
            " by config.run.init_from"
        )
    return source, meta
