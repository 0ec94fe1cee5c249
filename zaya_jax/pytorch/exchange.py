"""Converts a directory of the public PyTorch implementation to a workdir and back, tensor by
tensor.

An import becomes step 0 of a run that has not begun: parameters and balancing biases, no optimizer.
`imported.json` keeps the rest (further keys of config.json, generation_config.json, each tensor's
dtype), so that an export returns the same files. Both directions hold one tensor at a time and
write under a temporary name first, so that a folder under the final name is complete.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zaya_jax import config as config_lib
from zaya_jax import trees
from zaya_jax.checkpoint.foreign import Unsealed
from zaya_jax.checkpoint.layout import DTYPES, IMPORTED, Array
from zaya_jax.checkpoint.run import claims, rewrite
from zaya_jax.config import Config, Model, UserError, shown
from zaya_jax.config.files import write
from zaya_jax.model import zaya
from zaya_jax.optim import balance
from zaya_jax.pytorch import any_model, hf, tensor_files, tokenizer_files
from zaya_jax.pytorch import hf_names as names
from zaya_jax.pytorch.any_model import AnyModel
from zaya_jax.text import chat_template
from zaya_jax.training.workdir import write_json
from zaya_jax.version import __version__

SHARD_GB = 5.0  # transformers' own
MOST_GB = 1e6
Progress = Callable[[int, int], None]  # bytes done, bytes in all


def from_hf(
    name: str | os.PathLike, workdir: str | os.PathLike, progress: Progress | None = None
) -> Path:
    """Makes a workdir from a model directory; UserError, with nothing left behind, if that is
    impossible."""
    found = any_model.find(name)
    if not isinstance(found.source, hf.Directory):
        raise UserError(f"{name} is a run's folder already; every program takes it as it is")
    target = claims.new_folder(workdir)
    config = any_model.config_of(
        found.model, target / "tokenizer" if found.tokenizer_folder else None
    )
    return write_workdir(target, found, config, progress)


def write_workdir(
    target: Path, model: AnyModel, config: Config, progress: Progress | None = None
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
        }
        biases = jax.eval_shape(
            lambda: balance.init(config.model.num_hidden_layers, config.model.num_experts)
        )
        state = {"params": zaya.abstract(config.model), "balance": biases._asdict()}
        rewrite.begin_run(part, model.source, state, meta, progress)
        if tokenizer:
            tokenizer.save(part / "tokenizer")
            for name, content in model.files().items():
                (part / "tokenizer" / name).write_bytes(content)
        write_json(part / IMPORTED, dict(model.imported))
        write_json(part / "config.json", config_lib.to_dict(config))
    return target


def to_hf(
    name: str | os.PathLike | AnyModel,
    out: str | os.PathLike,
    dtype: str | None = None,
    shard_gb: float = SHARD_GB,
    progress: Progress | None = None,
) -> Path:
    """Writes any model as a model directory that transformers' `zaya` loads, or leaves nothing
    behind."""
    if dtype not in (None, *DTYPES):
        raise UserError(f"dtype={shown(dtype)} is not one of {', '.join(DTYPES)}")
    if not 0 < shard_gb <= MOST_GB:
        raise UserError(f"--shard_gb={shard_gb:g} must be above 0 and at most {MOST_GB:g}")
    found = name if isinstance(name, AnyModel) else any_model.find(name)
    names.check_zaya(found.model, found.name)
    found.check()
    target = claims.new_folder(out)
    with claims.whole_or_nothing(target) as part:
        specs = _specs(found.model, found.imported["dtypes"], dtype)
        tensor_files.write_sharded(
            part, specs, _reader(found, specs, progress), int(shard_gb * 1e9)
        )
        _write_small(part, found, dtype)
    write_card(target, found.name, found.config, found.source.meta())
    return target


def _write_small(folder: Path, found: AnyModel, dtype: str | None) -> None:
    """Writes the configs and the tokenizer's files."""
    model, imported, tokenizer, trained = (
        found.model,
        found.imported,
        found.tokenizer(),
        found.trained,
    )
    written = (
        dtype
        or imported["config"].get("dtype")
        or imported["config"].get("torch_dtype")
        or "float32"
    )
    chats = tokenizer is not None and trained is not None and trained.data.chats
    end_turn = (
        next(iter(chat_template.Template(tokenizer).ending[0]), None)
        if tokenizer and chats
        else None
    )
    write_json(
        folder / "config.json", names.model_to_json(model, written, imported["config"], end_turn)
    )
    generation = names.generation_json(model, imported["generation_config"], end_turn)
    write_json(folder / "generation_config.json", generation)
    tokenizer_files.write(folder, found.files(), tokenizer, trained)


