"""Lists all keys for people: in --help, and in docs/config.md (`tools.config_page`)."""

import dataclasses
import textwrap
import typing
from collections.abc import Iterator

from zaya_jax.config.fields import item_type, leaves, limits
from zaya_jax.config.keys import Config, Phase

WIDTH = 110

type Row = tuple[str, str, str, str]  # key, default, allowed values and meaning, ready to be shown


def listing() -> str:
    """All keys, for a terminal."""
    lines = [
        "keys of the config, as --config.KEY=VALUE (phases: in the file alone), where the file"
        " leaves the default:"
    ]
    for title, about, rows in groups():
        lines += ["", f"{title}: {about}"]
        for key, default, allowed, meaning in rows:
            lines.append(f"  {key}={default}")
            line = f"{meaning} [{allowed}]" if allowed else meaning
            lines += textwrap.wrap(line, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def groups() -> Iterator[tuple[str, str, list[Row]]]:
    """(title, description, keys) of each group, outermost first, and of a phase."""
    yield "config", _about(Config), [row for row in _rows(Config, "") if "." not in row[0]]
    for field in dataclasses.fields(Config):
        if dataclasses.is_dataclass(field.type):
            cls = typing.cast(type, field.type)
            yield f"config.{field.name}", _about(cls), _rows(cls, f"{field.name}.")
    yield "config.schedule.phases[i]", _about(Phase), _rows(Phase, "schedule.phases[i].")


def _rows(cls: type, prefix: str) -> list[Row]:
    return [
        (key, repr(field.default), _allowed(field), field.metadata["meaning"])
        for key, field in leaves(cls, prefix)
    ]


def _allowed(field: dataclasses.Field) -> str:
    if "range" in field.metadata:
        return " to ".join(limits(field))
    if "choices" in field.metadata:
        return ", ".join(str(word) or '""' for word in field.metadata["choices"])
    return "False, True" if item_type(field.type) is bool else ""


def _about(cls: type) -> str:
    return " ".join((cls.__doc__ or "").split("\n\n")[0].split())
