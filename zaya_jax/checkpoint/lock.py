"""One writer of a workdir at a time: a lock that the system takes back when its process ends, however it ends.

    take(workdir, say)      UserError names who has it
    release(workdir)

A POSIX record lock on `WORKDIR/.lock`: NFS and Lustre (mounted with flock) hold it across nodes, forked workers do not
inherit it, and a killed process leaves nothing to clean up. Of several processes of a run the first takes it.
"""

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
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "rb+", buffering=0)
    latest = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
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


def held(workdir: Path) -> bool:
    """Whether this process has it."""
    return workdir.resolve() / NAME in _held


def _owner(file: BinaryIO) -> str:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        file.seek(0)
        found = json.loads(file.read(1 << 16))
        return f"process {found['process']} on {found['host']} since {found['since']}"
    return "another process"
