"""Safetensors files one tensor at a time: read by plain reads, written by plain writes, never whole in memory.

A file is the header's length (8 bytes, little-endian), the header (JSON: dtype, shape and byte range of each tensor)
and the tensors' bytes. Mapping files instead, as the safetensors library does, counts every page that was touched
as this process's memory; reading them holds one tensor.
"""

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path

import ml_dtypes
import numpy as np

from zaya_jax.config import UserError, shown
from zaya_jax.config.fields import parse_json

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
NAMES = {dtype.name: name for name, dtype in DTYPES.items()}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER = 100 << 20  # as the safetensors library: more is no header


class TensorFile:
    """One safetensors file whose header was checked against its size."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self._start, self._tensors = _read_header(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damaged(path, error) from None

    def names(self) -> set[str]:
        """The tensors it holds."""
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        return tuple(self._tensors[name]["shape"])

    def dtype_name(self, name: str) -> str:
        """A tensor's dtype as safetensors writes it: F32, BF16, I64 .."""
        return self._tensors[name]["dtype"]

    def read(self, name: str) -> np.ndarray:
        """A tensor in memory."""
        shape, dtype = self.shape(name), DTYPES[self.dtype_name(name)]
        begin, _ = self._tensors[name]["data_offsets"]
        count = math.prod(shape)
        try:
            with self.path.open("rb") as f:
                f.seek(self._start + begin)
                x = np.fromfile(f, dtype, count)
        except OSError as error:
            raise _damaged(self.path, error) from None
        if x.size != count:
            raise _damaged(self.path, f"it ends within {name}")
        return x.reshape(shape)


def _read_header(path: Path) -> tuple[int, dict[str, dict]]:
    size = path.stat().st_size
    with path.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            raise ValueError(f"{size} bytes, with a header of {length}")
        tensors = parse_json(f.read(length))
    tensors.pop("__metadata__", None)
    end = 0
    for name, entry in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
        if not _are_counts(entry["data_offsets"]):
            raise ValueError(f"{name} has data_offsets {shown(entry['data_offsets'])}")
        begin, stop = entry["data_offsets"]
        if begin != end or stop < begin:
            raise ValueError(f"the byte ranges leave a hole or overlap at {name}")
        if not _are_counts(entry["shape"]):
            raise ValueError(f"{name} has shape {shown(entry['shape'])}")
        dtype = DTYPES.get(entry["dtype"])
        if dtype and math.prod(entry["shape"]) * dtype.itemsize != stop - begin:
            raise ValueError(f"{name} has {stop - begin} bytes, not those of its shape {entry['shape']}")
        end = stop
    if 8 + length + end != size:
        raise ValueError(f"{size} bytes, its header says {8 + length + end}")
    return 8 + length, tensors


def _are_counts(values: list) -> bool:
    """Whether these are what a size or a place can be; True and 2.0 are none, though Python would count with them."""
    return all(type(n) is int and n >= 0 for n in values)


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
