"""The weights of a run of low-rank updates (`run.lora`): its checkpoint holds adapters alone, and
names its base.

    source = Merged(adapters, base)     two sources; reads like a checkpoint of all weights, each base + A B in float32

The base's numbers are its own, as PEFT has them under the adapters. The run itself holds them
rounded to the format of its products.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from zaya_jax.checkpoint import layout
from zaya_jax.checkpoint.foreign import Unsealed
from zaya_jax.checkpoint.layout import Array
from zaya_jax.checkpoint.seal import crc32c
from zaya_jax.checkpoint.source import Source
from zaya_jax.config import UserError


def mark_of(base: Source) -> str:
    """A hash of all weights, in float32: it does not change with the files that hold them.

    Of their checksums, which find a change, not a forger: ten times as fast as a cryptographic
    hash of the numbers.
    """
    found = hashlib.sha256()
    for name, array in sorted(base.arrays().items()):
        if layout.is_weight(name):
            found.update(f"{name}{array.shape}".encode())
            by_layer = layout.by_layer(name, array.shape)  # in memory, a layer of the large ones
            for index in range(array.shape[0]) if by_layer else [None]:
                part = base.read(name.split("."), index).astype(np.float32, copy=False)
                found.update(crc32c(np.ascontiguousarray(part)).to_bytes(4, "little"))
    return found.hexdigest()


def checked_mark(base: Source, meta: Mapping[str, Any], name: str) -> str:
    """The mark of a base; UserError if a checkpoint with this metadata names another one."""
    mark = mark_of(base)
    if meta and mark != meta["base"]["mark"]:
        raise UserError(
            f"{name} was trained over {meta['base']['name']}, and {base.name} has other weights;"
            " bring the former back"
        )
    return mark


class Merged(Unsealed):
    """Base and adapters together, as one checkpoint."""

    def __init__(self, adapters: Source, base: Source):
        super().__init__(Path())
        self.place, self.workdir, self.run = adapters.place, adapters.workdir, adapters.run
        self.step, self.name, self.warning = adapters.step, adapters.name, base.warning
        self._adapters, self.base = adapters, base
        self._bases, self._pairs, self._arrays = (
            base.arrays(),
            dict[str, np.ndarray](),
            dict[str, Array](),
        )
        checked_mark(base, self.meta(), self.name)

    def meta(self) -> dict[str, Any]:
        """The run's."""
        return self._adapters.meta()

    def check(self, *args: Any, **options: Any) -> None:
        """Of both."""
        self._adapters.check(*args, **options)
        self.base.check(*args, **options)

    @property
    def base_name(self) -> str:
        """The base's, as the run's checkpoints name it."""
        return self.meta()["base"]["name"]

    def adapters(self) -> tuple[dict[str, np.ndarray], bool]:
        """(the factors by name, whether the balancing biases are others than the base's)."""
        self.arrays()
        bias = ("balance", "bias")
        return self._pairs, not np.array_equal(self._adapters.read(bias), self.base.read(bias))

    def arrays(self) -> dict[str, Array]:
        """The base's parameters and the run's balancing biases; reads the adapters, which are
        small, the first time."""
        if not self._arrays:
            own = self._adapters.arrays()
            self._pairs = {
                name: self._adapters.read(name.split("."))
                for name in own
                if name.startswith("params.")
            }
            found = {
                name: Array(name, x.shape, "float32", x.chunk)
                for name, x in self._bases.items()
                if name.startswith("params.")
            }
            self._arrays = found | {
                name: x for name, x in own.items() if name.startswith("balance.")
            }
        return self._arrays

    def _chunk(self, array: Array, index: tuple[int, ...]) -> np.ndarray:
        if array.name.startswith("balance."):
            return self._adapters._chunk(array, index)
        x = self.base._chunk(self._bases[array.name], index).astype(np.float32)
        if f"{array.name}.a" in self._pairs:
            whole = tuple(slice(0, n) for n in array.shape)
            _, box = next(at for at in array.touched(whole) if at[0] == index)
            a, b = self._pairs[f"{array.name}.a"], self._pairs[f"{array.name}.b"]
            rows = a.ndim - 2  # the dim of the matrices' rows; columns of gate and up are two dims
            update = a[box[: rows + 1]] @ b[box[:rows]]
            update = update.reshape(*update.shape[:-1], *array.shape[rows + 1 :])
            x[tuple(slice(0, n) for n in layout.sizes(box))] += update[(..., *box[rows + 1 :])]
        return x
