"""Guards around the arrays of interpreted kernels: what they read beyond an array's end is NaN, and
a whole array is once they write there. A GPU would read and write its neighbours; the interpreter
reads the last row again."""

import jax
import jax.numpy as jnp
import pytest
from jax._src.state.indexing import Slice
from jax._src.state.types import TransformedRef

from pallas_kernels import chip, tiles


def outside(view, mask) -> jax.Array:
    """Which numbers of a view of an array lie beyond the array's end, of those that the mask does
    not leave out."""
    indexer = view.transforms[-1]
    slices = sum(isinstance(index, Slice) for index in indexer.indices)
    of_numbers, seen = tuple(indexer.int_indexer_shape), 0
    inside = jnp.ones(of_numbers + (1,) * slices, bool)
    for index, length in zip(indexer.indices, indexer.shape, strict=True):
        if isinstance(index, Slice):
            places = index.start + jnp.arange(index.size) * index.stride
            places, seen = places.reshape(-1, *(1,) * (slices - seen - 1)), seen + 1
        else:
            places = jnp.asarray(index)
            places = jnp.broadcast_to(places, of_numbers).reshape(of_numbers + (1,) * slices)
        inside = inside & (places >= 0) & (places < length)
    return ~inside if mask is None else ~inside & mask


def poison(dtype):
    return jnp.asarray(
        jnp.nan if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min, dtype
    )


@pytest.fixture(autouse=True)
def guarded(monkeypatch):
    load, store = tiles.load, tiles.store

    def guarded_load(view, *, mask=None, other=None):
        x = load(view, mask=mask, other=other)
        if not chip.current().is_host or not isinstance(view, TransformedRef):
            return x
        return jnp.where(outside(view, mask), poison(x.dtype), x)

    def guarded_store(view, x, *, mask=None):
        store(view, x, mask=mask)
        if chip.current().is_host and isinstance(view, TransformedRef):

            @tiles.when(outside(view, mask).any())
            def spoil():
                view.ref[...] = jnp.full(view.ref.shape, poison(view.ref.dtype))

    monkeypatch.setattr(tiles, "load", guarded_load)
    monkeypatch.setattr(tiles, "store", guarded_store)
