"""Copies whole steps to a safe place, a folder or URL, and fetches them from there.

    durable.fetch_newest(accept)       makes its newest step whole in workdir/checkpoints, if that is newer
    durable.make_up()                  begins to copy the steps that it lacks
    durable.owe([step])                has a step copied
    durable.close()                    returns the steps without a whole copy

All processes call these together; each sends and fetches its share of the files. Copies are made by
a thread of their own. A place that is slow or dead delays no save: steps wait in a set and are
copied one at a time, the newest first.
"""

import concurrent.futures
import contextlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zaya_jax.checkpoint import writing
from zaya_jax.checkpoint.place import Unreachable, each
from zaya_jax.checkpoint.run import claims
from zaya_jax.checkpoint.run.times import record
from zaya_jax.checkpoint.seal import RUN, Seal
from zaya_jax.checkpoint.vault import Vault, share
from zaya_jax.cluster import multihost
from zaya_jax.config import Checkpoint, StorageError, UserError, fields

Accept = Callable[[dict[str, Any]], object]  # raises UserError for the meta of another run


class Durable:
    """A run's copies; `root` is workdir/checkpoints. `say` is heard from process 0 alone."""

    def __init__(self, root: Path, settings: Checkpoint, say: Callable[[str], None]):
        self.root, self._settings, self._say = root, settings, say
        self.vault, self._here = Vault(settings.durable), Vault(root)
        self._option = f"config.checkpoint.durable={settings.durable}"
        if self.vault.place.folder:
            with fields.naming("config.checkpoint.durable"):
                claims.require_apart([root.parent, root], self.vault.place.folder)
        self.vault.place.tell = say
        self.silent: Unreachable | None = None  # it did not answer at this start; of process 0
        self._copier = concurrent.futures.ThreadPoolExecutor(1, "copy")
        self._copies: list[concurrent.futures.Future] = []  # one for each step that is owed
        # In process 0, which chooses the next to copy:
        self.obsolete: list[int] = []  # steps that were deleted here: their copies are to go
        self.copying: int | None = None
        self._owed: set[int] = set()
        self._failed: dict[int, str] = {}  # steps whose last copy failed, and why

    # #############################################################################################
    # To the place
    # ##############################################################################################

    def owe(self, steps: list[int]) -> None:
        """Has steps copied; all processes do so at the same points, since their threads must do as
        many copies."""
        self._owed |= {*steps}
        self._copies = [job for job in self._copies if not job.done()]
        self._copies += [self._copier.submit(self._copy_newest) for _ in steps]

    def make_up(self) -> None:
        """Begins to copy steps that the place lacks: their copies failed or were cut short."""
        for step in writing.numbered(self.root) if multihost.is_writer() else ():
            try:
                self._here.seal(step)
            except StorageError as error:
                self._say(
                    f"WARNING: {error}; it is neither read nor copied: move it away, or restore it"
                )
        self.owe(self._missing()[0])

    def settle(self, seconds: float | None = None) -> None:
        """Waits until nothing is on its way; copies that take longer than that are cut short."""
        if concurrent.futures.wait(self._copies, seconds).not_done:
            self.vault.place.given_up.set()
        for job in self._copies:
            job.result()

    def close(self, again: bool = True) -> list[int]:
        """Finishes copying and retries failures once; returns the steps without a whole copy.

        Without `again` a scheduler waits for the end: copies have as long as a save, the next start
        makes them up.
        """
        self.settle(None if again else self._settings.max_wait)
        # a dead place would hold the end up
        missing, error = self._missing() if again else (self._known_missing(), "")
        if missing and again and not error:
            self.owe(missing)
            self.settle()
            missing, error = self._missing()
        self._copier.shutdown()
        if missing:
            why = error or next(
                (self._failed[step] for step in missing if step in self._failed), ""
            )
            self._say(
                f"error: {self._settings.durable} has no whole copy of step"
                f" {', '.join(map(str, missing))}{f': {why}' if why else ''}; the same command"
                " tries again"
            )
        return missing

    def _copy_newest(self) -> None:
        def choose() -> int | None:
            # Copied before the look at the folder: another thread adds the step that it has just
            # saved.
            owed = set(self._owed)
            here = {*writing.steps_in(self.root)}  # the rules delete some before their turn comes
            self.copying = max(owed & here, default=None)
            self._owed -= (owed - here) | {self.copying}
            return self.copying

        step = multihost.broadcast_from_zero("copy", choose)
        if step is None:
            return
        error = self._send(step, time.time())
        self.copying = None
        self._failed.pop(step, None)
        if error:
            self._failed[step] = error
            self._say(
                f"warning: step {step} is saved, but its copy is NOT: {error}; training goes on"
            )

    def _known_missing(self) -> list[int]:
        """Steps here whose copies have failed or were not made, without a look at the place."""
        known = {*self._failed, *self._owed}
        return multihost.broadcast_from_zero(
            "failed", lambda: [step for step in writing.steps_in(self.root) if step in known]
        )

    def _missing(self) -> tuple[list[int], str]:
        """Steps here without a whole copy, and the error if that could not be determined."""

        def look() -> list:
            here = writing.steps_in(self.root)
            silent, self.silent = self.silent, None  # the next look may find that it answers
            try:
                if silent:
                    raise silent
                there = set(self.vault.steps())
                copied = each(lambda step: step in there and self._has_copy(step), here)
                return [[step for step, whole in zip(here, copied, strict=True) if not whole], ""]
            except StorageError as error:
                return [here, str(error)]

        missing, error = multihost.broadcast_from_zero("missing", look)
        return missing, error

    def _has_copy(self, step: int) -> bool:
        """Whether a step there is a copy of the one here; or whole by itself, where the one here is
        damaged."""
        whole = None
        with contextlib.suppress(StorageError):
            whole = self._here.seal(step)
        try:
            return self.vault.holds(step, whole or self.vault.seal(step))
        except Unreachable:
            raise
        except StorageError:
            return False

    def _claim(self, run: str) -> None:
        """Makes an empty place this run's; StorageError where another was faster."""
        owner = self.vault.owner()
        if owner and owner != run:
            raise StorageError(
                f"{self.vault.url} is run {owner}'s by now, this is run {run}; give each run a"
                " place of its own"
            )
        if not owner and run:
            self.vault.place.put(RUN, run.encode())

    def _send(self, step: int, begun: float) -> str | None:
        """Copies a step, unless it is there already or was deleted here meanwhile; returns an
        error, if any."""
        clock, folder = time.perf_counter(), self.root / str(step)

        def look() -> list:
            """[an error, whether to send it, whether that replaces a whole copy]."""
            if not folder.exists():
                return [None, False, False]
            try:
                whole = self._here.seal(step)
                self._claim(writing.run_of(self.root))
                wanted = not self.vault.holds(step, whole)
                return [None, wanted, wanted and self.vault.has(step)]
            except StorageError as failure:
                return [writing.reason(failure), False, False]

        error, wanted, replaces = multihost.broadcast_from_zero("send", look)
        if not error and replaces:  # never replace a whole copy with a damaged one
            damages = self._here.verify_together("before a copy goes", step)
            error = f"{folder} is damaged: {damages[0]}" if damages else None
            # No whole copy any more from before the first of its files is written anew.
            error = error or writing.together(
                "reopen", lambda: None, lambda _: self.vault.reopen(step)
            )
        if error or not wanted:
            return error

        def work() -> list:
            sums = self._here.seal(step).files
            mine = share(sums)
            self._here.copy(step, mine, self.vault)
            return [{"write": time.perf_counter() - clock}, sum(sums[name][0] for name in mine)]

        def end(parts: list) -> None:
            clock = time.perf_counter()
            self.vault.complete(step, self._here.seal(step))
            commit = {"commit": time.perf_counter() - clock}
            record(
                self.root.parent,
                "copy",
                step,
                begun,
                [(seconds | commit, size) for seconds, size in parts],
            )
            while self.obsolete:
                self.vault.remove(self.obsolete[0])
                self.obsolete.pop(0)

        return writing.together("copy sent", work, end)

    # #############################################################################################
    # From the place
    # ##############################################################################################

    def fetch_newest(self, accept: Accept | None) -> None:
        """Fetches the newest whole step, if it is newer than all steps here.

        If a step is here, a place that does not answer is skipped: it ends no run, so it ends no
        restart.
        """

        def look() -> list[int]:
            here = writing.steps_in(self.root)
            try:
                if self.silent:  # its steps were not compared with the run's decisions
                    raise self.silent
                self._require_own(writing.run_of(self.root) if here else "")
                if not here and accept:
                    self._require_accepted(accept)
                for step in self.vault.unfinished():  # uploads that never ended
                    self.vault.remove(step)
                newer = [step for step in self.vault.steps() if step > max(here, default=-1)]
                return newer[::-1]
            except Unreachable as failure:
                if not here:
                    raise
                self.silent = failure
                self._say(
                    f"WARNING: {failure}; going on from step {here[-1]}, which is here, without"
                    " having seen whether it has a newer one"
                )
                return []

        error = None
        for step in multihost.broadcast_from_zero("durable", look):
            error = self._fetch(step)
            if not error:
                return
            if self._settings.on_corrupt == "stop":
                raise StorageError(
                    f"{error}; --config.checkpoint.on_corrupt=previous goes on from the one before"
                )
            self._say(
                f"WARNING: step {step} could not be fetched: {error}; looking for the one before"
            )
        if error and not multihost.broadcast_from_zero(
            "left", lambda: bool(writing.numbered(self.root))
        ):
            raise StorageError(
                f"{error}; no copy in {self.vault.url} is whole: restore one, or give another"
                " checkpoint.durable"
            )

    def _require_own(self, run: str) -> None:
        """UserError where the place is another run's, or holds steps and no name. `run` is "" for
        one that has none yet.

        Asked before anything is fetched, copied or deleted: a place bears its name from before the
        first copy on.
        """
        owner = self.vault.owner()
        if not owner and (numbered := self.vault.numbered()):
            raise UserError(
                f"{self._option} holds step {numbered[-1]}, and no {RUN} tells whose it is; write"
                " the run's name there, or give another place"
            )
        if owner and run and owner != run:
            raise UserError(
                f"{self._option} is the place of another run than {self.root.parent} (that is run"
                f" {owner}, this is run {run}); give each run a place of its own"
            )

    def _require_accepted(self, accept: Accept) -> None:
        """UserError where the newest copy is of another config than a new workdir's."""
        for step in self.vault.steps()[-1:]:
            try:
                accept(self.vault.meta(step))
            except UserError as error:
                raise UserError(
                    f"{self._option} holds step {step} of another run"
                    f" than {self.root.parent} ({error}); give each run a place of its own"
                ) from None
            except Unreachable:
                raise
            except (StorageError, ValueError):
                pass  # damage is found when it is fetched

    def _fetch(self, step: int) -> str | None:
        """Makes a step of the vault whole in workdir/checkpoints; returns an error, if any."""
        folder = self.root / f"{writing.SAVING}{step}"

        def end(_: list) -> None:
            found = self.vault.seal(step)
            writing.begin_run(self.root, self.vault.owner())
            writing.commit(folder, self.root / str(step), Seal(found.files, step, found.run))
            self._say(f"step {step} was fetched from {self.vault.url}")

        def work() -> None:
            self.vault.copy(step, share(self.vault.seal(step).files), self._here, folder.name)

        error = writing.together("fetched", work, end)
        if error and multihost.is_writer():
            shutil.rmtree(folder, ignore_errors=True)
        return error
