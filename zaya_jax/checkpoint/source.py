"""Reads one checkpoint: in a run's folder, in a folder by itself, or at an address.

source = Source("runs/tiny", step)              or "runs/tiny@300", exported parameters, "s3://bucket/run"
source.check(names=["state/params."])           StorageError if one of these files is damaged
source.read(("params", "head", "kernel"))       an array on the host
source.fill(array, box, out)                    a part of one, without a copy of the rest
source.restore(like, held)                      a tree of arrays on devices (`reading`)
"""

import contextlib
import difflib
import functools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zaya_jax import config as config_lib
from zaya_jax import schedule, trees
from zaya_jax.checkpoint import boxes, layout, reading
from zaya_jax.checkpoint.boxes import Holding
from zaya_jax.checkpoint.layout import Array, Box
from zaya_jax.checkpoint.seal import Seal, Sums
from zaya_jax.checkpoint.vault import Progress, Step, Vault, vault_at
from zaya_jax.config import Config, Model, StorageError, UserError, shown


class Source:
    """A whole checkpoint's files."""

    warning = ""  # a reservation about its numbers, said after its name

    def __init__(self, place: str | Path, step: int | None = None):
        """`step`: by default the newest, or the one that FOLDER@STEP names."""
        place, step = place_and_step(place, step)
        self.place, self.workdir = place, None
        self._kept: tuple[str, np.ndarray] | None = None
        vault = vault_at(place)
        name: Step
        if vault:
            name = choose_step(place, vault.steps(), step)
        # one checkpoint's own folder, or exported parameters
        elif (Path(place) / layout.MARKER).is_file():
            folder = Path(place).absolute()
            vault, name = Vault(folder.parent), folder.name
            if vault.owner() and folder.name.isdecimal():
                name = int(folder.name)
        else:
            self.workdir = Path(place).absolute()
            # The newest is the one of the greatest name, as for a start: a folder gets its name with
            # its list in it, so one without is damaged, and an older one in its place would be
            # another model without a word.
            vault = Vault(self.workdir / "checkpoints")
            name = choose_step(place, vault.numbered(), step)
        self._vault, self._name = vault, name
        with self._unless_deleted():
            found = self._whole()
        self.files, self.run, self.step = found.files, found.run or "", found.step
        self.name = f"step {self.step} of {place}"

    def _whole(self) -> Seal:
        """Its list; StorageError with a way out where that is damaged."""
        try:
            return self._vault.seal(self._name)
        except StorageError as error:
            if not self.workdir:
                raise
            others = [step for step in self._vault.steps() if step != self._name]
            take = f", or take step {others[-1]} ({self.place}@{others[-1]})" if others else ""
            raise StorageError(
                f"{error}; `python -m experiments.checkpoint verify` lists it all{take}"
            ) from None

    @contextlib.contextmanager
    def _unless_deleted(self) -> Iterator[None]:
        """Turns errors of reading into a UserError if the run has deleted the step meanwhile."""
        try:
            yield
        except (OSError, ValueError, KeyError, TypeError, StorageError):
            left = self._vault.numbered() if self.workdir else self._vault.steps()
            if self._name in left or isinstance(self._name, str):
                raise
            has = f"it has {', '.join(map(str, left))}" if left else "it has no other"
            raise UserError(
                f"step {self._name} of {self.place} is gone meanwhile, its run has deleted it;"
                f" {has}"
            ) from None

    def check(self, progress: Progress | None = None, names: Sequence[str] = ("",)) -> None:
        """StorageError if files that begin with one of these names, or by which they are found, are
        damaged."""
        wanted = (*names, layout.META, "_CHECKPOINT", f"{layout.STATE}/_METADATA")
        self.check_files(
            {n: entry for n, entry in self.files.items() if n.startswith(wanted)}, progress
        )

    def check_files(self, sums: Sums, progress: Progress | None = None) -> None:
        """StorageError if one of these is damaged."""
        with self._unless_deleted():
            damages = self._vault.check(self._name, sums, progress)
            if damages:
                more = f", and {len(damages) - 1} more" if len(damages) > 1 else ""
                raise StorageError(f"{self.name} is damaged: {damages[0]}{more}")

    def json(self, name: str) -> dict[str, Any]:
        """A small file."""
        with self._unless_deleted():
            return json.loads(self._vault.get(self._name, name))

    def meta(self) -> dict[str, Any]:
        """Its small file; what Orbax has saved, by `Handler` too, has none: then as much as is
        known without."""
        if layout.META not in self.files:
            return {"step": self.step, "tokens": 0}
        self.check(names=[layout.META])
        return self.json(layout.META)

    @functools.cached_property
    def model(self) -> Model | None:
        """The model that the weights are of; None where no config is there that can be read."""
        with contextlib.suppress(KeyError, UserError):
            return model_at(config_lib.check(self.meta()["config"]), self.step)
        return None

    def arrays(self) -> dict[str, Array]:
        """All arrays by name; StorageError if their descriptions are damaged."""
        described = sorted(name for name in self.files if name.endswith("/zarr.json"))
        self.check(names=described)
        return {array.name: array for array in map(self._array, described)}

    def array(self, path: Sequence[str]) -> Array:
        """One array; UserError if there is no such array."""
        name = ".".join(path)
        if f"{layout.STATE}/{name}/zarr.json" not in self.files:
            raise UserError(f"{self.name} has no array {name}")
        return self._array(f"{layout.STATE}/{name}/zarr.json")

    def _array(self, file: str) -> Array:
        return Array.of_json(file.split("/")[1], self.json(file))

    def read(self, path: Sequence[str], index: int | None = None) -> np.ndarray:
        """An array, or its entry at `index` of the first dimension."""
        array = self.array(path)
        box = tuple(slice(0, n) for n in array.shape)
        if index is not None:
            box = (slice(index, index + 1), *box[1:])
        out = np.empty(layout.sizes(box), array.dtype)
        self.fill(array, box, out)
        return out if index is None else out[0]

    def fill(self, array: Array, box: Box, out: np.ndarray) -> None:
        """Fills `out` with a part of an array, in `out`'s own type; holds one chunk, until the next
        is read."""
        for index, holds in array.touched(box):
            if self._kept is None or self._kept[0] != array.file(index):
                self._kept = None  # before the next is read
                self._kept = array.file(index), self._chunk(array, index)
            inside = layout.overlap(holds, box)
            out[layout.within(inside, box)] = self._kept[1][layout.within(inside, holds)]

    def _chunk(self, array: Array, index: tuple[int, ...]) -> np.ndarray:
        """One chunk, verified by its own checksum, which is the listed one: so it is not another
        chunk."""
        name = array.file(index)
        with self._unless_deleted():
            return reading.chunk_of(
                self._vault.get(self._name, name), array, index, self.files[name][1]
            )

    def restore(self, like: Any, held: Holding | None = None, everything: bool = False) -> Any:
        """A tree of arrays laid out as `like`'s ShapeDtypeStructs with shardings say; StorageError
        for damage.

        `held` says where the checkpoint's arrays lie in it, if it is not a tree of them;
        `everything`: the checkpoint must have no others.
        """
        held = held or boxes.of_tree(like)
        try:
            theirs = self.arrays()
            if odd := misfit(theirs, held.arrays, everything):
                raise ValueError(odd)
            found = reading.on_devices(self._chunk, theirs, held)
        except UserError:  # of a model directory's numbers
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StorageError(f"{self.name} cannot be read: {error}") from error
        return jax.tree.unflatten(
            jax.tree.structure(like), [found[name] for name in trees.flat(like)]
        )


