"""Defines the files of a checkpoint: its arrays, their chunks, and the sharding from which they are
written.

A checkpoint of step N is the folder `checkpoints/N`, in the layout of Orbax, which reads it:

    checksums.json          every other file's size and crc32c; written last, so a folder with it is whole
    commit_success.txt      Orbax's AtomicityMode.COMMIT_FILE takes a folder without it for unfinished
    meta/data.json          step, tokens, data position, config, tokenizer, version
    state/NAME/zarr.json    one array (zarr v3); NAME is its path, such as params.layers.cca.q.kernel
    state/NAME/c.1.0        one chunk of it: the raw numbers, then their crc32c, which any reader checks

Arrays are stored whole and un-padded, whatever mesh wrote them (except that, as zarr requires, the
last chunk is padded where chunks do not divide a dimension). For a save, every sufficiently large
array is sharded over all devices, even if the run replicates it (`cut_replicas`), so nothing is
copied or written twice. `boxes` assigns the writers.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

# at most this much in a chunk, since a reader of any part must read a whole one
CHUNK_BYTES = 32 << 20
# arrays are cut over replicas, and layers into chunks of their own, down to this size
PART_BYTES = 4 << 20
SEAL_FILE = "checksums.json"
# Orbax's own marker, where folders cannot be renamed
COMMITTED, DONE = ("commit_success.txt", b"done\n")
META = "meta/data.json"
STATE = "state"
IMPORTED = "imported.json"  # in a workdir whose first weights came from a model directory

# Types to which arrays may be exported.
DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}

# As Orbax wants them in a zarr.json; of other types 0.
ZEROS = {"bool": False, "complex64": [0, 0], "complex128": [0, 0]}

Box = tuple[slice, ...]  # a stretch of each dim

_HANDLERS = "orbax.checkpoint.experimental.v1._src.handlers"
_CHECKPOINT_METADATA = {
    "item_handlers": {
        "state": f"{_HANDLERS}.pytree_handler.PyTreeHandler",
        "meta": f"{_HANDLERS}.json_handler.JsonHandler",
    },
    "metrics": {},
    "performance_metrics": {},
    "custom_metadata": {},
}


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """How one array is stored."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the numbers of a chunk."""
        return math.prod(self.chunk) * np.dtype(self.dtype).itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of all its numbers."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def num_chunks(self) -> int:
        """How many chunks it has."""
        return sum(1 for _ in self.chunks_overlapping(full_box(self.shape)))

    @property
    def folder(self) -> str:
        """Its folder in a checkpoint."""
        return f"{STATE}/{self.name}"

    def file(self, index: tuple[int, ...]) -> str:
        """The file of one chunk."""
        return f"{self.folder}/{'.'.join(['c', *map(str, index)])}"

    def chunk_box(self, index: tuple[int, ...]) -> Box:
        """The part of the array that a chunk holds."""
        lengths = zip(index, self.chunk, self.shape, strict=True)
        return tuple(slice(i * c, min((i + 1) * c, n)) for i, c, n in lengths)

    def chunks_overlapping(self, box: Box) -> Iterator[tuple[tuple[int, ...], Box]]:
        """(index, box) of each chunk that a box overlaps."""
        dims = zip(box, self.chunk, strict=True)
        indices = [range(part.start // c, -(-part.stop // c)) for part, c in dims]
        for index in itertools.product(*indices):
            yield index, self.chunk_box(index)

    @classmethod
    def from_json(cls, name: str, fields: dict[str, Any]) -> "StoredArray":
        """The array of a zarr.json of this package."""
        chunk = fields["chunk_grid"]["configuration"]["chunk_shape"]
        return cls(name, tuple(fields["shape"]), fields["data_type"], tuple(chunk))

    def to_json(self) -> dict[str, Any]:
        """Its zarr.json."""
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(self.shape),
            "data_type": self.dtype,
            "fill_value": ZEROS.get(self.dtype, 0),
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(self.chunk)}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}},
                {"name": "crc32c"},
            ],
        }


def array_of_file(file: str) -> str:
    """The name of the array that one of its files belongs to; "" for other files."""
    folder, *rest = file.split("/")
    return rest[0] if folder == STATE and len(rest) > 1 else ""


def box_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    """A sharding's index as a box."""
    return tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, shape, strict=True))


