"""A layer or a router of the user's own in the place of ZAYA's.

    model = customized(config.model, layer="my_layers:Sink")    or the class itself
    own_class(model, "layer")                                   the class; None: the usual one
    sources(model)                                              their names and hashes, for a checkpoint

A module is imported only where the user names it: in the config of a training, in `zj.load(..,
layer=)`, by an option. The config in a checkpoint names it too, and is never followed: its model is
refused as long as nobody has given the class.
"""

import dataclasses
import functools
import hashlib
import importlib
import inspect
import operator
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flax import nnx

from zaya_jax.config import Config, Model, UserError, first_line, shown
from zaya_jax.model.router import Router

BASES: dict[str, type] = {"layer": nnx.Module, "router": Router}


@dataclasses.dataclass(frozen=True)
class CustomModel(Model):
    """An architecture with the classes that its keys `layer` and `router` name."""

    layer_class: type[nnx.Module] | None = None
    router_class: type[Router] | None = None


def customized(model: Model, **parts: type | str | None) -> Model:
    """The model with a layer or router of the user's, a class or "MODULE:CLASS"; None leaves the
    model's."""
    changes: dict[str, Any] = {}
    for name, choice in parts.items():
        if not choice:
            continue
        part = _imported(name, choice) if isinstance(choice, str) else choice
        base = BASES[name]
        if not (isinstance(part, type) and issubclass(part, base)) or model.model_type != "zaya":
            raise UserError(
                f"{name}={shown(choice)} must be a subclass of {base.__name__}, and model_type must"
                " be 'zaya'"
            )
        changes[name] = f"{part.__module__}:{part.__qualname__}"
        changes[f"{name}_class"] = part
    keys = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    return CustomModel(**keys | changes) if changes else model


def as_named(config: Config) -> Config:
    """The config with the classes that it names, for one that the user has given."""
    model = customized(config.model, layer=config.model.layer, router=config.model.router)
    return dataclasses.replace(config, model=model)


def _imported(part: str, name: str) -> type:
    module, _, attribute = name.partition(":")
    try:
        return operator.attrgetter(attribute)(importlib.import_module(module))
    except Exception as error:  # a module is a program, and may do anything
        raise UserError(
            f"{part}={name} cannot be imported ({type(error).__name__}: {first_line(error)}); give"
            " MODULE:CLASS, with the module's folder in PYTHONPATH"
        ) from None


def own_class(model: Model, part: str) -> type | None:
    """The class of the user's own that is the model's layer or router; None: the usual one.

    UserError for one that only a record names.
    """
    name, part_class = getattr(model, part), getattr(model, f"{part}_class", None)
    if name and part_class is None:
        raise UserError(
            f"the model has a {part} of its own, {name}, which is imported only where you name it:"
            f" --{part}={name}, or zj.load(.., {part}={name!r})"
        )
    return part_class


def sources(model: Model) -> dict[str, str]:
    """The name of each part of the user's own, and a hash of the file that it is written in."""
    parts = {part: own_class(model, part) for part in BASES}
    return {
        part: f"{getattr(model, part)} {_hash_of_file(part_class)}"
        for part, part_class in parts.items()
        if part_class
    }


@functools.cache  # as it was when it was first asked for: the code that runs does not change
def _hash_of_file(part: type) -> str:
    try:
        content = Path(inspect.getfile(part)).read_bytes()
    except (OSError, TypeError):  # of a notebook, or typed at a prompt
        raise UserError(
            f"{part.__qualname__} is written in no file, so its source cannot be recorded; put it"
            " into a module"
        ) from None
    return hashlib.sha256(content).hexdigest()[:16]


def require_same_source(
    model: Model,
    meta: Mapping[str, Any],
    name: str,
    changed_source: bool,
    say: Callable[[str], object],
) -> None:
    """UserError if a checkpoint with this metadata was trained with another layer or router; with
    `changed_source` that is said."""
    there, here = meta.get("own_parts", {}), sources(model)
    if "config" not in meta:  # of plain Orbax, or transformers: nothing is known
        return
    for part in BASES:
        was, now = there.get(part, "the usual one"), here.get(part, "the usual one")
        if was == now:
            continue
        difference = (
            f"{name} was trained with the {part} {was}, here it is {now} (a name, and a hash of"
            " its file)"
        )
        if not changed_source:
            raise UserError(
                f"{difference}; name the one of the training (config.model.{part}, --{part}), restore"
                " its file, or allow the other by changed_source=True (config.run.changed_source,"
                " --changed_source)"
            )
        say(f"note: {difference}")
