"""One name for a model, wherever a model is asked for.

    model = any_model.find("runs/tiny@200")     its config, its tokenizer and the source of its weights
    params, balance = model.load_weights(shardings)

A name is a run's folder (of its newest step), FOLDER@STEP, a directory of transformers' `zaya`, or
OWNER/NAME on the Hugging Face hub (OWNER/NAME@REVISION), which keeps one copy in its own cache.
Nothing else is copied: the arrays are read from where they lie onto the devices.
"""

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from zaya_jax import config as config_lib
from zaya_jax import trees
from zaya_jax.checkpoint import source as sources
from zaya_jax.checkpoint.layout import IMPORTED
from zaya_jax.checkpoint.merged import MergedSource
from zaya_jax.checkpoint.orbax_source import open_source
from zaya_jax.checkpoint.source import ArraySource
from zaya_jax.config import Config, Model, UserError, fields, files, first_line
from zaya_jax.pytorch import hf, hf_names, hub, tokenizer_files
from zaya_jax.text import tokenizers
from zaya_jax.training.workdir import read_config

HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt"]
# Of a model that was made here.
NOT_IMPORTED: Mapping[str, Any] = MappingProxyType(
    {"config": {}, "generation_config": None, "dtypes": {}, "hub_name": None}
)


@dataclasses.dataclass(frozen=True, eq=False)
class AnyModel:
    """A model and its origin; its weights are not read yet. Hashed by identity, as part of jitted
    arguments."""

    name: str  # says the step, too
    folder: Path
    config: Config  # as recorded for this step, or made for a directory's model
    source: ArraySource
    tokenizer_folder: str | None  # as `tokenizers.load` takes it
    imported: Mapping[str, Any] = NOT_IMPORTED  # see `import_record`
    step: int = 0  # of a run

    @property
    def model(self) -> Model:
        """The model as the run's phase at this step has it."""
        return sources.model_at(self.config, self.step)

    @property
    def training_config(self) -> Config | None:
        """The config that it was trained with here; None for imported weights as they came."""
        return self.config if self.step or not self.imported["config"] else None

    def tokenizer(self) -> tokenizers.Tokenizer | None:
        """Its tokenizer; UserError where that belongs to another model."""
        if self.tokenizer_folder is None:
            return None
        tokenizer = tokenizers.load(self.tokenizer_folder)
        if self.source.meta().get("tokenizer") not in (None, tokenizer.sha256):
            raise UserError(
                f"{self.tokenizer_folder} is not the tokenizer that {self.name} was trained with,"
                " so its ids mean other text; put that one back, or take the folder away to go on"
                " with ids alone"
            )
        if tokenizer.vocab_size > self.config.model.vocab_size:
            raise UserError(
                f"{self.folder}: its tokenizer has {tokenizer.vocab_size} ids, its config.json a"
                f" vocab_size of {self.config.model.vocab_size}; they do not belong together"
            )
        return tokenizer

    def tokenizer_file_contents(self) -> dict[str, bytes]:
        """The contents of the files that belong to the tokenizer."""
        if self.tokenizer_folder is None:
            return {}
        return tokenizer_files.read_files(Path(self.tokenizer_folder))

    def load_weights(self, shardings: dict | None = None) -> tuple[dict, jax.Array]:
        """(parameters, balancing biases): on the first device, or by `shardings`, a tree of
        {"params", "balance"}, where each device reads its own parts.
        """
        wanted = hf_names.abstract(self.model)
        if shardings is None:
            first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            shardings = jax.tree.map(lambda _: first, wanted)
        like = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            wanted,
            shardings,
        )
        self.check()
        state = self.source.restore(like)
        return state["params"], state["balance"]["bias"]

    def check(self) -> None:
        """UserError if the weights have other shapes than the config says."""
        wanted = trees.flat(hf_names.abstract(self.model))
        if odd := sources.misfit(self.source.arrays, wanted):
            raise UserError(f"{self.name}: its weights are not those of its config: {odd}")


def find(name: str | os.PathLike, config: Config | None = None) -> AnyModel:
    """The model of this name; UserError if there is none. `config`: of a state without one, as
    Orbax saves it."""
    folder, step = resolve(name)
    source = _open(folder, step)
    if config is None:
        if isinstance(source, hf.Directory):
            return _of_directory(str(name), source)
        if source.workdir is None:
            raise UserError(
                f"{name} holds no model; give {fields.MODEL_FORMS}, or config= with a state that"
                " Orbax saved"
            )
        return _of_run(folder, source)
    if (folder / "config.json").exists():
        raise UserError(f"{folder} has a config of its own; leave config= out")
    tokenizer = config.data.tokenizer
    exists = tokenizer == "bytes" or Path(tokenizer).exists()
    return AnyModel(str(name), folder, config, source, tokenizer if exists else None)