def write_card(target: Path, name: str, config: Config, meta: Mapping[str, Any]) -> None:
    """Writes a model card, README.md; `meta` is the checkpoint's of a run."""
    counts, loss = zaya.param_counts(config.model), meta.get("metrics", {}).get("eval/loss")
    facts = [
        (
            f"- model: `zaya`, {counts['total']:,} parameters, {counts['active']:,} of them active"
            " for a token"
        ),
        f"- from: `{name}`, written by zaya_jax {__version__}",
    ]
    if meta.get("tokens"):
        mixture = ", ".join(f"`{source}`" for source in config.data.mixture or (config.data.path,))
        facts += [
            f"- data: {mixture}",
            f"- trained: {meta['step']:,} steps, {meta['tokens']:,} tokens of this run",
        ]
    if loss is not None:
        facts.append(f"- held-out loss: {loss:.4f} nats a token at this step")
    load = (
        "from transformers import AutoModelForCausalLM\n\nmodel ="
        f' AutoModelForCausalLM.from_pretrained("{target}")'
    )
    text = (
        f"# {config.name}\n\n" + "\n".join(facts) + f"\n\nTo load it:\n\n```python\n{load}\n```\n"
    )
    write(target / "README.md", text.encode())


class InMemory(Unsealed):
    """A tree of arrays, read as a checkpoint."""

    def __init__(self, tree: Mapping[str, Any]):
        super().__init__(Path())
        self._leaves = trees.flat(tree)

    def arrays(self) -> dict[str, Array]:
        """All arrays by name, each one chunk."""
        return {
            n: Array(n, x.shape, np.dtype(x.dtype).name, x.shape) for n, x in self._leaves.items()
        }

    def _chunk(self, array: Array, index: tuple[int, ...]) -> np.ndarray:
        return np.asarray(self._leaves[array.name])


def _specs(
    model: Model, recorded: dict[str, str], dtype: str | None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Every tensor to write: in the requested or else the recorded dtype; balancing biases stay
    float32."""
    shapes = hf.expected_shapes(model)
    if names.HEAD in recorded:
        shapes[names.HEAD] = shapes[names.EMBEDDING]
    chosen = {
        n: "float32" if n.endswith(names.BALANCE) else dtype or recorded.get(n, "float32")
        for n in shapes
    }
    return {
        n: jax.ShapeDtypeStruct(shapes[n], DTYPES[chosen[n]])
        for n in sorted(shapes, key=names.natural)
    }


def _reader(
    found: AnyModel, specs: tensor_files.Specs, progress: Progress | None
) -> Callable[[str], np.ndarray]:
    """The function that reads a tensor by its name."""
    rows = {name: (row, layer) for name, row, layer in names.all_rows(found.model)}
    rows[names.HEAD] = rows[names.EMBEDDING]
    done, total = 0, sum(map(tensor_files.num_bytes, specs.values()))

    def tensor(name: str) -> np.ndarray:
        nonlocal done
        done += tensor_files.num_bytes(specs[name])
        if progress:
            progress(done, total)
        if name.endswith(names.BALANCE):
            return found.source.read(
                ("balance", "bias"), int(name.removeprefix("model.layers.").split(".")[0])
            )
        row, layer = rows[name]
        path = row.path if layer is None else ("layers", *row.path)
        return row.to_torch(found.source.read(("params", *path), layer)).astype(specs[name].dtype)

    return tensor
