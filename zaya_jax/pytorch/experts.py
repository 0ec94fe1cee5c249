"""The experts of a layer as one tensor, as transformers' `zaya` has them, of files that have each
expert's matrices apart: mlp.experts.7.gate_proj.weight, .up_proj, .down_proj, or both first in one.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from zaya_jax.config import UserError
from zaya_jax.pytorch.hf_names import natural
from zaya_jax.pytorch.tensor_files import Tensor

MATRIX = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(?:(gate|up|gate_up)|down)_proj\.weight")
FUSED = re.compile(r"(.+\.mlp\.experts)\.(gate_up|down)_proj")
PROJECTIONS = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}


@dataclasses.dataclass(frozen=True)
class FusedExperts(Tensor):
    """The matrices of a layer's experts as one tensor."""

    matrices: list[Tensor]

    def read(self, part: str = "numbers") -> np.ndarray:
        """This part of all matrices in memory."""
        matrices = [matrix.read(part) for matrix in self.matrices]
        return np.stack(matrices).reshape(self.shape[0], -1, matrices[0].shape[-1])


def fuse(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under transformers' names; UserError for matrices of different shapes."""
    tensors: dict[str, Tensor] = {}
    matrices: dict[str, list[str]] = defaultdict(list)
    for name in sorted(stored, key=natural):  # gate before up, expert 9 before expert 10
        if matrix := MATRIX.fullmatch(name):
            projection = "gate_up" if matrix[3] else "down"
            matrices[f"{matrix[1]}.{projection}_proj"].append(name)
        else:
            tensors[name] = stored[name]
    for fused, names in matrices.items():
        first = stored[names[0]]
        for name in names:
            if stored[name].shape != first.shape:
                raise UserError(
                    f"{name} has shape {stored[name].shape}, but {names[0]} has {first.shape};"
                    " copy the weights again"
                )
        num_experts = 1 + int(MATRIX.sub(r"\2", names[-1]))  # one that is missing gives odd rows
        rows = first.shape[0] * len(names) // num_experts
        shape = (num_experts, rows, *first.shape[1:])
        tensors[fused] = FusedExperts(shape, first.dtype, [stored[name] for name in names])
    return tensors
