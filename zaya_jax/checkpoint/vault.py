"""The checkpoints of one run in one place: `workdir/checkpoints`, another folder, or a URL.

    vault = Vault("s3://bucket/run")
    for damage in vault.verify(step):         every file against the sizes and checksums taken while writing
        print(damage)                         state/params.w/c.0 (array params.w) is changed: crc32c ...
    vault.copy(step, names, other)            files of a step to another vault, checked on the way
    other.complete(step, vault.read_seal(step))    its seal, last: before this the step does not exist there

Files lie at URL/STEP/NAME. Object stores cannot rename, so `checksums.json` makes a step complete;
deleting takes it away first. Orbax has a file for the same purpose, `commit_success.txt`, which
goes with it.
"""

import concurrent.futures
import dataclasses
import io
import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

from zaya_jax.checkpoint import folders, layout, seal, writing
from zaya_jax.checkpoint.layout import COMMITTED, DONE, META, SEAL_FILE
from zaya_jax.checkpoint.seal import Seal, Sums
from zaya_jax.checkpoint.storage import FileError, Storage, for_each
from zaya_jax.cluster import multihost
from zaya_jax.config import StorageError, UserError

StepName = int | str  # a checkpoint's number, or the name of a folder outside of a run
CountBytes = Callable[[int, int], None]  # bytes done, bytes in all


@dataclasses.dataclass(frozen=True)
class Damage:
    """The damage in one file."""

    file: str
    what: str  # goes on from "FILE is"

    def __str__(self) -> str:
        array = layout.array_of_file(self.file)
        return f"{self.file}{f' (array {array})' if array else ''} is {self.what}"


