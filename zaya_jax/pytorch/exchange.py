"""Converts a directory of the public PyTorch implementation to a workdir and back, tensor by tensor.

An import becomes step 0 of a run that has not begun: parameters and balancing biases, no optimizer. `imported.json`
keeps the rest (further keys of config.json, generation_config.json, each tensor's dtype), so that an export returns
the same files. Both directions hold one tensor at a time and write under a temporary name first, so that a folder
under the final name is complete.
"""

import functools
import itertools
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

import zaya_jax
from zaya_jax import config as config_lib
from zaya_jax import schedule
from zaya_jax.checkpoint import claims, store, writing
from zaya_jax.checkpoint.foreign import open_source
from zaya_jax.checkpoint.layout import DTYPES, IMPORTED
from zaya_jax.checkpoint.source import Source, read_meta
from zaya_jax.config import Config, Model, UserError
from zaya_jax.data import tokenizers
from zaya_jax.model import zaya
from zaya_jax.optim import balance
from zaya_jax.pytorch import hf, tensor_files, tokenizer_files
from zaya_jax.pytorch import hf_names as names
from zaya_jax.training.workdir import check_same, read_config, write_json

WEIGHTS = ("state/params.", "state/balance.")  # a checkpoint's files, apart from its small ones
SHARD_GB = 5.0  # transformers' own
MOST_GB = 1e6
Progress = Callable[[int, int], None]  # bytes done, bytes in all
# Reads the array ("params", ..) or ("balance", "bias"), whole or at an index of its first dimension.
Read = Callable[[tuple[str, ...], int | None], np.ndarray]
Leaf = tuple[tuple[str, ...], int | None, np.ndarray]  # path below the parameters, layer or None for all, array


def from_hf(directory: str | os.PathLike, workdir: str | os.PathLike, progress: Progress | None = None) -> Path:
    """Makes a workdir from a model directory; UserError, with nothing left behind, if that is impossible."""
    source = hf.Directory(directory)
    target = claims.new_folder(workdir, "--workdir")
    tokenizer = tokenizer_of(source)
    config = config_of(source.model, target / "tokenizer" if tokenizer else None)
    eda = ("layers", "router", "eda"), 0, np.ones(source.model.router_hidden_size, np.float32)
    return write_workdir(
        target, config, itertools.chain([eda], source.leaves()), source.balance(), tokenizer,
        small_files(source.path), imported_of(source), progress,
    )  # fmt: skip


def write_workdir(
    target: Path,
    config: Config,
    leaves: Iterable[Leaf],
    bias: np.ndarray,
    tokenizer: tokenizers.Tokenizer | None,
    files: Mapping[str, bytes],
    imported: Mapping[str, Any],
    progress: Progress | None = None,
) -> Path:
    """Makes a workdir with these weights as step 0 of a run that has not begun; leaves nothing behind if that fails.

    `files` join the tokenizer's own, `imported` goes into `imported.json` for an export.
    """
    with claims.whole_or_nothing(target) as part:
        state = _abstract_state(config.model)
        meta = {
            "step": 0, "tokens": 0, "imported": True, "config": config_lib.to_dict(config),
            "tokenizer": tokenizer.sha256 if tokenizer else None, "version": zaya_jax.__version__,
        }  # fmt: skip
        writer = writing.Builder(part, 0, state, meta)
        done, total = 0, sum(x.size for x in jax.tree.leaves(state["params"])) * 4
        for path, layer, x in leaves:
            writer.write(("params", *path), x, layer)
            done += x.nbytes
            if progress:
                progress(min(done, total), total)
        for key, like in state["balance"].items():
            writer.write(("balance", key), bias if key == "bias" else np.zeros(like.shape, like.dtype))
        writer.close()
        if tokenizer:
            tokenizer.save(part / "tokenizer")
            for name, content in files.items():
                (part / "tokenizer" / name).write_bytes(content)
        write_json(part / IMPORTED, dict(imported))
        write_json(part / "config.json", config_lib.to_dict(config))
    return target


def imported_of(source: hf.Directory) -> dict[str, Any]:
    """The parts of a model directory that our config has no room for, kept for an export."""
    generation = source.path / "generation_config.json"
    kept = hf.read_json(generation) if generation.exists() else None
    return {"config": source.json, "generation_config": kept, "dtypes": source.dtypes()}


