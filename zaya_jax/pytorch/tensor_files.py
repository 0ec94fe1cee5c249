"""Reads and writes safetensors files one tensor at a time: reading by the library, writing by plain
writes.

A model is never in memory as a whole. The library maps a file, and every touched page counts as
this process's memory while the file is open, so the file is opened again for each tensor. Its
writer takes a whole file's tensors at once, 10 GB for a shard of 5 GB, so shards are written here.
"""

import contextlib
import functools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from zaya_jax.config import UserError

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
NAMES = {dtype.name: name for name, dtype in DTYPES.items()} | {FP8.name: "F8_E4M3", "uint8": "U8"}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class TensorFile:
    """One safetensors file; the library checks its header against its size."""

    def __init__(self, path: Path):
        self.path = path
        with _open(path) as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            self.tensors = {
                name: TensorInfo(tuple(part.get_shape()), part.get_dtype())
                for name, part in slices.items()
            }

    def read(self, name: str) -> np.ndarray:
        """A tensor in memory."""
        if self.tensors[name].dtype == NAMES[FP8.name]:  # the library gives NumPy none of these
            begin = self._begins[name]
            shape = self.tensors[name].shape
            return np.fromfile(self.path, FP8, math.prod(shape), offset=begin).reshape(shape)
        with _open(self.path) as file:
            return file.get_tensor(name)

    @functools.cached_property
    def _begins(self) -> dict[str, int]:
        """The first byte of each tensor."""
        with self.path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(size))
        return {name: 8 + size + entries[name]["data_offsets"][0] for name in self.tensors}


class TensorInfo(NamedTuple):
    """A tensor's shape, and its dtype as safetensors writes it: F32, BF16, I64 .."""

    shape: tuple[int, ...]
    dtype: str


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path} cannot be read, it is truncated or damaged ({error}); copy it anew"
        ) from None


Specs = Mapping[str, jax.ShapeDtypeStruct]


def num_bytes(x: jax.ShapeDtypeStruct) -> int:
    """Bytes of a tensor."""
    return math.prod(x.shape) * np.dtype(x.dtype).itemsize


def write_sharded(
    folder: Path, specs: Specs, tensor: Callable[[str], np.ndarray], shard_bytes: int
) -> None:
    """Writes tensors as one file, or as shards with an index; `tensor` gives one at a time by its
    name."""
    # imported here: it takes 0.3 s
    from huggingface_hub import split_state_dict_into_shards_factory

    split = split_state_dict_into_shards_factory(
        dict(specs),
        get_storage_size=num_bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    for file, names in split.filename_to_tensors.items():
        with (folder / file).open("wb") as f:
            f.write(_header({name: specs[name] for name in names}))
            for name in names:
                x = tensor(name)
                assert (x.shape, x.dtype) == (specs[name].shape, specs[name].dtype), (
                    name,
                    x.shape,
                    x.dtype,
                )
                np.ascontiguousarray(x).tofile(f)
                del x
            f.flush()
            os.fsync(f.fileno())
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _header(shard: Specs) -> bytes:
    entries: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, x in shard.items():
        begin, end = end, end + num_bytes(x)
        entries[name] = {
            "dtype": NAMES[np.dtype(x.dtype).name],
            "shape": list(x.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin on a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text
