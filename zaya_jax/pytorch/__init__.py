"""Exchanges models with PyTorch: names, tensor files, whole model directories of transformers."""

import jax
import numpy as np

from zaya_jax.config import Model
from zaya_jax.pytorch import hf_names


def named(tree: dict, model: Model) -> dict[str, np.ndarray]:
    """A tree like the parameters (weights, gradients) under transformers' names, in its shapes."""
    tree, out = jax.tree.map(np.asarray, tree), {}
    for name, row, layer in hf_names.all_rows(model):
        leaf = hf_names.get(tree, row.path, layer)
        out[name] = np.ascontiguousarray(row.to_torch(leaf if layer is None else leaf[layer]))
    return out
