"""A run that goes on from another's checkpoint, otherwise than that did: `run.fork=FOLDER@STEP`.

    config = settle(config, find(config, workdir))   with the step, and how many tokens had been seen there
    parent = Parent(config, tokenizer)               UserError where its state does not fit; its files are checked
    parent.meta, parent.load(like, held)             what the fork begins with

Weights, optimizer, balancing and the data's position are the parent's, and its steps and tokens are counted on. Nothing
is written there, and its lock is not touched, so it may be running. The fork's first save is of the state that it took
over, so from then on it is a run like any other, and needs the parent no more.
"""

import contextlib
import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zaya_jax import config as config_lib
from zaya_jax import schedule, trees
from zaya_jax.checkpoint import layout, writing
from zaya_jax.checkpoint.boxes import HeldBox, Holding
from zaya_jax.checkpoint.source import Source
from zaya_jax.checkpoint.vault import share, vault_at
from zaya_jax.config import Config, Model, StorageError, UserError
from zaya_jax.data import pipeline
from zaya_jax.data.tokenizers import Tokenizer
from zaya_jax.model import zaya
from zaya_jax.schedule import Plan
from zaya_jax.training.workdir import flat

OWN = (
    "run.fork",
    "run.fork_step",
    "run.fork_tokens",
    "run.init_from",
    "run.init_grow",
)  # of each run by itself


def find(config: Config, workdir: Path) -> list | None:
    """[FOLDER@STEP, step, tokens] of what a config forks: as the workdir has recorded, otherwise as the parent has."""
    if not config.run.fork:
        return None
    folder, step = _split(config.run.fork)
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # nothing is recorded there
        recorded = json.loads((workdir / "config.json").read_text(encoding="utf-8"))["run"]
        known = recorded["fork_step"] and folder == recorded["fork"].rpartition("@")[0]
        if known and step in (None, recorded["fork_step"]):
            return [recorded["fork"], recorded["fork_step"], recorded["fork_tokens"]]
    source = _open(config.run.fork)
    meta = _meta(source, f"{folder}@{source.step}")
    return [f"{folder}@{source.step}", source.step, meta["tokens"]]


def settle(config: Config, found: list | None) -> Config:
    """The config with that in it."""
    if found is None:
        return config
    given = (config.run.fork_step, config.run.fork_tokens)
    if given not in ((0, 0), tuple(found[1:])):
        raise UserError(
            f"config.run.fork_step={given[0]} and fork_tokens={given[1]}, but {found[0]} has {found[2]} tokens at step "
            f"{found[1]}; leave them out"
        )
    run = dataclasses.replace(config.run, fork=found[0], fork_step=found[1], fork_tokens=found[2])
    return dataclasses.replace(config, run=run)


class Parent:
    """The checkpoint that a fork begins with."""

    def __init__(self, config: Config, tokenizer: Tokenizer):
        self._name = config.run.fork
        self._source = _open(self._name)
        found = _meta(self._source, self._name)
        self._config = config_lib.check(found["config"])
        self._must_fit(config, tokenizer, found)
        files = self._source.files
        with _reading(self._name):
            self._source.check_files({name: files[name] for name in share(files)})
        before, now = flat(config_lib.to_dict(self._config)), flat(config_lib.to_dict(config))
        changed = {
            key: [before.get(key), now.get(key)]
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key) and key not in OWN
        }
        folder = self._name.rpartition("@")[0]
        from_here = {
            "folder": folder if "://" in folder else str(Path(folder).absolute()), "run": self._source.run,
            "step": found["step"], "tokens": found["tokens"], "changed": changed,
        }  # fmt: skip
        self.meta = {
            "step": found["step"], "tokens": found["tokens"], "data": pipeline.forked(found["data"]),
            "config": config_lib.to_dict(config), "metrics": found.get("metrics") or {},
            "lineage": [from_here, *found.get("lineage", [])],
        }  # fmt: skip

    def note(self, plan: Plan) -> str:
        """What is taken over and what differs; `plan` is the fork's."""
        here = self.meta["lineage"][0]
        step = here["step"]
        changes = [f"config.{key} {was!r} there, {now!r} here" for key, (was, now) in here["changed"].items()]
        with contextlib.suppress(UserError, ValueError):  # a parent that was stopped at once has no such step
            was = schedule.make_plan(self._config).step(step).lr
            now = plan.step(step + 1).lr
            changes.append(f"learning rate {was:.6g} at step {step} there, {now:.6g} at step {step + 1} here")
        return f"note: fork of {self._name} ({step} steps, {here['tokens']:,} tokens): {'; '.join(changes)}"

    def load(self, like: Any, held: Holding) -> Any:
        """A copy of the whole state (`training.snapshot`), laid out as these ShapeDtypeStructs with shardings say."""
        with _reading(self._name):
            theirs = self._source.arrays()
            for name, x in held.arrays.items():
                if name not in theirs or theirs[name].shape != tuple(x.shape):
                    has = f"of {theirs[name].shape}" if name in theirs else "not"
                    raise StorageError(f"it has {name} {has}, the state needs {tuple(x.shape)}")
            parts: dict[str, list[HeldBox]] = defaultdict(list)
            for part in held.parts:
                parts[part.leaf].append(part)
            found = [_filled(self._source, theirs, x, parts[name]) for name, x in trees.flat(like).items()]
        return jax.tree.unflatten(jax.tree.structure(like), found)

    def _must_fit(self, config: Config, tokenizer: Tokenizer, meta: dict[str, Any]) -> None:
        theirs, name = self._config, self._name
        if _shapes(theirs.model) != _shapes(config.model):
            was, now = (flat(config_lib.to_dict(c.model)) for c in (theirs, config))
            different = ", ".join(
                f"{key}={now[key]!r} ({was[key]!r} there)" for key in was if was[key] != now[key]
            )
            raise UserError(
                f"config.model has {different}, so the state of run.fork={name} does not fit; restore it, or let a "
                "larger model take what fits of the weights, by config.run.init_from and init_grow"
            )
        if theirs.optim.name != config.optim.name:
            raise UserError(
                f"config.optim.name={config.optim.name!r}, but run.fork={name} has {theirs.optim.name!r}, whose state "
                "is another; restore it, or begin with the weights alone by config.run.init_from"
            )
        if meta["tokenizer"] != tokenizer.sha256:
            raise UserError(
                f"config.data.tokenizer={config.data.tokenizer!r} is another than run.fork={name} has: its ids "
                "mean other text; give that run's, which lies in its folder as tokenizer/"
            )
        if not any(name.startswith(f"{layout.STATE}/optimizer.") for name in self._source.files):
            raise UserError(
                f"config.run.fork={name} has weights alone, no optimizer; begin with them by config.run.init_from"
            )


