"""Reads one checkpoint: in a run's folder, in a folder by itself, or at an address.

    source = Source("runs/tiny", step)              or "runs/tiny@300", exported parameters, "s3://bucket/run"
    source.check(names=["state/params."])           StorageError if one of these files is damaged
    source.read(("params", "head", "kernel"))       an array on the host
    source.fill(array, box, out)                    a part of one, without a copy of the rest

Arrays are read a chunk at a time: local chunks are mapped, those of an address fetched.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zaya_jax.checkpoint import layout, store
from zaya_jax.checkpoint.layout import Array, Box
from zaya_jax.checkpoint.seal import TAIL, Sums
from zaya_jax.checkpoint.vault import Progress, Step, Vault, vault_at
from zaya_jax.config import StorageError, UserError, shown
from zaya_jax.config.fields import parse_json

SLAB = 4 << 20  # bytes of a chunk that are mapped at once


class Source:
    """A whole checkpoint's files."""

    def __init__(self, place: str | Path, step: int | None = None):
        """`step`: by default the newest, or the one that FOLDER@STEP names."""
        path, at, number = str(place).rpartition("@")
        # A folder's own name may end like that, too.
        if step is None and at and number.isdecimal() and not Path(place).is_dir():
            place, step = path, int(number)
        self.place, self.workdir = place, None
        self._kept: tuple[str, np.ndarray] | None = None
        vault = vault_at(place)
        name: Step
        if vault:
            steps = vault.steps()
            if not steps or step not in (None, *steps):
                which = f" of step {shown(step)}" if step is not None else ""
                raise UserError(f"--from={place} has no checkpoint{which}")
            name = max(steps) if step is None else step
        elif (Path(place) / layout.MARKER).is_file():  # one checkpoint's own folder, or exported parameters
            folder = Path(place).absolute()
            vault, name = Vault(folder.parent), folder.name
            if vault.owner() and folder.name.isdecimal():
                name = int(folder.name)
        else:
            self.workdir = Path(place).absolute()
            vault, name = Vault(self.workdir / "checkpoints"), store.latest_step(place, step)
        self._vault, self._name = vault, name
        with self.unless_deleted():
            found = self._vault.seal(self._name)
        self.files, self.run, self.step = found.files, found.run or "", found.step
        self.name = f"step {self.step} of {place}"

    @contextlib.contextmanager
    def unless_deleted(self) -> Iterator[None]:
        """Turns errors of reading into a UserError if the run has deleted the step meanwhile."""
        try:
            yield
        except (OSError, ValueError, KeyError, TypeError, StorageError):
            left = self._vault.numbered() if self.workdir else self._vault.steps()
            if self._name in left or isinstance(self._name, str):
                raise
            has = f"it has {', '.join(map(str, left))}" if left else "it has no other"
            raise UserError(
                f"step {self._name} of {self.place} is gone meanwhile, its run has deleted it; {has}"
            ) from None

    def check(self, progress: Progress | None = None, names: Sequence[str] = ("",)) -> None:
        """StorageError if files that begin with one of these names, or by which they are found, are damaged."""
        wanted = (*names, layout.META, "_CHECKPOINT", f"{layout.STATE}/_METADATA")
        self.check_files({n: entry for n, entry in self.files.items() if n.startswith(wanted)}, progress)

    def check_files(self, sums: Sums, progress: Progress | None = None) -> None:
        """StorageError if one of these is damaged."""
        damages = self._vault.check(self._name, sums, progress)
        if damages:
            more = f", and {len(damages) - 1} more" if len(damages) > 1 else ""
            raise StorageError(f"{self.name} is damaged: {damages[0]}{more}")

    def json(self, name: str) -> dict[str, Any]:
        """A small file."""
        return parse_json(self._vault.get(self._name, name))

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
        """Fills `out` with a part of an array, in `out`'s own type."""
        for index, holds in array.touched(box):
            for slab in _slabs(layout.overlap(holds, box), np.dtype(array.dtype).itemsize):
                # Mapped anew for each, so that the memory of what was copied can go.
                out[layout.within(slab, box)] = self._chunk(array, index)[layout.within(slab, holds)]

    def _chunk(self, array: Array, index: tuple[int, ...]) -> np.ndarray:
        name, dtype = array.file(index), np.dtype(array.dtype)
        if self._vault.folder:
            return np.memmap(self._vault.folder / str(self._name) / name, dtype, "r", shape=array.chunk)
        if self._kept is None or self._kept[0] != name:
            self._kept = None  # before the next is fetched
            raw = np.frombuffer(self._vault.get(self._name, name), np.uint8)[:-TAIL]
            self._kept = name, raw.view(dtype).reshape(array.chunk)
        return self._kept[1]


def _slabs(box: Box, itemsize: int) -> Iterator[Box]:
    """A box in slabs of about SLAB bytes, along its first dim that has a length."""
    sizes = layout.sizes(box)
    dim = next((d for d, n in enumerate(sizes) if n > 1), None)
    if dim is None:
        yield box
        return
    rows = max(1, SLAB // (math.prod(sizes) // sizes[dim] * itemsize))
    for begin in range(box[dim].start, box[dim].stop, rows):
        yield (*box[:dim], slice(begin, min(begin + rows, box[dim].stop)), *box[dim + 1 :])
