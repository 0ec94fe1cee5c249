"""Arrays of a checkpoint read and written piece by piece, for models that should not lie in memory whole.

An array's chunks are files (`layout`); TensorStore, which is below Orbax, reads them one by one and checks them. Large
stacked matrices have a chunk a layer at least, so that a layer is read alone.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from zaya_jax import trees
from zaya_jax.checkpoint import layout, store, writing
from zaya_jax.checkpoint.seal import Seal
from zaya_jax.config import StorageError, UserError, first_line


class Reader:
    """The arrays of one checkpoint's state by path, such as ("params", "layers", "experts", "down")."""

    def __init__(self, workdir: str | os.PathLike, step: int):
        self._folder = store.step_folder(workdir, step) / layout.STATE
        self._open: dict[tuple[str, ...], ts.TensorStore] = {}

    def shape(self, path: tuple[str, ...]) -> tuple[int, ...]:
        """An array's shape; UserError where there is no such array."""
        return tuple(self._array(path).shape)

    def read(self, path: tuple[str, ...], index: int | None = None) -> np.ndarray:
        """An array, or its entry at `index` of the first dimension."""
        array = self._array(path)
        try:
            return (array if index is None else array[index]).read().result()
        except ValueError as error:
            raise StorageError(f"{self._folder / '.'.join(path)} is damaged ({first_line(error)})") from None

    def _array(self, path: tuple[str, ...]) -> ts.TensorStore:
        if path not in self._open:
            kvstore = {"driver": "file", "path": f"{self._folder / '.'.join(path)}/"}
            try:
                spec = {"driver": "zarr3", "kvstore": kvstore}
                self._open[path] = ts.open(spec, open=True, read=True).result()
            except ValueError as error:
                raise UserError(
                    f"{self._folder} has no readable {'/'.join(path)} ({first_line(error)})"
                ) from None
        return self._open[path]


class Writer:
    """Fills the arrays of a new checkpoint, which is there only when `close` has returned."""

    def __init__(self, workdir: Path, step: int, abstract_state: dict[str, Any], meta: dict[str, Any]):
        """`abstract_state` has the shape and dtype of every array."""
        root = store.step_folder(workdir, step).parent
        self._step, self._run = step, writing.begin_run(root)
        meta = meta | {"run": self._run}
        self._folder, self._target = root / f"{writing.SAVING}{step}", root / str(step)
        self._arrays = {
            name: layout.Array(name, tuple(x.shape), np.dtype(x.dtype).name, chunk_of(name, x))
            for name, x in trees.flat(abstract_state).items()
        }
        self._sums = writing.write_files(self._folder, layout.frame(tuple(self._arrays.values()), meta))
        self._gathered: dict[str, np.ndarray] = {}

    def write(self, path: tuple[str, ...], x: np.ndarray, index: int | None = None) -> None:
        """Sets an array, or its entry at `index` of the first dimension; all must be set."""
        array = self._arrays[".".join(path)]
        if index is None:
            self._write(array, x, tuple(slice(0, n) for n in array.shape))
        elif array.chunk[0] == 1:
            box = (slice(index, index + 1), *(slice(0, n) for n in array.shape[1:]))
            self._write(array, x[None], box)
        else:
            if array.name not in self._gathered:
                self._gathered[array.name] = np.zeros(array.shape, array.dtype)
            self._gathered[array.name][index] = x

    def close(self) -> None:
        """Writes what was gathered, and gives the checkpoint its name."""
        for name, x in self._gathered.items():
            self._write(self._arrays[name], x, tuple(slice(0, n) for n in x.shape))
        self._gathered.clear()
        writing.commit(self._folder, self._target, Seal(self._sums, self._step, self._run))

    def _write(self, array: layout.Array, x: np.ndarray, box: tuple[slice, ...]) -> None:
        (self._folder / array.folder).mkdir(parents=True, exist_ok=True)
        x = np.asarray(x, array.dtype)
        for chunk, place in array.chunks(box):
            name = array.file(chunk)
            self._sums[name] = writing.write_chunk(self._folder / name, x[place])


def chunk_of(name: str, x: Any) -> tuple[int, ...]:
    """The chunks of an array that no mesh cuts."""
    return layout.chunk_shape(name, tuple(x.shape), np.dtype(x.dtype).itemsize)
