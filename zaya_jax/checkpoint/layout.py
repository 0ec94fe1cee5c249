"""What lies where in a checkpoint: which arrays, cut into which chunks, each written by which process.

A checkpoint of step N is the folder `checkpoints/N`, in the layout of Orbax, which reads it:

    checksums.json          every other file's size and crc32c; written last, so what has it is whole
    meta/data.json          step, tokens, data position, config, tokenizer, version, layout
    state/NAME/zarr.json    one array (zarr v3); NAME is its path, such as params.layers.cca.q.kernel
    state/NAME/c.1.0        one chunk of it: the raw numbers, then their crc32c, which any reader checks

Arrays are stored whole and un-padded, whatever mesh wrote them. For saving, each device holds its own part of every
array that is worth cutting (`spread`), also of one that the run keeps on all devices; so nothing is copied or written
twice. Of what is still held twice, the process with the least to write so far is the writer.
"""

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import jax
import ml_dtypes  # noqa: F401  (NumPy then knows bfloat16 by name)
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

CHUNK_BYTES = 32 << 20  # at most this much in a chunk: what a reader of a part must read at least
PART_BYTES = 4 << 20  # arrays are cut over replicas, and layers into chunks of their own, down to this size
MARKER = "checksums.json"
META = "meta/data.json"
STATE = "state"

