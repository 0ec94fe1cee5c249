"""Saves a run's checkpoints during training and restores them on any mesh; each is complete or
absent.

    store = Store(workdir, config.checkpoint, say)
    step = store.bring_newest()                             the newest complete one, verified; None without one
    state, meta = store.restore(step, abstract_state)
    store.save(step, snapshot, meta)                        begins, and returns; the training goes on
    store.save_now(step, snapshot, meta)                    the last one: returns when it is there

The arrays lie in Orbax's layout (`layout`), written (`writing`) and read (`source`) by this
package, each process the parts of its own devices (`boxes`). A save goes: copy (the caller's
snapshot), serialise and write (by threads), commit (process 0, when all have finished). A failure
is reported and counted, and the run continues; nothing is deleted before a newer checkpoint is
complete.
"""

import concurrent.futures
import contextlib
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zaya_jax.checkpoint import boxes, layout, writing
from zaya_jax.checkpoint.boxes import Holding, Writers
from zaya_jax.checkpoint.run import retention
from zaya_jax.checkpoint.run.durable import Accept, Durable
from zaya_jax.checkpoint.run.times import record
from zaya_jax.checkpoint.seal import Seal
from zaya_jax.checkpoint.source import Source
from zaya_jax.checkpoint.vault import Vault
from zaya_jax.checkpoint.writing import OnHost
from zaya_jax.cluster import multihost
from zaya_jax.config import Checkpoint, StorageError, files

State = dict[str, Any] | OnHost
RETRY_SECONDS = 5.0  # between attempts at the last save


