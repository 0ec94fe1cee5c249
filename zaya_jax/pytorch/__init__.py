"""Exchanges models with PyTorch: names, tensor files, whole model directories of transformers."""

import jax
import numpy as np

from zaya_jax.config import Model
from zaya_jax.pytorch import hf_names


def named(tree: dict, model: Model) -> dict[str, np.ndarray]:
    """A tree like the parameters (weights, gradients) under transformers' names, in its shapes."""
    tree = jax.tree.map(np.asarray, tree)
    out = {}
    for name, row, layer in hf_names.all_rows(model):
        leaf = hf_names.leaf_of_row(tree, row.path, layer)
        out[name] = np.ascontiguousarray(row.to_torch(leaf if layer is None else leaf[layer]))
    return out
