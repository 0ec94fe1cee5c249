"""Trees of nested dicts, and the names of their leaves: "layers.cca.q.kernel"."""

from collections.abc import Mapping
from typing import Any

import jax


def name_of(path: Any, separator: str = ".") -> str:
    """An array's name by its path in a tree."""
    return jax.tree_util.keystr(path, simple=True, separator=separator)


def flat(tree: Any, separator: str = ".") -> dict[str, Any]:
    """The leaves of a tree of dicts by name."""
    return {
        name_of(path, separator): x for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def nested(arrays: Mapping[str, Any], separator: str = ".") -> dict[str, Any]:
    """The inverse of `flat`."""
    tree: dict[str, Any] = {}
    for name, x in arrays.items():
        *folders, last = name.split(separator)
        inner = tree
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[last] = x
    return tree
