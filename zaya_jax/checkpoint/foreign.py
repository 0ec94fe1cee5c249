"""Reads a state that plain Orbax saved, in any layout that it knows: OCDBT, zarr files, zstd, v0,
safetensors.

    source = open_source(place, step)       a `Source`, also where Orbax alone has written

`place` is the folder of one such checkpoint, a folder of steps, or FOLDER@STEP. The tree must have
our names (`params.layers.cca.q.kernel`) or be the parameters themselves; balancing biases that it
does not have are a new run's. Such a state has no checksums: Orbax 0.12.8 loads a changed bit
without an error.
"""

import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zaya_jax import trees
from zaya_jax.checkpoint import layout, writing
from zaya_jax.checkpoint.layout import Array
from zaya_jax.checkpoint.source import Source, nearest, place_and_step
from zaya_jax.config import StorageError, UserError
from zaya_jax.model import zaya

BIASES = "balance.bias"
SIGNS = ("_CHECKPOINT_METADATA", "_METADATA")  # Orbax's own files, in v1 and in v0
# under way at once: without a limit Orbax takes 1.67 states of memory, with it 1.31
READ_BYTES = 96 << 20


def open_source(place: str | Path, step: int | None = None) -> Source:
    """The checkpoint at a place, by any writer; UserError where there is none."""
    folder = foreign_folder(place, step)
    return Foreign(folder) if folder else Source(place, step)


def foreign_folder(place: str | Path, step: int | None = None) -> Path | None:
    """The folder at a place that Orbax wrote without this package; None for anything else."""
    place, step = place_and_step(place, step)
    folder = Path(place).absolute()
    steps = writing.numbered(folder)
    if steps and not any((folder / name).exists() for name in SIGNS):
        folder /= str(max(steps) if step is None else step)
    ours = (folder / layout.MARKER).exists()
    theirs = any((folder / name).is_file() for name in SIGNS) or any(folder.glob("*.safetensors"))
    return folder if theirs and not ours else None


class Unsealed(Source):
    """A folder of another program: it has no checksums, and nothing deletes it. A kind adds
    `arrays` and `_chunk`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.place, self.workdir, self.files, self.run = str(folder), None, {}, ""
        self.step, self.name, self._kept = 0, str(folder), None

    def check(self, *_: Any, **__: Any) -> None:
        """There is nothing to compare it with."""

    def array(self, path: Any) -> Array:
        """One array; UserError if there is no such array."""
        name, theirs = ".".join(path), self.arrays()
        if name not in theirs:
            raise UserError(f"{self.name} has no array {name}{nearest(name, theirs)}")
        return theirs[name]


class Foreign(Unsealed):
    """A state that Orbax saved. An array is read as a whole, one at a time."""

    warning = ", saved by Orbax without checksums: a changed bit would not be noticed"

    def __init__(self, folder: Path):
        # Imported here: it takes seconds, and few runs begin with such a state.
        from orbax.checkpoint import v1 as ocp

        super().__init__(folder)
        self._ocp, self._lock = ocp, threading.Lock()
        self.step = int(folder.name) if folder.name.isdecimal() else 0
        try:
            with self._context():
                self._tree = ocp.metadata(folder).metadata
        except Exception as error:  # of many classes
            raise StorageError(
                f"{folder} cannot be read by Orbax: {writing.reason(error)}"
            ) from error
        found = {n: x for n, x in trees.flat(self._tree).items() if hasattr(x, "shape")}
        above = "params." if any(name.startswith("layers.") for name in found) else ""
        self._theirs = {f"{above}{name}": name for name in found}  # by our names
        self._shapes = {
            ours: (tuple(found[name].shape), np.dtype(found[name].dtype).name)
            for ours, name in self._theirs.items()
        }
        layers = [shape for name, (shape, _) in self._shapes.items() if "params.layers." in name]
        if layers and BIASES not in self._shapes:
            # A dense model has no router, and two classes.
            router, _ = self._shapes.get("params.layers.router.out.kernel", ((2,), ""))
            self._shapes[BIASES] = (layers[0][0], router[-1]), "float32"
            self.warning += "; its balancing biases begin anew, since it has none"

    def _context(self) -> Any:
        context, me = self._ocp.Context(), jax.process_index()
        context.checkpoint_layout = "auto"
        context.memory.read_concurrent_bytes = READ_BYTES
        if jax.process_count() > 1:  # each process reads by itself, at its own pace
            context.multiprocessing.active_processes = {me}
            context.multiprocessing.primary_host = me
        return context

    def arrays(self) -> dict[str, Array]:
        """All arrays by name."""
        return {name: Array(name, *about, about[0]) for name, about in self._shapes.items()}

    def _chunk(self, array: Array, index: tuple[int, ...]) -> np.ndarray:
        if array.name not in self._theirs:  # the balancing biases of a beginning
            biases = np.zeros(array.shape, array.dtype)
            biases[:, -1] = zaya.SKIP_BIAS
            return biases
        name = self._theirs[array.name]
        wanted = np.broadcast_to(np.zeros((), array.dtype), array.shape)

        def only(path, _):
            return wanted if trees.name_of(path) == name else self._ocp.PLACEHOLDER

        flat = name in self._tree  # as safetensors are, which take no placeholder
        like = {name: wanted} if flat else jax.tree_util.tree_map_with_path(only, self._tree)
        with self._lock, self._context():
            found = self._ocp.load(self.folder, like)
        return np.asarray(trees.flat(found)[name])
