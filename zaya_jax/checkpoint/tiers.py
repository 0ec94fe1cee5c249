"""Moves checkpoints between tiers: a fast folder before `workdir/checkpoints`, a safe place after it.

    [checkpoint.local, each node's own]  →  workdir/checkpoints  →  [checkpoint.durable, a folder or URL]
             `local`                                                        `durable`

Each copy is made by a background thread of its own. A durable place that is slow or dead delays no save: steps wait in
a set and are copied one at a time, the newest first. At the start of a run `bring_newest`
makes the newest step of any tier whole in `workdir/checkpoints`.
"""

import concurrent.futures
import contextlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from zaya_jax.checkpoint import claims, retention, writing
from zaya_jax.checkpoint.durable import Accept, Durable
from zaya_jax.checkpoint.local import Local, local_folder
from zaya_jax.checkpoint.seal import Seal, Sums
from zaya_jax.checkpoint.times import Log
from zaya_jax.checkpoint.vault import Vault
from zaya_jax.cluster import multihost
from zaya_jax.config import Checkpoint, StorageError

Jobs = list[concurrent.futures.Future]


class Tiers:
    """The tiers of a run's checkpoints; `root` is workdir/checkpoints."""

    def __init__(self, root: Path, settings: Checkpoint, say: Callable[[str], None], log: Log):
        self.root, self._say, self._settings = root, say, settings
        folder, option = local_folder(root, settings), f"config.checkpoint.local={settings.local}"
        self.local = Local(root, folder, option, say) if folder else None
        self.durable = Durable(root, settings, say, log) if settings.durable else None
        there = self.durable.vault.folder if self.durable else None
        others = {option: folder, f"config.checkpoint.durable={settings.durable}": there}
        claims.require_apart([root.parent, root], {name: place for name, place in others.items() if place})
        self._publisher = concurrent.futures.ThreadPoolExecutor(1, "publish")
        self._copier = concurrent.futures.ThreadPoolExecutor(1, "copy")
        self._publishing: dict[int, concurrent.futures.Future] = {}  # by step
        self._copies: Jobs = []  # one for each step that is owed
        # In process 0, which chooses the next to copy:
        self._owed: set[int] = set()
        self._copying: int | None = None
        self._failed: dict[int, str] = {}  # steps whose last copy failed, and why

    ####################################################################################################################
    # A save on its way
    ####################################################################################################################

    def staging(self, step: int) -> Path:
        """The folder in which this process writes its pieces of a step."""
        return self.local.staging(step) if self.local else self.root / f"{writing.SAVING}{step}"

    def commit(self, step: int, folder: Path, files: Sums) -> None:
        """Makes a step whole, when all processes have written; in process 0."""
        if self.local is None:
            writing.commit(folder, self.root / str(step), Seal(files, step, writing.run_of(self.root) or None))
            self.delete_old()

    def give_up(self, step: int) -> None:
        """Removes what has been written of a step, in any process."""
        if self.local or multihost.is_writer():
            shutil.rmtree(self.staging(step), ignore_errors=True)

    def pass_on(self, step: int) -> None:
        """Begins to bring a saved step to the next tiers."""
        if self.local:
            self.local.saved(step)
            alive = {s: job for s, job in self._publishing.items() if not job.done()}
            self._publishing = alive | {step: self._publisher.submit(self._publish, step)}
        else:
            self._owe([step])

    def _publish(self, step: int) -> None:
        assert self.local is not None
        error = self.local.publish_own(step)
        if error:
            self._not_copied(step, error)
            return
        if multihost.is_writer():
            self.delete_old()
        self._owe([step])

    def _owe(self, steps: list[int]) -> None:
        """Has steps copied; all processes do so at the same points, since their threads must do as many copies."""
        if self.durable:
            self._owed |= {*steps}
            self._copies = [job for job in self._copies if not job.done()]
            self._copies += [self._copier.submit(self._copy_newest) for _ in steps]

    def _copy_newest(self) -> None:
        assert self.durable is not None

        def choose() -> int | None:
            # Copied before the look at the folder: another thread adds the step that it has just saved.
            owed = set(self._owed)
            here = {*writing.steps_in(self.root)}  # the rules delete some before their turn comes
            self._copying = max(owed & here, default=None)
            self._owed -= (owed - here) | {self._copying}
            return self._copying

        step = multihost.from_first("copy", choose)
        if step is None:
            return
        error = self.durable.send(step, time.time())
        self._copying = None
        self._failed.pop(step, None)
        if error:
            self._failed[step] = error
            self._not_copied(step, error)

    def _not_copied(self, step: int, error: str) -> None:
        if multihost.is_writer():
            self._say(f"warning: step {step} is saved, but its copy is NOT: {error}; training goes on")

    def room(self, seconds: float) -> bool:
        """Waits until at most one step is on its way to workdir/checkpoints; False if that takes longer."""
        return _wait(list(self._publishing.values())[:-1], seconds)

    def delete_old(self) -> None:
        """Deletes the steps that no rule keeps and no thread needs any more; their copies go with the next."""
        busy = {self._copying, *(step for step, job in self._publishing.items() if not job.done())}
        for step in retention.to_delete(retention.saved_in(self.root), self._settings):
            if step not in busy:
                if self.durable:
                    self.durable.obsolete.append(step)
                with contextlib.suppress(OSError):
                    writing.remove(self.root, step)

    ####################################################################################################################
    # The end
    ####################################################################################################################

    def publish(self) -> None:
        """Waits until all is in workdir/checkpoints; copies may be on their way."""
        _wait(list(self._publishing.values()))

    def settle(self, seconds: float | None = None) -> None:
        """Waits until nothing is on its way; copies that take longer than that are cut short."""
        self.publish()
        if not _wait(self._copies, seconds):
            assert self.durable is not None
            self.durable.vault.given_up.set()
            _wait(self._copies)

    def close(self, again: bool = True) -> list[int]:
        """Finishes copying and retries failures once; returns the steps without a durable copy.

        Without `again` a scheduler waits for the end: copies have as long as a save, the next start makes them up.
        """
        self.settle(None if again else self._settings.max_wait)
        missing, error = self._missing(look=again)  # a dead place would hold the end up
        if missing and again and not error:
            self._owe(missing)
            self.settle()
            missing, error = self._missing()
        self._publisher.shutdown()
        self._copier.shutdown()
        if missing and multihost.is_writer():
            why = error or next((self._failed[step] for step in missing if step in self._failed), "")
            self._say(
                f"error: {self._settings.durable} has no whole copy of step {', '.join(map(str, missing))}"
                f"{f': {why}' if why else ''}; the same command tries again"
            )
        return missing

    def _missing(self, look: bool = True) -> tuple[list[int], str]:
        """Steps here without a whole copy, and why that could not be looked up; or those whose copies have failed."""
        if not self.durable:
            return [], ""
        if look:
            return self.durable.missing()
        known = lambda: [s for s in writing.steps_in(self.root) if s in {*self._failed, *self._owed}]  # noqa: E731
        return multihost.from_first("failed", known), ""

    ####################################################################################################################
    # The start; in all processes together
    ####################################################################################################################

    def bring_newest(self, accept: Accept | None) -> None:
        """Makes the newest step of any tier whole in workdir/checkpoints; removes half-written folders."""
        here = multihost.from_first("tiers", self._tidy)
        if self.local:
            self.local.rescue_newest(here)
        if self.durable:
            self.durable.fetch_newest(accept)

    def make_up(self) -> None:
        """Begins to copy steps that the durable place lacks: their copies failed or were cut short."""
        for step in writing.numbered(self.root) if multihost.is_writer() else ():
            try:
                Vault(self.root).seal(step)
            except StorageError as error:
                self._say(f"WARNING: {error}; it is neither read nor copied: move it away, or restore it")
        self._owe(self._missing()[0])

    def _tidy(self) -> int:
        try:
            writing.clear(self.root)
            self.root.mkdir(parents=True, exist_ok=True)
            newest = max(writing.steps_in(self.root), default=-1)
            if not writing.run_of(self.root):  # of a new run, or lost: then its newest checkpoint has it
                known = ""
                with contextlib.suppress(OSError, ValueError):
                    known = writing.read_seal(self.root / str(newest)).run or ""
                writing.begin_run(self.root, known)
        except OSError as error:
            raise StorageError(
                f"{self.root} cannot be used for checkpoints ({writing.reason(error)}); move the file there away"
            ) from None
        return newest


def _wait(jobs: Jobs, seconds: float | None = None) -> bool:
    """Whether all are done in time; raises the error of one that failed."""
    done, late = concurrent.futures.wait(jobs, seconds)
    for job in done:
        job.result()
    return not late
