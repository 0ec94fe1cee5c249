"""Gradients that travel layer by layer, while the backward pass computes the next layer's.

A large stack of matrices would otherwise wait, whole and in float32, until the backward pass has ended, and be reduced
then, while nothing else runs. Here each layer's gradient is reduced and scattered as it leaves the layer, and each
device keeps its share. In the end a device has a piece of every layer, and owns a few whole matrices (as
`matrices` places them): one all-to-all, in which every device sends and gets as much as a layer or two have.

The pieces must be whole matrices or whole parts of them, so the number of devices is usually a power of two.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zaya_jax.optim import ownership
from zaya_jax.optim.grid import UNIT
from zaya_jax.optim.matrices import Matrices

LARGE = 2**24  # numbers of a layer from which its sum over many nodes takes longer than its start: 64 MiB


class ByLayer:
    """How the gradients of one bucket travel, if they can; rows, shards and owners are the bucket's."""

    def __init__(self, bucket: Matrices):
        (weight,) = bucket.weights
        self.bucket, self.layers = bucket, weight.shape[0]
        self.matrices = bucket.count // self.layers  # per layer
        self.kept = self.matrices * bucket.rows // bucket.shards  # rows of a layer that a device keeps
        self.piece = min(self.kept, bucket.rows)  # rows of one matrix in it
        at_once = max(self.kept // bucket.rows, 1)
        # Pieces from one device to another: an owner's matrices follow each other, through the layers.
        self.each = min(bucket.slots, -(-bucket.slots // self.matrices) * at_once)

    @staticmethod
    def of(bucket: Matrices) -> "ByLayer | None":
        """None if a bucket's gradients travel in another way."""
        weight, rows = bucket.weights[0], bucket.rows
        if len(bucket.weights) > 1 or not weight.path.startswith("layers/") or bucket.plan is None:
            return None
        of_layer = bucket.count // weight.shape[0] * rows
        whole = bucket.shards == bucket.grid.num_devices and math.prod(bucket.row) == rows * UNIT
        if not whole or of_layer % bucket.shards or of_layer * UNIT < LARGE:
            return None
        kept = of_layer // bucket.shards
        return None if kept % rows and rows % kept else ByLayer(bucket)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a device's shares of all layers' gradients."""
        return (self.layers, self.kept, UNIT)

    @property
    def rounds(self) -> int:
        """All-to-alls between many devices go by way of a square root of them."""
        return 1 if self.bucket.shards <= ownership.MOST_AT_ONCE else 2

    @property
    def sent(self) -> int:
        """Numbers that a device sends to owners, mostly zeros if there are many owners."""
        return self.rounds * self.bucket.shards * self.each * self.piece * UNIT

    @jax.named_scope("optimizer/exchange")
    def share(self, gradient: jax.Array) -> jax.Array:
        """One layer's partial gradient to a device's share of the sum."""
        x = gradient.astype(jnp.float32).reshape(-1, UNIT)
        return lax.psum_scatter(x, self.bucket.form.shared, scatter_dimension=0, tiled=True)

    def to_owners(self, x: jax.Array) -> jax.Array:
        """The shares of all layers to the matrices [slots, a, b] that a device owns."""
        bucket, axes, rows = self.bucket, self.bucket.grid.names, self.bucket.rows
        devices, me = bucket.shards, lax.axis_index(axes)
        pieces = self.kept // self.piece  # per layer
        # Where mine go: the number of a piece's matrix determines its owner, and there the pieces are in order.
        of_layer = (me * self.kept + np.arange(pieces) * self.piece) // rows
        matrix = (np.arange(self.layers)[:, None] * self.matrices + of_layer).reshape(-1)
        target = jnp.asarray(np.repeat(np.arange(devices), bucket.counts))[matrix]
        sent = jnp.zeros((devices * self.each, self.piece * UNIT), x.dtype)
        sent = sent.at[target * self.each + _before(target)].set(
            x.reshape(len(matrix), -1), unique_indices=True, mode="promise_in_bounds"
        )
        came = ownership.swap(sent.reshape(devices, self.each, -1), axes)
        # The sources of my matrices' pieces.
        start, count = (ownership.of_device(table, axes) for table in (bucket.starts, bucket.counts))
        slot = np.arange(bucket.slots)
        begin = (start + slot) % self.matrices * rows
        source = (begin[:, None] + np.arange(0, rows, self.piece)) // self.kept
        number = jax.vmap(_before, 1, 1)(source)
        found = came.reshape(devices * self.each, -1).at[source * self.each + number].get(mode="clip")
        return jnp.where((slot < count)[:, None, None], found.reshape(bucket.slots, *bucket.row), 0)


def _before(x: jax.Array) -> jax.Array:
    """How many earlier entries equal each one."""
    return jnp.sum(jnp.tril(x[:, None] == x[None, :], -1), 1)
