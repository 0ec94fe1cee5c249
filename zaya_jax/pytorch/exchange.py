"""Converts a directory of the public PyTorch implementation to a workdir and back, tensor by tensor.

An import becomes step 0 of a run that has not begun: parameters and balancing biases, no optimizer. `imported.json`
keeps the rest (further keys of config.json, generation_config.json, each tensor's dtype), so that an export returns
the same files. Both directions hold one tensor at a time and write under a temporary name first, so that a folder
under the final name is complete.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

import zaya_jax
from zaya_jax import config as config_lib
from zaya_jax import trees
from zaya_jax.checkpoint import claims, rewrite
from zaya_jax.checkpoint.foreign import Unsealed
from zaya_jax.checkpoint.layout import DTYPES, IMPORTED, Array
from zaya_jax.checkpoint.source import Source, read_meta
from zaya_jax.config import Config, Model, UserError
from zaya_jax.config.files import write
from zaya_jax.data import chat_template, tokenizers
from zaya_jax.model import zaya
from zaya_jax.optim import balance
from zaya_jax.pytorch import any_model, hf, tensor_files, tokenizer_files
from zaya_jax.pytorch import hf_names as names
from zaya_jax.training.workdir import write_json

SHARD_GB = 5.0  # transformers' own
MOST_GB = 1e6
Progress = Callable[[int, int], None]  # bytes done, bytes in all
# Reads the array ("params", ..) or ("balance", "bias"), whole or at an index of its first dimension.
Read = Callable[[tuple[str, ...], int | None], np.ndarray]


def from_hf(name: str | os.PathLike, workdir: str | os.PathLike, progress: Progress | None = None) -> Path:
    """Makes a workdir from a model directory; UserError, with nothing left behind, if that is impossible."""
    found = any_model.find(name)
    if not isinstance(found.source, hf.Directory):
        raise UserError(f"{name} is a run's folder already; every program takes it as it is")
    target = claims.new_folder(workdir, "--workdir")
    tokenizer = found.tokenizer()
    config = any_model.config_of(found.model, target / "tokenizer" if tokenizer else None)
    small = any_model.small_files(found.folder)
    return write_workdir(target, config, found.source, tokenizer, small, found.imported, progress)


def write_workdir(
    target: Path,
    config: Config,
    weights: Source,
    tokenizer: tokenizers.Tokenizer | None,
    files: Mapping[str, bytes],
    imported: Mapping[str, Any],
    progress: Progress | None = None,
) -> Path:
    """Makes a workdir with these weights as step 0 of a run that has not begun; leaves nothing behind if that fails.

    `files` join the tokenizer's own, `imported` goes into `imported.json` for an export.
    """
    with claims.whole_or_nothing(target) as part:
        meta = {
            "step": 0, "tokens": 0, "imported": True, "config": config_lib.to_dict(config),
            "tokenizer": tokenizer.sha256 if tokenizer else None, "version": zaya_jax.__version__,
        }  # fmt: skip
        biases = jax.eval_shape(lambda: balance.init(config.model.num_hidden_layers, config.model.num_experts))
        state = {"params": zaya.abstract(config.model), "balance": biases._asdict()}
        rewrite.begin_run(part, weights, state, meta, progress)
        if tokenizer:
            tokenizer.save(part / "tokenizer")
            for name, content in files.items():
                (part / "tokenizer" / name).write_bytes(content)
        write_json(part / IMPORTED, dict(imported))
        write_json(part / "config.json", config_lib.to_dict(config))
    return target


def to_hf(
    name: str | os.PathLike,
    out: str | os.PathLike,
    dtype: str | None = None,
    shard_gb: float = SHARD_GB,
    progress: Progress | None = None,
) -> Path:
    """Writes any model (`any_model`) as a model directory that transformers' `zaya` loads."""
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"--dtype={dtype} is not one of {', '.join(DTYPES)}")
    if not 0 < shard_gb <= MOST_GB:
        raise UserError(f"--shard_gb={shard_gb:g} must be above 0 and at most {MOST_GB:g}")
    found = any_model.find(name)
    check_zaya(found.model, found.name)
    found.check()
    target = claims.new_folder(out, "--out")
    write_directory(
        target, found.model, found.source.read, found.imported, found.files(), found.tokenizer(), found.trained,
        dtype, shard_gb, progress,
    )  # fmt: skip
    write_card(target, found.name, found.config, read_meta(found.folder, found.step) if found.step else {})
    return target


def write_card(target: Path, name: str, config: Config, meta: Mapping[str, Any]) -> None:
    """Writes a model card, README.md; `meta` is the checkpoint's of a run."""
    counts, loss = zaya.param_counts(config.model), meta.get("metrics", {}).get("eval/loss")
    facts = [
        f"- model: `zaya`, {counts['total']:,} parameters, {counts['active']:,} of them active for a token",
        f"- from: `{name}`, written by zaya_jax {zaya_jax.__version__}",
    ]
    if "tokens" in meta:
        mixture = ", ".join(f"`{source}`" for source in config.data.mixture or (config.data.path,))
        facts += [f"- data: {mixture}", f"- trained: {meta['step']:,} steps, {meta['tokens']:,} tokens of this run"]
    if loss is not None:
        facts.append(f"- held-out loss: {loss:.4f} nats a token at this step")
    load = f'from transformers import AutoModelForCausalLM\n\nmodel = AutoModelForCausalLM.from_pretrained("{target}")'
    text = f"# {config.name}\n\n" + "\n".join(facts) + f"\n\nTo load it:\n\n```python\n{load}\n```\n"
    write(target / "README.md", text.encode())


def check_zaya(model: Model, where: str) -> None:
    """UserError for a model that transformers' `zaya` cannot express."""
    names.check_kinds(model, where)
    if model.model_type != "zaya":
        raise UserError(
            f"{where} holds a model of model_type={model.model_type!r}; only 'zaya' has a form "
            "that transformers' `zaya` loads"
        )


class InMemory(Unsealed):
    """A tree of arrays, read as a checkpoint."""

    def __init__(self, tree: Mapping[str, Any]):
        super().__init__(Path())
        self._leaves = trees.flat(tree)

    def arrays(self) -> dict[str, Array]:
        """All arrays by name, each one chunk."""
        return {n: Array(n, x.shape, np.dtype(x.dtype).name, x.shape) for n, x in self._leaves.items()}

    def _chunk(self, array: Array, index: tuple[int, ...]) -> np.ndarray:
        return np.asarray(self._leaves[array.name])


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
        chats = tokenizer is not None and trained is not None and trained.data.chats
        end_turn = next(iter(chat_template.Template(tokenizer).ending[0]), None) if tokenizer and chats else None
        write_json(part / "config.json", names.model_to_json(model, written, imported["config"], end_turn))
        write_json(
            part / "generation_config.json", names.generation_json(model, imported["generation_config"], end_turn)
        )
        tokenizer_files.write(part, files, tokenizer, trained)
    return target


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
