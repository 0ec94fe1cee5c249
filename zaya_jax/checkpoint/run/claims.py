"""Claims folders: one program at a time writes in a workdir, and no place of a run lies inside
another.

    take(workdir, say)                  claims it for this process; UserError names the process that has it
    require_apart(own, place)           refuses places inside each other, or inside a checkpoint
    require_new_folder(path)            checks that it can be made
    with whole_or_nothing(target):      a new folder that appears when it is complete

The lock is a POSIX record lock on `WORKDIR/.lock`: NFS and Lustre (mounted with flock) hold it
across nodes, forked workers do not inherit it, and a killed process leaves nothing to clean up. The
first process of a run takes it.
"""

import contextlib
import datetime
import errno
import fcntl
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from zaya_jax.checkpoint.seal import RUN
from zaya_jax.config import UserError, fields, files

LOCK = ".lock"
PATIENCE = 5.0  # seconds: a process that was just killed may still be giving back its memory
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
LOCKS_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)

# Opened once a process: closing any of its descriptors of a file gives up the process's locks on
# it.
_taken: dict[Path, BinaryIO] = {}


# ################################################################################################
# The lock
# ##################################################################################################


def take(workdir: Path, say: Callable[[str], None] = print) -> None:
    """Claims a folder for this process; UserError if another has it."""
    path = workdir.resolve() / LOCK
    if path in _taken:
        return
    latest = time.monotonic() + PATIENCE
    file = _open(path)
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in LOCKS_UNSUPPORTED:
                say(
                    f"note: file locking does not work in {workdir}, so another run writing there"
                    " would go undetected"
                )
                break
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            if time.monotonic() > latest:
                file.seek(0)
                who = file.read(200).decode(errors="replace") or "another process"
                file.close()
                raise UserError(
                    f"{workdir} is in use by {who}; wait until that has ended, or give another"
                    " folder"
                ) from None
            time.sleep(0.1)
        else:
            if _is_still_at(file, path):
                break
            # A refused run deleted its new folder together with this lock file, so the lock on it
            # protects nothing; open the new one. Not before: the run unlocks when all is deleted.
            file.close()
            file = _open(path)
    _taken[path] = file
    since = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
    with contextlib.suppress(OSError):  # on a full disk the message to the next process says less
        file.truncate(0)
        file.seek(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {since}".encode())


def require_free(workdir: Path) -> None:
    """UserError if another process has claimed a folder; creates nothing."""
    if os.path.lexists(workdir / LOCK) and not taken(workdir):
        take(workdir)
        release(workdir)


def taken(workdir: Path) -> bool:
    """Whether this process has claimed it."""
    return workdir.resolve() / LOCK in _taken


def release(workdir: Path) -> None:
    """Ends the claim, if there is one."""
    file = _taken.pop(workdir.resolve() / LOCK, None)
    if file is not None:
        file.close()


def _open(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    # not through a link, whose target would lose its content
    return os.fdopen(os.open(path, _FLAGS, 0o644), "rb+", buffering=0)


def _is_still_at(file: BinaryIO, path: Path) -> bool:
    """Whether an open file still has this path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.lstat(path))
    except OSError:
        return False


# ################################################################################################
# Folders
# ##################################################################################################


def require_apart(run_folders: Iterable[Path], location: Path) -> None:
    """UserError if a location lies in one of a run's own folders, or one of these in it."""
    for folder in run_folders:
        if overlap(location, folder):
            raise UserError(
                f"{location} and the run's own folder {folder} overlap: copies would overwrite"
                " checkpoints and be deleted with them; choose a separate place"
            )
    require_outside(location)


def overlap(a: Path, b: Path) -> bool:
    """Whether one of two folders is the other or lies in it, through links and `..`, and before
    they exist."""
    a, b = Path(os.path.realpath(a)), Path(os.path.realpath(b))
    return a.is_relative_to(b) or b.is_relative_to(a)


def require_outside(folder: Path) -> None:
    """UserError for a folder among a run's checkpoints or in one, where any other file counts as
    damage."""
    for above in Path(os.path.realpath(folder)).parents:
        if os.path.exists(above / RUN):
            raise UserError(
                f"{folder} lies in {above}, among the checkpoints of a run, and would count as one"
                " of them or as damage; give a folder elsewhere"
            )


def require_writable(folder: str | os.PathLike) -> None:
    """UserError where a folder that may have to be made could not be; makes nothing."""
    nearest = files.existing(folder)
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(
            f"{folder} cannot be written ({nearest} is a file, or not yours to write in); give a"
            " folder that can"
        )


def require_new_folder(path: str | os.PathLike) -> Path:
    """The real path of a folder that may be made: it does not exist, or is empty, and it can be
    written. Makes nothing."""
    target = Path(os.path.realpath(path))  # a link is followed: no folder can take its name
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{path} exists and is not empty; give a new folder")
    with fields.naming(str(path)):
        require_writable(target.parent)
    require_outside(Path(path))
    return target


@contextlib.contextmanager
def whole_or_nothing(target: Path) -> Iterator[Path]:
    """A folder next to `target` that takes its name when the block is over, and disappears if it
    fails.

    One program at a time: a second is refused, or sees the first one's folder.
    """
    part = target.parent / f".{target.name}.part"
    new_parents = [folder for folder in part.parents if not folder.exists()]
    try:
        take(part)
    except OSError as error:
        raise UserError(
            f"{target} cannot be written ({error.strerror}); give a folder that can"
        ) from None
    try:
        require_new_folder(target)  # which another may have made meanwhile
        for path in part.iterdir():  # the rest of an interrupted attempt
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != LOCK:
                path.unlink()
        yield part
        if target.exists():
            target.rmdir()
        part.rename(target)
        (target / LOCK).unlink()  # not before: another program would make a new one in `part`
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        remove_empty(new_parents)
        raise
    finally:
        release(part)


def remove_empty(folders: Iterable[Path]) -> None:
    """Removes folders that this program made, innermost first, up to the first that is not
    empty."""
    with contextlib.suppress(OSError):
        for folder in folders:
            if folder.exists():
                folder.rmdir()
