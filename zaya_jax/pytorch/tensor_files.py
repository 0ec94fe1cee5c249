"""Reads and writes safetensors files one tensor at a time, by plain reads and writes.

A model is never in memory as a whole. The library checks a file, but it maps the file to read it,
and every touched page counts as this process's memory while it is open. Its writer takes a whole
file's tensors at once, 10 GB for a shard of 5 GB.
"""

import abc
import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from zaya_jax.config import UserError

# What tensors of numbers may be stored in, and the codes and scales of quantized ones.
DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
ALL_DTYPES = DTYPES | {"F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "U8": np.dtype(np.uint8)}
NAMES = {dtype: name for name, dtype in ALL_DTYPES.items()}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclasses.dataclass(frozen=True)
class Tensor(abc.ABC):
    """A tensor that is not read yet."""

    shape: tuple[int, ...]
    dtype: str  # as safetensors writes it: F32, BF16, I64 ..

    @abc.abstractmethod
    def read(self, part: str = "numbers") -> np.ndarray:
        """The tensor in memory; of a quantized one also its "codes" or "scale"."""


@dataclasses.dataclass(frozen=True)
class StoredTensor(Tensor):
    """A tensor of a file."""

    path: Path
    begin: int  # its first byte

    def read(self, part: str = "numbers") -> np.ndarray:
        """The tensor in memory, whatever the part: it has no codes."""
        dtype, size = ALL_DTYPES[self.dtype], math.prod(self.shape)
        return np.fromfile(self.path, dtype, size, offset=self.begin).reshape(self.shape)


def open_file(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name; UserError if it is not whole."""
    try:
        with safe_open(path, framework="numpy"):  # which compares its header with its size
            pass
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path} cannot be read, it is missing, truncated or damaged ({error}); copy it anew"
        ) from None
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    tensors: dict[str, Tensor] = {}
    for name, entry in header.items():
        begin = 8 + size + entry["data_offsets"][0]
        tensors[name] = StoredTensor(tuple(entry["shape"]), entry["dtype"], path, begin)
    return tensors


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
            "dtype": NAMES[np.dtype(x.dtype)],
            "shape": list(x.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin on a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text
