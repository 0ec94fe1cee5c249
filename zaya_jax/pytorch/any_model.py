"""One name for a model, wherever a model is asked for.

    found = any_model.find("runs/tiny@200")     its config, its tokenizer and the source of its weights
    params, balance = found.weights(shardings)

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
import numpy as np

from zaya_jax import config as config_lib
from zaya_jax import trees
from zaya_jax.checkpoint import source as sources
from zaya_jax.checkpoint.foreign import open_source
from zaya_jax.checkpoint.layout import IMPORTED
from zaya_jax.checkpoint.merged import Merged
from zaya_jax.checkpoint.run import store
from zaya_jax.checkpoint.source import Source
from zaya_jax.config import Config, Model, UserError, fields, first_line
from zaya_jax.model import zaya
from zaya_jax.pytorch import hf, tokenizer_files
from zaya_jax.text import tokenizers
from zaya_jax.training.workdir import check_same, read_config

WEIGHTS = ("state/params.", "state/balance.")  # a checkpoint's files, apart from its small ones
HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt"]
FORMS = fields.MODEL_FORMS
# Of a model that was made here.
NOT_IMPORTED: Mapping[str, Any] = MappingProxyType(
    {"config": {}, "generation_config": None, "dtypes": {}}
)


@dataclasses.dataclass(frozen=True, eq=False)
class AnyModel:
    """A model and its origin; nothing of its weights is read yet. Hashed by identity, as part of
    jitted arguments."""

    name: str  # says the step, too
    folder: Path
    config: Config  # as recorded for this step, or made for a directory's model
    source: Source
    tokenizer_folder: str | None  # as `tokenizers.load` takes it
    imported: Mapping[str, Any] = NOT_IMPORTED  # see `imported_of`
    step: int = 0  # of a run

    @property
    def model(self) -> Model:
        """The model as the run's phase at this step has it."""
        return sources.model_at(self.config, self.step)

    @property
    def trained(self) -> Config | None:
        """The config that it was trained with here; None for imported weights as they came."""
        return self.config if self.step or not self.imported["config"] else None

    def tokenizer(self) -> tokenizers.Tokenizer | None:
        """Its tokenizer; UserError where that belongs to another model."""
        if self.tokenizer_folder is None:
            return None
        found = tokenizers.load(self.tokenizer_folder)
        if (self.source.meta().get("tokenizer") or found.sha256) != found.sha256:
            raise UserError(
                f"{self.tokenizer_folder} is not the tokenizer that {self.name} was trained with,"
                " so its ids mean other text; put that one back, or take the folder away to go on"
                " with ids alone"
            )
        if found.vocab_size > self.config.model.vocab_size:
            raise UserError(
                f"{self.folder}: its tokenizer has {found.vocab_size} ids, its config.json a"
                f" vocab_size of {self.config.model.vocab_size}; they do not belong together"
            )
        return found

    def files(self) -> dict[str, bytes]:
        """The files that belong to the tokenizer."""
        folder = Path(self.tokenizer_folder or "")
        return small_files(folder) if self.tokenizer_folder and folder.is_dir() else {}

    def weights(self, shardings: dict | None = None) -> tuple[dict, jax.Array]:
        """(parameters, balancing biases): on the first device, or by `shardings`, a tree of
        {"params", "balance"}, where each device reads its own parts.
        """
        model = self.model
        wanted = {
            "params": zaya.abstract(model),
            "balance": {
                "bias": jax.ShapeDtypeStruct(
                    (model.num_hidden_layers, model.num_experts + 1), np.float32
                )
            },
        }
        if shardings is None:
            like = store.abstract_like(
                wanted, jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            )
        else:
            like = jax.tree.map(
                lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), wanted, shardings
            )
        self.check()
        found = self.source.restore(like)
        return found["params"], found["balance"]["bias"]

    def check(self) -> None:
        """StorageError where the weights are damaged, UserError where they have other shapes than
        the config says."""
        self.source.check(names=WEIGHTS)
        if odd := sources.misfit(
            self.source.arrays(), trees.flat({"params": zaya.abstract(self.model)})
        ):
            raise UserError(f"{self.name}: its weights are not those of its config: {odd}")