class Vault:
    """The checkpoints in a folder or at a URL."""

    def __init__(self, url: str | Path):
        self.storage = Storage(url)
        self.url = self.storage.url
        self._owner = ""

    def numbered(self) -> list[int]:
        """All folders named like a step, complete or not, oldest first."""
        return folders.steps_of(self.storage.names())

    def steps(self) -> list[int]:
        """The complete checkpoints, oldest first."""
        numbered = self.numbered()
        return list(itertools.compress(numbered, for_each(self.is_complete, numbered)))

    def unfinished(self) -> list[int]:
        """Steps whose upload is under way, or was cut short."""
        return sorted({*self.numbered()} - {*self.steps()})

    def is_complete(self, step: int) -> bool:
        """Whether it has this step, with its seal."""
        return self.storage.exists(f"{step}/{SEAL_FILE}")

    def owner(self) -> str:
        """The name of the run whose checkpoints these are; "" before the first one."""
        if self.storage.folder:  # a start may give a folder a name
            return folders.run_of(self.storage.folder)
        if not self._owner and self.storage.exists(seal.RUN):
            self._owner = self.storage.get(seal.RUN).decode("utf-8", errors="replace").strip()
        return self._owner

    # #############################################################################################
    # Reading and checking
    # ##############################################################################################

    def read_seal(self, step: StepName) -> Seal:
        """A step's seal; FileError if it is damaged or belongs to another step or run, UserError
        if it is of another version's format."""
        result = self._seal_or_damage(step)
        if isinstance(result, Damage):
            raise FileError(f"{self.url}/{step} is damaged: {result}")
        return result

    def _seal_or_damage(self, step: StepName) -> Seal | Damage:
        try:
            listed = seal.parse(self.read(step, SEAL_FILE))
        except UserError as error:
            raise UserError(f"{self.url}/{step} {error}") from None
        except ValueError as error:
            return Damage(SEAL_FILE, str(error))
        except FileError as error:
            return Damage(SEAL_FILE, _describe(error))
        number = step if isinstance(step, int) else None
        mismatch = listed.mismatch(number, self.owner())
        return Damage(SEAL_FILE, mismatch) if mismatch else listed

    def read(self, step: StepName, name: str) -> bytes:
        """One file."""
        return self.storage.get(f"{step}/{name}")

    def read_checked(self, step: StepName, name: str, sums: Sums) -> bytes:
        """One file, which must be as listed."""
        damage: str | None = "not listed"
        if name in sums:
            try:
                content = self.read(step, name)
                damage = seal.damage_in(io.BytesIO(content), sums[name])
            except FileError as error:
                damage = _describe(error)
        if damage:
            raise FileError(f"{self.url}/{step} is damaged: {Damage(name, damage)}")
        return content

    def read_meta(self, step: StepName) -> dict[str, Any]:
        """A step's small file: tokens, data position, config; StorageError if it is damaged."""
        return json.loads(self.read_checked(step, META, self.read_seal(step).files))

    def verify(self, step: StepName, progress: CountBytes | None = None) -> list[Damage]:
        """All damages of a step in this process's share of its files: changed, exchanged, truncated,
        missing, and in process 0 unlisted ones."""
        listed = self._seal_or_damage(step)
        if isinstance(listed, Damage):
            return [listed]
        sums = listed.files
        names = my_files(sums)

        def damage_in(name: str) -> str | None:
            try:
                return self.storage.read(f"{step}/{name}", seal.damage_in, sums[name])
            except FileError as error:
                return _describe(error)

        total = sum(sums[name][0] for name in names)
        done = 0
        damages = []
        with concurrent.futures.ThreadPoolExecutor(writing.THREADS, "verify") as pool:
            for name, damage in zip(names, pool.map(damage_in, names), strict=True):
                done += sums[name][0]
                if progress:
                    progress(done, total)
                if damage:
                    damages.append(Damage(name, damage))
        if multihost.is_writer():
            _, unlisted = self._differences(step, listed)
            damages += [Damage(name, "not part of the checkpoint") for name in unlisted]
        return damages

    def verify_together(self, step: int, barrier: str) -> list[str]:
        """All damages of a step; all processes call this, under one name for each thread, and get
        the same answer."""
        damages = self.verify(step)
        reports = multihost.gather_to_zero(barrier, [*map(str, damages[:100])]) or []
        return multihost.broadcast_from_zero(
            f"{barrier}: all", lambda: sorted({*itertools.chain(*reports)})
        )

    def has_copy_of(self, step: int, listed: Seal) -> bool:
        """Whether it has a copy of a step with this seal, all files of the right size; their
        content is checked by `verify`."""
        result = self._seal_or_damage(step)
        if isinstance(result, Damage) or result.files != listed.files:
            return False
        return not any(self._differences(step, listed))

    def _differences(self, step: StepName, listed: Seal) -> tuple[list[str], list[str]]:
        """The listed files that are missing or of another size, and those that are not listed."""
        sizes = self.storage.sizes(str(step))
        lacking = [name for name, entry in listed.files.items() if sizes.get(name) != entry[0]]
        return lacking, sorted(sizes.keys() - {SEAL_FILE, *listed.files})

    # #############################################################################################
    # Writing
    # ##############################################################################################

    def copy(self, step: int, names: Iterable[str], target: "Vault", to: str = "") -> None:
        """Copies files of a step, checked on the way, to another vault, and there below another
        name if it is given."""
        sums = self.read_seal(step).files
        # With this file Orbax takes a step for complete: in its own folder `complete` writes it.
        names = [name for name in names if to or name != COMMITTED]

        def copy_file(name: str) -> None:
            target.storage.put(f"{to or step}/{name}", self.read_checked(step, name, sums))

        for_each(copy_file, names)

    def complete(self, step: int, listed: Seal) -> None:
        """Makes an uploaded step complete, if all its files are there; deletes leftovers of an
        earlier upload."""
        lacking, unlisted = self._differences(step, listed)
        lacking = [name for name in lacking if name != COMMITTED]
        if lacking:
            raise StorageError(
                f"{self.url}/{step} lacks {len(lacking)} of {len(listed.files)} files, such as"
                f" {lacking[0]}; upload them first"
            )
        self._delete(step, unlisted)
        if COMMITTED in listed.files:
            self.storage.put(f"{step}/{COMMITTED}", DONE)
        if self.storage.folder:  # the seal must not outlive a power cut that its files do not
            folders.sync_folders(self.storage.folder / str(step), listed)
        self.storage.put(f"{step}/{SEAL_FILE}", listed.to_bytes())

    def remove(self, step: int) -> None:
        """Deletes a step, its seal first, so that half a step never counts."""
        # One after the other: a kill between them must not leave our seal without Orbax's marker.
        self._delete(step, [SEAL_FILE])
        self._delete(step, [COMMITTED])
        self.storage.delete_below(str(step))

    def _delete(self, step: int, names: list[str]) -> None:
        self.storage.delete([f"{step}/{name}" for name in names])


def vault_of(location: str | Path) -> tuple[Vault, Path | None]:
    """(the vault at an address, in a folder of steps or in a workdir; this workdir).

    In a workdir folders are renamed into place with their seal inside, so one without a seal is
    damaged; elsewhere it may be an upload under way.
    """
    folder = Path(location).absolute()
    has_steps = bool(folders.steps_in(folder)) and not (folder / "checkpoints").is_dir()
    if "://" in str(location) or has_steps:
        return Vault(location), None
    return Vault(folder / "checkpoints"), folder


def _describe(error: FileError) -> str:
    """A file's error, as the end of a sentence that begins with the file."""
    cause = error.__cause__
    if isinstance(cause, FileNotFoundError):
        return "missing"
    assert isinstance(cause, OSError)
    return f"unreadable ({cause.strerror or cause})"


def my_files(sums: Sums) -> list[str]:
    """This process's share of the files, balanced by bytes to within the largest file."""
    by_size = sorted(sums, key=lambda name: (-sums[name][0], name))
    return by_size[jax.process_index() :: jax.process_count()]
