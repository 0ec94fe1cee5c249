"""Copies complete steps to a safe place, a folder or URL, and fetches them from there.

    durable.find_steps(run, here, ...)   in process 0: cleans the place; its complete steps
    durable.fetch(step)                  makes its copy a step of workdir/checkpoints
    durable.enqueue([step])              has a step copied, if the place lacks it
    durable.close()                      returns the steps without a complete copy

All processes call these together; each sends and fetches its share of the files. Copies are made by
a thread of their own. A place that is slow or dead delays no save: steps wait in a set and are
copied one at a time, the newest first; where the place does not answer, all that wait have failed.
"""

import concurrent.futures
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zaya_jax.checkpoint import folders
from zaya_jax.checkpoint.run import claims, retention
from zaya_jax.checkpoint.run.retention import Decisions
from zaya_jax.checkpoint.seal import RUN, Seal
from zaya_jax.checkpoint.storage import FileError, Unreachable
from zaya_jax.checkpoint.vault import Vault, my_files
from zaya_jax.checkpoint.writing import reason, run_in_all_then_zero
from zaya_jax.cluster import multihost
from zaya_jax.config import Checkpoint as CheckpointKeys
from zaya_jax.config import StorageError, UserError, fields

CheckMeta = Callable[[dict[str, Any]], object]  # raises UserError for the meta of another run


