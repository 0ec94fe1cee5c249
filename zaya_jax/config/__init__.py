"""The config: an ml_collections ConfigDict at the border, frozen dataclasses inside, every key
checked.

A config file's `get_config()` starts from `default()` and sets its own values; `check()` turns the
result into a `Config`, or raises one `UserError` that names the key, the value given, those
expected and the way out. keys.py declares the keys, fields.py how a key is declared, checks.py
holds rules between keys, page.py lists them for people.
"""

import dataclasses
import json
import re
import runpy
import traceback
from pathlib import Path
from typing import Any

from ml_collections import config_dict

from zaya_jax.config import checks, fields
from zaya_jax.config.fields import StorageError, UserError, first_line, shown
from zaya_jax.config.keys import (
    LAYER_KINDS,
    Balance,
    Checkpoint,
    Config,
    Data,
    Guard,
    Hardware,
    Mesh,
    Model,
    Optim,
    Phase,
    Precision,
    Rope,
    RopeKinds,
    Run,
    Schedule,
)

__all__ = [
    "LAYER_KINDS",
    "SHIPPED",
    "Balance",
    "Checkpoint",
    "Config",
    "Data",
    "Guard",
    "Hardware",
    "Mesh",
    "Model",
    "Optim",
    "Phase",
    "Precision",
    "Rope",
    "RopeKinds",
    "Run",
    "Schedule",
    "StorageError",
    "UserError",
    "all_keys",
    "check",
    "check_model",
    "default",
    "editable",
    "first_line",
    "read_config",
    "read_config_dict",
    "shown",
    "to_dict",
]

# Configs of the repository, or in site-packages.
SHIPPED = Path(__file__).resolve().parents[2] / "experiments" / "configs"


def default() -> config_dict.ConfigDict:
    """All keys with their defaults, typed and locked: the start of a config file's get_config()."""
    return editable(Config())


def editable(config: Config) -> config_dict.ConfigDict:
    """A Config in the form that config files return: for files that start from a recorded
    config."""
    return _to_config_dict(config).lock()


def check(cfg: config_dict.ConfigDict | dict) -> Config:
    """The frozen Config of a ConfigDict, or of the dict in config.json; UserError names a wrong
    key."""
    config = fields.build(Config, cfg)
    checks.check_config(config)
    return config


def check_model(given: dict, prefix: str = "config.model.") -> Model:
    """The frozen Model of a nested dict of its keys alone; UserError names a key behind
    `prefix`."""
    model = fields.build(Model, given, prefix)
    checks.check_model(model, prefix)
    return model


def to_dict(config: Any) -> dict:
    """The config as JSON-able nested dicts; `check` reads it back to an equal Config, with layers
    of the user's own by their names alone."""

    def without_classes(items: list[tuple[str, Any]]) -> dict:
        return {key: value for key, value in items if not key.endswith("_class")}

    return json.loads(json.dumps(dataclasses.asdict(config, dict_factory=without_classes)))


def all_keys() -> list[str]:
    """Every key, dotted."""
    return [path for path, _ in fields.leaves(Config)]


def _to_config_dict(value: Any) -> config_dict.ConfigDict:
    out = config_dict.ConfigDict()
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if optional := fields.optional_type(field.type):
            out[field.name] = config_dict.placeholder(optional)
        if dataclasses.is_dataclass(item):
            item = _to_config_dict(item)
        if item is not None:
            out[field.name] = item
    return out


def read_config(given: str) -> Config:
    """The checked config of a Python file with get_config(), named as FILE or FILE:ARGUMENT."""
    return check(read_config_dict(given))


def read_config_dict(given: str) -> config_dict.ConfigDict:
    """The ConfigDict of a file; experiments/configs/NAME.py is found from any folder."""
    fields.check_path("--config", given)
    file, _, argument = given.partition(":")
    path = Path(file)
    if not path.is_file() and path.parts[:-1] == ("experiments", "configs"):
        path = SHIPPED / path.name
    if not path.is_file():
        raise UserError(
            f"--config={given} is not a file; give a Python file with get_config(), see {SHIPPED}"
        )
    try:
        found = runpy.run_path(str(path))["get_config"](*([argument] if argument else []))
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # a config file is a program, and may do anything
        raise UserError(f"--config={given} gives no config ({_reason(error, path)})") from None
    if not isinstance(found, config_dict.ConfigDict):
        raise UserError(
            f"--config={given}: get_config() returns {type(found).__name__}, not a ConfigDict"
        )
    return found


def _reason(error: BaseException, path: Path) -> str:
    """The error of a config file in a few words, with its line."""
    line = None
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == str(path):
            line = frame.lineno
    where = f" in line {line}" if line else ""
    if unknown := re.match(r"'?Key \"(\w+)\" does not exist", str(error)):
        names = [key.rpartition(".")[2] for key in all_keys()]
        return f"unknown config key {unknown[1]!r}{where}{fields.nearest(unknown[1], names)}"
    return f"{type(error).__name__}{where}: {first_line(error)}"