def find(name: str | os.PathLike, config: Config | None = None) -> AnyModel:
    """The model of this name; UserError where there is none. `config`: of a state without one, as
    Orbax saves it."""
    folder, step = place_of(name)
    if config is not None:
        if is_run(folder) and (folder / "config.json").exists():
            raise UserError(
                f"{folder} is a run's folder and has a config of its own; leave config= out"
            )
        kept = config.data.tokenizer
        has = kept == "bytes" or Path(kept).exists()
        source = open_source(os.fspath(folder), step)
        return AnyModel(str(name), folder, config, source, kept if has else None)
    if is_run(folder):
        source = Source(folder, step)
        step, source = source.step, with_base(source)
        config = config_at(folder, step)
        # the weights are whole
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, lora=None))
        tokenizer = str(folder / "tokenizer") if (folder / "tokenizer").is_dir() else None
        imported = {
            **NOT_IMPORTED,
            **(hf.read_json(folder / IMPORTED) if (folder / IMPORTED).exists() else {}),
        }
        return AnyModel(f"{folder}@{step}", folder, config, source, tokenizer, imported, step)
    if step is None and ((folder / "config.json").is_file() or any(folder.glob("*.safetensors*"))):
        directory = hf.Directory(folder)
        has = any((folder / file).is_file() for file in (tokenizers.FILE, "tokenizer.model"))
        tokenizer = str(folder) if has else None
        made = config_of(directory.model, folder if has else None)
        return AnyModel(str(name), folder, made, directory, tokenizer, imported_of(directory))
    raise UserError(
        f"{name} holds no model; give {FORMS}, or config= with a state that Orbax saved"
    )


def weights_of(name: str) -> Source:
    """The weights of config.run.init_from: of any name, also without a config (exported parameters,
    an address)."""
    try:
        place = _on_hub(name) or name
        if (Path(place) / "config.json").is_file() and any(Path(place).glob("*.safetensors")):
            return hf.Directory(place)
        return with_base(open_source(place))
    except UserError as error:
        raise UserError(
            f"config.run.init_from={name}: {error}; or give {FORMS}, or exported parameters"
        ) from None


def with_base(source: Source) -> Source:
    """A checkpoint's weights: merged with their base's, where it holds low-rank updates alone
    (`run.lora`)."""
    base = source.meta().get("base")
    if not base:
        return source
    try:
        found = weights_of(base["name"])
    except UserError:
        raise UserError(
            f"{source.name} holds low-rank updates of {base['name']}, which cannot be read; bring"
            " it back, or put a link to it there"
        ) from None
    return Merged(source, found)


def is_run(folder: str | os.PathLike) -> bool:
    """Whether a folder is a run's, with checkpoints."""
    return (Path(folder) / "checkpoints").is_dir()


def place_of(name: str | os.PathLike) -> tuple[Path, int | None]:
    """(the existing folder, the step) of a name; a model of the hub is downloaded, or taken from
    the hub's cache."""
    fields.check_path("place", os.fspath(name))
    folder, step = sources.place_and_step(os.fspath(name), None)
    if Path(folder).is_dir():
        return Path(folder), step
    if downloaded := _on_hub(str(name)):
        return downloaded, None
    raise UserError(f"{name} is not a folder; give {FORMS}")


def _on_hub(name: str) -> Path | None:
    """The folder in the hub's cache that has this model; None for a name that is a path."""
    found = HUB_NAME.fullmatch(name)
    # where the first part is a folder, the rest is misspelt
    if not found or Path(name.split("/")[0]).is_dir():
        return None
    # imported here: it takes 0.3 s, and few names are the hub's
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(found[1], revision=found[2], allow_patterns=HUB_FILES))
    except Exception as error:  # the hub's own classes, the network's, the disk's
        raise UserError(
            f"{name} is not a folder here, and the Hugging Face hub does not give it"
            f" ({first_line(error)}); give {FORMS}; without a network, download it elsewhere and"
            " give its folder"
        ) from None


def config_at(workdir: str | os.PathLike, step: int) -> Config:
    """The config that a step was trained with, from its checkpoint; UserError if config.json
    contradicts it."""
    workdir = Path(workdir)
    recorded = read_config(workdir)
    saved = sources.read_meta(workdir, step).get("config")
    if not saved:
        return recorded
    trained = config_lib.check(saved)
    try:
        check_same(trained, recorded, workdir, step)
    except UserError as error:
        raise UserError(
            f"{workdir / 'config.json'} contradicts the checkpoint of step {step}:"
            f" {str(error).rpartition(';')[0]}; restore the former from the checkpoint's"
            " meta/data.json"
        ) from None
    return trained


def config_of(model: Model, tokenizer: Path | None) -> Config:
    """The config of an imported model: the defaults, except for the model and its tokenizer."""
    given = config_lib.default().to_dict()
    given["name"] = "imported"
    given["model"] = config_lib.to_dict(model)
    given["data"]["seq_len"] = min(given["data"]["seq_len"], model.max_position_embeddings)
    if tokenizer:
        given["data"]["tokenizer"] = str(tokenizer)
    return config_lib.check(given)


def imported_of(directory: hf.Directory) -> dict[str, Any]:
    """The parts of a model directory that our config has no room for, kept for an export."""
    generation = directory.path / "generation_config.json"
    kept = hf.read_json(generation) if generation.exists() else None
    return {"config": directory.config, "generation_config": kept, "dtypes": directory.dtypes()}


def small_files(folder: Path) -> dict[str, bytes]:
    """The files of a folder that belong to a tokenizer."""
    return {
        name: (folder / name).read_bytes()
        for name in tokenizer_files.FILES
        if (folder / name).is_file()
    }