class Durable:
    """A run's copies; `root` is workdir/checkpoints. `say` is heard from process 0 alone."""

    def __init__(self, root: Path, keys: CheckpointKeys, say: Callable[[str], None]):
        self.vault = Vault(keys.durable)
        self._root = root
        self._keys = keys
        self._say = say
        self._local = Vault(root)
        self._option = f"config.checkpoint.durable={keys.durable}"
        if self.vault.storage.folder:
            with fields.naming("config.checkpoint.durable"):
                claims.require_apart([root.parent, root], self.vault.storage.folder)
        self.vault.storage.on_first_failure = say
        self.vault.storage.may_be_cancelled = True
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "copy")
        self._jobs: list[concurrent.futures.Future] = []  # one for each step that waits
        # In process 0, which chooses the next step to copy:
        self._unreachable = ""  # why the place was not compared at this start
        self._waiting: set[int] = set()
        self._failed: dict[int, str] = {}  # steps whose last copy failed, and why
        self._copying: int | None = None
        # Steps deleted by this start, whose copies go after the next copy; a kill forgets them.
        self._obsolete: list[int] = []
        self._choice = threading.Lock()  # a step is either copied or deleted

    # #############################################################################################
    # To the place
    # ##############################################################################################

    def enqueue(self, steps: list[int]) -> None:
        """Has steps copied. All processes call it at the same points: they run each job together,
        so each must have as many, one for a step."""
        self._waiting |= {*steps}
        for job in [job for job in self._jobs if job.done()]:
            self._jobs.remove(job)
            job.result()  # raises what no job should raise
        self._jobs += [self._thread.submit(self._copy_newest) for _ in steps]

    def enqueue_all(self) -> None:
        """Has all steps copied: copies may have failed before, or have been cut short."""
        steps = multihost.broadcast_from_zero("to copy", lambda: folders.numbered(self._root))
        self.enqueue(steps)

    def delete_here(self, step: int) -> None:
        """Deletes a step here, and its copy once the next is made. A step that is being copied is
        left to the deletions after a later save."""
        with self._choice:
            if step != self._copying:
                folders.remove(self._root, step)
                self._obsolete.append(step)

    def wait(self, seconds: float | None = None) -> None:
        """Waits until nothing is on its way; copies that take longer than that are cut short."""
        if concurrent.futures.wait(self._jobs, seconds).not_done:
            self.vault.storage.cancel()
        for job in self._jobs:
            job.result()

    def close(self, retry: bool = True) -> list[int]:
        """Finishes copying and retries failures once; returns the steps without a complete copy.

        With retry=False (a scheduler is waiting) copies get max_wait seconds; the next start
        catches up.
        """
        self.wait(None if retry else self._keys.max_wait)
        missing = self._missing()
        if missing and retry:
            self.enqueue(missing)
            self.wait()
            missing = self._missing()
        self._thread.shutdown()
        if missing:
            why = next((f" ({self._failed[step]})" for step in missing if step in self._failed), "")
            self._say(
                f"error: {self._keys.durable} has no complete copy of step"
                f" {', '.join(map(str, missing))}{why}; running the same command again retries"
            )
        return missing

    def _copy_newest(self) -> None:
        step = multihost.broadcast_from_zero("copy", self._choose)
        if step is None:
            return
        error = self._send(step)
        self._copying = None
        self._failed.pop(step, None)
        if error:
            self._failed[step] = error
            self._say(
                f"warning: step {step} is saved, but its copy is NOT: {error}; training goes on"
            )
            if self.vault.storage.is_failing:
                waiting = set(self._waiting)  # to which another thread may be adding a step
                self._failed |= dict.fromkeys(waiting, error)
                self._waiting -= waiting

    def _choose(self) -> int | None:
        """The newest step that waits."""
        with self._choice:
            # First the set, then the folder: otherwise a step that another thread saves and adds in
            # between would be taken for one that is gone.
            waiting = set(self._waiting)
            local = set(folders.numbered(self._root))  # without those that the rules have deleted
            self._copying = max(waiting & local, default=None)
            self._waiting -= (waiting - local) | {self._copying}
            return self._copying

    def _missing(self) -> list[int]:
        """Steps here whose copies have failed or were not made."""

        def compare() -> list[int]:
            uncopied = {*self._failed, *self._waiting}
            return [step for step in folders.numbered(self._root) if step in uncopied]

        return multihost.broadcast_from_zero("missing", compare)

    def _listed(self, step: int) -> Seal:
        """A step's seal; that of its copy, if the one here is damaged: then a whole copy stays as
        it is."""
        try:
            return self._local.read_seal(step)
        except (StorageError, UserError) as error:
            self._say(
                f"WARNING: {error}; it is neither read nor copied: move it away, or restore it"
            )
            return self.vault.read_seal(step)

    def _claim(self, run: str) -> None:
        """Makes an empty place this run's; StorageError if another was faster."""
        owner = self.vault.owner()
        if owner and owner != run:
            raise StorageError(
                f"{self.vault.url} now belongs to run {owner}, but this is run {run}; give each run"
                " a place of its own"
            )
        if not owner and run:
            self.vault.storage.put(RUN, run.encode())

    def _decide(self, step: int) -> list:
        """[action, error]: "skip" a step that is copied or gone, or has an error; "send" it; or
        "replace" a complete copy that differs."""
        if not (self._root / str(step)).exists():
            return ["skip", None]
        try:
            self._claim(folders.run_of(self._root))
            listed = self._listed(step)
            if self.vault.has_copy_of(step, listed):
                return ["skip", None]
            return ["replace" if self.vault.is_complete(step) else "send", None]
        except (StorageError, UserError) as failure:
            return ["skip", reason(failure)]

    def _send(self, step: int) -> str | None:
        """Copies a step, unless it is there already or was deleted here meanwhile; returns an
        error, if any."""
        action, error = multihost.broadcast_from_zero("send", lambda: self._decide(step))
        if action == "skip":
            return error
        if action == "replace":  # never a complete copy with a damaged one
            damages = self._local.verify_together(step, "before a copy is replaced")
            if damages:
                return f"{self._root / str(step)} is damaged: {damages[0]}"
            if error := run_in_all_then_zero(
                "replaced", lambda: None, lambda _: self.vault.remove(step)
            ):
                return error

        def send_files() -> None:
            names = my_files(self._local.read_seal(step).files)
            self._local.copy(step, names, self.vault)

        error = run_in_all_then_zero(
            "copy sent",
            send_files,
            lambda _: self.vault.complete(step, self._local.read_seal(step)),
        )
        if not error and multihost.is_writer():
            self._remove_obsolete()
        return error

    def _remove_obsolete(self) -> None:
        """Deletes copies of steps that were deleted here; what fails is left to the next copy."""
        try:
            while self._obsolete:
                self.vault.remove(self._obsolete[0])
                self._obsolete.pop(0)
        except StorageError as error:
            self._say(f"warning: a copy that no rule keeps is not deleted: {error}")

    # #############################################################################################
    # From the place
    # ##############################################################################################

    def find_steps(
        self,
        run: str,
        local_steps: list[int],
        decisions: Decisions,
        decisions_file: Path,
        check_meta: CheckMeta | None,
    ) -> list[int]:
        """Deletes stale steps and broken uploads there; returns the complete steps that are left.
        In process 0.

        `run` is "" for a run that has no checkpoint yet. If a step is here, a place that does
        not answer is skipped: it ends no run, so it ends no restart.
        """
        try:
            # Before anything is deleted, fetched or copied.
            self._require_own(run)
            if not local_steps and check_meta:
                self._require_accepted(check_meta)
            remove = retention.find_stale(self.vault, decisions, decisions_file)
            # Uploads that never ended. Where no step is here, they may be under way: of the run
            # whose place this workdir takes over.
            if local_steps:
                remove += self.vault.unfinished()
            for step in remove:
                self.vault.remove(step)
            return self.vault.steps()
        except Unreachable as failure:
            if not local_steps:
                raise
            # Nothing is fetched from there: its steps were not compared with the decisions.
            self._unreachable = str(failure)
            self._say(
                f"WARNING: {failure}; continuing from the local step {local_steps[-1]} without"
                " checking for a newer copy there"
            )
            return []

    def _require_own(self, run: str) -> None:
        """UserError if the place is another run's, or holds steps and no name: a place gets its
        run's name before its first copy."""
        owner = self.vault.owner()
        if not owner and (numbered := self.vault.numbered()):
            raise UserError(
                f"{self._option} holds step {numbered[-1]}, and no {RUN} tells whose it is; write"
                " the run's name there, or give another place"
            )
        if owner and run and owner != run:
            raise UserError(
                f"{self._option} is the place of another run than {self._root.parent} (that is"
                f" run {owner}, this is run {run}); give each run a place of its own"
            )
        if owner and owner != folders.run_of(self._root) and not self.vault.steps():
            raise UserError(
                f"{self._option} is marked as the place of run {owner}, which has no complete copy"
                " there; delete that folder if the run is gone, or give another place"
            )

    def _require_accepted(self, check_meta: CheckMeta) -> None:
        """UserError if the newest copy is of another config than a new workdir's."""
        for step in self.vault.steps()[-1:]:
            try:
                check_meta(self.vault.read_meta(step))
            except UserError as error:
                raise UserError(
                    f"{self._option} holds step {step} of another run"
                    f" than {self._root.parent} ({error}); give each run a place of its own"
                ) from None
            except (FileError, ValueError):
                pass  # damage is found when it is fetched

    def fetch(self, step: int, why: str) -> str | None:
        """Makes a copy a step of workdir/checkpoints; a damaged step there is set aside. Returns the
        copy's damage, if any. StorageError for a copy that cannot be fetched now, but may be whole;
        it begins with `why` the copy is needed."""
        if error := multihost.broadcast_from_zero("compared", lambda: self._unreachable):
            raise self._not_now(why, error)
        folder = self._root / f"{folders.SAVING}{step}"
        damages: list[str] = []  # of all processes, in process 0

        def fetch_files() -> str | None:  # damage is returned: from an error only its text remains
            try:
                names = my_files(self.vault.read_seal(step).files)
                self.vault.copy(step, names, self._local, folder.name)
            except FileError as damage:
                return str(damage)
            return None

        def commit(found: list[str | None]) -> None:
            damages.extend(filter(None, found))
            if damages:
                raise FileError(damages[0])
            listed = self.vault.read_seal(step)
            # Named before: a step's seal and the folder's name must agree.
            folders.name_run(self._root, self.vault.owner())
            if renamed := folders.rename_damaged(self._root, step):  # only now that another is here
                self._say(f"WARNING: the damaged step {step} is kept as {renamed}")
            folders.commit(folder, self._root / str(step), listed)
            self._say(f"step {step} was fetched from {self.vault.url}")

        error = run_in_all_then_zero("fetched", fetch_files, commit, folder)
        if error and not multihost.broadcast_from_zero("damages", lambda: bool(damages)):
            raise self._not_now(why, error)
        return error

    def _not_now(self, why: str, error: str) -> StorageError:
        return StorageError(
            f"{why}; its copy in {self.vault.url} cannot be fetched now: {error}. Start again when"
            " it can, or without copies: --config.checkpoint.durable="
        )
