"""The experts of a layer as one tensor, as transformers' `zaya` has them, of files that have each
expert's matrices apart: mlp.experts.7.gate_proj.weight, .up_proj, .down_proj, or both first in one.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from zaya_jax.config import UserError
from zaya_jax.pytorch.hf_names import natural
from zaya_jax.pytorch.tensor_files import TensorInfo

MATRIX = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(?:(gate|up|gate_up)|down)_proj\.weight")
FUSED = re.compile(r"(.+\.mlp\.experts)\.(gate_up|down)_proj")
PROJECTIONS = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}


def _fused_name(name: str) -> str:
    """The tensor of all experts that a stored matrix is a part of; other tensors keep their name."""
    matrix = MATRIX.fullmatch(name)
    if not matrix:
        return name
    projection = "gate_up" if matrix[3] else "down"
    return f"{matrix[1]}.{projection}_proj"


class FusedExperts:
    """The tensors of several files, like one `TensorFile`; experts are fused as they are read."""

    def __init__(self, files: Mapping[str, Any]):
        self._files = files
        self._stored_names: dict[str, list[str]] = {}
        for name in sorted(files, key=natural):  # gate before up, expert 9 before expert 10
            self._stored_names.setdefault(_fused_name(name), []).append(name)
        self.tensors = {name: self._info(name) for name in self._stored_names}

    def _info(self, name: str) -> TensorInfo:
        first, *_ = stored = self._stored_names[name]
        info = self._files[first].tensors[first]
        if not MATRIX.fullmatch(first):
            return info
        for matrix in stored:
            shape = self._files[matrix].tensors[matrix].shape
            if shape != info.shape:
                raise UserError(
                    f"{matrix} has shape {shape}, but {first} has {info.shape}; copy the weights again"
                )
        num_experts = len({MATRIX.sub(r"\2", matrix) for matrix in stored})
        rows = info.shape[0] * len(stored) // num_experts
        return info._replace(shape=(num_experts, rows, *info.shape[1:]))

    def read(self, name: str) -> np.ndarray:
        """A tensor in memory."""
        parts = [self._files[stored].read(stored) for stored in self._stored_names[name]]
        if not MATRIX.fullmatch(self._stored_names[name][0]):
            return parts[0]
        return np.stack(parts).reshape(self.tensors[name].shape[0], -1, parts[0].shape[-1])
