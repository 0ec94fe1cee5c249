"""Reads model directories of the public PyTorch ZAYA, without PyTorch.

Every tensor's name, shape and dtype is checked before any is read.
"""

import functools
import os
from pathlib import Path

import numpy as np

from zaya_jax import trees
from zaya_jax.checkpoint.layout import StoredArray
from zaya_jax.checkpoint.source import ArraySource
from zaya_jax.config import Model, UserError, files
from zaya_jax.model import quantized
from zaya_jax.pytorch import compressed, experts, older, tensor_files
from zaya_jax.pytorch import hf_names as names
from zaya_jax.pytorch.tensor_files import Tensor

RECOPY = "copy config.json and weights again from one place"


class Directory(ArraySource):
    """A checked model directory: its config, and its tensors, which it also reads as a checkpoint's
    arrays."""

    model: Model

    def __init__(self, path: str | os.PathLike):
        super().__init__(Path(path))
        self.path = Path(path)
        where = self.path / "config.json"
        if not where.exists():
            raise UserError(f"{where} is missing; give a model directory as transformers writes it")
        self.config = files.read_object(where)
        self._quantization = self.config.pop("quantization_config", None)
        if self._quantization:  # other schemes have files that cannot be read either
            self.warning = compressed.check(self._quantization, str(where))
        tensors = self._stored()
        if self._quantization:
            tensors = compressed.unpack(tensors)
        is_older = older.is_older(self.config)
        if is_older:
            tensors = older.rename(tensors)
        self._tensors = experts.fuse(tensors)  # all, under transformers' names
        if is_older:
            self.config = older.config_of(self.config, self._tensors, str(where))
        self.model = names.model_from_json(self.config, str(where))
        self._check()

    def _stored(self) -> dict[str, Tensor]:
        """The tensors of all files."""
        index = self.path / tensor_files.INDEX
        if (self.path / tensor_files.SINGLE).exists() or not index.exists():
            return tensor_files.open_file(self.path / tensor_files.SINGLE)
        file_names = files.read_object(index)["weight_map"]
        stored = {
            (name, file): tensor
            for file in {*file_names.values()}
            for name, tensor in tensor_files.open_file(self.path / file).items()
        }
        if odd := sorted(stored.keys() ^ {*file_names.items()}):
            raise UserError(f"{index} and {odd[0][1]} disagree about {odd[0][0]}; {RECOPY}")
        return {name: tensor for (name, _), tensor in stored.items()}

    def _check(self) -> None:
        expected = expected_shapes(self.model)
        stored = self._tensors
        # Some files repeat the tied embedding.
        odd = sorted(set(expected) ^ (set(stored) - {names.HEAD}), key=names.natural)
        if odd:
            wrong = "lacks tensor" if odd[0] in expected else "has an unknown tensor"
            more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
            raise UserError(
                f"{self.path} {wrong} {odd[0]}{more}: its config.json implies others; {RECOPY}"
            )
        if names.HEAD in stored:
            expected[names.HEAD] = expected[names.EMBEDDING]
        for name, shape in expected.items():
            tensor = stored[name]
            if tensor.shape != shape:
                raise UserError(
                    f"{self.path}: {name} has shape {tensor.shape}, expected {shape}; {RECOPY}"
                )
            if tensor.dtype not in tensor_files.DTYPES:
                raise UserError(
                    f"{self.path}: {name} is {tensor.dtype}, not F32, F16 or BF16; convert it"
                )
        if names.HEAD in stored and not np.array_equal(
            self.tensor(names.HEAD).view(np.uint8), self.tensor(names.EMBEDDING).view(np.uint8)
        ):
            raise UserError(
                f"{self.path}: {names.HEAD} differs from {names.EMBEDDING}; the head must be tied:"
                " ZAYA has no other"
            )

    def dtypes(self) -> dict[str, str]:
        """The stored dtype of every tensor: float32, float16 or bfloat16."""
        return {name: tensor_files.DTYPES[x.dtype].name for name, x in self._tensors.items()}

    def tensor(self, name: str) -> np.ndarray:
        """One tensor as stored; UserError if it has a NaN or an infinity, because no run could
        begin with it."""
        x = self._tensors[name].read()
        bad = x.size - np.count_nonzero(np.isfinite(x))
        if bad:
            raise UserError(
                f"{self.path}: {name} has {bad:,} of {x.size:,} numbers that are not finite;"
                f" {RECOPY}, or take an earlier checkpoint of that model"
            )
        return x

    def stored_codes(
        self, form: str, name: str, layer: int
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Codes and scale of a layer's experts, in our layout; None where they are not stored in
        this form."""
        if not self._quantization:
            return None
        array = self.arrays[f"params.layers.{name.replace('/', '.')}"]
        row = self._rows[array.name]
        stored = self._tensors[row.name.format(layer)]
        parts = [stored.read("codes"), stored.read("scale")]
        wanted = quantized.abstract(array.shape[1:], form, quantized.INPUT_AXES[name])
        if [x.dtype for x in parts] != [x.dtype for x in wanted]:
            return None
        codes, scale = (
            row.from_torch(x, like.shape) for x, like in zip(parts, wanted, strict=True)
        )
        return codes, scale

    @functools.cached_property
    def arrays(self) -> dict[str, StoredArray]:
        """The parameters and balancing biases under our names, float32, a layer in each chunk."""
        shapes = trees.flat(names.abstract(self.model))
        arrays = {}
        for name, row in self._rows.items():
            shape = shapes[name].shape
            chunk = (1, *shape[1:]) if row.is_stacked else shape
            arrays[name] = StoredArray(name, shape, "float32", chunk)
        return arrays

    @functools.cached_property
    def _rows(self) -> dict[str, names.TensorRow]:
        return {row.array: row for row in names.all_rows(self.model)}

    def read_chunk(self, array: StoredArray, index: tuple[int, ...]) -> np.ndarray:
        """A layer's part of an array, or a whole one outside of the layers."""
        row, number = self._rows[array.name], index[0]
        if row.array == names.EDA and number == 0:
            return np.ones(array.chunk, np.float32)
        shape = array.shape[1:] if row.is_stacked else array.shape
        x = row.from_torch(self.tensor(row.name.format(number)), shape)
        return x.reshape(array.chunk).astype(np.float32, copy=False)


def expected_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Every tensor's name and shape in their layout."""
    shapes = trees.flat(names.abstract(model))
    out = {}
    for name, row, layer in names.all_tensors(model):
        shape = shapes[row.array].shape
        like = np.broadcast_to(np.float32(0), shape if layer is None else shape[1:])
        out[name] = row.to_torch(like).shape
    return out
