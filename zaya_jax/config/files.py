"""Writes small files whole or not at all, and reads JSON.

files.write(path, x)       whole or not at all
files.is_part_of(p, path)  whether a killed `write` left p
files.existing(path)       the path, or the nearest folder above it that exists
files.read_json(path)      its value; ValueError for any defect
files.read_object(path)    the same, a dict; UserError for any defect
files.last_record(line)    of a file of records that a kill may have cut short
"""

import contextlib
import json
import os
import secrets
from pathlib import Path
from typing import Any

from zaya_jax.config.fields import UserError, first_line


def write(path: str | os.PathLike, content: bytes, folder: Path | None = None) -> None:
    """A file of these bytes, on the disk when this returns; a reader, and a kill, find the old one
    or the new one. Until then it has another name beside it, or in `folder`.

    A link is replaced, its target stays as it is.
    """
    target = Path(path)
    # Two programs may write it at once, on two nodes with one process id.
    name = f"{_hidden(target)}.{os.getpid()}-{secrets.token_hex(4)}.part"
    part = (folder or target.parent) / name
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def existing(path: str | os.PathLike) -> Path:
    """The path, or the nearest folder above it that exists: the path may have yet to be made."""
    whole = Path(path).absolute()
    return next(place for place in (whole, *whole.parents) if os.path.exists(place))


def is_part_of(path: Path, target: Path) -> bool:
    """Whether a file was left by a killed `write`."""
    return path.name.startswith(f"{_hidden(target)}.") and path.name.endswith(".part")


def _hidden(path: Path) -> str:
    return "." + path.name.removeprefix(".")


def read_json(path: str | os.PathLike) -> Any:
    """The value of a JSON file."""
    return json.loads(Path(path).read_text(encoding="utf-8"))


def read_object(path: str | os.PathLike) -> dict[str, Any]:
    """The object in a JSON file; UserError where it has none."""
    try:
        value = read_json(path)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path} cannot be read as JSON ({first_line(error)}); copy it anew"
        ) from None
    if not isinstance(value, dict):
        raise UserError(
            f"{path} holds {type(value).__name__}, expected a JSON object; copy it anew"
        )
    return value


def last_record(line: bytes) -> Any:
    """The last record in a line of a JSONL file whose records begin with "kind"; ValueError where
    it is not whole. A record that a kill cut short has the next one behind it, in the same line."""
    begin = line.rfind(b'{"kind"')
    return json.loads(line[max(begin, 0) :])
