"""Reads a state that plain Orbax saved, in any layout that it knows: OCDBT, zarr files, zstd, v0,
safetensors.

    source = open_source(location, step)       an `ArraySource`, whoever has written there

The location is the folder of one such checkpoint, a folder of steps, or FOLDER@STEP. The tree must
have our names (`params.layers.cca.q.kernel`) or be the parameters themselves; balancing biases that
it does not have are a new run's. Such a state has no checksums: Orbax 0.12.8 loads a changed bit
without an error.
"""

import functools
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zaya_jax import trees
from zaya_jax.checkpoint import folders, layout
from zaya_jax.checkpoint.layout import StoredArray
from zaya_jax.checkpoint.seal import RUN
from zaya_jax.checkpoint.source import ArraySource, SealedSource, split_step
from zaya_jax.checkpoint.writing import reason
from zaya_jax.config import StorageError
from zaya_jax.model import zaya

BIASES = "balance.bias"
ORBAX_FILES = ("_CHECKPOINT_METADATA", "_METADATA")  # in v1 and in v0
# under way at once: without a limit Orbax takes 1.67 states of memory, with it 1.31
READ_BYTES = 96 << 20


def open_source(location: str | Path, step: int | None = None) -> ArraySource:
    """The checkpoint at a location, by any writer; UserError if there is none."""
    folder = orbax_folder(location, step)
    return OrbaxSource(folder) if folder else SealedSource(location, step)


def orbax_folder(location: str | Path, step: int | None = None) -> Path | None:
    """The folder at a location that Orbax wrote without this package; None for anything else."""
    location, step = split_step(location, step)
    folder = Path(location).absolute()
    if (folder / RUN).exists() or (folder.parent / RUN).exists():
        return None  # the newest step may lack its seal: while it is sent, or since it is damaged
    steps = folders.numbered(folder)
    if any((folder / str(number) / layout.SEAL_FILE).exists() for number in steps):
        return None
    if steps and not any((folder / name).exists() for name in ORBAX_FILES):
        folder /= str(max(steps) if step is None else step)
    if (folder / layout.SEAL_FILE).exists():
        return None
    is_orbax = any((folder / name).is_file() for name in ORBAX_FILES)
    return folder if is_orbax or any(folder.glob("*.safetensors")) else None


class OrbaxSource(ArraySource):
    """A state that Orbax saved. An array is read as a whole, one at a time."""

    warning = ", saved by Orbax without checksums: a changed bit would not be noticed"

    def __init__(self, folder: Path):
        # Imported here: it takes seconds, and few runs begin with such a state.
        from orbax.checkpoint import v1 as ocp

        super().__init__(folder)
        self.step = folders.step_of(folder.name) or 0
        self._folder = folder
        self._ocp = ocp
        self._lock = threading.Lock()
        try:
            with self._context():
                self._tree = ocp.metadata(folder).metadata
        except Exception as error:  # of many classes
            raise StorageError(f"{folder} cannot be read by Orbax: {reason(error)}") from error
        stored = {name: x for name, x in trees.flat(self._tree).items() if hasattr(x, "shape")}
        prefix = "params." if any(name.startswith("layers.") for name in stored) else ""
        self._names = {f"{prefix}{name}": name for name in stored}  # theirs by ours
        self._shapes = {
            name: (tuple(stored[theirs].shape), np.dtype(stored[theirs].dtype).name)
            for name, theirs in self._names.items()
        }
        layers = [shape for name, (shape, _) in self._shapes.items() if "params.layers." in name]
        if layers and BIASES not in self._shapes:
            # A dense model has no router, and two classes.
            router, _ = self._shapes.get("params.layers.router.out.kernel", ((2,), ""))
            self._shapes[BIASES] = (layers[0][0], router[-1]), "float32"
            self.warning += "; its balancing biases begin anew, since it has none"

    def _context(self) -> Any:
        context = self._ocp.Context()
        me = jax.process_index()
        context.checkpoint_layout = "auto"
        context.memory.read_concurrent_bytes = READ_BYTES
        if jax.process_count() > 1:  # each process reads by itself, at its own pace
            context.multiprocessing.active_processes = {me}
            context.multiprocessing.primary_host = me
        return context

    @functools.cached_property
    def arrays(self) -> dict[str, StoredArray]:
        """All arrays by name, each one chunk."""
        return {
            name: StoredArray(name, shape, dtype, shape)
            for name, (shape, dtype) in self._shapes.items()
        }

    def read_chunk(self, array: StoredArray, index: tuple[int, ...]) -> np.ndarray:
        """A whole array."""
        if array.name not in self._names:  # the balancing biases of a beginning
            biases = np.zeros(array.shape, array.dtype)
            biases[:, -1] = zaya.SKIP_BIAS
            return biases
        name = self._names[array.name]
        wanted = np.broadcast_to(np.zeros((), array.dtype), array.shape)

        def only(path: tuple, _: Any) -> Any:
            return wanted if trees.name_of(path) == name else self._ocp.PLACEHOLDER

        if name in self._tree:  # flat, as safetensors are, which take no placeholder
            like = {name: wanted}
        else:
            like = jax.tree_util.tree_map_with_path(only, self._tree)
        with self._lock, self._context():
            loaded = self._ocp.load(self._folder, like)
        return np.asarray(trees.flat(loaded)[name])