def full_box(shape: tuple[int, ...]) -> Box:
    """The box of a whole array."""
    return tuple(slice(0, length) for length in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    """A box's shape."""
    return tuple(part.stop - part.start for part in box)


def volume(box: Box) -> int:
    """The number of elements in a box."""
    return math.prod(shape_of(box))


def overlap(a: Box, b: Box) -> Box:
    """The intersection of two boxes, with empty stretches if there is none."""
    both = []
    for s, t in zip(a, b, strict=True):
        start = max(s.start, t.start)
        both.append(slice(start, max(start, min(s.stop, t.stop))))
    return tuple(both)


def within(box: Box, outer: Box) -> Box:
    """A box in the coordinates of an outer one."""
    dims = zip(box, outer, strict=True)
    return tuple(slice(s.start - o.start, s.stop - o.start) for s, o in dims)


def is_real(dtype: Any) -> bool:
    """Whether a type is one of weights: floating-point numbers, of few bits too."""
    return jax.dtypes.issubdtype(np.dtype(dtype), np.inexact)


def is_weight(name: str) -> bool:
    """Whether an array is a model's: a parameter, or the balancing biases."""
    return name.startswith("params.") or name == "balance.bias"


def is_stored_by_layer(name: str, shape: tuple[int, ...]) -> bool:
    """Whether an array is stored layer by layer: matrices are, stacked vectors lie together."""
    return "layers" in name.split(".") and len(shape) >= 3


def chunk_shape(
    name: str, shape: tuple[int, ...], itemsize: int, part: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    """Chunks that tile a device's part of an array: of single layers unless these are small, and
    never large."""
    part = tuple(part or shape)
    chunk = list(part)
    if is_stored_by_layer(name, shape):
        layer = math.prod(part[1:]) * itemsize
        chunk[0] = _greatest_divisor(part[0], min(PART_BYTES, CHUNK_BYTES) // layer)
    for dim, size in enumerate(part):
        rest = math.prod(chunk) * itemsize
        if rest > CHUNK_BYTES:
            chunk[dim] = _greatest_divisor(size, chunk[dim] // math.ceil(rest / CHUNK_BYTES))
    return tuple(chunk)


def cut_replicas(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> NamedSharding:
    """A sharding that also cuts replicated parts, over the devices that hold them; the same one
    where there is nothing to cut.

    Each device's new part lies within its old one, so the array need not travel. Parts do not get
    smaller than PART_BYTES.
    """
    assert isinstance(sharding.mesh, Mesh)
    mesh, names = factored(sharding.mesh)
    # The axes of each dim that the sharding names, in the names of `factored`.
    already_cut: list[tuple[str, ...]] = [()] * len(shape)
    for dim, axes in enumerate(sharding.spec):
        if isinstance(axes, str):
            axes = (axes,)
        already_cut[dim] = sum((names[axis] for axis in axes or ()), ())
    used = sum(already_cut, ())

    def num_parts(axes: tuple[str, ...]) -> int:
        return math.prod(mesh.shape[name] for name in axes)

    dims, parts = [*already_cut], [*map(num_parts, already_cut)]
    size = math.prod(shape) * np.dtype(dtype).itemsize // max(num_parts(used), 1)
    for name, factor in mesh.shape.items():
        if name in used or size // factor < PART_BYTES:
            continue
        for dim, length in enumerate(shape):
            if length % (parts[dim] * factor) == 0:
                dims[dim] += (name,)
                parts[dim] *= factor
                size //= factor
                break
    if dims == already_cut:
        return sharding
    return NamedSharding(mesh, PartitionSpec(*(dim or None for dim in dims)))


def metadata_files(arrays: tuple[StoredArray, ...], meta: dict[str, Any]) -> dict[str, bytes]:
    """The files of a checkpoint other than its chunks and the seal.

    Arrays are declared as NumPy's, so that Orbax can load them without being given devices.
    """
    tree = {}
    for array in arrays:
        keys = array.name.split(".")
        tree[str(tuple(keys))] = {
            "key_metadata": [{"key": key, "key_type": 2} for key in keys],
            "value_metadata": {
                "value_type": "np.ndarray",
                "skip_deserialize": False,
                "write_shape": list(array.shape),
            },
        }
    state = {
        "tree_metadata": tree,
        "use_ocdbt": False,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    files = {f"{array.folder}/zarr.json": array.to_json() for array in arrays}
    files |= {"_CHECKPOINT_METADATA": _CHECKPOINT_METADATA, f"{STATE}/_METADATA": state, META: meta}
    return {COMMITTED: DONE} | {name: json.dumps(value).encode() for name, value in files.items()}


def factored(mesh: Mesh) -> tuple[Mesh, dict[str, tuple[str, ...]]]:
    """The same devices with each axis as several of prime sizes, and which these are."""
    sizes: dict[str, int] = {}
    names: dict[str, tuple[str, ...]] = {}
    for axis, size in mesh.shape.items():
        factors: list[int] = []
        while size > 1:
            factors.append(next(n for n in range(2, size + 1) if size % n == 0))
            size //= factors[-1]
        names[axis] = tuple(f"{axis}/{i}" for i in range(len(factors)))
        sizes |= dict(zip(names[axis], factors, strict=True))
    if not sizes:
        return mesh, {axis: (axis,) for axis in mesh.shape}
    devices = mesh.devices.reshape(tuple(sizes.values()))
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)), names


def _greatest_divisor(n: int, most: int) -> int:  # at least 1, also for a smaller `most`
    return next(d for d in range(max(min(n, most), 1), 0, -1) if n % d == 0)
