"""The spread of a model's work over a mesh: sizes and switches, from which `devices` makes a
layer's placement.

A `Spread` is static: with `NO_SPREAD` the program has no collective. The loss of a sharded program
is the sum over devices, each token counted by one device; gradients of a replicated weight are
partial sums.
"""

import dataclasses
import math
from collections.abc import Mapping

import jax

from zaya_jax import config

AXES = ("data", "expert", "context", "tensor")
TENSOR = "tensor"
FSDP_DIM = "embed"  # the logical axis of matrices that fsdp spreads over data


@dataclasses.dataclass(frozen=True)
class Spread:
    """Axis sizes, and switches for their use."""

    data: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1
    fsdp: bool = False  # weights are split over data too, gathered layer by layer
    tsp: bool = False  # the tensor axis carries the sequence too, weights travel
    ring: bool = False  # keys and values travel round the context axis instead of being gathered
    across: bool = False  # the devices of the context axis are in nodes of their own

    @property
    def sequence_axes(self) -> tuple[str, ...]:
        """The axes that split the sequence; () if every device has whole sequences."""
        axes = ("context", "tensor") if self.tsp else ("context",)
        return tuple(axis for axis in axes if getattr(self, axis) > 1)

    @property
    def sequence_parts(self) -> int:
        """The number of devices that share a sequence."""
        return math.prod(getattr(self, axis) for axis in self.sequence_axes)

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The axes along which devices hold different tokens; counts of tokens are summed over
        them."""
        return AXES if self.tsp else AXES[:3]

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """The axes that split the experts: with TSP tensor too, because its devices then hold other
        tokens."""
        axes = ("expert", "tensor") if self.tsp else ("expert",)
        return tuple(axis for axis in axes if getattr(self, axis) > 1)

    @property
    def head_shards(self) -> int:
        """The number of devices that share attention's heads and the experts' width."""
        return 1 if self.tsp else self.tensor

    def facts(self) -> dict[str, int | bool]:
        """The sizes, and the switches that are on: plain values for files and pages."""
        return {name: value for name, value in vars(self).items() if value is not False}


NO_SPREAD = Spread()


def spread_of(sizes: config.Mesh, shape: Mapping[str, int]) -> Spread:
    """The spread that a config's mesh group asks for, on a mesh of this shape."""
    axes = {axis: shape[axis] for axis in AXES}
    tsp = sizes.tsp and axes[TENSOR] > 1
    cut = axes["context"] > 1 or tsp  # whether devices share a sequence
    return Spread(
        **axes,
        fsdp=sizes.fsdp and axes["data"] > 1,
        tsp=tsp,
        ring=sizes.ring and cut,
        across=sizes.across and axes["context"] > 1,
    )


def is_matrix(names: tuple[str | None, ...]) -> bool:
    """Whether a weight with these logical axes is a matrix or a stack of matrices; fsdp spreads
    these."""
    return len([name for name in names if name not in ("layers", "expert")]) > 1


def gather_over_data(x: jax.Array, names: tuple[str | None, ...]) -> jax.Array:
    """Gathers a weight that fsdp has spread over data; its gradient is summed and spread on the way
    back."""
    if not is_matrix(names) or FSDP_DIM not in names:
        return x
    return jax.lax.all_gather(x, "data", axis=names.index(FSDP_DIM), tiled=True)


def share_of_tokens(x: jax.Array, spread: Spread) -> jax.Array:
    """This device's part of rows that all devices of the tensor axis hold, so that each row counts
    once in the loss."""
    if spread.head_shards == 1:
        return x
    size, rest = divmod(x.shape[0], spread.head_shards)
    assert rest == 0  # `sharding.check` guarantees it
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(TENSOR) * size, size, 0)
