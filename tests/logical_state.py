"""The optimizer's state as a checkpoint would hold it, put together from the boxes that
`Bucket.state_boxes` lists."""

from collections.abc import Iterator

import jax
import numpy as np

from zaya_jax import trees
from zaya_jax.optim.chain import KINDS, Optimizer
from zaya_jax.optim.zero import Layout


def boxes(layout: Layout, name: str, bucket: np.ndarray) -> Iterator[tuple]:
    """What each device holds of a bucket, a global array: (by the layout, its numbers)."""
    axes, dims = layout.grid.axes, layout.spec(name)
    over = dims[0] if len(dims) and dims[0] else ()
    over = (over,) if isinstance(over, str) else over
    parts = bucket.reshape(*(axes[axis] for axis in over), -1, *bucket.shape[1:])
    for held in layout.bucket_of[name].state_boxes(name):
        places = dict(zip(axes, np.unravel_index(held.device, tuple(axes.values())), strict=True))
        yield held, parts[tuple(places[axis] for axis in over)][held.place]


def weights(layout: Layout, buckets: dict) -> dict[str, np.ndarray]:
    """Buckets, global arrays, as one array per weight, by path; every box that several devices hold
    is the same."""
    shapes = {w.path: w.shape for w in layout.weights}
    found: dict[str, np.ndarray] = {}
    for name, x in buckets.items():
        for held, numbers in boxes(layout, name, np.asarray(x)):
            whole = found.setdefault(held.weight, np.full(shapes[held.weight], np.nan, x.dtype))
            box = numbers.reshape(whole[held.box].shape)
            assert np.isnan(whole[held.box].astype(np.float32)).all() or np.array_equal(
                whole[held.box], box
            )
            whole[held.box] = box
    assert not any(np.isnan(x.astype(np.float32)).any() for x in found.values())
    return found


def of(optimizer: Optimizer, state) -> dict:
    """`steps`, `skip`, and for the weights of each method `momentum` or `mean` and `square`, in
    nested dicts."""
    arrays = jax.device_get(optimizer.arrays(state))
    return arrays | {
        kind: trees.nested(weights(optimizer.layout, arrays[kind]), "/") for kind in KINDS
    }
