"""Moves checkpoints between tiers: a fast folder before `workdir/checkpoints`, a safe place after it.

    [checkpoint.local, each node's own]  →  workdir/checkpoints  →  [checkpoint.durable, a folder or URL]
             `Local`                                                        `durable`

With a fast folder a save is over when all parts are there, before `workdir/checkpoints`. Any process that sees a part
can copy it.

Each copy is made by a background thread of its own. A durable place that is slow or dead delays no save: steps wait in
a set and are copied one at a time, the newest first. At the start of a run `bring_newest`
makes the newest step of any tier whole in `workdir/checkpoints`.
"""

import concurrent.futures
import contextlib
import functools
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import jax

from zaya_jax.checkpoint import claims, retention, writing
from zaya_jax.checkpoint.durable import Accept, Durable
from zaya_jax.checkpoint.seal import Seal, Sums, signed, unsigned
from zaya_jax.checkpoint.times import Log
from zaya_jax.checkpoint.vault import Vault, each
from zaya_jax.cluster import multihost
from zaya_jax.config import Checkpoint, StorageError, files

Jobs = list[concurrent.futures.Future]
PART = "part.json"  # of one process: its files, and of how many parts it is one


class Tiers:
    """The tiers of a run's checkpoints; `root` is workdir/checkpoints."""

    def __init__(self, root: Path, settings: Checkpoint, say: Callable[[str], None], log: Log):
        self.root, self._say, self._settings = root, say, settings
        folder, option = _local_folder(root, settings), f"config.checkpoint.local={settings.local}"
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

    def commit(self, step: int, folder: Path, sums: Sums) -> None:
        """Makes a step whole, when all processes have written; in process 0."""
        if self.local is None:
            writing.commit(folder, self.root / str(step), Seal(sums, step, writing.run_of(self.root) or None))
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


class Local:
    """A run's part of the fast folder; `root` is workdir/checkpoints. All processes publish and rescue together."""

    def __init__(self, root: Path, folder: Path, option: str, say: Callable[[str], None]):
        claims.require_writable(folder, option)
        self.root, self.folder, self._say = root, folder, say

    @property
    def mine(self) -> Path:
        """This process's."""
        return self.folder / f"process-{jax.process_index()}"

    def staging(self, step: int) -> Path:
        """The folder in which this process writes its pieces of a step."""
        return self.mine / f"{writing.SAVING}{step}"

    def written(self, step: int, sums: Sums, decisions: list) -> None:
        """Records the files that this process has written, and the run's decisions."""
        part = {
            "step": step, "process": jax.process_index(), "count": jax.process_count(), "files": sums,
            "run": writing.run_of(self.root), retention.KEY: decisions,
        }  # fmt: skip
        writing.write_files(self.staging(step), {PART: signed(part)})

    def known(self) -> Iterator[retention.Known]:
        """All visible parts, with the decisions recorded in them."""
        for folder, step in self._visible():
            with contextlib.suppress(OSError, ValueError):
                yield folder, step, _read_part(folder)[retention.KEY]

    def _visible(self) -> list[tuple[Path, int]]:
        """The folder and step of each visible part."""
        processes = sorted(self.folder.glob("process-*"))
        return [(own / str(step), step) for own in processes for step in writing.numbered(own)]

    def saved(self, step: int) -> None:
        """All processes have written."""
        target = self.mine / str(step)
        shutil.rmtree(target, ignore_errors=True)
        with contextlib.suppress(OSError):  # a reader will miss it
            self.staging(step).rename(target)

    def publish_own(self, step: int) -> str | None:
        """Makes a step whole in workdir/checkpoints, each process with its own part; older parts then go."""
        error = self._publish("publish", step, [self.mine / str(step)])
        if not error:
            for old in writing.numbered(self.mine):
                if old < step:
                    writing.remove(self.mine, old)
        return error

    def _publish(self, name: str, step: int, parts: list[Path]) -> str | None:
        """Copies parts of a step into workdir/checkpoints and makes it whole there; returns an error, if any."""
        folder, here = self.root / f"{writing.SAVING}{step}", Vault(self.root)

        def put(part: Path, its: Sums, name: str) -> None:
            here.put(folder.name, name, Vault(part.parent).checked(part.name, name, its))

        def work() -> Sums:
            sums = Sums()
            for part in parts:
                its = _read_part(part)["files"]
                each(functools.partial(put, part, its), list(its))
                sums |= its
            return sums

        def end(listed: list[Sums]) -> None:
            if not (self.root / str(step)).exists():
                whole = {name: entry for part in listed for name, entry in part.items()}
                writing.commit(folder, self.root / str(step), Seal(whole, step, writing.run_of(self.root)))

        error = writing.together(name, work, end)
        if error and multihost.is_writer():
            shutil.rmtree(folder, ignore_errors=True)
        return error

    def rescue_newest(self, here: int) -> None:
        """Puts together the newest step that only the local folders have, after step `here`."""
        writing.clear(self.mine)
        views = multihost.to_first("local", self._seen()) or []

        def choose(failed: list[int]) -> list:
            """[the newest step that all parts of are seen and that has not failed, by part the process to copy it]."""
            for step in sorted({int(s) for view in views for s in view}, reverse=True):
                seen = [view.get(str(step), []) for view in views]
                count = max(count for parts in seen for _, count in parts)
                who = {p: i for i, parts in reversed(list(enumerate(seen))) for p, c in parts if c == count}
                if step > here and step not in failed and len(who) == count:
                    return [step, who]
            return [None, {}]

        failed: list[int] = []
        while True:
            step, who = multihost.from_first("local step", functools.partial(choose, failed))
            if step is None:
                return
            mine = [int(part) for part, reader in who.items() if reader == jax.process_index()]
            error = self._publish("rescue", step, [self.folder / f"process-{i}" / str(step) for i in mine])
            if multihost.is_writer():
                self._say(
                    f"warning: step {step} of the local folders could not be put together: {error}"
                    if error
                    else f"step {step} was only in the local folders; it is put together in {self.root}"
                )
            if not error:
                return
            failed.append(step)

    def _seen(self) -> dict[str, list]:
        """For each step, [its writer, the number of writers] of each visible part; parts of other runs are deleted."""
        seen: dict[str, list] = {}
        run = writing.run_of(self.root)
        for folder, step in self._visible():
            try:
                part = _read_part(folder)
                if part["run"] != run:
                    shutil.rmtree(folder, ignore_errors=True)
                elif part["step"] != step:
                    raise ValueError(f"of step {part['step']}")
                else:
                    seen.setdefault(str(step), []).append([part["process"], part["count"]])
            except (OSError, ValueError) as damage:
                self._say(f"warning: {folder / PART} is not taken: {writing.reason(damage)}")
        return seen


def _local_folder(root: Path, settings: Checkpoint) -> Path | None:
    """The folder of a run's parts in the fast folder; its name has a checksum of the workdir's path."""
    if not settings.local:
        return None
    own = f"{root.parent.name}-{google_crc32c.value(str(root).encode()):08x}"
    return Path(settings.local).absolute() / own


def _read_part(folder: Path) -> dict[str, Any]:
    return unsigned(files.read(folder / PART))


def _wait(jobs: Jobs, seconds: float | None = None) -> bool:
    """Whether all are done in time; raises the error of one that failed."""
    done, late = concurrent.futures.wait(jobs, seconds)
    for job in done:
        job.result()
    return not late
