"""Whether checkpoints are what was written: every file against the sizes and checksums taken while writing.

for damage in audit.verify(folder):          a checkpoint's folder; `verify_there` for one in a vault
    print(damage)                            state/params.embed.embedding/c.0.0 (array params.embed.embedding) is ...
"""

import concurrent.futures
import contextlib
import dataclasses
import heapq
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import jax

from zaya_jax.checkpoint import writing
from zaya_jax.checkpoint.layout import MARKER, META, STATE
from zaya_jax.checkpoint.seal import Seal, Sums, check_file
from zaya_jax.config import StorageError, UserError, files

Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclasses.dataclass(frozen=True)
class Damage:
    """What is wrong with one file."""

    file: str
    what: str

    @property
    def array(self) -> str:
        """The array that the file is of, or ""."""
        parts = self.file.split("/")
        return parts[1] if parts[0] == STATE and len(parts) > 2 else ""

    def __str__(self) -> str:
        return f"{self.file}{f' (array {self.array})' if self.array else ''} is {self.what}"


def verify(folder: Path, progress: Progress | None = None) -> list[Damage] | None:
    """What is wrong with a step's folder: changed, exchanged, truncated and missing files, and such as nobody wrote.

    None where it has gone meanwhile, as old steps of a run do.
    """
    before = _inode(folder)
    try:
        found = writing.read_seal(folder)
        damages = identity(folder, found) + check_here(folder, found.files, progress) + foreign(folder, found)
    except (OSError, ValueError) as error:
        damages = [Damage(MARKER, unreadable(error))]
    return damages if not damages or (before and _inode(folder) == before) else None


def _inode(folder: Path) -> int:
    try:
        return folder.stat().st_ino
    except OSError:
        return 0


def unreadable(error: OSError | ValueError) -> str:
    """What is wrong with a file that could not be read."""
    if isinstance(error, OSError):
        return "missing" if isinstance(error, FileNotFoundError) else f"unreadable ({error.strerror})"
    return str(error)


def identity(folder: Path, found: Seal, run: str | None = None) -> list[Damage]:
    """Whether a step's folder is of the step that it is called, and of the run it lies with (or of `run`)."""
    if found.step is None:  # format 1; its small file knew
        with contextlib.suppress(OSError, ValueError, AttributeError):
            meta = files.read_json(folder / META)
            found = Seal(found.files, meta.get("step"), meta.get("run"))
    steps = writing.steps_of([folder.name.removeprefix(writing.SAVING)])
    what = found.differs(steps[0] if steps else None, run or writing.run_of(folder.parent))
    return [Damage(MARKER, what)] if what else []


def own_seal(folder: Path, step: int) -> Seal:
    """The list of a step's folder; StorageError where it is not whole, or another step's or run's."""
    try:
        found = writing.read_seal(folder)
        what = found.differs(step, None)
        damages = identity(folder, found) or ([Damage(MARKER, what)] if what else [])
    except (OSError, ValueError) as error:
        damages = [Damage(MARKER, unreadable(error))]
    if damages:
        raise StorageError(f"{folder} is damaged: {damages[0]}")
    return found


def checked_meta(folder: Path, step: int) -> dict[str, Any]:
    """The small file of a step; StorageError where it, the list, or whose they are is not right."""
    sums = own_seal(folder, step).files
    damages = check_here(folder, {META: sums[META]}) if META in sums else [Damage(META, "missing")]
    if not damages:
        with contextlib.suppress(OSError, ValueError):
            return files.read_json(folder / META)
    raise StorageError(f"{folder} is damaged: {(*damages, Damage(META, 'no JSON'))[0]}")


def foreign(folder: Path, found: Seal) -> list[Damage]:
    """What lies in a step's folder and is not listed: files, links, empty folders."""
    listed = {MARKER, *found.files}
    folders = {str(parent) for name in listed for parent in PurePosixPath(name).parents}
    there = {str(path.relative_to(folder)): path for path in folder.rglob("*")}
    return [
        Damage(name, "not part of the checkpoint")
        for name, path in sorted(there.items())
        if name not in (folders if path.is_dir() and not path.is_symlink() else listed)
    ]


def check_here(folder: Path, sums: Sums, progress: Progress | None = None) -> list[Damage]:
    """What is wrong with some files of a folder."""
    return check(sums, lambda name: check_file(folder / name, sums[name]), progress)


def require(folder: Path, prefixes: Sequence[str] = ("",)) -> None:
    """StorageError unless the files of a step's folder that begin with one of these are what was written."""
    try:
        found = writing.read_seal(folder)
        damages = identity(folder, found)
        damages += check_here(folder, {n: e for n, e in found.files.items() if n.startswith(tuple(prefixes))})
    except (OSError, ValueError) as error:
        damages = [Damage(MARKER, unreadable(error))]
    if damages and not folder.exists():
        raise UserError(f"{folder} has gone meanwhile, as old steps of a run do; take a newer one")
    if damages:
        more = f", and {len(damages) - 1} more" if len(damages) > 1 else ""
        raise StorageError(f"{folder} is damaged: {damages[0]}{more}")


def check(sums: Sums, one: Callable[[str], str | None], progress: Progress | None = None) -> list[Damage]:
    """Applies a check to all files, several at once."""
    total, done = sum(entry[0] for entry in sums.values()), 0
    damages = []
    with concurrent.futures.ThreadPoolExecutor(writing.THREADS, "verify") as pool:
        for name, what in _in_order(pool, one, list(sums)):
            done += sums[name][0]
            if progress:
                progress(done, total)
            if what:
                damages.append(Damage(name, what))
    return damages


def _in_order(
    pool: concurrent.futures.Executor, one: Callable[[str], str | None], names: list[str]
) -> Iterator[tuple[str, str | None]]:
    return zip(names, pool.map(one, names), strict=True)


def share(files: Sums) -> list[str]:
    """Which files this process handles: about as many bytes as each other one."""
    loads, mine = [(0, process) for process in range(jax.process_count())], []
    for name, (size, *_) in sorted(files.items(), key=lambda f: (-f[1][0], f[0])):
        load, least = loads[0]
        heapq.heapreplace(loads, (load + size, least))
        if least == jax.process_index():
            mine.append(name)
    return mine
