"""Reads and writes safetensors files one tensor at a time: reading by the library, writing by plain writes.

A model is never in memory as a whole. The library maps a file, and every touched page counts as this
process's memory while the file is open, so the file is opened again for each tensor. Its writer takes
a whole file's tensors at once, 10 GB for a shard of 5 GB, so shards are written here.
"""

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from zaya_jax.config import UserError

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
NAMES = {dtype.name: name for name, dtype in DTYPES.items()}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class TensorFile:
    """One safetensors file; the library checks its header against its size."""

    def __init__(self, path: Path):
        self.path = path
        try:
            with safe_open(path, framework="numpy") as file:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                self._tensors = {n: (tuple(s.get_shape()), s.get_dtype()) for n, s in slices.items()}
        except (OSError, SafetensorError) as error:
            raise _damaged(path, error) from None

    def names(self) -> set[str]:
        """The tensors it holds."""
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        return self._tensors[name][0]

    def dtype_name(self, name: str) -> str:
        """A tensor's dtype as safetensors writes it: F32, BF16, I64 .."""
        return self._tensors[name][1]

    def read(self, name: str) -> np.ndarray:
        """A tensor in memory."""
        try:
            with safe_open(self.path, framework="numpy") as file:
                return file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise _damaged(self.path, error) from None


def _damaged(path: Path, why: object) -> UserError:
    return UserError(f"{path} cannot be read, it is truncated or damaged ({why}); copy it anew")


Spec = tuple[str, tuple[int, ...], np.dtype]  # name, shape, dtype


def num_bytes(spec: Spec) -> int:
    """Bytes of a tensor."""
    return math.prod(spec[1]) * spec[2].itemsize


def split(specs: list[Spec], shard_bytes: int) -> list[list[Spec]]:
    """Tensors in order, in shards of at most `shard_bytes` (or of one tensor that is larger)."""
    shards: list[list[Spec]] = []
    filled = 0
    for spec in specs:
        size = num_bytes(spec)
        if not shards or filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += size
    return shards


def write_sharded(folder: Path, specs: list[Spec], tensors: Iterable[np.ndarray], shard_bytes: int) -> None:
    """Writes `tensors`, which come one by one in the order of `specs`, as one file or as shards with an index."""
    shards = split(specs, shard_bytes)
    files = [SINGLE]
    if len(shards) > 1:
        files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    source = iter(tensors)
    for file, shard in zip(files, shards, strict=True):
        with (folder / file).open("wb") as f:
            f.write(_header(shard))
            for name, shape, dtype in shard:
                x = next(source)
                assert x.shape == shape and x.dtype == dtype, (name, x.shape, shape, x.dtype, dtype)
                np.ascontiguousarray(x).tofile(f)
                del x
            f.flush()
            os.fsync(f.fileno())
    if len(shards) > 1:
        where = {name: file for file, shard in zip(files, shards, strict=True) for name, _, _ in shard}
        index = {"metadata": {"total_size": sum(map(num_bytes, specs))}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _header(shard: list[Spec]) -> bytes:
    entries: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in shard:
        name, shape, dtype = spec
        begin, end = end, end + num_bytes(spec)
        entries[name] = {"dtype": NAMES[dtype.name], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin on a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text
