"""A base with its experts in few bits (`run.base`): codes and scales for the frozen weights in
memory, or the numbers of these codes, which low-rank updates were trained over.

    FewBits(base, "mxfp4")                  arrays of codes, and "scales.experts.down.scale"
    FewBits(base, "mxfp4", decoded=True)    the same arrays as the base has, of other numbers

A base that has codes in this form already keeps them; others are rounded. All else is the base's.
"""

import functools
import threading

import jax
import numpy as np

from zaya_jax.checkpoint.layout import StoredArray
from zaya_jax.checkpoint.source import ArraySource
from zaya_jax.model import quantized


class FewBits(ArraySource):
    """A base whose experts are in a form of `quantized`; in another, as "compute", it is as it
    was."""

    def __init__(self, base: ArraySource, form: str, decoded: bool = False):
        super().__init__(base.location)
        self.name = base.name
        self._base = base
        self._form = form
        self._decoded = decoded
        self._axes = quantized.input_axes(form)
        # the weight of each array that is not the base's
        self._weights = {name: weight for weight in self._axes for name in _names(weight)}
        # By weight and layer: a layer is encoded when its codes are read, and its scale, which is
        # read after all codes, is kept for then.
        self._scales: dict[tuple[str, int], np.ndarray] = {}
        self._lock = threading.Lock()

    @functools.cached_property
    def arrays(self) -> dict[str, StoredArray]:
        """The base's, and the scales; a layer of experts in each chunk."""
        arrays = dict(self._base.arrays)
        for weight, axis in self._axes.items():
            of_codes, of_scale = _names(weight)
            shape = arrays[of_codes].shape
            codes, scale = quantized.abstract(shape, self._form, axis)
            parts = {of_codes: codes, of_scale: scale}
            if self._decoded:
                parts = {of_codes: jax.ShapeDtypeStruct(shape, np.float32)}
            for name, x in parts.items():
                chunk = (1, *x.shape[1:])
                arrays[name] = StoredArray(name, x.shape, np.dtype(x.dtype).name, chunk)
        return arrays

    def read_chunk(self, array: StoredArray, index: tuple[int, ...]) -> np.ndarray:
        """A layer's codes, scale or numbers, or a chunk of the base."""
        if array.name not in self._weights:
            return self._base.read_chunk(self._base.arrays[array.name], index)
        weight = self._weights[array.name]
        layer = index[0]
        if (weight, layer) in self._scales and array.name.startswith("scales."):
            return self._scales.pop((weight, layer))[None]
        codes, scale = self.of_layer(weight, layer)
        if self._decoded:
            return quantized.decode(codes, scale, self._axes[weight])[None]
        if array.name.startswith("scales."):
            return scale[None]
        self._scales[weight, layer] = scale
        return codes[None]

    def of_layer(self, weight: str, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Codes and scale of a layer's "experts/down" or "experts/gate_up"."""
        if stored := self._base.stored_codes(self._form, weight, layer):
            return stored
        with self._lock:  # a source remembers one chunk
            x = self._base.read(_names(weight)[0], layer)
        return quantized.encode(x, self._form, self._axes[weight])


def _names(weight: str) -> tuple[str, str]:
    """The arrays of the codes (or numbers) and of the scale of "experts/down"."""
    name = weight.replace("/", ".")
    return f"params.layers.{name}", f"scales.{name}.scale"
