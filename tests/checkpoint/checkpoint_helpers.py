"""Runs' folders of checkpoints for tests, and comparisons of states and folders."""

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from saved_trees import save_tree

from zaya_jax.checkpoint.run import store
from zaya_jax.config import Checkpoint


def put(x, *spec, shape=(4, 2)):
    """An array on the eight devices, as a mesh of this shape."""
    devices = np.array(jax.devices()).reshape(shape)
    mesh = Mesh(devices, ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))


def small(number):
    return {"params": {"w": jnp.arange(1000.0) + number, "v": jnp.ones(7) * number}}


def save(checkpoints, *steps, plus=0, state=small, **meta):
    """Steps whose states are state(step + plus)."""
    for step in steps:
        save_tree(checkpoints, step, state(step + plus), {"step": step, "tokens": step, **meta})
        checkpoints.wait()


def train(workdir, *steps, plus=0, state=small, say=print, meta=(), **settings):
    """A run's folder of checkpoints, with these steps."""
    checkpoints = store.Store(workdir, Checkpoint(**{"keep": 9, **settings}), say)
    checkpoints.find_newest()
    save(checkpoints, *steps, plus=plus, state=state, **dict(meta))
    checkpoints.close()
    return workdir / "checkpoints"


def put_in_place(folder, other):
    """Puts another folder's content in the place of this one's."""
    shutil.rmtree(folder)
    shutil.copytree(other, folder)


def flip(file, bit=0):
    """Changes a bit of a file."""
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def cut(file):
    """Takes the last byte of a file away."""
    file.write_bytes(file.read_bytes()[:-1])


def content(folder):
    return {p: p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


def same(a, b):
    jax.tree.map(functools.partial(np.testing.assert_array_equal, strict=True), a, b)
