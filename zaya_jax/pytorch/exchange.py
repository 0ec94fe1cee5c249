"""Converts a directory of the public PyTorch implementation to a workdir and back, tensor by
tensor.

An import becomes step 0 of a run that has not begun: parameters and balancing biases, no optimizer.
`imported.json` keeps the rest (further keys of config.json, generation_config.json, each tensor's
dtype), so that an export returns the same files. Both directions hold one tensor at a time and
write under a temporary name first, so that a folder under the final name is complete.
"""

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zaya_jax import config as config_lib
from zaya_jax import trees
from zaya_jax.checkpoint import few_bits
from zaya_jax.checkpoint.layout import DTYPES, IMPORTED, StoredArray
from zaya_jax.checkpoint.run import claims, step_zero
from zaya_jax.checkpoint.source import ArraySource
from zaya_jax.checkpoint.vault import CountBytes
from zaya_jax.config import Config, Model, UserError, shown
from zaya_jax.model import own_parts, zaya
from zaya_jax.optim import balance
from zaya_jax.pytorch import any_model, card, compressed, hf, tensor_files, tokenizer_files
from zaya_jax.pytorch import hf_names as names
from zaya_jax.pytorch.any_model import AnyModel
from zaya_jax.pytorch.card import UNPUBLISHED, Publication
from zaya_jax.text import chat_template
from zaya_jax.training.workdir import write_json
from zaya_jax.version import __version__

SHARD_GB = 5.0  # transformers' own


def from_hf(
    name: str | os.PathLike, workdir: str | os.PathLike, progress: CountBytes | None = None
) -> Path:
    """Makes a workdir from a model directory; UserError, with nothing left behind, if that is
    impossible."""
    model = any_model.find(name)
    if not isinstance(model.source, hf.Directory):
        raise UserError(f"{name} is a run's folder already; every program takes it as it is")
    target = claims.require_new_folder(workdir)
    tokenizer = target / "tokenizer" if model.tokenizer_folder else None
    config = any_model.make_config(model.model, tokenizer)
    return write_workdir(target, model, config, progress)


def write_workdir(
    target: Path, model: AnyModel, config: Config, progress: CountBytes | None = None
) -> Path:
    """Makes a workdir with a model as step 0 of a run that has not begun; leaves nothing behind if
    that fails.

    `config` is the run's.
    """
    model.check()
    tokenizer = model.tokenizer()
    with claims.whole_or_nothing(target) as part:
        meta = {
            "step": 0,
            "tokens": 0,
            "imported": True,
            "config": config_lib.to_dict(config),
            "tokenizer": tokenizer.sha256 if tokenizer else None,
            "version": __version__,
            "own_parts": own_parts.sources(config.model),
        }
        biases = jax.eval_shape(
            lambda: balance.init(config.model.num_hidden_layers, config.model.num_experts)
        )
        state = {"params": zaya.abstract(config.model), "balance": biases._asdict()}
        step_zero.write(part, model.source, state, meta, progress)
        if tokenizer:
            tokenizer.save(part / "tokenizer")
            for name, content in model.tokenizer_file_contents().items():
                (part / "tokenizer" / name).write_bytes(content)
        write_json(part / IMPORTED, dict(model.imported))
        write_json(part / "config.json", config_lib.to_dict(config))
    return target


def to_hf(
    name: str | os.PathLike | AnyModel,
    out: str | os.PathLike,
    dtype: str | None = None,
    shard_gb: float = SHARD_GB,
    progress: CountBytes | None = None,
    publication: Publication = UNPUBLISHED,
    quantize: str | None = None,
) -> Path:
    """Writes any model as a model directory that transformers' `zaya` loads, or leaves nothing
    behind; `quantize` stores the experts in this form of `quantized`."""
    if dtype not in (None, *DTYPES):
        raise UserError(f"dtype={shown(dtype)} is not one of {', '.join(DTYPES)}")
    model = name if isinstance(name, AnyModel) else any_model.find(name)
    names.check_zaya(model.model, model.name)
    model.check()
    target = claims.require_new_folder(out)
    with claims.whole_or_nothing(target) as part:
        specs: tensor_files.Specs = _specs(model.model, model.imported["dtypes"], dtype)
        places: dict[str, compressed.Place] = {}
        if quantize:
            specs, places = compressed.packed(specs, quantize)
        encoded = few_bits.FewBits(model.source, quantize or "compute")
        reader = _reader(model, specs, places, encoded, progress)
        tensor_files.write_sharded(part, specs, reader, int(shard_gb * 1e9))
        _write_json_and_tokenizer(part, model, dtype, quantize)
        card.write(part, model, publication)
    return target


