"""Whether checkpoints are what was written: every file against the sizes and checksums taken while writing.

for damage in audit.verify(folder):          a checkpoint's folder; `verify_there` for one in a vault
    print(damage)                            state/params.embed.embedding/c.0.0 (array params.embed.embedding) is ...
"""

import concurrent.futures
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

from zaya_jax.checkpoint import writing
from zaya_jax.checkpoint.layout import MARKER, STATE

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


def verify(folder: Path, progress: Progress | None = None) -> list[Damage]:
    """What is wrong with a checkpoint's folder: changed, truncated and missing files, and such as nobody wrote."""
    try:
        files = writing.read_seal(folder)
    except (OSError, ValueError) as error:
        return [
            Damage(
                MARKER, "missing" if isinstance(error, FileNotFoundError) else "changed: not its own checksum"
            )
        ]
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    extra = [Damage(name, "not part of the checkpoint") for name in sorted(there - files.keys() - {MARKER})]
    return check(files, lambda name: writing.check_file(folder / name, *files[name]), progress) + extra


def verify_some(folder: Path, names: list[str]) -> list[Damage]:
    """The same of some files alone."""
    files = writing.read_seal(folder)
    mine = {name: files[name] for name in names}
    return check(mine, lambda name: writing.check_file(folder / name, *files[name]))


def check(
    files: writing.Sums, one: Callable[[str], str | None], progress: Progress | None = None
) -> list[Damage]:
    """Applies a check to all files, several at once."""
    total, done = sum(size for size, _ in files.values()), 0
    damages = []
    with concurrent.futures.ThreadPoolExecutor(writing.THREADS, "verify") as pool:
        for name, what in _in_order(pool, one, list(files)):
            done += files[name][0]
            if progress:
                progress(done, total)
            if what:
                damages.append(Damage(name, what))
    return damages


def _in_order(
    pool: concurrent.futures.Executor, one: Callable[[str], str | None], names: list[str]
) -> Iterator[tuple[str, str | None]]:
    return zip(names, pool.map(one, names), strict=True)