def _split(place: str) -> tuple[str, int | None]:
    folder, at, number = place.rpartition("@")
    if at and folder and number.isdecimal() and not Path(place).is_dir():  # a folder may be called so, too
        return folder, int(number)
    return place, None


def _steps(folder: str) -> list[int]:
    vault = vault_at(folder)
    return vault.steps() if vault else writing.numbered(Path(folder) / "checkpoints")


def _open(place: str) -> Source:
    folder, step = _split(place)
    steps = _steps(folder)
    if not steps or step not in (None, *steps):
        wanted = "no complete checkpoint" + ("" if step is None else f" of step {step}")
        there = (
            f"; it has {', '.join(map(str, steps))}" if steps else "; give the folder of a run that has saved"
        )
        raise UserError(f"config.run.fork={place} has {wanted}{there}")
    with _reading(f"{folder}@{max(steps) if step is None else step}"):
        return Source(folder, step)


@contextlib.contextmanager
def _reading(place: str) -> Iterator[None]:
    """Names the parent and its steps in an error of its files."""
    try:
        yield
    except (OSError, ValueError, StorageError) as error:
        there = ", ".join(map(str, _steps(_split(place)[0])))
        raise StorageError(f"config.run.fork={place}: {writing.reason(error)}; it has {there}") from None


def _meta(source: Source, place: str) -> dict[str, Any]:
    with _reading(place):
        meta = source.json(layout.META)
    if {"step", "tokens", "data", "config", "tokenizer"} <= meta.keys() and meta["tokens"]:
        return meta
    raise UserError(
        f"config.run.fork={place} is of a run that has not been trained; begin with its weights by config.run.init_from"
    )


def _shapes(model: Model) -> dict[str, tuple[int, ...]]:
    shapes = {name: tuple(x.shape) for name, x in trees.flat(zaya.abstract(model)).items()}
    return shapes | {"balance": (model.num_hidden_layers, model.num_experts)}


def _filled(
    source: Source, theirs: dict[str, layout.Array], like: jax.ShapeDtypeStruct, parts: list[HeldBox]
) -> jax.Array:
    """One array of the run from a checkpoint's; what several devices of a process hold is read once."""
    read: dict[tuple, np.ndarray] = {}
    singles = []
    for device in sorted(like.sharding.addressable_devices, key=lambda device: device.id):
        its = [part for part in parts if part.device == device]
        key = tuple((part.name, part.box, part.place) for part in its)
        if key not in read:
            read[key] = np.zeros(like.sharding.shard_shape(tuple(like.shape)), like.dtype)
            for part in its:
                x = np.empty(layout.sizes(part.box), like.dtype)
                source.fill(theirs[part.name], part.box, x)
                part.of(read[key])[...] = x
        singles.append(jax.device_put(read[key], device, may_alias=False))
    return jax.make_array_from_single_device_arrays(tuple(like.shape), like.sharding, singles)
