"""How a model's work is spread over a mesh, as the model itself sees it inside `shard_map`: sizes and switches.

A `Spread` is static: with `ALONE` no collective enters the program. The loss of a spread program is the sum over
devices of what each computes, each token counted by one device; gradients of a replicated weight are partial sums.
"""

import dataclasses
import math

from zaya_jax import config

AXES = ("data", "expert", "context", "tensor")


@dataclasses.dataclass(frozen=True)
class Spread:
    """Axis sizes, and how they are used."""

    data: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1
    fsdp: bool = False  # weights lie over data too, gathered layer by layer
    tsp: bool = False  # the tensor axis carries the sequence too, weights travel
    ring: bool = False  # keys and values travel round the context axis instead of being gathered

    @property
    def sequence_axes(self) -> tuple[str, ...]:
        """The axes that the sequence is cut over; () where every device has whole sequences."""
        axes = ("context", "tensor") if self.tsp else ("context",)
        return tuple(axis for axis in axes if getattr(self, axis) > 1)

    @property
    def sequence_parts(self) -> int:
        """On how many devices a sequence lies."""
        return math.prod(getattr(self, axis) for axis in self.sequence_axes)

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The axes on which devices hold different tokens: what counts of tokens are summed over."""
        return AXES if self.tsp else AXES[:3]

    @property
    def heads(self) -> int:
        """On how many devices attention's heads and the experts' width lie."""
        return 1 if self.tsp else self.tensor


ALONE = Spread()


def of(sizes: config.Mesh, shape: dict[str, int]) -> Spread:
    """The spread that a config's mesh group asks for, on a mesh of this shape."""
    axes = {axis: shape[axis] for axis in AXES}
    return Spread(
        **axes,
        fsdp=sizes.fsdp and axes["data"] > 1,
        tsp=sizes.tsp and axes["tensor"] > 1,
        ring=sizes.ring and axes["context"] > 1,
    )