def small_files(folder: Path) -> dict[str, bytes]:
    """The files of a folder that belong to a tokenizer."""
    return {name: (folder / name).read_bytes() for name in tokenizer_files.FILES if (folder / name).is_file()}


def to_hf(
    workdir: str | os.PathLike,
    out: str | os.PathLike,
    step: int | None = None,
    dtype: str | None = None,
    shard_gb: float = SHARD_GB,
    progress: Progress | None = None,
) -> Path:
    """Writes a step (the newest by default) of any workdir as a model directory that transformers' `zaya` loads."""
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"--dtype={dtype} is not one of {', '.join(DTYPES)}")
    if not 0 < shard_gb <= MOST_GB:
        raise UserError(f"--shard_gb={shard_gb:g} must be above 0 and at most {MOST_GB:g}")
    workdir = Path(workdir)
    names.check_kinds(read_config(workdir).model, f"--workdir={workdir}")
    source = Source(workdir, step)
    with source.unless_deleted():
        config = config_at(workdir, source.step)
        source.check(names=WEIGHTS)
        model = schedule.model_at(config, source.step)
        check_zaya(model, f"--workdir={workdir}")
        _check_shapes(source, model, workdir)
        imported = read_imported(workdir)
        target = claims.new_folder(out, "--out")
        folder = workdir / "tokenizer"
        tokenizer = tokenizers.load(folder) if folder.is_dir() else None
        trained = config if source.step or not imported["config"] else None
        return write_directory(
            target, model, source.read, imported, small_files(folder), tokenizer, trained, dtype, shard_gb, progress
        )


def check_zaya(model: Model, where: str) -> None:
    """UserError for a model that transformers' `zaya` cannot express."""
    names.check_kinds(model, where)
    if model.model_type != "zaya":
        raise UserError(
            f"{where} holds a model of model_type={model.model_type!r}; only 'zaya' has a form "
            "that transformers' `zaya` loads"
        )


def in_memory(tree: Mapping[str, Any]) -> Read:
    """Reads a tree of arrays through a checkpoint reader's interface."""

    def read(path: tuple[str, ...], index: int | None) -> np.ndarray:
        found: Any = functools.reduce(operator.getitem, path, tree)
        return np.asarray(found if index is None else found[index])

    return read


def write_directory(
    target: Path,
    model: Model,
    read: Read,
    imported: Mapping[str, Any],
    files: Mapping[str, bytes],
    tokenizer: tokenizers.Tokenizer | None,
    trained: Config | None,
    dtype: str | None = None,
    shard_gb: float = SHARD_GB,
    progress: Progress | None = None,
) -> Path:
    """Writes weights as a model directory, or leaves nothing behind. `trained`: see `tokenizer_files.write`."""
    specs = _specs(model, imported["dtypes"], dtype)
    total = sum(map(tensor_files.num_bytes, specs))

    def tensors() -> Iterator[np.ndarray]:
        done = 0
        sources = {name: (row, layer) for name, row, layer in names.all_rows(model)}
        sources[names.HEAD] = sources[names.EMBEDDING]
        for spec in specs:
            yield _tensor(read, sources, spec)
            done += tensor_files.num_bytes(spec)
            if progress:
                progress(done, total)

    with claims.whole_or_nothing(target) as part:
        tensor_files.write_sharded(part, specs, tensors(), int(shard_gb * 1e9))
        written = dtype or imported["config"].get("dtype") or imported["config"].get("torch_dtype") or "float32"
        end = tokenizer.chat_token("end_turn") if tokenizer and trained and trained.data.chats else []
        end_turn = end[0] if len(end) == 1 else None
        write_json(part / "config.json", names.model_to_json(model, written, imported["config"], end_turn))
        write_json(
            part / "generation_config.json", names.generation_json(model, imported["generation_config"], end_turn)
        )
        tokenizer_files.write(part, files, tokenizer, trained)
    return target


def config_at(workdir: str | os.PathLike, step: int) -> Config:
    """The config that a step was trained with, from its checkpoint; UserError if config.json contradicts it."""
    workdir = Path(workdir)
    recorded = read_config(workdir)
    saved = read_meta(workdir, step).get("config")
    if not saved:
        return recorded
    trained = config_lib.check(saved)
    try:
        check_same(trained, recorded, workdir, step)
    except UserError as error:
        raise UserError(
            f"{workdir / 'config.json'} contradicts the checkpoint of step {step}: {str(error).rpartition(';')[0]}; "
            "restore the former from the checkpoint's meta/data.json"
        ) from None
    return trained


