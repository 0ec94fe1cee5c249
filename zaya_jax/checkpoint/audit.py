"""Whether checkpoints are what was written: every file against the sizes and checksums taken while writing.

for damage in audit.verify(folder):          a checkpoint's folder; `Vault.verify` for one in a vault
    print(damage)                            state/params.embed.embedding/c.0.0 (array params.embed.embedding) is ...
"""

import concurrent.futures
import contextlib
import dataclasses
import heapq
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import jax

from zaya_jax.checkpoint import writing
from zaya_jax.checkpoint.layout import MARKER, META, STATE
from zaya_jax.checkpoint.seal import Seal, Sums, check_file
from zaya_jax.cluster import multihost
from zaya_jax.config import StorageError, files

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


def own_seal(folder: Path) -> Seal:
    """The list of a step's folder; StorageError where it is damaged, or of another step or run than it lies as."""
    found = _own_seal(folder)
    if isinstance(found, Damage):
        raise StorageError(f"{folder} is damaged: {found}")
    return found


def _own_seal(folder: Path) -> Seal | Damage:
    run = writing.run_of(folder.parent)
    steps = writing.steps_of([folder.name]) if run or folder.parent.name == "checkpoints" else []
    try:
        found = writing.read_seal(folder)
        what = found.differs(steps[0] if steps else None, run)
    except FileNotFoundError:
        what = "missing"
    except OSError as error:
        what = f"unreadable ({error.strerror})"
    except ValueError as error:
        what = str(error)
    return Damage(MARKER, what) if what else found


def verify(folder: Path, progress: Progress | None = None) -> list[Damage] | None:
    """What is wrong with a step's folder: changed, exchanged, truncated and missing files, and such as nobody wrote.

    None where it has gone meanwhile, as old steps of a run do.
    """
    before, found = _inode(folder), _own_seal(folder)
    if isinstance(found, Damage):
        damages = [found]
    else:
        damages = check_here(folder, found.files, progress) + unlisted(folder, found)
    return damages if not damages or (before and _inode(folder) == before) else None


def _inode(folder: Path) -> int:
    try:
        return folder.stat().st_ino
    except OSError:
        return 0


def verify_together(name: str, folder: Path) -> list[str]:
    """What is wrong with a step's files, each read by one process; in all processes together, with the same answer."""
    found = _own_seal(folder)
    if isinstance(found, Damage):
        damages = [found]
    else:
        damages = check_here(folder, {name: found.files[name] for name in share(found.files)})
        damages += unlisted(folder, found) if multihost.is_writer() else []
    told = multihost.to_first(name, [str(damage) for damage in damages[:100]])
    return multihost.from_first(f"{name}: all", lambda: sorted({d for part in told or [] for d in part}))


def checked_meta(folder: Path) -> dict[str, Any]:
    """The small file of a step; StorageError where it, the list, or whose they are is not right."""
    sums = own_seal(folder).files
    damages = check_here(folder, {META: sums[META]}) if META in sums else [Damage(META, "missing")]
    if not damages:
        with contextlib.suppress(OSError, ValueError):
            return files.read_json(folder / META)
    raise StorageError(f"{folder} is damaged: {(*damages, Damage(META, 'no JSON'))[0]}")


def unlisted(folder: Path, found: Seal) -> list[Damage]:
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


def check(sums: Sums, one: Callable[[str], str | None], progress: Progress | None = None) -> list[Damage]:
    """Applies a check to all files, several at once."""
    total, done, damages = sum(entry[0] for entry in sums.values()), 0, []
    with concurrent.futures.ThreadPoolExecutor(writing.THREADS, "verify") as pool:
        for name, what in zip(sums, pool.map(one, sums), strict=True):
            done += sums[name][0]
            if progress:
                progress(done, total)
            if what:
                damages.append(Damage(name, what))
    return damages


def share(files: Sums) -> list[str]:
    """Which files this process handles: about as many bytes as each other one."""
    loads, mine = [(0, process) for process in range(jax.process_count())], []
    for name, (size, *_) in sorted(files.items(), key=lambda f: (-f[1][0], f[0])):
        load, least = loads[0]
        heapq.heapreplace(loads, (load + size, least))
        if least == jax.process_index():
            mine.append(name)
    return mine
