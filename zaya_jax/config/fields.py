"""Declares keys with default, allowed values and meaning in one place, and checks values against
the declaration.

    lr: float = ranged(1e-3, 0, 100, "the schedule's peak")

Every key is declared this way (a test holds it), so no check and no line of docs/config.md is
forgotten.
"""

import contextlib
import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any

from ml_collections import config_dict


class UserError(ValueError):
    """Bad input: programs print it as one line and exit with code 2."""


class StorageError(RuntimeError):
    """Storage that stays unreadable after all retries, or damaged data: one line, exit code 4."""


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Has a UserError begin with the option or key that it is about, where what raises it knows
    none."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{what}: {error}") from None


# Of strings; a path may be an address, a source is "path=weight".
TEXT_KINDS = ("name", "path", "text", "source")
ADDRESS = re.compile(r"[A-Za-z][\w+.-]+:/")  # s3://bucket/run, which pathlib makes s3:/bucket/run
LONGEST_LINE = 1500  # characters of a message
MODEL_FORMS = (
    "a run's folder, FOLDER@STEP, a directory of transformers' zaya, or OWNER/NAME on the hub"
)
LONGEST_VALUE = 80  # characters of a value in a message


def on_a_line(error: BaseException) -> str:
    """An error's text on one line; cut in its middle if it is too long to read."""
    text, half = " ".join(str(error).split()), LONGEST_LINE // 2
    return text if len(text) <= LONGEST_LINE else f"{text[:half]} ... {text[-half:]}"


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or the error's kind where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def ranged(default: float | None, least: float, greatest: float, meaning: str) -> Any:
    """A number, or a row of numbers; infinities and NaN never fit."""
    return key(default, meaning, range=(least, greatest))


def choice(default: Any, choices: tuple, meaning: str) -> Any:
    """One of a few words, or a row of them; a single choice is kept because other formats write the
    key."""
    return key(default, meaning, choices=choices)


def text(default: Any, kind: str, meaning: str) -> Any:
    """Other words, or a row of them, of one of TEXT_KINDS; an empty one only where that is the
    default."""
    assert kind in TEXT_KINDS, kind
    return key(default, meaning, kind=kind)


def key(default: Any, meaning: str, **metadata: Any) -> Any:
    """True or False, a row of dataclasses, or an optional one; a dataclass that is always there is
    described by its docstring."""
    return dataclasses.field(default=default, metadata={"meaning": meaning, **metadata})


# ################################################################################################
# From nested dicts to frozen dataclasses
# ##################################################################################################