_HANDLERS = "orbax.checkpoint.experimental.v1._src.handlers"
_FRAME = {
    "item_handlers": {
        "state": f"{_HANDLERS}.pytree_handler.PyTreeHandler",
        "meta": f"{_HANDLERS}.json_handler.JsonHandler",
    },
    "metrics": {}, "performance_metrics": {}, "custom_metadata": {},
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Array:
    """How one array is stored."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]

    @property
    def folder(self) -> str:
        """Its folder in a checkpoint."""
        return f"{STATE}/{self.name}"

    def file(self, index: tuple[int, ...]) -> str:
        """The file of one chunk."""
        return f"{self.folder}/{'.'.join(['c', *map(str, index)])}"

    def chunks(self, box: tuple[slice, ...]) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
        """(chunk's index, its place in the box) of all chunks in a box whose corners lie between chunks."""
        begins = [s.start for s in box]
        counts = [-(-(s.stop - s.start) // c) for s, c in zip(box, self.chunk, strict=True)]
        for at in np.ndindex(*counts):
            index = tuple(b // c + i for b, c, i in zip(begins, self.chunk, at, strict=True))
            yield index, tuple(slice(i * c, (i + 1) * c) for i, c in zip(at, self.chunk, strict=True))

    def to_json(self) -> dict[str, Any]:
        """Its zarr.json."""
        return {
            "zarr_format": 3, "node_type": "array", "shape": list(self.shape), "data_type": self.dtype, "fill_value": 0,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(self.chunk)}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one process writes of an array: the chunks of one device's part."""

    array: Array
    device: jax.Device
    box: tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """All arrays, and the pieces and bytes of each process."""

    arrays: tuple[Array, ...]
    pieces: dict[int, list[Piece]]
    bytes: dict[int, int]


def name_of(path: Any) -> str:
    """An array's name by its path in a tree of dicts."""
    return ".".join(str(key.key) if hasattr(key, "key") else str(key) for key in path)


def flat(tree: Any) -> dict[str, Any]:
    """The leaves of a tree of dicts by name."""
    return {name_of(path): x for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]}


def nested(arrays: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `flat`."""
    tree: dict[str, Any] = {}
    for name, x in arrays.items():
        *folders, last = name.split(".")
        inner = tree
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[last] = x
    return tree


def by_layer(name: str, shape: tuple[int, ...]) -> bool:
    """Whether an array is stored layer by layer: matrices are, stacked vectors lie together."""
    return "layers" in name.split(".") and len(shape) >= 3


def chunk_shape(
    name: str, shape: tuple[int, ...], itemsize: int, part: tuple[int, ...] | None = None, most: int = 0
) -> tuple[int, ...]:
    """Chunks that tile a device's part of an array: of single layers unless these are small, and never large.

    `most`: bytes of a chunk, if not CHUNK_BYTES.
    """
    most = most or CHUNK_BYTES
    part = tuple(part or shape)
    chunk = list(part)
    if by_layer(name, shape):
        layer = math.prod(part[1:]) * itemsize
        chunk[0] = max(n for n in _divisors(part[0]) if n == 1 or n * layer <= min(PART_BYTES, most))
    for dim, size in enumerate(part):
        rest = math.prod(chunk) * itemsize
        if rest > most:
            wanted = chunk[dim] / math.ceil(rest / most)
            chunk[dim] = max((n for n in _divisors(size) if n <= wanted), default=1)
    return tuple(chunk)


def spread(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> NamedSharding:
    """A sharding that also cuts what `sharding` keeps several times, over the devices that keep it.

    Each device's part lies in what it has already, so that an array of that sharding need not travel. Parts do not get
    smaller than PART_BYTES.
    """
    assert isinstance(sharding.mesh, Mesh)
    mesh, names = _factored(sharding.mesh)
    spec = list(sharding.spec) + [None] * (len(shape) - len(sharding.spec))
    dims: list[list[str]] = []
    for axes in spec:
        axes = () if axes is None else axes if isinstance(axes, tuple) else (axes,)
        dims.append([name for axis in axes for name in names[axis]])
    parts = [math.prod(mesh.shape[name] for name in dim) for dim in dims]
    size = math.prod(shape) * np.dtype(dtype).itemsize // max(math.prod(parts), 1)
    used = {name for dim in dims for name in dim}
    for name, factor in mesh.shape.items():
        if name in used or size // factor < PART_BYTES:
            continue
        dim = next((d for d, n in enumerate(shape) if n % (parts[d] * factor) == 0), None)
        if dim is not None:
            dims[dim].append(name)
            parts[dim] *= factor
            size //= factor
    return NamedSharding(mesh, PartitionSpec(*(tuple(dim) or None for dim in dims)))


def make_plan(abstract: Any) -> Plan:
    """The plan for a tree of ShapeDtypeStructs with shardings; the same in every process."""
    arrays, held = [], []
    load: dict[int, int] = defaultdict(int)
    pieces: dict[int, list[Piece]] = defaultdict(list)
    for name, x in flat(abstract).items():
        itemsize = np.dtype(x.dtype).itemsize
        part = x.sharding.shard_shape(x.shape)
        arrays.append(
            Array(name, tuple(x.shape), np.dtype(x.dtype).name, chunk_shape(name, x.shape, itemsize, part))
        )
        holders: dict[tuple, list[jax.Device]] = defaultdict(list)
        for device, index in x.sharding.devices_indices_map(x.shape).items():
            box = tuple(
                (s.start or 0, n if s.stop is None else s.stop) for s, n in zip(index, x.shape, strict=True)
            )
            holders[box].append(device)
        held += [(math.prod(part) * itemsize, arrays[-1], box, devices) for box, devices in holders.items()]
    # First what only one process can write, then the greatest first.
    held.sort(key=lambda h: (len({d.process_index for d in h[3]}) > 1, -h[0]))
    for size, array, box, devices in held:
        device = min(devices, key=lambda d: (load[d.process_index], d.process_index, d.id))
        pieces[device.process_index].append(Piece(array, device, tuple(slice(*b) for b in box)))
        load[device.process_index] += size
    return Plan(tuple(arrays), dict(pieces), dict(load))


def frame(arrays: tuple[Array, ...], meta: dict[str, Any]) -> dict[str, bytes]:
    """The files of a checkpoint that are no chunks, but for the marker.

    Arrays count as NumPy's, so that Orbax also gives them to a reader who does not say on which devices to put them.
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
        "tree_metadata": tree, "use_ocdbt": False, "use_zarr3": True, "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }  # fmt: skip
    files = {f"{array.folder}/zarr.json": array.to_json() for array in arrays}
    files |= {"_CHECKPOINT_METADATA": _FRAME, f"{STATE}/_METADATA": state, META: meta}
    return {name: json.dumps(value).encode() for name, value in files.items()}


def describe(abstract: Any) -> dict[str, Any]:
    """Where each array lay when it was written, for people who look into a checkpoint: the mesh axes over each dim."""
    return {
        name: {
            "axes": [
                str(axes) for axes in (*x.sharding.spec, *[None] * (len(x.shape) - len(x.sharding.spec)))
            ],
            "mesh": dict(x.sharding.mesh.shape),
        }
        for name, x in flat(abstract).items()
        if isinstance(x.sharding, NamedSharding)
    }


def _factored(mesh: Mesh) -> tuple[Mesh, dict[str, list[str]]]:
    """The same devices with each axis as several of prime sizes, and which these are."""
    sizes: dict[str, int] = {}
    names: dict[str, list[str]] = {}
    for axis, size in mesh.shape.items():
        factors, n = [], 2
        while size > 1:
            while size % n == 0:
                factors.append(n)
                size //= n
            n += 1
        names[axis] = [f"{axis}/{i}" for i in range(len(factors))]
        sizes |= dict(zip(names[axis], factors, strict=True))
    if not sizes:
        return mesh, {axis: [axis] for axis in mesh.shape}
    devices = mesh.devices.reshape(tuple(sizes.values()))
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)), names


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
