"""Where checkpoints go beside `workdir/checkpoints`: a fast folder before it, a safe place after it.

    [checkpoint.local, each node's own]  →  workdir/checkpoints  →  [checkpoint.durable, a folder or URL]
             `local`                                                        `durable`

Each further way is gone by a thread of its own in the background, in the order of the steps. A durable place that is
slow or dead holds no save up: while a copy is on its way there, those of later steps are put off. At the start of a
run `bring_newest` makes the newest step of any tier whole in `workdir/checkpoints`.
"""

import concurrent.futures
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zaya_jax.checkpoint import audit, places, writing
from zaya_jax.checkpoint.local import Local, local_folder
from zaya_jax.checkpoint.seal import RUN, Seal, Sums
from zaya_jax.cluster import multihost
from zaya_jax.config import Checkpoint, StorageError

if TYPE_CHECKING:
    from zaya_jax.checkpoint.durable import Durable


class Tiers:
    """The ways of a run's checkpoints; `record` takes their times."""

    def __init__(
        self, root: Path, settings: Checkpoint, say: Callable[[str], None], record: Callable[..., None],
        delete_old: Callable[[], None], accept: Callable[[dict[str, Any]], object] | None = None,
    ):  # fmt: skip
        self.root, self._say, self._settings = root, say, settings
        folder, option = local_folder(root, settings), f"config.checkpoint.local={settings.local}"
        self.local = Local(root, folder, option, say, delete_old) if folder else None
        self.durable = _durable(root, settings, say, record, accept) if settings.durable else None
        there = self.durable.vault.folder if self.durable else None
        others = {option: folder, f"config.checkpoint.durable={settings.durable}": there}
        places.require_apart([root.parent, root], {name: place for name, place in others.items() if place})
        self._publisher = concurrent.futures.ThreadPoolExecutor(1, "publish")
        self._copier = concurrent.futures.ThreadPoolExecutor(1, "copy")
        # A step and what brings it, to workdir/checkpoints and to the durable place.
        self._publishing: list[tuple[int, concurrent.futures.Future]] = []
        self._copying: list[tuple[int, concurrent.futures.Future]] = []
        self._owed: list[int] = []  # copies that failed, or were put off
        self._failed: dict[int, str] = {}  # steps whose last copy failed, and why

    def staging(self, step: int) -> Path:
        """Where this process writes its pieces of a step."""
        return self.local.staging(step) if self.local else self.root / f"{writing.SAVING}{step}"

    def commit(self, step: int, folder: Path, files: Sums) -> None:
        """Makes a step whole, when all processes have written; in process 0."""
        if self.local is None:
            writing.commit(folder, self.root / str(step), Seal(files, step, self.run() or None))

    def written(self, step: int, files: Sums, decisions: int = 0) -> None:
        """Notes what this process has written in its local folder."""
        if self.local:
            self.local.written(step, files, decisions)

    def give_up(self, step: int) -> None:
        """Clears this process's local folder of a step that others could not write."""
        if self.local:
            self.local.give_up(step)

    def pass_on(self, step: int, put_off: bool = False) -> None:
        """Begins to bring a saved step to the next tiers; its durable copy later, if that is to be `put_off`."""
        publish = None
        if self.local:
            self.local.saved(step)
            publish = self._publisher.submit(self._publish, step)
            self._publishing = [*_not_done(self._publishing), (step, publish)]
        self._copying = _not_done(self._copying)
        if self.durable and put_off:
            self._owed.append(step)
            self._not_copied(step, "the one before is still on its way; it follows")
        elif self.durable:
            self._copying.append((step, self._copier.submit(self._bring, step, publish)))
            self._pay(1)

    def copying(self) -> bool:
        """Whether the durable copy of a step is on its way."""
        return bool(_not_done(self._copying))

    def may_go(self, step: int) -> bool:
        """Whether nobody needs a step in workdir/checkpoints any more; if so, its copy goes too."""
        if any(waiting == step for waiting, _ in _not_done([*self._publishing, *self._copying])):
            return False
        if self.durable:
            self.durable.deleted.append(step)
        return True

    def room(self, seconds: float) -> bool:
        """Waits until at most one step is on its way to workdir/checkpoints; False if that takes longer."""
        return _wait([job for _, job in _not_done(self._publishing)][:-1], seconds)

    def settle(self, seconds: float | None = None) -> list[int]:
        """Waits until nothing is on its way; copies that take longer than that are cut short: their steps."""
        self.publish()
        if _wait([job for _, job in self._copying], seconds):
            return []
        assert self.durable is not None
        late = sorted(step for step, _ in _not_done(self._copying))
        self.durable.vault.given_up.set()
        _wait([job for _, job in self._copying], None)
        return [step for step in late if step in self._failed]

    def publish(self) -> None:
        """Waits until all is in workdir/checkpoints; copies may be on their way."""
        _wait([job for _, job in self._publishing], None)

    def make_up(self) -> None:
        """Begins to bring to the durable place what is here and not there: copies that failed or were cut short."""
        if multihost.is_writer():
            self._warn_of_strangers()
        self._owed = self._missing()[0]
        self._pay(1)

    def _pay(self, count: int) -> None:
        """Puts some of what is owed on its way, the newest first.

        One beside each save: more would keep the copy of that waiting. All processes do so at the same points, since
        their threads must have the same steps in the same order.
        """
        for _ in range(min(count, len(self._owed))):
            step = self._owed.pop()
            self._copying.append((step, self._copier.submit(self._bring_copy, step)))

    def close(self, again: bool = True) -> list[int]:
        """Finishes what is on its way, and tries once more what has failed; the steps without a durable copy.

        Without `again` somebody waits for the end: copies have as long as a save, then the next start makes them up.
        """
        late, cut = self.settle(None if again else self._settings.max_wait), list[int]()

        def known() -> list[int]:
            """Without a look at a place that has been given up."""
            return [step for step in writing.steps_in(self.root) if step in {*late, *self._owed}]

        if self.durable and not again:
            cut = multihost.from_first("late", lambda: known() if late else [])
        missing, error = (cut, "") if cut else self._missing()
        if missing and again and not error:
            self._owed = list(missing)
            self._pay(len(missing))
            self.settle()
            missing, error = self._missing()
        self._publisher.shutdown()
        self._copier.shutdown()
        if missing and multihost.is_writer():
            # What is damaged here stays damaged, however often it is tried.
            hopeless = {step: why for step, why in self._failed.items() if why.startswith(f"{self.root}/")}
            again_later = [step for step in missing if step not in hopeless]
            if again_later:
                self._say(
                    f"error: {self._settings.durable} has no whole copy of step {', '.join(map(str, again_later))}"
                    f"{f': {error}' if error else ''}; the same command tries again"
                )
            for step in sorted(set(missing) & hopeless.keys()):
                self._say(
                    f"error: {self._settings.durable} has no whole copy of step {step}, and cannot get one: "
                    f"{hopeless[step]}; restore {self.root / str(step)}, or move it away"
                )
        return missing

    def _missing(self) -> tuple[list[int], str]:
        return self.durable.missing() if self.durable else ([], "")

    def _warn_of_strangers(self) -> None:
        """Says which steps here are damaged in their lists, or another step's or run's: they are never copied."""
        for step in writing.numbered(self.root):
            try:
                audit.own_seal(self.root / str(step), step)
            except StorageError as error:
                self._say(f"WARNING: {error}; it is neither read nor copied: move it away, or restore it")

    def run(self) -> str:
        """The run's own name, made when it begins."""
        return writing.run_of(self.root)

    ####################################################################################################################
    # One step on its way; in all processes together, in the threads
    ####################################################################################################################

    def _publish(self, step: int) -> str | None:
        assert self.local is not None
        error = self.local.publish_own(step)
        if error:
            self._not_copied(step, error)
        return error

    def _bring(self, step: int, publish: concurrent.futures.Future | None) -> None:
        if publish is None or not publish.result():
            self._bring_copy(step)

    def _bring_copy(self, step: int) -> None:
        assert self.durable is not None
        error = self.durable.send(step, time.time())
        self._failed.pop(step, None)
        if error:
            self._failed[step] = error
            self._not_copied(step, error)

    def _not_copied(self, step: int, error: str) -> None:
        if multihost.is_writer():
            self._say(f"warning: step {step} is saved, but its copy is NOT: {error}; training goes on")

    ####################################################################################################################
    # At the start of a run; in all processes together
    ####################################################################################################################

    def bring_newest(self) -> None:
        """Makes the newest step of any tier whole in workdir/checkpoints; clears what was left half-done."""
        here = multihost.from_first("tiers", self._tidy)
        if self.local:
            self.local.rescue_newest(here)
        if self.durable:
            self.durable.fetch_newest()

    def _tidy(self) -> int:
        try:
            writing.clear(self.root)
            self.root.mkdir(parents=True, exist_ok=True)
            self._name_run()
        except OSError as error:
            raise StorageError(
                f"{self.root} cannot be used for checkpoints ({writing.reason(error)}); move away what is in its place"
            ) from None
        return max(writing.steps_in(self.root), default=-1)

    def _name_run(self) -> None:
        """Makes the run's name, or finds it again where it was lost or changed: each checkpoint has it too."""
        runs = set()
        for step in writing.steps_in(self.root):
            with contextlib.suppress(OSError, ValueError):
                runs.add(writing.read_seal(self.root / str(step)).run)
        here, known = self.run(), sorted(run for run in runs if run)
        if here and (here in known or not known):
            return
        if here or len(known) > 1:
            what = f"names run {here!r}" if here else "is missing or empty"
            raise StorageError(
                f"{self.root / RUN} {what}, but the checkpoints beside it are of {' and '.join(known)}; if they "
                "are this run's, write their name into it, otherwise move them away"
            )
        writing.begin_run(self.root, *known)
        if known:
            self._say(f"{self.root / RUN} was missing; it is written again, by what the checkpoints say")


def _not_done(
    jobs: list[tuple[int, concurrent.futures.Future]],
) -> list[tuple[int, concurrent.futures.Future]]:
    return [job for job in jobs if not job[1].done()]


def _wait(jobs: list[concurrent.futures.Future], seconds: float | None) -> bool:
    """Whether all are done in time; what went wrong in one is raised."""
    done, late = concurrent.futures.wait(jobs, seconds)
    for job in done:
        job.result()
    return not late


def _durable(root: Path, *settings: Any) -> "Durable":
    from zaya_jax.checkpoint import durable  # with all that reaches other machines

    return durable.Durable(root, *settings)
