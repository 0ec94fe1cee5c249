"""Reads named arrays, chunk by chunk, wherever they lie.

source = open_source("runs/tiny@300")        (`orbax_source`) a run's folder, one step's, "s3://bucket/run"
source.read("params.final_norm.scale")      an array on the host; StorageError if a chunk is damaged
source.fill(array, box, out)                 a part of one, without a copy of the rest
source.restore(like, locations)              a tree of arrays on devices (`reading`)

ArraySource      what every source can do
  SealedSource   a checkpoint of this package: with checksums
  OrbaxSource    a state that plain Orbax saved
  FewBits        another source, its experts in few bits
  MergedSource   a run's low-rank updates and their base
  Directory, InMemory (in `pytorch`)   a model directory of transformers; arrays in memory
"""

import abc
import contextlib
import functools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zaya_jax import config as config_lib
from zaya_jax import schedule, trees
from zaya_jax.checkpoint import boxes, folders, layout, reading
from zaya_jax.checkpoint.boxes import Locations
from zaya_jax.checkpoint.layout import Box, StoredArray
from zaya_jax.checkpoint.storage import FileError, for_each
from zaya_jax.checkpoint.vault import StepName, Vault, vault_of
from zaya_jax.config import Config, Model, StorageError, UserError, fields, shown


