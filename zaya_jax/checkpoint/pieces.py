"""Arrays of a checkpoint read and written piece by piece, for models that should not lie in memory whole.

Orbax stores an array as zarr chunks inside one OCDBT database a checkpoint; TensorStore, which is below Orbax, opens
them one by one. Stacked matrices have a layer a chunk at least (`store.by_layer`), so a layer is read alone.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from zaya_jax.checkpoint import store
from zaya_jax.config import UserError


class Reader:
    """The arrays of one checkpoint's state by path, such as ("params", "layers", "experts", "down")."""

    def __init__(self, workdir: str | os.PathLike, step: int):
        self._folder = store.step_folder(workdir, step) / "state"
        self._open: dict[tuple[str, ...], ts.TensorStore] = {}

    def shape(self, path: tuple[str, ...]) -> tuple[int, ...]:
        """An array's shape; UserError where there is no such array."""
        return tuple(self._array(path).shape)

    def read(self, path: tuple[str, ...], index: int | None = None) -> np.ndarray:
        """An array, or its entry at `index` of the first dimension."""
        array = self._array(path)
        return (array if index is None else array[index]).read().result()

    def _array(self, path: tuple[str, ...]) -> ts.TensorStore:
        if path not in self._open:
            try:
                self._open[path] = ts.open(_spec(self._folder, path), open=True, read=True).result()
            except ValueError as error:
                first = str(error).splitlines()[0]
                raise UserError(f"{self._folder} has no readable {'/'.join(path)} ({first})") from None
        return self._open[path]


class Writer:
    """Fills the arrays of a new checkpoint of step 0, which is complete only when `close` has returned.

    The caller owns the folder until then: put it under another name and rename it.
    """

    def __init__(self, workdir: Path, abstract_state: dict[str, Any], meta: dict[str, Any]):
        """`abstract_state` has the shape and dtype of every array."""
        # Orbax writes the frame with arrays of one number, which are then replaced.
        frame = _map(lambda _, x: np.zeros((1,) * len(x.shape), x.dtype), abstract_state)
        frame_store = store.Store(workdir)
        frame_store.save(0, frame, meta)
        frame_store.close()
        self._folder = store.step_folder(workdir, 0) / "state"
        self._arrays: dict[tuple[str, ...], ts.TensorStore] = {}
        self._gathered: dict[tuple[str, ...], np.ndarray] = {}
        _map(self._create, abstract_state)

    def _create(self, path: tuple[str, ...], x: Any) -> None:
        self._arrays[path] = ts.open(
            _spec(self._folder, path), create=True, delete_existing=True, dtype=ts.dtype(x.dtype.name), shape=x.shape,
            chunk_layout=ts.ChunkLayout(chunk_shape=_chunk(path, x.shape, x.dtype.itemsize)),
        ).result()  # fmt: skip

    def write(self, path: tuple[str, ...], x: np.ndarray, index: int | None = None) -> None:
        """Sets an array, or its entry at `index` of the first dimension; all must be set."""
        array = self._arrays[path]
        if index is None:
            _write_rows(array, x)
        elif store.by_layer(path, array.shape):
            array[index].write(x).result()
        else:
            if path not in self._gathered:
                self._gathered[path] = np.zeros(array.shape, x.dtype)
            self._gathered[path][index] = x

    def close(self) -> None:
        """Writes what was gathered."""
        for path, x in self._gathered.items():
            _write_rows(self._arrays[path], x)
        self._gathered.clear()


def _write_rows(array: ts.TensorStore, x: np.ndarray) -> None:
    """Writes an array a row of chunks at a time: TensorStore copies what it is given before it returns."""
    if not x.ndim:
        array.write(x).result()
        return
    chunk = array.chunk_layout.write_chunk.shape
    assert chunk is not None
    rows = chunk[0] or len(x)
    for begin in range(0, len(x), rows):
        array[begin : begin + rows].write(x[begin : begin + rows]).result()


def _spec(folder: Path, path: tuple[str, ...]) -> dict[str, Any]:
    base = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}}
    # Else a chunk of zeros is left out, which Orbax takes for lost.
    zeros = {"store_data_equal_to_fill_value": True}
    return {"driver": "zarr3", "kvstore": {**base, "path": ".".join(path) + "/"}, **zeros}


def _chunk(path: tuple[str, ...], shape: tuple[int, ...], itemsize: int) -> list[int]:
    """Chunks of at most CHUNK_BYTES, cut at the first dimension that is not one yet; layers never share one."""
    chunk = [1, *shape[1:]] if store.by_layer(path, shape) else list(shape)
    for dim, size in enumerate(shape):
        rest = int(np.prod(chunk)) * itemsize
        if rest > store.CHUNK_BYTES:
            parts = -(-rest // store.CHUNK_BYTES)
            divisors = (n for n in range(1, chunk[dim] + 1) if size % n == 0)
            chunk[dim] = max((n for n in divisors if n * parts <= chunk[dim]), default=1)
    return chunk


def _map(function: Any, tree: Any, path: tuple[str, ...] = ()) -> Any:
    if isinstance(tree, dict):
        return {key: _map(function, value, (*path, key)) for key, value in tree.items()}
    return function(path, tree)