def _write_json_and_tokenizer(
    folder: Path, model: AnyModel, dtype: str | None, quantize: str | None
) -> None:
    """Writes the configs and the tokenizer's files."""
    imported = model.imported
    tokenizer = model.tokenizer()
    training = model.training_config
    recorded_dtype = imported["config"].get("dtype") or imported["config"].get("torch_dtype")
    end_turn = None
    if tokenizer and training and training.data.chats:
        end_turn = next(iter(chat_template.Template(tokenizer).stops[0]), None)
    config = names.model_to_json(
        model.model, dtype or recorded_dtype or "float32", imported["config"], end_turn
    )
    if quantize:
        config["quantization_config"] = compressed.quantization_config(quantize)
    generation = names.generation_json(model.model, imported["generation_config"], end_turn)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", generation)
    tokenizer_files.write(folder, model.tokenizer_file_contents(), tokenizer, training)


class InMemory(ArraySource):
    """A tree of arrays, read as a checkpoint."""

    def __init__(self, tree: Mapping[str, Any]):
        super().__init__("a model in memory")
        self._leaves = trees.flat(tree)

    @functools.cached_property
    def arrays(self) -> dict[str, StoredArray]:
        """All arrays by name, each one chunk."""
        return {
            name: StoredArray(name, x.shape, np.dtype(x.dtype).name, x.shape)
            for name, x in self._leaves.items()
        }

    def read_chunk(self, array: StoredArray, index: tuple[int, ...]) -> np.ndarray:
        """A whole array."""
        return np.asarray(self._leaves[array.name])


def _specs(
    model: Model, recorded: dict[str, str], dtype: str | None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Every tensor to write: in the requested or else the recorded dtype; balancing biases stay
    float32."""
    shapes = hf.expected_shapes(model)
    if names.HEAD in recorded:
        shapes[names.HEAD] = shapes[names.EMBEDDING]
    specs = {}
    for name in sorted(shapes, key=names.natural):
        chosen = dtype or recorded.get(name, "float32")
        if name.endswith(names.BALANCE):
            chosen = "float32"
        specs[name] = jax.ShapeDtypeStruct(shapes[name], DTYPES[chosen])
    return specs


def _reader(
    model: AnyModel,
    specs: tensor_files.Specs,
    places: Mapping[str, compressed.Place],
    encoded: few_bits.FewBits,
    progress: CountBytes | None,
) -> Callable[[str], np.ndarray]:
    """The function that reads a tensor by its name; those with a place are codes or scales of
    `encoded`."""
    rows = {name: (row, layer) for name, row, layer in names.all_tensors(model.model)}
    rows[names.HEAD] = rows[names.EMBEDDING]
    total = sum(map(tensor_files.num_bytes, specs.values()))
    done = 0

    @functools.lru_cache(maxsize=2)  # of a layer two, of which the experts' parts come in turn
    def codes_and_scale(fused: str) -> list[np.ndarray]:
        row, layer = rows[fused]
        assert layer is not None
        weight = row.array.removeprefix("params.layers.").replace(".", "/")
        return [row.to_torch(x) for x in encoded.of_layer(weight, layer)]

    def tensor(name: str) -> np.ndarray:
        nonlocal done
        done += tensor_files.num_bytes(specs[name])
        if progress:
            progress(done, total)
        if name in places:
            fused, part, expert, rows_of_expert = places[name]
            return codes_and_scale(fused)[part][expert, rows_of_expert]
        row, row_layer = rows[name]
        numbers = row.to_torch(model.source.read(row.array, row_layer))
        return numbers.astype(specs[name].dtype)

    return tensor