class ArraySource(abc.ABC):
    """Named arrays; a kind says which there are and reads a chunk of one."""

    warning = ""  # a reservation about its numbers, said after its name
    workdir: Path | None = None  # of a run's checkpoint that was found in its folder
    run = ""  # the run's name, if it is known
    step = 0

    def __init__(self, location: str | Path):
        self.location = location
        self.name = str(location)  # in messages
        self._cached_chunk: tuple[str, np.ndarray] | None = None

    @property
    @abc.abstractmethod
    def arrays(self) -> dict[str, StoredArray]:
        """All arrays by name; StorageError if their descriptions are damaged."""

    @abc.abstractmethod
    def read_chunk(self, array: StoredArray, index: tuple[int, ...]) -> np.ndarray:
        """One chunk, verified if that is possible."""

    def meta(self) -> dict[str, Any]:
        """The metadata of the step (meta/data.json); as much as is known if there is none."""
        return {"step": self.step, "tokens": 0}

    @functools.cached_property
    def model(self) -> Model | None:
        """The model that the weights are of; None if no config is there that can be read."""
        with contextlib.suppress(KeyError, UserError):
            return model_at(config_lib.check(self.meta()["config"]), self.step)
        return None

    def read(self, name: str, index: int | None = None) -> np.ndarray:
        """An array, or its entry at `index` of the first dimension; UserError if there is no such
        array."""
        if name not in self.arrays:
            raise UserError(f"{self.name} has no array {name}{fields.nearest(name, self.arrays)}")
        array = self.arrays[name]
        box = layout.full_box(array.shape)
        if index is not None:
            box = (slice(index, index + 1), *box[1:])
        out = np.empty(layout.shape_of(box), array.dtype)
        self.fill(array, box, out)
        return out if index is None else out[0]

    def stored_codes(
        self, form: str, name: str, layer: int
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Codes and scale of a layer's "experts/down" (`model.quantized`), if it has them in this
        form."""
        return None

    def fill(self, array: StoredArray, box: Box, out: np.ndarray) -> None:
        """Fills `out` with a part of an array, in `out`'s own type; holds one chunk, until the next
        is read."""
        for index, chunk_box in array.chunks_overlapping(box):
            file = array.file(index)
            if self._cached_chunk is None or self._cached_chunk[0] != file:
                self._cached_chunk = None  # before the next is read
                self._cached_chunk = file, self.read_chunk(array, index)
            inside = layout.overlap(chunk_box, box)
            chunk = self._cached_chunk[1]
            out[layout.within(inside, box)] = chunk[layout.within(inside, chunk_box)]

    def restore(self, like: Any, locations: Locations | None = None, exact: bool = False) -> Any:
        """A tree of arrays laid out as `like`'s ShapeDtypeStructs with shardings say; StorageError
        for damage.

        `locations` says where the arrays lie in it, if it is not a tree of them; `exact`: the source
        must have no others.
        """
        locations = locations or boxes.of_tree(like)
        if odd := misfit(self.arrays, locations.arrays, exact):
            raise StorageError(f"{self.name} cannot be read: {odd}")
        restored = reading.on_devices(self.read_chunk, self.arrays, locations)
        leaves = [restored[name] for name in trees.flat(like)]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)


class SealedSource(ArraySource):
    """A complete checkpoint, in a run's folder, in a folder by itself, or at an address."""

    def __init__(self, location: str | Path, step: int | None = None):
        """`step`: by default the newest, or the one that FOLDER@STEP names."""
        location, step = split_step(location, step)
        super().__init__(location)
        self._vault, self._step_name, self.workdir = _locate(location, step)
        try:
            seal = self._vault.read_seal(self._step_name)
        except FileError as error:
            if not self.workdir:
                raise
            raise StorageError(
                f"{error}; `python -m experiments.checkpoint verify` lists it all, and"
                f" {location}@STEP is another step"
            ) from None
        self.files = seal.files
        self.run = seal.run or ""
        self.step = seal.step
        self.name = f"step {self.step} of {location}"

    def _read_json(self, name: str) -> dict[str, Any]:
        """A small file; StorageError if it is damaged."""
        return json.loads(self._vault.read_checked(self._step_name, name, self.files))

    def meta(self) -> dict[str, Any]:
        """The metadata of the step; what Orbax has saved, by `Handler` too, has none."""
        return self._read_json(layout.META) if layout.META in self.files else super().meta()

    @functools.cached_property
    def arrays(self) -> dict[str, StoredArray]:
        """All arrays by name; StorageError if their descriptions are damaged."""

        def describe(file: str) -> StoredArray:
            return StoredArray.from_json(layout.array_of_file(file), self._read_json(file))

        described = sorted(name for name in self.files if name.endswith("/zarr.json"))
        return {array.name: array for array in for_each(describe, described)}

    def read_chunk(self, array: StoredArray, index: tuple[int, ...]) -> np.ndarray:
        """One chunk, verified against the seal's checksum (which also rules out a swapped
        chunk)."""
        content = self._vault.read_checked(self._step_name, array.file(index), self.files)
        numbers = np.frombuffer(content, np.uint8, array.chunk_bytes)
        return numbers.view(array.dtype).reshape(array.chunk)


def _locate(location: str | Path, step: int | None) -> tuple[Vault, StepName, Path | None]:
    """(the vault, the checkpoint in it, the workdir) at a location, which is one of

    - the folder of one checkpoint;
    - an address or a folder of steps; by default its newest complete step;
    - a workdir; by default its highest-numbered step, as for a run that resumes: silently using an
      older one than a damaged step would load a different model.
    """
    folder = Path(location).absolute()
    if (folder / layout.SEAL_FILE).is_file():
        vault = Vault(folder.parent)
        number = folders.step_of(folder.name)
        if number is not None and vault.owner():
            return vault, number, None
        return vault, folder.name, None
    vault, workdir = vault_of(location)
    steps = vault.numbered() if workdir else vault.steps()
    return vault, choose_step(location, steps, step), workdir


def model_at(config: Config, step: int) -> Model:
    """The model as the run's phase at this step has it."""
    if step == 0:
        return config.model
    return schedule.phase_config(config, schedule.phase_at(config, step)).model


def model_differences(theirs: Model | None, ours: Model) -> list[str]:
    """Describes config keys that make the same weights compute something different here; empty if
    the other model is unknown."""
    if theirs is None:
        return []
    there, here = trees.flat(_keys_that_matter(theirs)), trees.flat(_keys_that_matter(ours))
    return [
        f"config.model.{key} {there.get(key)!r} there, {here.get(key)!r} here"
        for key in sorted(there.keys() | here.keys())
        if there.get(key) != here.get(key)
    ]


def _keys_that_matter(model: Model) -> dict[str, Any]:
    """The keys on which a model's results depend."""
    keys = config_lib.to_dict(model) | {"layer_types": ", ".join(model.kinds)}
    ropes = keys["rope_parameters"].items()
    keys["rope_parameters"] = {kind: rope for kind, rope in ropes if kind in model.kinds}
    without_effect = ["initializer_range", "max_position_embeddings"]
    if "hybrid_sliding" not in model.kinds:
        without_effect.append("sliding_window")
    return {
        name: x
        for name, x in keys.items()
        if name not in without_effect and not name.endswith("_token_id")
    }


def choose_step(location: str | os.PathLike, steps: Sequence[int], step: int | None) -> int:
    """`step`, or without one the newest of a location's; UserError if there is none."""
    if not steps:
        raise UserError(f"{location} has no checkpoint; train first, or give a run's folder")
    if step not in (None, *steps):
        present = ", ".join(map(str, steps))
        raise UserError(f"{location} has no checkpoint of step {shown(step)}; it has {present}")
    return steps[-1] if step is None else step


def misfit(
    stored: Mapping[str, StoredArray], wanted: Mapping[str, Any], exact: bool = False
) -> str:
    """How the arrays of a checkpoint differ from those that are wanted; "" if they do not."""
    for name, x in wanted.items():
        if name not in stored:
            return f"it has no array {name}{fields.nearest(name, stored)}"
        array = stored[name]
        if array.shape != tuple(x.shape):
            return f"its array {name} is {list(array.shape)}, {list(x.shape)} is needed"
        if layout.is_real(array.dtype) != layout.is_real(x.dtype):
            return (
                f"its array {name} is of {array.dtype}, and {np.dtype(x.dtype)} is needed; multiply"
                " quantised weights by their scales before they are saved"
            )
    more = sorted(stored.keys() - wanted.keys())
    if exact and more:
        return f"it has arrays that are not wanted, such as {more[0]} ({len(more)} in all)"
    return ""


def split_step(location: str | Path, step: int | None) -> tuple[str | Path, int | None]:
    """FOLDER@STEP in two parts; a folder's own name may end like that, too."""
    path, _, number = str(location).rpartition("@")
    named = folders.step_of(number)
    if step is None and path and named is not None and not Path(location).is_dir():
        return path, named
    return location, step


def read_meta(workdir: str | os.PathLike, step: int) -> dict[str, Any]:
    """The JSON part of a checkpoint alone, checked; touches nothing, so a run may be writing
    there."""
    return Vault(Path(workdir) / "checkpoints").read_meta(step)
