"""The checkpoints of one run in one place: `workdir/checkpoints`, another folder, or a URL.

    vault = Vault("s3://bucket/run")
    for damage in vault.verify(step):         every file against the sizes and checksums taken while writing
        print(damage)                         state/params.w/c.0 (array params.w) is changed: crc32c ...
    vault.copy(step, names, other)            files of a step to another place, checked on the way
    other.complete(step, vault.seal(step))    its list, last: before this the step does not exist there

Files lie at URL/STEP/NAME. Object stores cannot rename, so `checksums.json` makes a step whole;
deleting takes it away first. Orbax has a file for the same purpose, `commit_success.txt`, which
goes with it.
"""

import concurrent.futures
import dataclasses
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

from zaya_jax.checkpoint import seal, writing
from zaya_jax.checkpoint.layout import COMMITTED, DONE, MARKER, META, STATE
from zaya_jax.checkpoint.place import Place, Unreachable, each
from zaya_jax.checkpoint.seal import Seal, Sums
from zaya_jax.cluster import multihost
from zaya_jax.config import StorageError, UserError

Step = int | str  # a checkpoint's number, or the name of a folder outside of a run
Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclasses.dataclass(frozen=True)
class Damage:
    """The damage in one file."""

    file: str
    what: str

    def __str__(self) -> str:
        parts = self.file.split("/")
        of_array = f" (array {parts[1]})" if parts[0] == STATE and len(parts) > 2 else ""
        return f"{self.file}{of_array} is {self.what}"


