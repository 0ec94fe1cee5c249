"""Places that must lie apart: what is written in one of them would count as damage, or as a leftover, in the other."""

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from zaya_jax.checkpoint import lock, writing
from zaya_jax.checkpoint.layout import MARKER, META
from zaya_jax.checkpoint.seal import RUN
from zaya_jax.config import UserError, files


def require_apart(own: Iterable[Path], others: Mapping[str, Path]) -> None:
    """UserError where one of a run's other places (by its name) lies in the run's own, in another, or they in it."""
    own = list(own)
    for name, place in others.items():
        for theirs in own:
            if overlap(place, theirs):
                raise UserError(
                    f"{name} and the run's own {theirs} lie in each other: copies would be written over checkpoints, "
                    "and deleted with them; give a place apart"
                )
        require_outside(place, name)
        own.append(place)


def require_outside(folder: Path, option: str) -> None:
    """UserError for a folder in a checkpoint, where anything more counts as damage."""
    folder = Path(os.path.realpath(folder))
    for above in (folder, *folder.parents):
        if os.path.exists(above / MARKER) and os.path.exists(above / META):
            raise UserError(
                f"{option} lies in the checkpoint {above}, where all that is not its own counts as damage; "
                "give a folder elsewhere"
            )


def overlap(a: Path, b: Path) -> bool:
    """Whether one of two folders is the other or lies in it, however they are spelt, and before they exist."""
    return bool({_chain(a)[0]} & {*_chain(b)} or {_chain(b)[0]} & {*_chain(a)})


def _chain(path: Path) -> list[tuple]:
    """A folder and those above it: each as the inode of what exists of it, and the names below that.

    Symbolic links, `..`, bind mounts and upper or lower case spell one folder in several ways.
    """
    path = Path(os.path.realpath(path))
    chain = []
    for folder in (path, *path.parents):
        there = files.existing(folder)
        found = there.stat()
        chain.append((found.st_dev, found.st_ino, folder.relative_to(there).parts))
    return chain


def new_folder(path: str | os.PathLike, option: str) -> Path:
    """A folder that may be made: it does not exist, or is empty; and it can be written. Nothing is made yet."""
    target = Path(path).absolute()
    if target.is_symlink():  # no folder can take the name of a link
        raise UserError(f"{option}={path} is a symbolic link; give a new folder")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{option}={path} exists and is not empty; give a new folder")
    writing.require_writable(target.parent, f"{option}={path}")
    require_outside(target, f"{option}={path}")
    for above in Path(os.path.realpath(target)).parents:
        if os.path.exists(above / RUN):
            raise UserError(
                f"{option}={path} lies in {above}, among the checkpoints of a run, and would count as one of them or "
                "as damage; give a folder elsewhere"
            )
    return target


@contextlib.contextmanager
def whole_or_nothing(target: Path) -> Iterator[Path]:
    """A folder beside `target` that takes its name when the block is over, and disappears if it fails.

    One program at a time: a second is refused, or sees what the first has made.
    """
    part = target.parent / f".{target.name}.part"
    made = [folder for folder in part.parents if not folder.exists()]
    try:
        part.mkdir(parents=True, exist_ok=True)
        lock.take(part)
    except UserError as error:
        raise UserError(str(error).replace(f"--workdir={part}", str(target))) from None
    except OSError as error:
        raise UserError(f"{target} cannot be written ({error.strerror}); give a folder that can") from None
    try:
        new_folder(target, "the folder")  # which another may have made meanwhile
        for left in part.iterdir():  # what an interrupted attempt left
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left)
            elif left.name != lock.NAME:
                left.unlink()
        yield part
        if target.exists():
            target.rmdir()
        (part / lock.NAME).unlink()
        part.rename(target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        writing.remove_empty(made)
        raise
    finally:
        lock.release(part)
