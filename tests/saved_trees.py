"""Saves trees of arrays by a run's store, and restores them."""

import jax
import jax.numpy as jnp

from zaya_jax.checkpoint import boxes, writing
from zaya_jax.checkpoint.source import SealedSource


def save_tree(checkpoints, step, tree, meta, last=False):
    """Begins to save a tree whose arrays are the checkpoint's own; waits if it is the last."""
    tree = jax.tree.map(jnp.asarray, tree)
    save = checkpoints.save_now if last else checkpoints.save
    save(step, writing.parts_by_device(tree), meta, boxes.of_tree(tree))


def restore_tree(checkpoints, step, like):
    """A step as ShapeDtypeStructs with shardings say, or on one device as arrays do."""
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def shape(x):
        sharding = x.sharding if isinstance(x, jax.ShapeDtypeStruct) else one
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    source = SealedSource(checkpoints.root / str(step))
    return source.restore(jax.tree.map(shape, like), exact=True)
