"""Gradients that travel layer by layer, while the backward pass computes the next layer's.

Otherwise a large stack's gradient would sit in float32 until the backward pass ends, and then be
reduced with nothing to overlap. Here each layer's gradient is reduced and scattered as it leaves
the layer, and each device keeps its share. In the end a device has pieces of every layer, and owns
a few whole matrices (as `matrices` places them): one all-to-all, in which every device sends and
gets as much as a layer or two have.

Only a bucket of a single large weight of the layers goes this way, and only where every device
holds that weight whole (`ByLayer.if_possible`).

Each matrix is cut into equal pieces, and every device keeps the same number of them: six devices
keep half of one of a layer's three matrices. The last rows of a matrix and a layer's last pieces
may be padding; the cut with the least is chosen. On 1,016 devices each of the 16 matrices of a
layer of ZAYA1 has 127 pieces, and a device keeps two.

A ring over many nodes takes as many steps as there are devices, so small shares are reduced in two
levels: inside each node, then over the devices of the same place in all nodes ("along rails"). So
the order of a sum, and its bits, depend on the number of devices per node.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zaya_jax.optim.zero import owners
from zaya_jax.optim.zero.grid import UNIT, pad
from zaya_jax.optim.zero.matrices import WASTE, Matrices

# Numbers of a layer from which its sum over many nodes takes longer than its start: 64 MiB.
MIN_LAYER_SIZE = 2**24


class ByLayer:
    """How the gradients of one bucket travel, if they can; rows, replicas and owners are the
    bucket's."""

    def __init__(self, bucket: Matrices):
        (self.weight,) = bucket.weights
        self.bucket, self.layers = bucket, self.weight.shape[0]
        self.matrices = bucket.count // self.layers  # per layer
        self.per_device, self.per_matrix, self.piece_size = _best_pieces(
            self.matrices, bucket.rows_per_matrix, bucket.num_replicas
        )
        # numbers of a layer that travel
        self.padded = bucket.num_replicas * self.per_device * self.piece_size
        # the groups of devices that sum together, one set at a time
        self.levels = [np.arange(bucket.num_replicas)[None]]
        # The most pieces that one device has for another. An owner's matrices are consecutive, so
        # each position in a layer occurs at most ceil(slots / matrices) times among them, and a
        # device holds `per_device` positions' pieces of every layer.
        self.per_pair = min(
            bucket.slots * self.per_matrix, -(-bucket.slots // self.matrices) * self.per_device
        )

    @staticmethod
    def if_possible(bucket: Matrices) -> "ByLayer | None":
        """None if a bucket's gradients travel in another way."""
        weight = bucket.weights[0]
        if len(bucket.weights) > 1 or not weight.path.startswith("layers/") or bucket.plan is None:
            return None
        size = bucket.count // weight.shape[0] * math.prod(bucket.matrix)
        if bucket.num_replicas != bucket.grid.num_devices or size < MIN_LAYER_SIZE:
            return None
        by_layer = ByLayer(bucket)
        return by_layer if by_layer.padded <= (1 + WASTE) * size else None

    @staticmethod
    def choose_levels(chosen: Sequence["ByLayer"], two_levels_under: int) -> None:
        """Two levels where a device's shares have fewer numbers, alike for all: the compiler makes
        one sum of what leaves a layer together."""
        share = sum(by_layer.per_device * by_layer.piece_size for by_layer in chosen)
        for by_layer in chosen:
            nodes = by_layer.bucket.grid.nodes
            if min(nodes.shape) > 1 and share < two_levels_under:
                by_layer.levels = [nodes, nodes.T]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a device's shares of all layers' gradients."""
        return (self.layers, self.per_device, self.piece_size)

    @property
    def stages(self) -> int:
        """The number of all-to-alls, one after another, that bring pieces to their owners."""
        sizes = self.bucket.grid.shape
        return len(sizes) + sum(owners.first_stage(size) > 1 for size in sizes)

    @property
    def buffer_size(self) -> int:
        """Numbers that a device sends to owners, once in each stage: mostly zeros if there are many
        owners."""
        return self.bucket.num_replicas * self.per_pair * self.piece_size

    @jax.named_scope("optimizer/exchange")
    def share_of_layer(self, gradient: jax.Array) -> jax.Array:
        """One layer's partial gradient to a device's share of the sum."""
        x = gradient.astype(jnp.float32).reshape(self.matrices, -1)
        x = pad(x, 1, self.per_matrix * self.piece_size)
        x = pad(x.reshape(-1, self.piece_size), 0, self.bucket.num_replicas * self.per_device)
        for level in self.levels:
            groups = level.tolist() if len(level) > 1 else None
            x = lax.psum_scatter(
                x,
                self.bucket.form.replica_axes,
                scatter_dimension=0,
                axis_index_groups=groups,
                tiled=True,
            )
        return x

    def to_owners(self, x: jax.Array) -> jax.Array:
        """The shares of all layers to the matrices [slots, a, b] that a device owns."""
        # the device that holds each share of a layer, in order
        holders = self.levels[-1].reshape(-1)
        sent = self._send_buffer(x, holders)
        received = owners.all_to_all(sent, self.bucket.grid.names)
        return self._collected(received, holders)

    def _send_buffer(self, x: jax.Array, holders: np.ndarray) -> jax.Array:
        """This device's pieces [devices, per_pair, piece_size] by owner, those of one owner in the
        order of layers and matrices; pieces that are padding are dropped."""
        bucket, devices = self.bucket, self.bucket.num_replicas
        me = owners.of_device(np.argsort(holders), bucket.grid.names)
        in_layer = (me * self.per_device + np.arange(self.per_device)) // self.per_matrix
        matrix = np.arange(self.layers)[:, None] * self.matrices + in_layer
        owner = jnp.asarray(np.repeat(np.arange(devices), bucket.counts))[matrix]
        target = jnp.where(in_layer < self.matrices, owner, devices).reshape(-1)
        sent = jnp.zeros((devices * self.per_pair, self.piece_size), x.dtype)
        place = target * self.per_pair + _rank_among_equals(target)
        pieces = x.reshape(-1, self.piece_size)
        sent = sent.at[place].set(pieces, unique_indices=True, mode="drop")
        return sent.reshape(devices, self.per_pair, -1)

    def _collected(self, received: jax.Array, holders: np.ndarray) -> jax.Array:
        """The matrices [slots, a, b], put together from the pieces of all devices."""
        bucket = self.bucket
        start, count = bucket.owned_range()
        slot = np.arange(bucket.slots)
        first_piece = (start + slot) % self.matrices * self.per_matrix
        sources = jnp.asarray(holders)
        pieces = first_piece[:, None] + np.arange(self.per_matrix)
        source = sources[(pieces // self.per_device).reshape(-1)]
        x = received.reshape(-1, self.piece_size)
        place = source * self.per_pair + _rank_among_equals(source)
        x = x.at[place].get(mode="clip")
        x = x.reshape(bucket.slots, -1)[:, : math.prod(bucket.matrix)]
        return jnp.where((slot < count)[:, None, None], x.reshape(bucket.slots, *bucket.matrix), 0)


def _best_pieces(matrices: int, rows: int, devices: int) -> tuple[int, int, int]:
    """(pieces of a layer that a device keeps, pieces of a matrix, numbers of a piece) with the
    least padding, and then the fewest pieces."""
    candidates = []
    for per_device in range(-(-matrices // devices), matrices + 1):
        per_matrix = devices * per_device // matrices
        piece_size = -(-rows // per_matrix) * UNIT
        candidates.append((per_device * piece_size, per_device, per_matrix, piece_size))
    return min(candidates)[1:]


def _rank_among_equals(x: jax.Array) -> jax.Array:
    """How many earlier entries equal each one."""
    return jnp.sum(jnp.tril(x[:, None] == x[None, :], -1), 1)