def build(cls: type, given: Any, prefix: str = "config.") -> Any:
    """The dataclass of a nested dict, every key known, of its type and as its declaration allows;
    UserError names the key behind `prefix`."""
    if isinstance(given, config_dict.ConfigDict):
        given = given.to_dict()
    elif dataclasses.is_dataclass(given) and not isinstance(given, type):
        given = {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
    if not isinstance(given, dict):
        raise UserError(
            f"{prefix.rstrip('.')} is {shown(given)}; it is a group of keys, see docs/config.md"
        )
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in given:
        if key not in fields:
            path = f"{prefix}{key}"
            raise UserError(
                f"unknown config key {path}{nearest(path, [prefix + name for name in fields])}"
            )
    built = cls(
        **{key: _convert(fields[key].type, value, prefix + key) for key, value in given.items()}
    )
    for name, field in fields.items():  # one that is not given may have no allowed default
        value = getattr(built, name)
        if not isinstance(value, tuple):
            _check(field, value, f"{prefix}{name}")
            continue
        for i, item in enumerate(value):
            _check(field, item, f"{prefix}{name}[{i}]")
    return built


def _convert(kind: Any, value: Any, path: str) -> Any:
    # in a phase: ConfigDict does not look into tuples
    if isinstance(value, config_dict.FieldReference):
        value = value.get()
    if dataclasses.is_dataclass(kind):
        return build(typing.cast(type, kind), value, path + ".")
    optional = optional_type(kind)
    if optional is not None:
        return None if value is None else _convert(optional, value, path)
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        if not isinstance(value, list | tuple):
            raise _wrong(path, value, "a tuple")
        return tuple(_convert(item, v, f"{path}[{i}]") for i, v in enumerate(value))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise _wrong(path, value, f"of type {kind.__name__}")
    return value


def _wrong(path: str, value: Any, expected: str) -> UserError:
    return UserError(
        f"{path}={shown(value)} has the wrong type {type(value).__name__}; it must be {expected}"
    )


def optional_type(kind: Any) -> type | None:
    """T of `T | None`."""
    args = typing.get_args(kind)
    if isinstance(kind, types.UnionType) and type(None) in args:
        return next(a for a in args if a is not type(None))
    return None


def item_type(kind: Any) -> Any:
    """T of T, of `T | None` and of `tuple[T, ...]`."""
    kind = optional_type(kind) or kind
    return typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else kind


def leaves(cls: type, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field]]:
    """Every key of a dataclass except groups, dotted, with its declaration. Rows of groups count as
    one key."""
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(field.type):
            yield from leaves(typing.cast(type, field.type), f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field


# ################################################################################################
# Allowed values
# ##################################################################################################


def _check(field: dataclasses.Field, value: Any, path: str) -> None:
    if value is None or dataclasses.is_dataclass(value):  # optional; checked by its own `build`
        return
    given = f"{path}={shown(value)}"
    if "range" in field.metadata:
        least, greatest = field.metadata["range"]
        if not least <= value <= greatest:  # NaN is not
            low, high = limits(field)
            raise UserError(
                f"{given} is out of range; it must be at least {low} and at most {high}"
            )
    elif "choices" in field.metadata:
        choices = field.metadata["choices"]
        if value not in choices:
            words = ", ".join(map(str, filter(None, choices)))  # "" leaves a phase's key open
            raise UserError(f"{given} is not one of {words}{nearest(value, choices)}")
    elif field.metadata.get("kind", "text") != "text" and (value or field.default != ""):
        kind = field.metadata["kind"]
        check_path(path, value, addresses=kind in ("path", "source"), kind=kind)


def check_path(option: str, value: str, addresses: bool = False, kind: str = "path") -> None:
    """UserError if an option or a key cannot be a path."""
    problem = path_problem(value, addresses)
    if problem:
        raise UserError(f"{option}={shown(value)} {problem}; give a {kind}")


def path_problem(value: str, addresses: bool = False) -> str:
    """Why a text cannot be a path, before any file is looked for; "" where it can.

    An address would become a folder called `s3:` below the current one, and nothing would reach the
    store.
    """
    if not value.strip():
        return "is empty"
    if ADDRESS.match(value) and not addresses:
        return "is an address, where a folder or file of this machine is meant"
    return ""


def limits(field: dataclasses.Field) -> list[str]:
    """The least and the greatest value of a key that is a number."""
    return [str(x) if isinstance(x, int) else f"{x:g}" for x in field.metadata["range"]]


def nearest(value: Any, choices: Iterable[str]) -> str:
    """A question that ends a message: of the choices similar to the value the one with most of its
    words, if possible from its beginning on, and fewest others; if there is one."""
    similar = difflib.get_close_matches(str(value), map(str, choices), n=8, cutoff=0.5)
    if not similar:
        return ""
    words = set(re.split(r"[._]", str(value)))

    def likeness(choice: str) -> tuple[int, bool, int]:
        others = set(re.split(r"[._]", choice))
        return len(words & others), choice.startswith(str(value)), -len(others)

    return f"; did you mean {max(similar, key=likeness)}?"


def shown(value: Any) -> str:
    """A value in a message: its repr on one line, cut if it is too long to read."""
    out = " ".join(repr(value).splitlines())
    if len(out) <= LONGEST_VALUE:
        return out
    return f"{out[: LONGEST_VALUE - 20]} ... ({len(out)} characters)"