def _of_run(folder: Path, source: ArraySource) -> AnyModel:
    config = config_at(folder, source.step)
    # With its base, the weights are whole.
    run = dataclasses.replace(config.run, lora=None, base="compute")
    config = dataclasses.replace(config, run=run)
    tokenizer = str(folder / "tokenizer") if (folder / "tokenizer").is_dir() else None
    imported = NOT_IMPORTED
    if (folder / IMPORTED).exists():
        imported = files.read_object(folder / IMPORTED)
    name = f"{folder}@{source.step}"
    return AnyModel(name, folder, config, source, tokenizer, imported, source.step)


def _of_directory(name: str, directory: hf.Directory) -> AnyModel:
    folder = directory.path
    tokenizer = None
    if any((folder / file).is_file() for file in (tokenizers.FILE, "tokenizer.model")):
        tokenizer = str(folder)
    config = make_config(directory.model, tokenizer)
    return AnyModel(name, folder, config, directory, tokenizer, import_record(directory))


def open_weights(name: str) -> ArraySource:
    """The weights of any name; also of one without a config, such as an address."""
    if "://" in name:
        return with_base(open_source(name))
    return _open(*resolve(name))


def _open(folder: Path, step: int | None) -> ArraySource:
    """The weights in an existing folder: of a run, of transformers, or of Orbax's."""
    if step is None and (folder / "config.json").is_file() and not is_run(folder):
        return hf.Directory(folder)
    try:
        return with_base(open_source(folder, step))
    except UserError as error:
        raise UserError(f"{error}; or give {fields.MODEL_FORMS}") from None


def with_base(source: ArraySource) -> ArraySource:
    """A checkpoint's weights: merged with their base's, if it holds low-rank updates alone
    (`run.lora`)."""
    base = source.meta().get("base")
    if not base:
        return source
    try:
        weights = open_weights(base["name"])
    except UserError as error:
        raise UserError(
            f"{source.name} holds low-rank updates of {base['name']}, which cannot be read"
            f" ({error}); restore it, or link it at that path"
        ) from None
    return MergedSource(source, weights)


def is_run(folder: str | os.PathLike) -> bool:
    """Whether a folder is a run's, with checkpoints."""
    return (Path(folder) / "checkpoints").is_dir()


def resolve(name: str | os.PathLike) -> tuple[Path, int | None]:
    """(the existing folder, the step) of a name; a model of the hub is downloaded, or taken from
    the hub's cache."""
    fields.check_path("place", os.fspath(name))
    folder, step = sources.split_step(os.fspath(name), None)
    if Path(folder).is_dir():
        return Path(folder), step
    if downloaded := _on_hub(str(name)):
        return downloaded, None
    raise UserError(f"{name} is not a folder; give {fields.MODEL_FORMS}")


def _on_hub(name: str) -> Path | None:
    """The folder in the hub's cache that has this model; None for a name that is a path."""
    match = HUB_NAME.fullmatch(name)
    # where the first part is a folder, the rest is misspelt
    if not match or Path(name.split("/")[0]).is_dir():
        return None
    # imported here: it takes 0.3 s, and few names are the hub's
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(match[1], revision=match[2], allow_patterns=HUB_FILES))
    except Exception as error:  # the hub's own classes, the network's, the disk's
        raise UserError(
            f"{name} is not a folder here, and could not be downloaded from the Hugging Face"
            f" hub ({first_line(error)}); give {fields.MODEL_FORMS}; without a network, download it"
            " elsewhere and give its folder"
        ) from None


def config_at(workdir: str | os.PathLike, step: int) -> Config:
    """The config that a step was trained with: its checkpoint's own."""
    saved = sources.read_meta(workdir, step).get("config")
    return config_lib.check(saved) if saved else read_config(Path(workdir))


def make_config(model: Model, tokenizer: str | Path | None) -> Config:
    """The config of an imported model: the defaults, except for the model and its tokenizer."""
    keys = config_lib.default().to_dict()
    keys["name"] = "imported"
    keys["model"] = config_lib.to_dict(model)
    keys["data"]["seq_len"] = min(keys["data"]["seq_len"], model.max_position_embeddings)
    if tokenizer:
        keys["data"]["tokenizer"] = str(tokenizer)
    return config_lib.check(keys)


def import_record(directory: hf.Directory) -> dict[str, Any]:
    """The parts of a model directory that our config has no room for, recorded for an export."""
    path = directory.path / "generation_config.json"
    generation = files.read_object(path) if path.exists() else None
    return {
        "config": directory.config,
        "generation_config": generation,
        "dtypes": directory.dtypes(),
        "hub_name": hub.name_of(str(directory.path)),
    }
