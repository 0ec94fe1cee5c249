"""Saves a run's checkpoints during training and restores them on any mesh; each is complete or
absent.

    store = Store(workdir, config.checkpoint, say)
    step = store.find_newest(decisions)                     the newest complete one, verified; None without one
    state = store.restore(step, abstract_state)
    store.save(step, snapshot, meta, locations)             begins, and returns; the training goes on
    store.save_now(step, snapshot, meta, locations)         the last one: returns when it is there

The arrays lie in Orbax's layout (`layout`), written (`writing`) and read (`source`) by this
package, each process the parts of its own devices (`boxes`). A save goes: copy (the caller's
snapshot), serialise and write (by threads), commit (process 0, when all have finished). A failure
is reported and counted, and the run continues; nothing is deleted before a newer checkpoint is
complete.
"""

import concurrent.futures
import contextlib
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zaya_jax.checkpoint import folders, writing
from zaya_jax.checkpoint.boxes import Locations, Writers
from zaya_jax.checkpoint.run import retention, timings
from zaya_jax.checkpoint.run.durable import CheckMeta, Durable
from zaya_jax.checkpoint.run.retention import Decisions
from zaya_jax.checkpoint.seal import Seal
from zaya_jax.checkpoint.source import SealedSource
from zaya_jax.checkpoint.vault import Vault
from zaya_jax.checkpoint.writing import DeviceParts
from zaya_jax.cluster import multihost
from zaya_jax.config import Checkpoint as CheckpointKeys
from zaya_jax.config import StorageError

RETRY_SECONDS = 5.0  # between attempts at the last save

# By folder: the store with which this process last began a run there.
_begun: dict[Path, "Store"] = {}