def model_at(config: Config, step: int) -> Model:
    """The model as the run's phase at this step has it."""
    if step == 0:
        return config.model
    return schedule.phase_config(config, schedule.phase_at(config, step)).model


def differing(there: Model | None, here: Model) -> list[str]:
    """The keys by which the same weights are another function here, in words; none where the model
    there is not known."""
    was, now = (trees.flat(_function(model)) for model in (there or here, here))
    return [
        f"config.model.{key} {was.get(key)!r} there, {now.get(key)!r} here"
        for key in sorted(was.keys() | now.keys())
        if was.get(key) != now.get(key)
    ]


def _function(model: Model) -> dict[str, Any]:
    """The keys on which a model's results depend."""
    keys = config_lib.to_dict(model) | {"layer_types": ", ".join(model.kinds)}
    ropes = keys["rope_parameters"].items()
    keys["rope_parameters"] = {kind: rope for kind, rope in ropes if kind in model.kinds}
    others = ["initializer_range", "max_position_embeddings"]
    others += [] if "hybrid_sliding" in model.kinds else ["sliding_window"]
    return {k: x for k, x in keys.items() if k not in others and not k.endswith("_token_id")}


def nearest(name: str, names: Iterable[str]) -> str:
    """The names most like one that is not among them, as the end of an error."""
    known = sorted(names)
    found = difflib.get_close_matches(name, known, 3, 0.4) or known[:3]
    return f"; the nearest names are {', '.join(found)}" if found else ""


def choose_step(place: str | os.PathLike, steps: Sequence[int], step: int | None) -> int:
    """`step`, or without one the newest of a place's; UserError where there is none."""
    if not steps:
        raise UserError(f"{place} has no checkpoint; train first, or give a run's folder")
    if step not in (None, *steps):
        has = ", ".join(map(str, steps))
        raise UserError(f"{place} has no checkpoint of step {shown(step)}; it has {has}")
    return steps[-1] if step is None else step


def misfit(theirs: Mapping[str, Array], wanted: Mapping[str, Any], everything: bool = False) -> str:
    """How the arrays of a checkpoint differ from those that are wanted; "" where they do not."""
    for name, x in wanted.items():
        if name not in theirs:
            return f"it has no array {name}{nearest(name, theirs)}"
        if theirs[name].shape != tuple(x.shape):
            return f"its array {name} is {list(theirs[name].shape)}, {list(x.shape)} is needed"
        if layout.is_real(theirs[name].dtype) != layout.is_real(x.dtype):
            needed = (
                f"{np.dtype(x.dtype)} is needed; multiply quantised weights by their scales before"
                " they are saved"
            )
            return f"its array {name} is of {theirs[name].dtype}, and {needed}"
    more = sorted(theirs.keys() - wanted.keys())
    return (
        f"it has arrays that are not wanted, such as {more[0]} ({len(more)} in all)"
        if more and everything
        else ""
    )


def place_and_step(place: str | Path, step: int | None) -> tuple[str | Path, int | None]:
    """FOLDER@STEP in two parts; a folder's own name may end like that, too."""
    path, _, number = str(place).rpartition("@")
    if step is None and path and number.isdecimal() and not Path(place).is_dir():
        return path, int(number)
    return place, step


def read_meta(workdir: str | os.PathLike, step: int) -> dict[str, Any]:
    """The JSON part of a checkpoint alone, checked; touches nothing, so a run may be writing
    there."""
    return Vault(Path(workdir) / "checkpoints").meta(step)
