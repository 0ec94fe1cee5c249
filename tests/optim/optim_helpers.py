"""A small parameter tree with every kind of weight, gradients for it, and the optimizer run on a
mesh or on none."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from zaya_jax.config import Precision
from zaya_jax.optim import chain

FLOAT32 = Precision(newton_schulz="float32")


def shapes(L=5, D=32, H=2, K=1, C=8, E=4, F=16, R=8, V=50):
    """The parameter tree's shapes."""
    P = (H + K) * C
    join = {"y_scale": (L, D), "y_bias": (L, D), "h_scale": (L, D), "h_bias": (L, D)}
    cca = {
        name: {"kernel": (L, D, out)}
        for name, out in {"q": H * C, "k": K * C, "v_now": K * C // 2, "v_prev": K * C // 2}.items()
    }
    cca |= {
        "o": {"kernel": (L, H * C, D)},
        "conv_depthwise": {"kernel": (L, 2, P), "bias": (L, P)},
        "conv_grouped": {"kernel": (L, 2, H + K, C, C), "bias": (L, P)},
        "temperature": (L, K),
    }
    dense = {"kernel": (L, R, R), "bias": (L, R)}
    router = {
        "down": {"kernel": (L, D, R), "bias": (L, R)},
        "eda": (L, R),
        "norm": {"scale": (L, R)},
        "fc1": dense,
        "fc2": dict(dense),
        "out": {"kernel": (L, R, E + 1)},
    }
    tree = {
        "embed": {"embedding": (V, D), "bias": (D,), "scale": (D,)},
        "final_norm": {"scale": (D,)},
        "head": {"bias": (V,)},
        "layers": {
            "attn_norm": {"scale": (L, D)},
            "cca": cca,
            "attn_join": join,
            "moe_norm": {"scale": (L, D)},
            "router": router,
            "experts": {"gate_up": (L, E, D, 2, F), "down": (L, E, F, D)},
            "moe_join": dict(join),
        },
    }
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.float32), tree, is_leaf=lambda x: isinstance(x, tuple)
    )


def random_tree(like, seed, scale=1.0):
    """NumPy arrays of these shapes."""
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: (scale * random.standard_normal(x.shape)).astype(np.float32), like
    )


def mesh_of(**axes):
    """A mesh over the first devices there are."""
    devices = np.array(jax.devices()[: math.prod(axes.values())]).reshape(tuple(axes.values()))
    return jax.sharding.Mesh(
        devices, tuple(axes), axis_types=(jax.sharding.AxisType.Auto,) * len(axes)
    )


def replicated(tree):
    """A PartitionSpec for each leaf: everything everywhere."""
    return jax.tree.map(lambda x: PartitionSpec(), tree)


def expert_specs(tree):
    """Experts over the expert axis, all else everywhere."""
    specs = replicated(tree)
    specs["layers"]["experts"] = {
        name: PartitionSpec(None, "expert") for name in ("gate_up", "down")
    }
    return specs


def mesh_step(optimizer, mesh, specs):
    """The jitted step (params, state, gradients, lr) → (params, state) on a mesh; gradients come with
    a first dim of one part per device, whose sum is the gradient."""

    def step(params, state, parts, lr):
        return optimizer.apply(jax.tree.map(lambda x: x[0], parts), state, params, lr=lr)

    axes = tuple(mesh.shape)

    def part_spec(spec):
        used = [axis for dim in spec if dim for axis in (dim if isinstance(dim, tuple) else (dim,))]
        return PartitionSpec(tuple(axis for axis in axes if axis not in used), *spec)

    grad_specs = jax.tree.map(part_spec, specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    state_specs = optimizer.specs()
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(specs, state_specs, grad_specs, PartitionSpec()),
        out_specs=(specs, state_specs),
        check_vma=False,
    )
    return jax.jit(mapped)


def bytes_per_device(optimizer):
    """Bytes of optimizer state that each device holds: buckets in parts, counters and figures
    whole."""
    state = jax.eval_shape(optimizer.init)
    arrays = optimizer.arrays(state)
    kinds = {kind: arrays.pop(kind) for kind in chain.KINDS}
    total = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((arrays, state.figures)))
    for buckets in kinds.values():
        for name, x in buckets.items():
            total += x.size * x.dtype.itemsize // optimizer.layout.num_shards(name)
    return total
