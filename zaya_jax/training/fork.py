"""Forks: a run that goes on from another's checkpoint with a config of its own, by
`run.fork=FOLDER@STEP`.

    config = settle(config, find(config, workdir))   fills in the step, and how many tokens had been seen there
    parent = Parent(config, tokenizer)               its files are checked; UserError where its tokenizer is another
    parent.meta, parent.load(like, held)             the fork's first state; UserError where it does not fit

Weights, optimizer, balancing and the data's position are the parent's, and its steps and tokens are
counted on. The parent is only read, and its lock is not touched, so it may be running. The fork's
first save is of the state that it took over, so from then on it is a run like any other, and needs
the parent no more.
"""

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

from zaya_jax import config as config_lib
from zaya_jax import schedule
from zaya_jax.checkpoint.boxes import Holding
from zaya_jax.checkpoint.source import SealedSource, misfit
from zaya_jax.checkpoint.vault import my_files
from zaya_jax.config import Config, UserError, fields
from zaya_jax.data import pipeline
from zaya_jax.schedule import Plan
from zaya_jax.text.tokenizers import Tokenizer
from zaya_jax.training.workdir import flat

# Keys that are of each run by itself.
OWN = ("run.fork", "run.fork_step", "run.fork_tokens", "run.init_from")


def find(config: Config, workdir: Path) -> list | None:
    """[FOLDER@STEP, step, tokens] of the fork's parent: as the workdir has recorded, otherwise as
    the parent has."""
    given = config.run.fork
    if not given:
        return None
    # nothing is recorded there
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        recorded = json.loads((workdir / "config.json").read_text(encoding="utf-8"))["run"]
        if recorded["fork_step"] and given in (
            recorded["fork"],
            recorded["fork"].rpartition("@")[0],
        ):
            return [recorded["fork"], recorded["fork_step"], recorded["fork_tokens"]]
    source, meta = _open(given)
    return [f"{source.location}@{source.step}", source.step, meta["tokens"]]


def settle(config: Config, found: list | None) -> Config:
    """The config with the results of `find` filled in."""
    if found is None:
        return config
    given = (config.run.fork_step, config.run.fork_tokens)
    if given not in ((0, 0), tuple(found[1:])):
        raise UserError(
            f"config.run.fork_step={given[0]} and fork_tokens={given[1]}, but {found[0]} has"
            f" {found[2]} tokens at step {found[1]}; leave them out"
        )
    run = dataclasses.replace(config.run, fork=found[0], fork_step=found[1], fork_tokens=found[2])
    return dataclasses.replace(config, run=run)


class Parent:
    """The checkpoint that a fork begins with."""

    def __init__(self, config: Config, tokenizer: Tokenizer):
        self._name = config.run.fork
        self._source, found = _open(self._name)
        if found["tokenizer"] != tokenizer.sha256:
            raise UserError(
                f"config.data.tokenizer={config.data.tokenizer!r} is not the one of"
                f" run.fork={self._name}, so its ids mean other text; give that run's, which is in"
                " its folder as tokenizer/"
            )
        self._source.check(files=my_files(self._source.files))
        self._config = config_lib.check(found["config"])
        before, now = flat(config_lib.to_dict(self._config)), flat(config_lib.to_dict(config))
        self._changed = {
            key: [before.get(key), now.get(key)]
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key) and key not in OWN
        }
        folder = str(self._source.location)
        from_here = {
            "folder": folder if "://" in folder else str(Path(folder).absolute()),
            "run": self._source.run,
            "step": found["step"],
            "tokens": found["tokens"],
            "changed": self._changed,
        }
        self.meta = {
            "step": found["step"],
            "tokens": found["tokens"],
            "data": pipeline.forked(found["data"]),
            "config": config_lib.to_dict(config),
            "metrics": found.get("metrics") or {},
            "lineage": [from_here, *found.get("lineage", [])],
        }

    def note(self, plan: Plan) -> str:
        """Says which state the fork begins with and which keys differ; `plan` is the fork's."""
        step, changes = self.meta["step"], self._changes()
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

    def load(self, like: Any, held: Holding) -> Any:
        """A copy of the whole state (`training.snapshot`), laid out as these ShapeDtypeStructs with
        shardings say."""
        if odd := misfit(self._source.arrays, held.arrays):
            changes = "; ".join(
                x for x in self._changes() if x.startswith(("config.model", "config.optim"))
            )
            raise UserError(
                f"config.run.fork={self._name} does not fit: {odd} ({changes}); restore what"
                " differs, or begin with its weights alone, by config.run.init_from"
            )
        return self._source.restore(like, held)

    def _changes(self) -> list[str]:
        return [
            f"config.{key} {was!r} there, {now!r} here" for key, (was, now) in self._changed.items()
        ]


def _open(place: str) -> tuple[SealedSource, dict[str, Any]]:
    """A parent's checkpoint and its metadata."""
    with fields.naming(f"config.run.fork={place}"):
        source = SealedSource(place)
    meta = source.meta()
    if not {"step", "tokens", "data", "config", "tokenizer"} <= meta.keys() or not meta["tokens"]:
        raise UserError(
            f"config.run.fork={place} is of a run that has not been trained; begin with its weights"
            " by config.run.init_from"
        )
    return source, meta
