"""Attention of a new token to a cache in parts is that of one device; test_decode_in_parts.py has
its traffic."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rivals
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels.attention import decode_attention
from zaya_jax.model.cache import LayerSlice
from zaya_jax.parallel import tree

B, H, K, C = 2, 4, 2, 8
ALL = PartitionSpec()
PARTS = PartitionSpec(None, "context")


def mesh_of(size):
    return jax.make_mesh(
        (size,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size]
    )


def lay_out(x, size):
    """[B, T, ..] as the devices hold it: one device's columns after the other's."""
    return jnp.concatenate([x[:, i::size] for i in range(size)], axis=1)


def on_devices(function, size):
    mapped = functools.partial(function, scale=0.3, axis="context")
    return jax.shard_map(
        mapped,
        mesh=mesh_of(size),
        in_specs=(ALL, PARTS, PARTS, ALL),
        out_specs=ALL,
        check_vma=False,
    )


@pytest.mark.parametrize("size", [2, 8])
def test_equal_to_one_device(size):
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (B, 1, H, C))
    k, v = (jax.random.normal(key, (B, 16, K, C)) for key in keys[1:])
    # Left padding; and a row with a single key, so that most devices have none.
    valid = jnp.stack([(jnp.arange(16) > 2) & (jnp.arange(16) < 13), jnp.arange(16) == 4])
    out = jax.jit(on_devices(rivals.tree_attention, size))(
        q, lay_out(k, size), lay_out(v, size), valid
    )
    np.testing.assert_allclose(out, decode_attention(q, k, v, valid, scale=0.3), atol=1e-6)


def test_a_prompt_and_new_columns_go_where_they_belong():
    size, length = 4, 12
    cache = tree.SplitCache(size)
    x = jnp.arange(2.0 * length).reshape(2, length, 1, 1)

    def fill(x):
        held = LayerSlice(jnp.full((3, 2, length // size, 1, 1), -1.0), jnp.int32(1))
        held = cache.write(held, x[:, :6], jnp.int32(0))
        for index in range(6, length):
            held = cache.write(held, x[:, index : index + 1], jnp.int32(index))
        return held.read(), held.stack[::2]

    run = jax.shard_map(
        fill, mesh=mesh_of(size), in_specs=ALL, out_specs=(PARTS, ALL), check_vma=False
    )
    filled, others = jax.jit(run)(x)
    np.testing.assert_array_equal(filled, lay_out(x, size))
    np.testing.assert_array_equal(others, -1)  # the layers below and above