def read_weights(
    workdir: str | os.PathLike, step: int | None, model: Model, shardings: dict | None = None
) -> tuple[dict, jax.Array]:
    """(parameters, balancing biases) of a step without the rest of the state: on the first device, or by `shardings`,
    a tree of {"params", "balance"}, where each device reads its own parts."""
    source = open_source(os.fspath(workdir), step)
    wanted = {
        "params": zaya.abstract(model),
        "balance": {"bias": jax.ShapeDtypeStruct((model.num_hidden_layers, model.num_experts + 1), np.float32)},
    }
    if shardings is None:
        like = store.abstract_like(wanted, jax.sharding.SingleDeviceSharding(jax.local_devices()[0]))
    else:
        like = jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), wanted, shardings)
    with source.unless_deleted():
        source.check(names=WEIGHTS)
        _check_shapes(source, model, Path(workdir))
        found = source.restore(like)
    if source.warning:
        print(f"note: {source.name}{source.warning}")
    return found["params"], found["balance"]["bias"]


def config_of(model: Model, tokenizer: Path | None) -> Config:
    """The config of a workdir for an imported model: the defaults, except for the model and its tokenizer."""
    given = config_lib.default().to_dict()
    given["name"] = "imported"
    given["model"] = config_lib.to_dict(model)
    given["data"]["seq_len"] = min(given["data"]["seq_len"], model.max_position_embeddings)
    if tokenizer:
        given["data"]["tokenizer"] = str(tokenizer)
    return config_lib.check(given)


def tokenizer_of(source: hf.Directory) -> tokenizers.Tokenizer | None:
    """The tokenizer in the same directory; UserError if it belongs to another model."""
    if not any((source.path / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        return None
    tokenizer = tokenizers.load(source.path)
    if tokenizer.vocab_size > source.model.vocab_size:
        raise UserError(
            f"{source.path}: its tokenizer has {tokenizer.vocab_size} ids, its config.json a vocab_size of "
            f"{source.model.vocab_size}; they do not belong together"
        )
    return tokenizer


def _abstract_state(model: Model) -> dict[str, Any]:
    biases = jax.eval_shape(lambda: balance.init(model.num_hidden_layers, model.num_experts))
    return {"params": zaya.abstract(model), "balance": biases._asdict()}


def _check_shapes(source: Source, model: Model, workdir: Path) -> None:
    for path, x in jax.tree_util.tree_flatten_with_path(zaya.abstract(model))[0]:
        keys = ("params", *(p.key for p in path))
        if source.array(keys).shape != x.shape:
            raise UserError(
                f"--workdir={workdir}: {'/'.join(keys)} has shape {source.array(keys).shape}, the config implies "
                f"{x.shape}"
            )


def read_imported(workdir: Path) -> dict[str, Any]:
    """The content of `imported.json`; empty for a workdir without one."""
    path = workdir / IMPORTED
    if not path.exists():
        return nothing_imported()
    return nothing_imported() | hf.read_json(path)


def nothing_imported() -> dict[str, Any]:
    """The note of a model that was made here."""
    return {"config": {}, "generation_config": None, "dtypes": {}}


def _specs(model: Model, recorded: dict[str, str], dtype: str | None) -> list[tensor_files.Spec]:
    """Every tensor to write: in the requested or else the recorded dtype; balancing biases stay float32."""
    shapes = hf.expected_shapes(model)
    if names.HEAD in recorded:
        shapes[names.HEAD] = shapes[names.EMBEDDING]
    out = []
    for name in sorted(shapes, key=names.natural):
        chosen = "float32" if name.endswith(names.BALANCE) else dtype or recorded.get(name, "float32")
        out.append((name, shapes[name], DTYPES[chosen]))
    return out


def _tensor(read: Read, sources: dict, spec: tensor_files.Spec) -> np.ndarray:
    name, _, dtype = spec
    if name.endswith(names.BALANCE):
        layer = int(name.removeprefix("model.layers.").split(".")[0])
        return read(("balance", "bias"), layer)
    row, layer = sources[name]
    path = row.path if layer is None else ("layers", *row.path)
    return row.to_torch(read(("params", *path), layer)).astype(dtype)
