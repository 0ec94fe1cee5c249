"""The optimizer's state as a checkpoint would hold it, put together from the boxes that
`layout.held` lists."""

import jax
import numpy as np

from zaya_jax import trees
from zaya_jax.optim.chain import KINDS, Optimizer
from zaya_jax.optim.zero import Layout


def weights(layout: Layout, buckets: dict) -> dict[str, np.ndarray]:
    """Buckets, global arrays, as one array per weight, by path; every box that several devices hold
    is the same."""
    axes, shapes = layout.grid.axes, {w.path: w.shape for w in layout.weights}
    found: dict[str, np.ndarray] = {}
    for name, x in buckets.items():
        x, dims = np.asarray(x), layout.spec(name)
        over = (
            ()
            if not len(dims) or dims[0] is None
            else (dims[0],)
            if isinstance(dims[0], str)
            else dims[0]
        )
        parts = x.reshape(*(axes[axis] for axis in over), -1, *x.shape[1:]) if over else x
        for held in layout.held(name):
            places = (
                dict(zip(axes, np.unravel_index(held.device, tuple(axes.values())), strict=True))
                if axes
                else {}
            )
            own = parts[tuple(places[axis] for axis in over)] if over else parts
            whole = found.setdefault(held.weight, np.full(shapes[held.weight], np.nan, x.dtype))
            box = own[held.place].reshape(whole[held.box].shape)
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
