"""Runs' folders of checkpoints for tests, and comparisons of states and folders."""

import jax
import jax.numpy as jnp
import numpy as np

from zaya_jax.checkpoint import store
from zaya_jax.config import Checkpoint


def save(checkpoints, *steps, plus=0):
    for step in steps:
        state = {"params": {"w": jnp.arange(1000.0) + step + plus, "v": jnp.ones(7) * step}}
        checkpoints.save(step, state, {"step": step, "tokens": step})
        checkpoints.wait()


def train(workdir, *steps, plus=0, say=print, **settings):
    """A run's folder of checkpoints, with these steps."""
    checkpoints = store.Store(workdir, Checkpoint(**{"keep": 9, **settings}), say)
    checkpoints.newest()
    save(checkpoints, *steps, plus=plus)
    checkpoints.close()
    return workdir / "checkpoints"


def content(folder):
    return {p: p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
