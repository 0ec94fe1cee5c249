"""One writer of a workdir at a time: a lock that the system takes back when its process ends, however it ends.

    take(workdir, say)      UserError names who has it
    require_free(workdir)   the same, without taking it
    release(workdir)

A POSIX record lock on `WORKDIR/.lock`: NFS and Lustre (mounted with flock) hold it across nodes, forked workers do not
inherit it, and a killed process leaves nothing to clean up. Of several processes of a run the first takes it. A lock
is on a file, not on a name: who takes it sees that the file still bears the name, and who has it looks at each save.
"""

import atexit
import contextlib
import datetime
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from zaya_jax.config import UserError
from zaya_jax.config.fields import parse_json

NAME = ".lock"
PATIENCE = 5.0  # seconds: who was just killed may still be giving back its memory
WITHOUT = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)

# Opened once a process: closing any of its descriptors of a file gives up the process's locks on it.
_held: dict[Path, BinaryIO] = {}


def take(workdir: Path, say: Callable[[str], None] = print) -> None:
    """Makes this process the one that writes in a folder, if nobody else is."""
    path = workdir.resolve() / NAME
    if path in _held:
        return
    latest = time.monotonic() + PATIENCE
    file = _opened(path)
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is(file, path):
                break
            # Whoever had it has deleted it: it locks nothing any more, the next starter makes another.
            file.close()
            file = _opened(path)
        except OSError as error:
            if error.errno in WITHOUT:
                say(
                    f"note: {workdir} lies where files cannot be locked; that no other run writes there is not checked"
                )
                break
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            if time.monotonic() > latest:
                who = _owner(file)
                file.close()
                raise UserError(
                    f"--workdir={workdir} is in use by {who}; wait until that has ended, or give another folder"
                ) from None
            time.sleep(0.1)
    _held[path] = file
    _sign(file)


def require_free(workdir: Path) -> None:
    """UserError where another process has a folder, without taking it or writing there."""
    latest = time.monotonic() + PATIENCE
    while True:
        try:
            with (workdir.resolve() / NAME).open("rb+", buffering=0) as file:
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return
                except OSError as error:
                    if error.errno not in (errno.EACCES, errno.EAGAIN):
                        return  # whoever takes it says so
                    who = _owner(file)
        except OSError:
            return
        if time.monotonic() > latest:
            raise UserError(
                f"--workdir={workdir} is in use by {who}; wait until that has ended, or give another folder"
            )
        time.sleep(0.1)


def keep(workdir: Path) -> None:
    """Before something is written: takes it anew where somebody has deleted the file; UserError where another took it
    then, also if that has ended: what lies there is the other's. Does nothing for who has not taken it.
    """
    path = workdir.resolve() / NAME
    file = _held.get(path)
    if file is None or _is(file, path):
        return
    if path.exists():
        with contextlib.closing(_opened(path)) as other:
            who = _owner(other)
        raise UserError(
            f"{path} was deleted while this run had it, and {who} took --workdir={workdir}; this run writes nothing "
            "more there, the same command goes on from what the other has saved"
        )
    del _held[path]
    try:
        take(workdir)
    except BaseException:
        _held[path] = file  # so that the next time is refused too
        raise
    file.close()


def _opened(path: Path) -> BinaryIO:
    # A run that was refused may have taken its new folder away.
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "rb+", buffering=0)


def _is(file: BinaryIO, path: Path) -> bool:
    """Whether an open file is the one that bears the name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except OSError:
        return False


def _sign(file: BinaryIO) -> None:
    since = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
    with contextlib.suppress(OSError):  # a full disk: then the next is told less
        file.truncate(0)
        file.seek(0)
        file.write(
            json.dumps({"process": os.getpid(), "host": socket.gethostname(), "since": since}).encode()
        )


def release(workdir: Path) -> None:
    """Gives it back, if it was taken."""
    file = _held.pop(workdir.resolve() / NAME, None)
    if file is not None:
        file.close()


@atexit.register
def _release_all() -> None:
    for path in list(_held):
        _held.pop(path).close()


def held(workdir: Path) -> bool:
    """Whether this process has it."""
    return workdir.resolve() / NAME in _held


def _owner(file: BinaryIO) -> str:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        file.seek(0)
        found = parse_json(file.read(1 << 16))
        return f"process {found['process']} on {found['host']} since {found['since']}"
    return "another process"
