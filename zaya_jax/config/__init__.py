"""The config: an ml_collections ConfigDict at the border, frozen dataclasses inside, every key checked.

A config file's `get_config()` starts from `default()` and sets its own values; `check()` turns the result into a
`Config`, or raises one `UserError` that names the key, the value given, those expected and the way out. keys.py
declares the keys, fields.py how a key is declared, checks.py holds rules between keys, page.py lists them for people,
and load.py reads config files.
"""

import dataclasses
import json
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
    "LAYER_KINDS", "Balance", "Checkpoint", "Config", "Data", "Guard", "Mesh", "Model", "Optim", "Phase",
    "Precision", "Rope", "RopeKinds", "Run", "Schedule", "StorageError", "UserError", "all_keys", "check",
    "check_model", "default", "editable", "first_line", "shown", "to_dict",
]  # fmt: skip


def default() -> config_dict.ConfigDict:
    """All keys with their defaults, typed and locked: the start of a config file's get_config()."""
    return editable(Config())


def editable(config: Config) -> config_dict.ConfigDict:
    """A Config in the form that config files return: for files that start from a recorded config."""
    return _to_config_dict(config).lock()


def check(cfg: config_dict.ConfigDict | dict) -> Config:
    """The frozen Config of a ConfigDict, or of the dict in config.json; UserError names a wrong key."""
    config = fields.build(Config, cfg)
    fields.check_fields(config)
    checks.check_config(config)
    return config


def check_model(given: dict) -> Model:
    """The frozen Model of a nested dict of its keys alone."""
    model = fields.build(Model, given, "model.")
    fields.check_fields(model, "model.")
    checks.check_model(model)
    return model


def to_dict(config: Any) -> dict:
    """The config as JSON-able nested dicts; `check` reads it back to an equal Config."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def all_keys() -> list[str]:
    """Every key, dotted."""
    return [path for path, _ in fields.leaves(Config)]


def _to_config_dict(value: Any) -> config_dict.ConfigDict:
    out = config_dict.ConfigDict()
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        optional = fields.optional_type(field.type)
        if dataclasses.is_dataclass(item):
            out[field.name] = _to_config_dict(item)
        elif optional is not None:
            out[field.name] = config_dict.placeholder(optional)
            if item is not None:
                out[field.name] = item
        else:
            out[field.name] = item
    return out