class Store:
    """The checkpoints below `workdir/checkpoints`, and their copies in a safer place."""

    def __init__(
        self,
        workdir: str | os.PathLike,
        keys: CheckpointKeys | None = None,
        say: Callable[[str], None] = print,
        check_meta: CheckMeta | None = None,
    ):
        """`check_meta` raises UserError for the meta of another run, which a new workdir must not
        adopt."""
        self.root = Path(workdir).absolute() / "checkpoints"
        self.keys = keys or CheckpointKeys()
        self.durable: Durable | None = None
        self._say = say if multihost.is_writer() else lambda _: None
        self._check_meta = check_meta
        if self.keys.durable:
            self.durable = Durable(self.root, self.keys, self._say)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "save")
        self._pending: concurrent.futures.Future | None = None
        self._failures = 0  # saves in a row
        self._last_error = ""
        self._writers: tuple[Locations, Writers] | None = None
        # What one call measures and a later one records:
        self._asked_at = 0.0  # wait_for_room, for save
        self._verify_seconds = 0.0  # find_newest, for restore
        self._stage_seconds: dict[str, float] = {}  # the last save, for figures

    # #############################################################################################
    # Saving
    # ##############################################################################################

    def wait_for_room(self, step: int) -> bool:
        """Whether a save can begin: waits a while for the one before. The same answer in every
        process.

        StorageError when too many saves have failed in a row.
        """
        self._asked_at = begun = time.perf_counter()
        late = not self._finish_save(self.keys.max_wait)
        late = bool(multihost.reduce_figures({"late": float(late)}, {"late": np.max})["late"])
        if late:
            waited = time.perf_counter() - begun
            self._failures += 1
            self._last_error = f"the one before is still being written after {waited:.0f} s"
            self._report_failure(step, self._last_error)
        self._raise_if_too_many_failures()
        return not late

    def save(
        self, step: int, snapshot: DeviceParts, meta: dict[str, Any], locations: Locations
    ) -> None:
        """Begins to write a checkpoint of arrays that do not change any more, which lie as `locations`
        says; call `wait_for_room` before."""
        self._finish_save(None)
        if self._writers is None or self._writers[0] != locations:
            self._writers = locations, locations.writers()
        processes = jax.process_count()
        meta = {**meta, "processes": processes, "run": folders.run_of(self.root)}
        # The training was held up since it asked whether a save can begin.
        waited = time.perf_counter() - self._asked_at if self._asked_at else 0.0
        self._asked_at = 0.0
        self._pending = self._thread.submit(
            self._save, step, snapshot, self._writers[1], meta, time.time(), waited
        )

    def save_now(
        self, step: int, snapshot: DeviceParts, meta: dict[str, Any], locations: Locations
    ) -> None:
        """Writes the last checkpoint, with several attempts; StorageError if none succeeds."""
        self.wait_for_save()
        for attempt in range(self.keys.max_failures):
            if attempt:
                time.sleep(RETRY_SECONDS)
            self.save(step, snapshot, meta, locations)
            self.wait_for_save()
            if not self._failures:
                return
        self._raise_if_too_many_failures()

    def wait(self) -> None:
        """Waits until writing, and copying to the durable place, have ended."""
        self.wait_for_save()
        if self.durable:
            self.durable.wait()

    def wait_for_save(self) -> None:
        """Waits for the save in flight, and says so if that takes long."""
        begun = time.perf_counter()
        while not self._finish_save(max(self.keys.max_wait, 1.0)):
            self._say(
                f"the last save is still being written, since {time.perf_counter() - begun:.0f} s"
            )

    def wait_for_saved_steps(self) -> list[int]:
        """Waits for the save in flight; returns the steps of the checkpoints here."""
        self.wait_for_save()
        return self.steps()

    def close(self, retry_copies: bool = True) -> list[int]:
        """Finishes writing and copying; returns the steps that lack a durable copy."""
        self.wait_for_save()
        self._thread.shutdown()
        return self.durable.close(retry_copies) if self.durable else []

    def figures(self) -> dict[str, float]:
        """Seconds of each stage of the last save that ended, once, for the metrics."""
        seconds, self._stage_seconds = self._stage_seconds, {}
        return {f"checkpoint/{name}_seconds": value for name, value in seconds.items()}

    def _finish_save(self, timeout: float | None) -> bool:
        """Waits for the save in flight and counts how it ended; False if it has not within the
        timeout."""
        if self._pending is None:
            return True
        try:
            error = self._pending.result(timeout)
        except concurrent.futures.TimeoutError:
            return False
        self._pending = None
        self._failures = self._failures + 1 if error else 0
        self._last_error = error or ""
        return True

    def _raise_if_too_many_failures(self) -> None:
        if self._failures >= self.keys.max_failures:
            raise StorageError(
                f"{self._failures} saves failed in a row, the last with: {self._last_error}."
                f" {self._newest_line()}; mend the storage and start the same command again, or"
                " raise config.checkpoint.max_failures"
            )

    def _report_failure(self, step: int, error: str) -> None:
        self._say(
            f"warning: step {step} is NOT saved: {error}. {self._newest_line()}; training goes on "
            f"(at most {self.keys.max_failures} failures in a row)"
        )

    def _newest_line(self) -> str:
        steps = self.steps()
        if not steps:
            return "No checkpoint is complete yet"
        return f"The newest complete checkpoint is step {steps[-1]}'s"

    def _save(
        self,
        step: int,
        snapshot: DeviceParts,
        writers: Writers,
        meta: dict[str, Any],
        begun: float,
        waited: float,
    ) -> str | None:
        """Returns an error, if any; runs in a thread, in all processes together."""
        timer = writing.StageTimer()
        written_at = 0.0
        folder = self.root / f"{folders.SAVING}{step}"

        def write() -> list:
            with timer.stage("copy"):
                # a list, since devices as keys are no pytree; arrays on the host are ready
                jax.block_until_ready([[*parts.values()] for parts in snapshot.values()])
            folder.mkdir(parents=True, exist_ok=True)
            sums = writing.write_share(folder, writers, snapshot, meta, timer)
            nonlocal written_at
            written_at = time.perf_counter()  # from here on "commit", which waits for all others
            return [sums, timer.seconds(), writers.bytes.get(jax.process_index(), 0)]

        def commit(results: list) -> None:
            sums = {name: entry for of_one, _, _ in results for name, entry in of_one.items()}
            run = folders.run_of(self.root) or None
            folders.commit(folder, self.root / str(step), Seal(sums, step, run))
            seconds = {"commit": time.perf_counter() - written_at}
            parts = [(stages | seconds, size) for _, stages, size in results]
            timings.record(self.root.parent, "save", step, begun, parts)

        error = writing.run_in_all_then_zero("save", write, commit, folder)
        if error:
            self._report_failure(step, error)
            return error
        if multihost.is_writer():
            # Before the new step is copied: after that the copies of deleted steps are deleted.
            try:
                self._delete_old()
            except Exception as failure:  # the step is saved, whatever becomes of older ones
                self._say(f"warning: older checkpoints are not deleted: {writing.reason(failure)}")
        commit_seconds = time.perf_counter() - written_at
        self._stage_seconds = {"held": waited, **timer.seconds(), "commit": commit_seconds}
        if self.durable:
            self.durable.enqueue([step])
        return None

    def _delete_old(self) -> None:
        """Deletes the steps that no rule keeps."""
        for step in retention.to_delete(retention.saved_in(self.root), self.keys):
            if self.durable:
                self.durable.delete_here(step)
            else:
                folders.remove(self.root, step)

    # #############################################################################################
    # Loading
    # ##############################################################################################

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints here, oldest first."""
        return folders.steps_in(self.root)

    def find_newest(self, decisions: Decisions = ()) -> int | None:
        """Makes the newest complete checkpoint (local or durable) available locally and returns its
        step, or None. All processes together.

        Checkpoints of a branch that the run's decisions have abandoned are set aside first. Damage
        is StorageError, or with on_corrupt = "previous" the damaged one is set aside for the one
        before. An error may have ended an earlier run of this process here while a save was under
        way. This save is waited for: its folder would be deleted as one that a kill left
        half-written.
        """
        if self.root in _begun:
            _begun[self.root].wait_for_save()
        _begun[self.root] = self
        copies = multihost.broadcast_from_zero("there", functools.partial(self._prepare, decisions))
        newest = self._newest_whole(copies)
        if self.durable:
            self.durable.enqueue_all()  # after the check: a damaged step is not copied
        return newest

    def _prepare(self, decisions: Decisions) -> list[int]:
        """Cleans workdir/checkpoints and the durable place; returns the complete steps of the
        latter. In process 0.

        All that can be refused is refused before any checkpoint is deleted or renamed. The steps
        here are therefore renamed last: the durable place may refuse this run, or not answer.
        """
        self._tidy()
        file = self.root.parent / retention.DECISIONS_FILE
        stale = retention.find_stale(Vault(self.root), decisions, file)
        copies = []
        if self.durable:
            # Without a step here any run's copies will do: the run takes the name of their place, too.
            run = folders.run_of(self.root) if self.steps() else ""
            local_steps = [step for step in self.steps() if step not in stale]
            copies = self.durable.find_steps(run, local_steps, decisions, file, self._check_meta)
        if stale:
            folders.rename_stale(self.root, stale, len(decisions))
            self._say(
                f"set aside as {self.root}/{folders.STALE}{len(decisions)}-*: step"
                f" {', '.join(map(str, stale))}, of a past that was given up"
            )
        return copies

    def _tidy(self) -> None:
        """Removes half-written folders, and gives the run its name."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            folders.remove_unfinished(self.root)
            if not folders.run_of(self.root):
                # A new run has no name yet. One that has lost it has it in its newest seal.
                run = ""
                if steps := self.steps():
                    with contextlib.suppress(StorageError):
                        run = Vault(self.root).read_seal(steps[-1]).run or ""
                folders.name_run(self.root, run)
        except OSError as error:
            raise StorageError(
                f"{self.root} cannot be used for checkpoints ({writing.reason(error)}); move the"
                " file there away"
            ) from None

    def _newest_whole(self, copies: list[int]) -> int | None:
        """The newest step that is whole, here or as a copy, which is fetched. Newer ones, which are
        damaged, are set aside, or end the start."""
        # A folder that has a step's name and no seal is a damaged one: it got its name with the
        # seal in it.
        local = multihost.broadcast_from_zero("here", lambda: folders.numbered(self.root))
        steps = sorted({*local, *copies}, reverse=True)
        for step in steps:
            why = self._damage(step) if step in local else f"step {step} is not here"
            if why and self.durable:
                error = self.durable.fetch(step, why)
                why = f"{why}; its copy: {error}" if error else self._damage(step)
            if not why:
                return step
            self._set_aside(step, why, is_oldest=step == steps[-1])
        return None

    def _damage(self, step: int) -> str:
        """What is wrong with a step here, "" if it is whole."""
        clock = time.perf_counter()
        damages = Vault(self.root).verify_together(step, "damages")
        self._verify_seconds = time.perf_counter() - clock
        if not damages:
            return ""
        return f"checkpoint {self.root / str(step)} is damaged: {'; '.join(damages[:3])}"

    def _set_aside(self, step: int, why: str, is_oldest: bool) -> None:
        """Renames a damaged step, so that the one before is next; StorageError if it is the oldest,
        or the config says stop."""
        if self.keys.on_corrupt == "stop" or is_oldest:
            way_out = "--config.checkpoint.on_corrupt=previous goes on from the one before"
            if is_oldest:
                way_out = "there is none before it: restore it, or give a new workdir"
            raise StorageError(
                f"{why}. `python -m experiments.checkpoint verify --workdir={self.root.parent}`"
                f" lists it all; {way_out}"
            )
        aside = multihost.broadcast_from_zero(
            "aside", lambda: str(folders.rename_damaged(self.root, step) or "nothing")
        )
        self._say(f"WARNING: {why}; going on from the one before, and keeping {aside}")

    def restore(
        self, step: int, like: Any, locations: Locations, put_on_devices: Callable[[Any], Any]
    ) -> Any:
        """The state of a step: `put_on_devices` of its arrays, laid out as `like`
        (ShapeDtypeStructs with shardings) and `locations` say."""
        began, clock = time.time(), time.perf_counter()
        source = SealedSource(self.root / str(step))
        arrays = jax.block_until_ready(source.restore(like, locations, exact=True))
        stages = {"verify": self._verify_seconds, "read": time.perf_counter() - clock}
        size = sum(
            shard.data.nbytes for x in jax.tree.leaves(arrays) for shard in x.addressable_shards
        )
        clock = time.perf_counter()
        state = jax.block_until_ready(put_on_devices(arrays))
        stages["place"] = time.perf_counter() - clock
        parts = multihost.gather_to_zero("loaded", [stages, size])
        if parts is not None:
            timings.record(self.root.parent, "load", step, began, parts)
        return state

    def advice_on_return(self) -> str:
        """The newest checkpoint of a sound step, and how a run begins with it; for one that has
        gone wrong."""
        sound = [saved.step for saved in retention.saved_in(self.root) if saved.sound]
        if not sound:
            return "No checkpoint is from before"
        return (
            f"The newest checkpoint from before is step {sound[-1]}'s: a run in a new workdir"
            f" begins with its weights by --config.run.init_from={self.root.parent}@{sound[-1]}"
        )
