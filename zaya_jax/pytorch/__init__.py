"""Exchanges models with PyTorch: names, tensor files, whole model directories of transformers."""

import jax
import numpy as np

from zaya_jax import trees
from zaya_jax.config import Model
from zaya_jax.pytorch import hf_names


def named(tree: dict, model: Model) -> dict[str, np.ndarray]:
    """A tree like the parameters (weights, gradients) under transformers' names, in its shapes."""
    leaves = trees.flat({"params": jax.tree.map(np.asarray, tree)})
    out = {}
    for name, row, layer in hf_names.all_tensors(model):
        if row.array.startswith("params."):
            leaf = leaves[row.array]
            out[name] = np.ascontiguousarray(row.to_torch(leaf if layer is None else leaf[layer]))
    return out