class Vault:
    """The checkpoints in a place."""

    def __init__(self, url: str | Path):
        self.place = Place(url)
        self.url, self._owner = self.place.url, ""

    def numbered(self) -> list[int]:
        """All folders named like a step, whole or not, oldest first."""
        return sorted(writing.steps_of(self.place.names()))

    def steps(self) -> list[int]:
        """The whole checkpoints, oldest first."""
        numbered = self.numbered()
        whole = each(self.has, numbered)
        return [step for step, has in zip(numbered, whole, strict=True) if has]

    def unfinished(self) -> list[int]:
        """Steps whose upload is under way, or was cut short."""
        return sorted(set(self.numbered()) - set(self.steps()))

    def has(self, step: int) -> bool:
        """Whether it has this one."""
        return self.place.exists(f"{step}/{MARKER}")

    def owner(self) -> str:
        """The name of the run whose checkpoints these are; "" before the first one."""
        if self.place.folder:  # a start may give a folder a name
            return writing.run_of(self.place.folder)
        if not self._owner and self.place.exists(seal.RUN):
            self._owner = self.place.get(seal.RUN).decode("utf-8", errors="replace").strip()
        return self._owner

    # #############################################################################################
    # Reading and checking
    # ##############################################################################################

    def seal(self, step: Step) -> Seal:
        """A step's list; StorageError where it is damaged, or of another step or run than it lies
        as, UserError where it is of another version's format."""
        found = self._seal(step)
        if isinstance(found, Damage):
            raise StorageError(f"{self.url}/{step} is damaged: {found}")
        return found

    def _seal(self, step: Step) -> Seal | Damage:
        try:
            found = seal.parse(self.get(step, MARKER))
            what = found.differs(step if isinstance(step, int) else None, self.owner())
        except UserError as error:
            raise UserError(f"{self.url}/{step} {error}") from None
        except ValueError as error:
            what = str(error)
        except Unreachable:
            raise
        except StorageError as error:
            what = _in_words(error)
        return Damage(MARKER, what) if what else found

    def get(self, step: Step, name: str) -> bytes:
        """One file."""
        return self.place.get(f"{step}/{name}")

    def checked(self, step: Step, name: str, sums: Sums) -> bytes:
        """One file, which must be as listed."""
        content = self.get(step, name)
        what = seal.wrong_with(content, sums[name]) if name in sums else "not listed"
        if what:
            raise StorageError(f"{self.url}/{step} is damaged: {Damage(name, what)}")
        return content

    def meta(self, step: Step) -> dict[str, Any]:
        """A step's small file: tokens, data position, config; StorageError where it is damaged."""
        return json.loads(self.checked(step, META, self.seal(step).files))

    def verify(self, step: Step, progress: Progress | None = None) -> list[Damage]:
        """All damages of a step: changed, exchanged, truncated, missing and foreign files."""
        try:
            found = self._seal(step)
            if isinstance(found, Damage):
                return [found]
            return self.check(step, found.files, progress) + self._foreign(step, found)
        except StorageError as error:
            return [Damage(MARKER, str(error))]

    def verify_together(self, name: str, step: int) -> list[str]:
        """All damages of a step, each file read by one process; all processes call this and get the
        same answer."""
        found = self._seal(step)
        if isinstance(found, Damage):
            damages = [found]
        else:
            damages = self.check(step, {name: found.files[name] for name in share(found.files)})
            damages += self._foreign(step, found) if multihost.is_writer() else []
        reports = multihost.gather_to_zero(name, [str(damage) for damage in damages[:100]])
        return multihost.broadcast_from_zero(
            f"{name}: all", lambda: sorted({d for part in reports or [] for d in part})
        )

    def check(self, step: Step, sums: Sums, progress: Progress | None = None) -> list[Damage]:
        """The damages of some of a step's files."""

        def wrong(name: str) -> str | None:
            file, folder = f"{step}/{name}", self.place.folder
            try:
                if folder:  # in blocks, which takes the memory of none
                    return self.place.attempt(
                        "read", file, seal.wrong_with_file, folder / file, sums[name]
                    )
                return seal.wrong_with(self.place.get(file), sums[name])
            except StorageError as error:
                return _in_words(error)

        total, done, damages = sum(entry[0] for entry in sums.values()), 0, []
        with concurrent.futures.ThreadPoolExecutor(writing.THREADS, "verify") as pool:
            for name, what in zip(sums, pool.map(wrong, sums), strict=True):
                done += sums[name][0]
                if progress:
                    progress(done, total)
                if what:
                    damages.append(Damage(name, what))
        return damages

    def _foreign(self, step: Step, found: Seal) -> list[Damage]:
        there = self.place.sizes(str(step)).keys() - {MARKER, *found.files}
        return [Damage(name, "not part of the checkpoint") for name in sorted(there)]

    def holds(self, step: int, whole: Seal) -> bool:
        """Whether it has a copy of `whole`, all files of the right size; their content is checked
        by `verify`."""
        found = self._seal(step)
        return (
            isinstance(found, Seal)
            and found.files == whole.files
            and not self._wrong_sizes(step, whole)
        )

    def _wrong_sizes(self, step: int, whole: Seal) -> list[str]:
        there = self.place.sizes(str(step))
        wrong = [name for name, entry in whole.files.items() if there.pop(name, None) != entry[0]]
        return wrong + sorted(there.keys() - {MARKER})

    # #############################################################################################
    # Writing
    # ##############################################################################################

    def copy(self, step: int, names: Iterable[str], target: "Vault", to: str = "") -> None:
        """Copies files of a step, checked on the way, to another place, and there below another
        name if it is given."""
        sums = self.seal(step).files
        names = [name for name in names if to or name != COMMITTED]  # `complete` writes that one
        each(
            lambda name: target.place.put(f"{to or step}/{name}", self.checked(step, name, sums)),
            names,
        )

    def complete(self, step: int, whole: Seal) -> None:
        """Makes an uploaded step whole, if all its files are there; deletes leftovers of an earlier
        upload."""
        wrong = [name for name in self._wrong_sizes(step, whole) if name != COMMITTED]
        lacking = [name for name in wrong if name in whole.files]
        if lacking:
            raise StorageError(
                f"{self.url}/{step} lacks {len(lacking)} of {len(whole.files)} files, such as"
                f" {lacking[0]}; upload them first"
            )
        self._delete(step, wrong)
        if COMMITTED in whole.files:
            self.place.put(f"{step}/{COMMITTED}", DONE)
        self.place.put(f"{step}/{MARKER}", whole.content())

    def reopen(self, step: int) -> None:
        """Makes a step incomplete that is to be written again."""
        self._delete(step, [MARKER])
        self._delete(step, [COMMITTED])

    def remove(self, step: int) -> None:
        """Deletes a step, its list first, so that half a step never counts."""
        self.reopen(step)
        self._delete(step, list(self.place.sizes(str(step))))
        if self.place.folder:
            shutil.rmtree(self.place.folder / str(step), ignore_errors=True)

    def _delete(self, step: int, names: list[str]) -> None:
        self.place.delete([f"{step}/{name}" for name in names])


def vault_at(place: str | Path) -> Vault | None:
    """The vault at an address, or in a folder of steps; None for a workdir or anything else."""
    folder = Path(place)
    if "://" in str(place) or (writing.steps_in(folder) and not (folder / "checkpoints").is_dir()):
        return Vault(place)
    return None


def _in_words(error: StorageError) -> str:
    cause = error.__cause__
    if not isinstance(cause, OSError) or isinstance(error, Unreachable):
        return str(error)
    return "missing" if isinstance(cause, FileNotFoundError) else f"unreadable ({cause.strerror})"


def share(sums: Sums) -> list[str]:
    """The files that this process handles: as many bytes as each other one, but for at most the
    largest file's."""
    by_size = sorted(sums, key=lambda name: (-sums[name][0], name))
    return by_size[jax.process_index() :: jax.process_count()]
