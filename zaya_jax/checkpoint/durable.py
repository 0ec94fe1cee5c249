"""The safe place after `workdir/checkpoints`, a folder or URL: what is there, sent and fetched.

    durable.missing()                  steps here of which it has no whole copy
    durable.send(step, begun)          a copy, or what went wrong
    durable.fetch_newest()             what it has and workdir/checkpoints has not

All is for all processes together; each sends and fetches its share of the files.
"""

import contextlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zaya_jax.checkpoint import audit, layout, owner, writing
from zaya_jax.checkpoint.audit import share
from zaya_jax.checkpoint.layout import META
from zaya_jax.checkpoint.remote import Vault, each, unreachable
from zaya_jax.checkpoint.seal import Seal
from zaya_jax.cluster import multihost
from zaya_jax.config import Checkpoint, StorageError, files

GONE = "gone"


class Durable:
    """A run's copies; `root` is workdir/checkpoints, `record` takes their times, `accept` judges another's."""

    def __init__(
        self, root: Path, settings: Checkpoint, say: Callable[[str], None], record: Callable[..., None],
        accept: Callable[[dict[str, Any]], object] | None,
    ):  # fmt: skip
        self.root, self._settings, self._say, self._record, self._accept = root, settings, say, record, accept
        self.vault = Vault(settings.durable)
        if multihost.is_writer():
            self.vault.tell = say
        self.deleted: list[int] = []  # steps whose copies are to go
        self.silent: StorageError | None = None  # it did not answer at this start; of process 0

    def missing(self) -> tuple[list[int], str]:
        """Steps here of which it has no whole copy, and why that could not be looked up if so."""

        def look() -> list:
            here = writing.steps_in(self.root)
            silent, self.silent = self.silent, None  # the next look may find it answers
            if silent:
                return [here, str(silent)]
            try:
                there = set(self.vault.steps())
                copied = dict(
                    zip(here, each(lambda step: step in there and self._copied(step), here), strict=True)
                )
                return [[step for step in here if not copied[step]], ""]
            except StorageError as error:
                return [here, str(error)]

        missing, error = multihost.from_first("missing", look)
        return missing, error

    def _copied(self, step: int) -> bool:
        """Whether a step there is a copy of the one here; or whole by itself, where the one here is another's."""
        try:
            whole = audit.own_seal(self.root / str(step), step)
        except StorageError:
            with contextlib.suppress(StorageError):
                return self.vault.lacks(step, self.vault.manifest(step)) == []
            return False
        return self.vault.lacks(step, whole) == []

    def send(self, step: int, begun: float) -> str | None:
        """Copies a step there; what went wrong, None also where the rules have deleted it here meanwhile."""
        vault, clock, error = self.vault, time.perf_counter(), None
        folder, size = self.root / str(step), 0

        def begin() -> list:
            """What keeps it from being sent, the files to send (None: all), whether a whole copy would go for them."""
            if not folder.exists():
                return [GONE, None, False]
            try:
                whole = audit.own_seal(folder, step)
                vault.claim(writing.run_of(self.root))
                names = vault.lacks(step, whole)
                return [None, names, names is None and vault.has(step)]
            except StorageError as failure:
                return [writing.reason(failure), None, False]

        error, names, replaces = multihost.from_first("send", begin)
        if not error and replaces:
            error = self._damaged_here(folder)  # nothing whole is given up for what is not
        if error:
            return None if error == GONE else error

        def reopen() -> str | None:
            try:
                vault.reopen(step)  # no copy any more as soon as the first of its files is written anew
            except StorageError as failure:
                return writing.reason(failure)
            return None

        error = multihost.from_first("reopen", reopen) if replaces else None
        if error:
            return error
        try:
            sums = audit.own_seal(folder, step).files
            wanted = sums if names is None else {name: sums[name] for name in names if name in sums}
            mine = share(wanted)
            size = sum(sums[name][0] for name in mine)
            vault.upload(folder, step, mine)
        except (StorageError, OSError, ValueError) as failure:
            error = writing.reason(failure)
        stages = {"write": time.perf_counter() - clock}
        told = multihost.to_first("sent", [error, stages, size])

        def end() -> str | None:
            errors = [part[0] for part in told or [] if part[0]]
            if errors:
                return errors[0]
            try:
                clock = time.perf_counter()
                vault.complete(folder, step)
                seconds = time.perf_counter() - clock
                self._record(
                    "copy",
                    step,
                    begun,
                    [p[1] | {"commit": seconds} for p in told or []],
                    [p[2] for p in told or []],
                )
                for old in list(self.deleted):
                    vault.remove(old)
                    self.deleted.remove(old)
            except (StorageError, OSError, ValueError) as failure:
                return writing.reason(failure)
            return None

        return multihost.from_first("sent end", end)

    def _damaged_here(self, folder: Path) -> str | None:
        """What is wrong with a step's files here, each read by one process."""
        try:
            sums = writing.read_seal(folder).files
            found = [
                str(damage) for damage in audit.check_here(folder, {name: sums[name] for name in share(sums)})
            ]
        except (OSError, ValueError) as failure:
            found = [f"{layout.MARKER} is {audit.unreadable(failure)}"]
        told = multihost.to_first("here", found[:1])
        first = multihost.from_first(
            "damaged here", lambda: next((part[0] for part in told or [] if part), None)
        )
        return f"{folder} is damaged: {first}" if first else None

    def fetch_newest(self) -> None:
        """Makes the newest step that is whole there whole here, if it is newer than all that are here.

        A place that does not answer is passed over where a step is here: a run outlives it, so a restart does too.
        """
        vault = self.vault

        def look() -> list[int]:
            here = writing.steps_in(self.root)
            try:
                if self.silent:  # what it holds was not compared with the run's decisions
                    raise self.silent
                return newer(here)
            except StorageError as failure:
                if not here or not unreachable(failure):
                    raise
                self.silent = failure
                self._say(
                    f"WARNING: {failure}; going on from step {here[-1]}, which is here, without having seen whether it "
                    "has a newer one"
                )
                return []

        def newer(here: list[int]) -> list[int]:
            option = f"config.checkpoint.durable={vault.url}"
            owner.require_one(
                vault, writing.run_of(self.root) if here else owner.UNKNOWN, str(self.root.parent), option
            )
            if not here and self._accept:
                owner.require_accepted(vault, self.root.parent, self._accept)
            vault.clear()
            return sorted((step for step in vault.steps() if step > max(here, default=-1)), reverse=True)

        steps, error = multihost.from_first("durable", look), None
        for step in steps:
            error = self._fetch(step)
            if not error:
                return
            if self._settings.on_corrupt == "stop":
                raise StorageError(
                    f"{error}; --config.checkpoint.on_corrupt=previous goes on from the one before"
                )
            if multihost.is_writer():
                self._say(f"WARNING: step {step} could not be fetched: {error}; looking for the one before")
        if error and not multihost.from_first("left", lambda: bool(writing.numbered(self.root))):
            raise StorageError(
                f"{error}; no copy in {vault.url} is whole: restore one, or give another checkpoint.durable"
            )

    def _fetch(self, step: int) -> str | None:
        """Makes a step of the vault whole in workdir/checkpoints; what went wrong, if anything."""
        vault = self.vault
        folder, error = self.root / f"{writing.SAVING}{step}", None
        try:
            vault.download(step, folder, share(vault.manifest(step).files))
        except (StorageError, OSError) as failure:
            error = writing.reason(failure)
        told = multihost.to_first("fetched", error)

        def end() -> str | None:
            errors = [part for part in told or [] if part]
            if errors:
                shutil.rmtree(folder, ignore_errors=True)
                return errors[0]
            found = vault.manifest(step)
            run = found.run or files.read_json(folder / META).get("run")
            writing.begin_run(self.root, run or writing.run_of(self.root))
            writing.commit(folder, self.root / str(step), Seal(found.files, step, run))
            self._say(f"step {step} was fetched from {vault.url}")
            return None

        return multihost.from_first("fetched end", end)
