"""Reads and writes small files whose path may by now hold anything, without ever blocking on a pipe.

files.read(path)         the bytes of a regular file; OSError for a pipe, a device, a folder
files.read_json(path)    its value; ValueError for any defect
files.appending(path)    opened to write at its end
files.write(path, x)     whole or not at all
files.existing(path)     the path, or the nearest folder above it that exists
"""

import contextlib
import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO


class Irregular(OSError):
    """A pipe, a device or a socket where a file should be."""


def opened(path: str | os.PathLike, buffering: int = 0) -> BinaryIO:
    """A regular file to read. Opening a pipe would block until a writer comes."""
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    kind = os.fstat(number).st_mode
    if stat.S_ISREG(kind):
        return os.fdopen(number, "rb", buffering)
    os.close(number)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise Irregular(errno.EINVAL, "no regular file", str(path))


def appending(path: str | os.PathLike) -> BinaryIO:
    """A file to append to, made if missing; OSError for a folder or a pipe without a reader."""
    number = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    return os.fdopen(number, "ab")


def write(path: str | os.PathLike, content: bytes) -> None:
    """A file of these bytes, on the disk when this returns; a reader, and a kill, find the old one or the new one.

    A link is replaced, its target stays as it is. Irregular for a device and a socket: to replace /dev/null, as root
    can, would break the machine. A pipe is replaced: it may lie where a file of a copy was.
    """
    target = Path(path)
    with contextlib.suppress(FileNotFoundError):
        kind = os.lstat(target).st_mode
        if stat.S_ISCHR(kind) or stat.S_ISBLK(kind) or stat.S_ISSOCK(kind):
            raise Irregular(errno.EINVAL, "no regular file", str(path))
    part = target.with_name(f"{_hidden(target)}.{os.getpid()}.part")  # two programs may write it at once
    try:
        with part.open("wb", buffering=0) as file:
            rest = memoryview(content)
            while rest:
                rest = rest[file.write(rest) :]
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


def read(path: str | os.PathLike) -> bytes:
    """All of a regular file."""
    with opened(path) as file:
        return file.read()


def read_json(path: str | os.PathLike) -> Any:
    """The value of a JSON file."""
    return json.loads(read(path).decode("utf-8"))
