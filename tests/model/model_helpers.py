"""Small models whose every weight is random, so that nothing can be left out without a
difference."""

import jax
import jax.numpy as jnp
import numpy as np

from zaya_jax.config import Model, Precision, Rope, RopeKinds
from zaya_jax.model import zaya

# What makes `small` a dense model: no experts, no biases of attention.
DENSE = dict(model_type="dense", intermediate_size=24, num_experts=1, attention_bias=False)
EXACT = Precision(compute="float32", router="float32", matmul="highest")


def small(**changes):
    """A two-kind model: full attention, then a sliding window of 4, with biases everywhere."""
    return Model(
        **{
            "vocab_size": 32,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "moe_intermediate_size": 12,
            "num_experts": 3,
            "router_hidden_size": 8,
            "layer_types": ("hybrid", "hybrid_sliding"),
            "sliding_window": 4,
            "rope_parameters": RopeKinds(
                Rope(rope_theta=1e4), Rope(rope_theta=100.0, partial_rotary_factor=0.75)
            ),
            "attention_bias": True,
            "lm_head_bias": True,
            "pad_token_id": None,
            **changes,
        }
    )


def of_kinds(kinds, **changes):
    """A small model of layers of these kinds, or a dense one."""
    if kinds == "dense":
        return small(**DENSE, **changes)
    return small(layer_types=kinds, num_hidden_layers=len(kinds), **changes)


def weights(model, seed=0):
    """(parameters, balancing biases), all random."""
    shapes = zaya.abstract(model)
    leaves, treedef = jax.tree.flatten_with_path(shapes)
    # on the host: a program for each shape would take longer to compile
    rng = np.random.default_rng(seed)

    def draw(path, shape):
        noise = rng.standard_normal(shape.shape, np.float32)
        name = path[-1].key
        if name.endswith("scale") or name in ("eda", "temperature"):
            return 1 + 0.2 * noise
        return 0.1 * noise if name.endswith("bias") else noise * shape.shape[-2] ** -0.5

    params = [jnp.asarray(draw(path, shape), jnp.float32) for path, shape in leaves]
    bias = 0.05 * rng.standard_normal((model.num_hidden_layers, model.num_experts + 1), np.float32)
    return jax.tree.unflatten(treedef, params), jnp.asarray(bias)


def cache_bytes(rows):
    """The bytes of a continuation's cache on all devices together, copies included."""
    return sum(part.data.nbytes for x in rows._cache.values() for part in x.addressable_shards)
