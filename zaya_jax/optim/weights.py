"""What the optimizer's layouts speak of: weights, and where a piece of their state lies."""

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp

from zaya_jax.config import UserError
from zaya_jax.optim.placing import Grid


@dataclasses.dataclass(frozen=True)
class Weight:
    """One parameter as the optimizer sees it."""

    path: str
    shape: tuple[int, ...]  # over all devices
    method: str  # muon or adamw
    group: str  # whose norm it counts towards
    spec: tuple[tuple[str, ...], ...] = ()  # the mesh axes of each dim, as far as the last one that has any

    @property
    def dims(self) -> tuple[tuple[str, ...], ...]:
        """The mesh axes of every dim."""
        return (*self.spec, *((),) * (len(self.shape) - len(self.spec)))

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that it is sharded over."""
        return tuple(axis for dim in self.spec for axis in dim)

    def local(self, grid: Grid) -> tuple[int, ...]:
        """The shape of a device's part; UserError where the mesh does not divide it."""
        for size, axes in zip(self.shape, self.dims, strict=True):
            if size % grid.size(axes):
                raise UserError(
                    f"weight {self.path} {list(self.shape)} is sharded over {grid.size(axes)} devices "
                    f"({', '.join(axes)}) along a dim of {size}; give the mesh sizes that divide it"
                )
        return tuple(size // grid.size(axes) for size, axes in zip(self.shape, self.dims, strict=True))


@dataclasses.dataclass(frozen=True)
class Held:
    """One box of a weight's state that one device holds; `layout.held(bucket)` lists them all.

    The weight is meant as the run holds it: with split expert widths, columns are in the order of `rules.arrange`.
    """

    weight: str  # path of the weight
    device: int  # index in mesh.devices.flat
    place: tuple[slice, ...]  # in that device's own part of the bucket's array
    box: tuple[slice, ...]  # in the weight's shape; the same numbers in the same order, row-major


def group_sums(
    pieces: Sequence[tuple[Weight, int]], number: jax.Array, values: jax.Array
) -> Iterator[tuple[str, jax.Array]]:
    """Sums of values by group, where the pieces' weights have so many each, and value i is the number[i]-th of all."""
    start = 0
    for w, count in pieces:
        inside = (number >= start) & (number < start + count)
        yield w.group, jnp.sum(jnp.where(inside, values, 0.0))
        start += count
