"""Gradients that travel layer by layer, while the backward pass computes the next layer's.

A large stack of matrices would otherwise wait, whole and in float32, until the backward pass has
ended, and be reduced then, while nothing else runs. Here each layer's gradient is reduced and
scattered as it leaves the layer, and each device keeps its share. In the end a device has pieces of
every layer, and owns a few whole matrices (as `matrices` places them): one all-to-all, in which
every device sends and gets as much as a layer or two have.

Each matrix is cut into equal pieces, and every device keeps the same number of them: six devices
keep half of one of a layer's three matrices. The last rows of a matrix and a layer's last pieces
may be padding; the cut with the least is chosen. On 1,016 devices each of the 16 matrices of a
layer of ZAYA1 has 127 pieces, and a device keeps two.

A ring over many nodes takes as many steps as there are devices, so small shares are reduced in two
levels: inside each node, then over the devices of the same place in all nodes ("along rails"). The
order of a sum depends on the levels, so its bits do on the devices of a node.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zaya_jax.optim.zero import owners
from zaya_jax.optim.zero.grid import UNIT
from zaya_jax.optim.zero.matrices import WASTE, Matrices, pad

# numbers of a layer from which its sum over many nodes takes longer than its start: 64 MiB
LARGE = 2**24


class ByLayer:
    """How the gradients of one bucket travel, if they can; rows, shards and owners are the
    bucket's."""

    def __init__(self, bucket: Matrices):
        (weight,) = bucket.weights
        self.bucket, self.layers = bucket, weight.shape[0]
        self.matrices = bucket.count // self.layers  # per layer
        # Pieces of a layer that a device keeps, pieces of a matrix, and the numbers of a piece.
        self.kept, self.cut, self.piece = _cut(self.matrices, bucket.rows, bucket.shards)
        self.padded = bucket.shards * self.kept * self.piece  # numbers of a layer that travel
        # the groups of devices that sum together, one set at a time
        self.levels = [np.arange(bucket.shards)[None]]
        # Pieces from one device to another: an owner's matrices follow each other, through the
        # layers.
        self.each = min(bucket.slots * self.cut, -(-bucket.slots // self.matrices) * self.kept)

    @staticmethod
    def of(bucket: Matrices) -> "ByLayer | None":
        """None if a bucket's gradients travel in another way."""
        weight = bucket.weights[0]
        if len(bucket.weights) > 1 or not weight.path.startswith("layers/") or bucket.plan is None:
            return None
        numbers = bucket.count // weight.shape[0] * math.prod(bucket.row)
        if bucket.shards != bucket.grid.num_devices or numbers < LARGE:
            return None
        way = ByLayer(bucket)
        return way if way.padded <= (1 + WASTE) * numbers else None

    @staticmethod
    def settle(ways: Sequence["ByLayer"], two_levels_under: int) -> None:
        """Chooses two levels where a device's shares have fewer numbers, alike for all: the
        compiler makes one sum of what leaves a layer together."""
        share = sum(way.kept * way.piece for way in ways)
        for way in ways:
            nodes = way.bucket.grid.nodes
            if min(nodes.shape) > 1 and share < two_levels_under:
                way.levels = [nodes, nodes.T]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a device's shares of all layers' gradients."""
        return (self.layers, self.kept, self.piece)

    @property
    def rounds(self) -> int:
        """All-to-alls between many devices go by way of a square root of them."""
        return 1 if self.bucket.shards <= owners.MOST_AT_ONCE else 2

    @property
    def sent(self) -> int:
        """Numbers that a device sends to owners, mostly zeros if there are many owners."""
        return self.rounds * self.bucket.shards * self.each * self.piece

    @jax.named_scope("optimizer/exchange")
    def share(self, gradient: jax.Array) -> jax.Array:
        """One layer's partial gradient to a device's share of the sum."""
        x = pad(gradient.astype(jnp.float32).reshape(self.matrices, -1), 1, self.cut * self.piece)
        x = pad(x.reshape(-1, self.piece), 0, self.bucket.shards * self.kept)
        for level in self.levels:
            groups = level.tolist() if len(level) > 1 else None
            x = lax.psum_scatter(
                x,
                self.bucket.form.shared,
                scatter_dimension=0,
                axis_index_groups=groups,
                tiled=True,
            )
        return x

    def to_owners(self, x: jax.Array) -> jax.Array:
        """The shares of all layers to the matrices [slots, a, b] that a device owns."""
        bucket, axes = self.bucket, self.bucket.grid.names
        # the holder of each share, in order
        devices, holders = (bucket.shards, self.levels[-1].reshape(-1))
        me = owners.of_device(np.argsort(holders), axes)
        # Where mine go: the number of a piece's matrix determines its owner, and there the pieces
        # are in order. Those of no matrix go nowhere.
        of_layer = (me * self.kept + np.arange(self.kept)) // self.cut
        matrix = np.arange(self.layers)[:, None] * self.matrices + of_layer
        owner = jnp.asarray(np.repeat(np.arange(devices), bucket.counts))[matrix]
        target = jnp.where(of_layer < self.matrices, owner, devices).reshape(-1)
        sent = jnp.zeros((devices * self.each, self.piece), x.dtype)
        sent = sent.at[target * self.each + _before(target)].set(
            x.reshape(-1, self.piece), unique_indices=True, mode="drop"
        )
        came = owners.swap(sent.reshape(devices, self.each, -1), axes)
        # The sources of my matrices' pieces.
        start, count = (owners.of_device(table, axes) for table in (bucket.starts, bucket.counts))
        slot = np.arange(bucket.slots)
        begin = (start + slot) % self.matrices * self.cut
        source = jnp.asarray(holders)[
            ((begin[:, None] + np.arange(self.cut)) // self.kept).reshape(-1)
        ]
        found = (
            came.reshape(-1, self.piece).at[source * self.each + _before(source)].get(mode="clip")
        )
        found = found.reshape(bucket.slots, -1)[:, : math.prod(bucket.row)]
        return jnp.where((slot < count)[:, None, None], found.reshape(bucket.slots, *bucket.row), 0)


def _cut(matrices: int, rows: int, devices: int) -> tuple[int, int, int]:
    """(pieces that a device keeps, pieces of a matrix, numbers of a piece) with the least padding,
    and then the fewest pieces."""
    ways = []
    for kept in range(-(-matrices // devices), matrices + 1):
        cut = devices * kept // matrices
        piece = -(-rows // cut) * UNIT
        ways.append((kept * piece, kept, cut, piece))
    return min(ways)[1:]


def _before(x: jax.Array) -> jax.Array:
    """How many earlier entries equal each one."""
    return jnp.sum(jnp.tril(x[:, None] == x[None, :], -1), 1)
