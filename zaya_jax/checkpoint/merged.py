"""The weights of a run of low-rank updates (`run.lora`): its checkpoint holds adapters alone, and
names its base.

    source = MergedSource(adapters, base)   two sources; reads like a checkpoint of all weights,
                                            each base + A B in float32

The base weights are used at full precision, as PEFT does; the run itself trained over them rounded
to its compute dtype. Experts that a run kept in few bits (`run.base`) are the numbers of their codes:
the updates were trained to sit on those.
"""

import functools
import hashlib
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from zaya_jax.checkpoint import few_bits, layout
from zaya_jax.checkpoint.layout import StoredArray
from zaya_jax.checkpoint.seal import crc32c
from zaya_jax.checkpoint.source import ArraySource
from zaya_jax.config import UserError


def weights_fingerprint(base: ArraySource) -> str:
    """A hash of all weights, in float32: it does not change with the files that hold them.

    Of their checksums, which find a change, not a forger: ten times as fast as a cryptographic
    hash of the numbers.
    """
    digest = hashlib.sha256()
    for name, array in sorted(base.arrays.items()):
        if not layout.is_weight(name):
            continue
        digest.update(f"{name}{array.shape}".encode())
        # in memory, a layer of the large ones
        by_layer = layout.is_stored_by_layer(name, array.shape)
        for index in range(array.shape[0]) if by_layer else [None]:
            numbers = base.read(name, index).astype(np.float32, copy=False)
            digest.update(crc32c(np.ascontiguousarray(numbers)).to_bytes(4, "little"))
    return digest.hexdigest()


def require_same_base(base: ArraySource, meta: Mapping[str, Any], name: str) -> str:
    """The fingerprint of a base; UserError if a checkpoint with this metadata names another one."""
    fingerprint = weights_fingerprint(base)
    if meta and fingerprint != meta["base"]["mark"]:
        raise UserError(
            f"{name} was trained on top of {meta['base']['name']}, but {base.name} has different"
            " weights; restore the original base"
        )
    return fingerprint


class MergedSource(ArraySource):
    """Base and adapters together, as one checkpoint.

    The whole base is compared with the adapters' before its first number is given.
    """

    def __init__(self, adapters: ArraySource, base: ArraySource):
        super().__init__(adapters.location)
        self.step = adapters.step
        self.name = adapters.name
        self.workdir = adapters.workdir
        self.run = adapters.run
        self.warning = base.warning
        self.base = base
        form = adapters.meta()["base"].get("form", "compute")
        self._numbers = few_bits.FewBits(base, form, decoded=True)
        self._adapters = adapters
        self._lock = threading.Lock()
        self._is_compared = False

    def meta(self) -> dict[str, Any]:
        """The metadata of the run's step."""
        return self._adapters.meta()

    def require_same_base(self) -> None:
        """UserError if the base is not the one that was trained over; compares it once."""
        with self._lock:
            if not self._is_compared:
                require_same_base(self.base, self.meta(), self.name)
                self._is_compared = True

    @property
    def base_name(self) -> str:
        """The base's, as the run's checkpoints name it."""
        return self.meta()["base"]["name"]

    @functools.cached_property
    def factors(self) -> dict[str, np.ndarray]:
        """The adapters, which are small: NAME.a and NAME.b for each array NAME."""
        names = [name for name in self._adapters.arrays if name.startswith("params.")]
        return {name: self._adapters.read(name) for name in names}

    def biases_changed(self) -> bool:
        """Whether the balancing biases are others than the base's."""
        return not np.array_equal(
            self._adapters.read("balance.bias"), self.base.read("balance.bias")
        )

    @functools.cached_property
    def arrays(self) -> dict[str, StoredArray]:
        """The base's parameters and the run's balancing biases."""
        arrays = {
            name: StoredArray(name, x.shape, "float32", x.chunk)
            for name, x in self._numbers.arrays.items()
            if name.startswith("params.")
        }
        return arrays | {
            name: x for name, x in self._adapters.arrays.items() if name.startswith("balance.")
        }

    def read_chunk(self, array: StoredArray, index: tuple[int, ...]) -> np.ndarray:
        """One chunk, verified by the sources."""
        if array.name.startswith("balance."):
            return self._adapters.read_chunk(array, index)
        self.require_same_base()
        base_chunk = self._numbers.read_chunk(self._numbers.arrays[array.name], index)
        chunk = base_chunk.astype(np.float32)
        if f"{array.name}.a" in self.factors:
            box = array.chunk_box(index)
            a = self.factors[f"{array.name}.a"]
            b = self.factors[f"{array.name}.b"]
            rows = a.ndim - 2  # the dim of the matrices' rows; columns of gate and up are two dims
            update = a[box[: rows + 1]] @ b[box[:rows]]
            update = update.reshape(*update.shape[:-1], *array.shape[rows + 1 :])
            # the last chunk may be filled up
            chunk[layout.within(box, box)] += update[(..., *box[rows + 1 :])]
        return chunk