class Store:
    """The checkpoints below `workdir/checkpoints`, and their copies in a safer place."""

    def __init__(
        self,
        workdir: str | os.PathLike,
        settings: Checkpoint | None = None,
        say: Callable[[str], None] = print,
        accept: Accept | None = None,
    ):
        """`accept` raises UserError for the meta of another run, which a new workdir must not
        adopt."""
        self.root = Path(workdir).absolute() / "checkpoints"
        self.settings = settings or Checkpoint()
        self._say = say if multihost.is_writer() else lambda _: None
        self._accept = accept
        self.durable = (
            Durable(self.root, self.settings, self._say) if self.settings.durable else None
        )
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "save")
        self._pending: concurrent.futures.Future | None = None
        self._failures, self._seconds, self._last_error = 0, dict[str, float](), ""
        self._verify_seconds, self._asked = 0.0, 0.0
        self._plan: tuple[Holding, Writers] | None = None

    # #############################################################################################
    # Saving
    # ##############################################################################################

    def wait_for_room(self, step: int) -> bool:
        """Whether a save can begin: waits a while for the one before. The same answer in every
        process.

        StorageError when too many saves have failed in a row.
        """
        self._asked = begun = time.perf_counter()
        late = not self._collect(self.settings.max_wait)
        late = bool(multihost.reduce_figures({"late": float(late)}, {"late": np.max})["late"])
        if late:
            self._failures += 1
            self._complain(
                step,
                f"the one before is still being written after {time.perf_counter() - begun:.0f} s",
            )
        self._stop_after_too_many()
        return not late

    def save(
        self, step: int, state: State, meta: dict[str, Any], held: Holding | None = None
    ) -> None:
        """Begins to write a checkpoint of arrays that do not change any more; call `wait_for_room`
        before.

        `held` says where they lie, if they are not the checkpoint's own. Copies on the host need
        it.
        """
        self._collect(None)
        if held is None:
            state = jax.tree.map(jnp.asarray, state)
            held = boxes.of_tree(state)
        if self._plan is None or self._plan[0] != held:
            self._plan = held, held.plan()
        plan, processes = self._plan[1], jax.process_count()
        meta = {**meta, "processes": processes, "run": writing.run_of(self.root)}
        waited = time.perf_counter() - self._asked if self._asked else 0.0
        self._asked = 0.0
        self._pending = self._thread.submit(
            self._save, step, state, plan, meta, time.time(), waited
        )

    def save_now(
        self, step: int, state: State, meta: dict[str, Any], held: Holding | None = None
    ) -> None:
        """Writes the last checkpoint, with several attempts; StorageError if none succeeds."""
        self._see_through()
        for attempt in range(self.settings.max_failures):
            if attempt:
                time.sleep(RETRY_SECONDS)
            self.save(step, state, meta, held)
            self._see_through()
            if not self._failures:
                return
        self._stop_after_too_many()

    def wait(self, copies: bool = True) -> None:
        """Waits until writing, and copying to the durable place, have ended."""
        self._see_through()
        if copies and self.durable:
            self.durable.settle()

    def _see_through(self) -> None:
        """Waits for the save in flight, and says so where that takes long."""
        begun = time.perf_counter()
        while not self._collect(max(self.settings.max_wait, 1.0)):
            self._say(
                f"the last save is still being written, since {time.perf_counter() - begun:.0f} s"
            )

    def close(self, again: bool = True) -> list[int]:
        """Finishes writing and copying; returns the steps that lack a durable copy."""
        self.wait(copies=False)
        self._thread.shutdown()
        return self.durable.close(again) if self.durable else []

    def figures(self) -> dict[str, float]:
        """Seconds of each stage of the last save that ended, once, for the metrics."""
        figures, self._seconds = self._seconds, {}
        return {f"checkpoint/{name}_seconds": value for name, value in figures.items()}

    def _collect(self, seconds: float | None) -> bool:
        """Waits for the save in flight and counts how it ended; False if it has not within
        `seconds`."""
        if self._pending is None:
            return True
        try:
            error = self._pending.result(seconds)
        except concurrent.futures.TimeoutError:
            return False
        self._pending = None
        self._failures = self._failures + 1 if error else 0
        self._last_error = error or ""
        return True

    def _stop_after_too_many(self) -> None:
        if self._failures >= self.settings.max_failures:
            raise StorageError(
                f"{self._failures} saves failed in a row, the last with:"
                f" {self._last_error or 'it took too long'}. {self._newest_line()}; mend the"
                " storage and start the same command again, or raise"
                " config.checkpoint.max_failures"
            )

    def _complain(self, step: int, error: str) -> None:
        self._say(
            f"warning: step {step} is NOT saved: {error}. {self._newest_line()}; training goes on "
            f"(at most {self.settings.max_failures} failures in a row)"
        )

    def _newest_line(self) -> str:
        steps = self.steps()
        return (
            f"The newest complete checkpoint is step {steps[-1]}'s"
            if steps
            else "No checkpoint is complete yet"
        )

    def _save(
        self,
        step: int,
        state: State,
        plan: Writers,
        meta: dict[str, Any],
        begun: float,
        waited: float,
    ) -> str | None:
        """Returns an error, if any; runs in a thread, in all processes together.

        `waited`: seconds from asking whether a save can begin until the training went on.
        """
        me, times, written = jax.process_index(), writing.Times(), 0.0
        folder = self.root / f"{writing.SAVING}{step}"

        def work() -> list:
            with times.stage("copy"):
                jax.block_until_ready(state)  # arrays on the host are ready
            folder.mkdir(parents=True, exist_ok=True)
            sums = writing.write_parts(
                folder, plan, plan.parts.get(me, []), writing.copies_of(state), times
            )
            if me == 0:
                sums |= writing.write_files(folder, layout.frame(tuple(plan.arrays.values()), meta))
            nonlocal written
            written = time.perf_counter()
            return [sums, times.seconds(), plan.bytes.get(me, 0)]

        def end(parts: list) -> None:
            sums = {name: entry for part in parts for name, entry in part[0].items()}
            writing.commit(
                folder, self.root / str(step), Seal(sums, step, writing.run_of(self.root) or None)
            )
            self._delete_old()
            commit = {"commit": time.perf_counter() - written}
            record(
                self.root.parent,
                "save",
                step,
                begun,
                [(part[1] | commit, part[2]) for part in parts],
            )

        error = writing.together("save", work, end)
        if error:
            self._complain(step, error)
            if me == 0:
                shutil.rmtree(folder, ignore_errors=True)
            return error
        self._seconds = {"held": waited, **times.seconds(), "commit": time.perf_counter() - written}
        if self.durable:
            self.durable.owe([step])
        return None

    def _delete_old(self) -> None:
        """Deletes the steps that no rule keeps and that are not being copied; their copies go with
        the next."""
        for step in retention.to_delete(retention.saved_in(self.root), self.settings):
            if self.durable:
                if step == self.durable.copying:
                    continue
                self.durable.obsolete.append(step)
            with contextlib.suppress(OSError):
                writing.remove(self.root, step)

    def way_back(self) -> str:
        """The newest checkpoint of a sound step, and how a run begins with it; for one that has
        gone wrong."""
        sound = [saved.step for saved in retention.saved_in(self.root) if saved.sound]
        if not sound:
            return "No checkpoint is from before"
        return (
            f"The newest checkpoint from before is step {sound[-1]}'s: a run in a new workdir"
            f" begins with its weights by --config.run.init_from={self.root.parent}@{sound[-1]}"
        )

    # #############################################################################################
    # Loading
    # ##############################################################################################

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints here, oldest first."""
        return writing.steps_in(self.root)

    def drop_stale(self, decisions: Sequence[Mapping[str, Any]]) -> None:
        """Sets aside checkpoints of a past that these decisions abandoned. All processes
        together."""
        steps = retention.drop_stale(self.root, self.durable, decisions)
        if steps:
            there = f"{self.root}/{writing.STALE}{len(decisions)}-*"
            self._say(
                f"set aside as {there}: step {', '.join(map(str, steps))}, of a past that was"
                " given up"
            )

    def bring_newest(self) -> int | None:
        """Brings the newest checkpoint of either place here, complete; None if there is none. All
        processes together.

        A damaged one is StorageError, or with on_corrupt = "previous" is set aside for the one
        before.
        """
        multihost.broadcast_from_zero("tidy", self._tidy)
        if self.durable:
            self.durable.fetch_newest(self._accept)
        newest = self._newest_whole()
        if self.durable:
            self.durable.make_up()
        return newest

    def _tidy(self) -> None:
        """Removes half-written folders, and gives the run its name."""
        try:
            writing.clear(self.root)
            self.root.mkdir(parents=True, exist_ok=True)
            # of a new run, or lost: then its newest checkpoint has it
            if not writing.run_of(self.root):
                known = ""
                with contextlib.suppress(StorageError, ValueError):
                    known = Vault(self.root).seal(max(self.steps())).run or ""
                writing.begin_run(self.root, known)
        except OSError as error:
            raise StorageError(
                f"{self.root} cannot be used for checkpoints ({writing.reason(error)}); move the"
                " file there away"
            ) from None

    def _newest_whole(self) -> int | None:
        while True:
            # A folder that has a step's name and no marker is a damaged one: it got its name with
            # the marker in it.
            step = multihost.broadcast_from_zero(
                "newest", lambda: max(writing.numbered(self.root), default=None)
            )
            if step is None:
                return None
            clock = time.perf_counter()
            damages = Vault(self.root).verify_together("damages", step)
            self._verify_seconds = time.perf_counter() - clock
            if not damages:
                return step
            self._set_aside(step, damages)

    def _set_aside(self, step: int, damages: list[str]) -> None:
        """Puts a damaged step aside for the one before; StorageError where there is none, or the
        settings say stop."""
        found = f"checkpoint {self.root / str(step)} is damaged: {'; '.join(damages[:3])}"
        found += f" and {len(damages) - 3} more" if len(damages) > 3 else ""
        before = (
            multihost.broadcast_from_zero("before", lambda: min(writing.numbered(self.root))) < step
        )
        if self.settings.on_corrupt == "stop" or not before:
            way_out = "--config.checkpoint.on_corrupt=previous goes on from the one before"
            none = "there is none before it: restore it, or give a new workdir"
            raise StorageError(
                f"{found}. `python -m experiments.checkpoint verify --workdir={self.root.parent}`"
                f" lists it all; {way_out if before else none}"
            )
        where = multihost.broadcast_from_zero(
            "aside", lambda: str(writing.set_aside(self.root, step))
        )
        self._say(f"WARNING: {found}. Kept as {where}; going on from the one before")

    def restore(
        self,
        step: int,
        like: dict[str, Any],
        held: Holding | None = None,
        place: Callable[[Any], Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """(state, meta) of a step, laid out as `like` (ShapeDtypeStructs with shardings) says.

        `held` says where the checkpoint's arrays lie in it, if it is not a tree of them. `place` is
        applied to the state; its time is recorded as a stage of its own.
        """
        began, clock = time.time(), time.perf_counter()
        state = jax.block_until_ready(
            Source(self.root / str(step)).restore(like, held, everything=True)
        )
        stages = {"verify": self._verify_seconds, "read": time.perf_counter() - clock}
        size = sum(
            shard.data.nbytes for x in jax.tree.leaves(state) for shard in x.addressable_shards
        )
        if place is not None:
            clock = time.perf_counter()
            state = jax.block_until_ready(place(state))
            stages["place"] = time.perf_counter() - clock
            parts = multihost.gather_to_zero("loaded", [stages, size])
            if parts is not None:
                record(self.root.parent, "load", step, began, parts)
        return state, files.read_json(self.root / str(step) / layout.META)


def abstract_like(tree: Any, sharding: jax.sharding.Sharding) -> Any:
    """ShapeDtypeStructs of a tree, all with one sharding."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
