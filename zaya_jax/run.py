"""A training run, from a config to a report; read it from top to bottom.

`begin` finds out how the run begins; a `Loop` trains from there to one of its ends. After a loss
spike it may go back: `Loop.run` then returns None, and `train` begins again from an earlier
checkpoint, or without one from the beginning.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zaya_jax import cli
from zaya_jax import config as config_lib
from zaya_jax.checkpoint.run import retention
from zaya_jax.checkpoint.run.store import Store
from zaya_jax.checkpoint.source import SealedSource, read_meta
from zaya_jax.cluster import leaving, multihost
from zaya_jax.config import Config
from zaya_jax.data import pipeline
from zaya_jax.guard import decisions, first_step
from zaya_jax.guard.guard import Guard
from zaya_jax.guard.replay import Replay
from zaya_jax.hardware import host
from zaya_jax.pytorch.any_model import open_weights, with_base
from zaya_jax.report import write_report
from zaya_jax.schedule import Step
from zaya_jax.training import fork, kernels, logs, notes, snapshot, start
from zaya_jax.training import step as steps
from zaya_jax.training.evaluation import Evaluation
from zaya_jax.training.figures import Figures, final_code
from zaya_jax.training.observers import EndRun, Observer
from zaya_jax.training.pace import Pace
from zaya_jax.training.profile import Profile
from zaya_jax.training.sample import write_sample
from zaya_jax.training.trackers import Function, Trackers
from zaya_jax.training.workdir import CleanupIfRefused, check_same, open_workdir, record_start
from zaya_jax.version import __version__

UNHEALTHY_AFTER = 50  # steps in a row without a sound update (`retention.sound`)


def train(
    config: Config,
    folder: Path,
    faults: Any = None,
    tracker: Function | None = None,
    observers: Sequence[Observer] = (),
) -> int:
    """Trains a run from its beginning or from where it stopped; returns the exit code.

    Once the loop has begun, every end but going back writes the last figures to metrics.jsonl.
    `tracker` is called with each step and its figures, `observers` with the state too, after every
    so many steps. `faults` are for tests: `tools.faults.Faults`.
    """
    host.require_x32()
    host.keep_compiled()
    stop, code = None, None
    while code is None:  # the first time, and after each time that the run went back behind a spike
        with contextlib.ExitStack() as at_end:
            begun = begin(config, folder, at_end)
            if begun.planned.reached == begun.planned.recipe.last_step:
                return already_complete(begun)
            loop = Loop(begun, faults, tracker, observers)
            stop = stop or multihost.StopSignal()  # from here on a first signal saves, then stops
            at_end.push(loop.failed)
            at_end.callback(loop.profile.stop)
            at_end.callback(loop.stream.close)
            code = loop.run(stop)
            loop.trackers.end(cli.PREEMPTED if code is None else code)
    return code


# ################################################################################################
# How it begins
# ##################################################################################################


@dataclasses.dataclass(frozen=True)
class Beginning:
    """How a run begins."""

    way: start.Way
    planned: start.PlannedStart  # after step `planned.reached`; `planned.state` holds only shapes
    parent: fork.Parent | None  # of a fork
    meta: dict[str, Any]  # of the checkpoint that it resumes or forks from; otherwise empty
    decided: list[decisions.Decision]  # its earlier rollbacks
    kernels: dict[str, Any] | None  # `kernels.look_up`
    workdir: Path
    cleanup: CleanupIfRefused
    store: Store


def begin(config: Config, folder: Path, at_end: contextlib.ExitStack) -> Beginning:
    """Opens the folder, finds out how the run begins, and checks all that can be checked before
    anything is compiled.

    A newly created folder is removed if a check fails.

    The first of these that applies:
    1. resumed: from its own newest checkpoint, on this machine's disks or in the durable store;
    2. imported: with the weights that `experiments.checkpoint from_hf` or `model.save` has put
       there as step 0;
    3. forked: with the state and data position of `run.fork` at `run.fork_step`, continued as a
       separate run;
    4. initial weights: those of `run.init_from`, with a fresh optimizer;
    5. fresh.
    If the run has gone back before, the checkpoints that it abandoned are set aside before the
    newest is looked for;
    last, the batches that it leaves out are taken out of the stream.
    """
    recipe, tokenizer = start.plan_run(config, folder)
    found = kernels.look_up(recipe.config, jax.devices()[0], together=True)
    config = recipe.config  # with the keys that a fork and a tokenizer fill in
    folder, cleanup, store, decided = _open(folder, config, at_end)
    way: start.Way = "fresh"
    # here or in the durable place, verified; all processes together
    newest = store.find_newest(decided)
    reached, parent, meta = 0, None, dict[str, Any]()
    if newest:
        way, reached, meta = "resumed", newest, read_meta(folder, newest)
    elif newest == 0:
        way = "imported"
    elif config.run.fork:
        parent = fork.Parent(config, tokenizer)
        way, reached, meta = "forked", config.run.fork_step, parent.meta
    elif config.run.init_from:
        way = "initial weights"
    planned = start.plan_start(reached, recipe, tokenizer)
    if parent:
        planned.notes.append(parent.note(recipe.plan))
    if 0 < reached < recipe.last_step:
        # The checkpoint's config, since a start that never saved may have written config.json. A
        # fork's is its own.
        planned.notes.append(check_same(config_lib.check(meta["config"]), config, folder, reached))
        planned.notes.append(planned.stream.set_state(meta["data"]))
    planned.notes.extend(kernels.notes(meta, found, reached))
    decided = decisions.merge(decided, meta.get("decisions", []), folder)
    if decided:
        planned.stream.skip_batches(decisions.skipped_batches(decided))
    return Beginning(way, planned, parent, meta, decided, found, folder, cleanup, store)


def _open(folder: Path, config: Config, at_end: contextlib.ExitStack) -> tuple:
    """(folder, cleanup of a refused start, checkpoints, the run's decisions); locked until this
    start ends."""
    cleanup = CleanupIfRefused(folder)
    folder = open_workdir(folder, config, cleanup.locked)
    at_end.push(cleanup)
    decided = multihost.broadcast_from_zero("decisions", functools.partial(decisions.read, folder))
    accept = lambda m: check_same(config_lib.check(m.get("config")), config, folder, m["step"])  # noqa: E731
    store = Store(folder, config.checkpoint, logs.say, accept)
    return folder, cleanup, store, decided


def already_complete(begun: Beginning) -> int:
    """Handles a start after the last step: writes a missing report or durable copy, and says so."""
    recipe = begun.planned.recipe
    figures, updates = begun.meta.get("metrics") or {}, begun.planned.reached - recipe.plan.begin
    code = final_code(figures, begun.meta.get("unsound", 0), updates)
    # it returns the steps without a durable copy
    code = cli.STORAGE if begun.store.close() else code
    if multihost.is_writer():
        logs.say(notes.complete(recipe, begun.workdir, write_report(begun.workdir)))
    return code


# ################################################################################################
# The loop
# ##################################################################################################


class Loop:
    """The steps of one start. Each is dispatched before the figures of the last one are read: no
    accelerator waits."""

    def __init__(
        self,
        begun: Beginning,
        faults: Any = None,
        tracker: Function | None = None,
        observers: Sequence[Observer] = (),
    ):
        self.begun, self.planned = begun, begun.planned
        self.faults, self.observers = faults, observers
        self.config, self.plan = self.planned.recipe.config, self.planned.recipe.plan
        self.store, self.workdir = begun.store, begun.workdir
        self.mesh, self.stream = self.planned.phase.mesh, self.planned.stream
        self.program = functools.cache(self._program)
        self.kept: dict[str, float] = {}  # the figures of the last save
        self.ended = ""  # an observer's reason to end the run
        # First of all: an agent that watches this process counts its silence from here.
        self.pace = Pace(jax.devices()[0])
        self.evaluation = Evaluation(self.planned, self.pace)
        self._first_state()
        self._say_how_it_starts()
        self._first_figures(tracker)

    def _first_state(self) -> None:
        """Records the start, then makes the state; from here on the stream sends batches."""
        begun, planned = self.begun, self.planned
        lineage = begun.meta.get("lineage", [])
        record_start(self.workdir, self.config, planned.tokenizer, lineage)
        if begun.decided and multihost.is_writer():
            decisions.write(self.workdir, begun.decided)
        # Other processes read what process 0 has just written.
        multihost.barrier("set-up")
        # `copies.take` makes the copy from which a checkpoint is written; `copies.held` says where
        # its arrays lie in that.
        self.copies = snapshot.Copies(planned.setup.optimizer, planned.state, logs.say)
        # `named`: for each checkpoint's metadata, the base of a low-rank run; otherwise empty.
        self.state, self.named = start.first_state(
            begun.way, planned, begun.parent, begun.meta, self.store, self.copies, open_weights
        )
        # After the state, whose making needs more memory than a step.
        self.stream.send_with(self._put)

    def _say_how_it_starts(self) -> None:
        """Makes the last checks that can refuse the run, and says how it starts."""
        planned = self.planned
        # Unreadable held-out text is an error now, not at the first evaluation.
        self.evaluation.windows(self.plan.step(planned.reached + 1).phase)
        # Nothing is said, and a new folder is not kept, before all processes have come so far.
        multihost.barrier("the first step")
        said = planned.notes + self.evaluation.notes
        notes.describe_start(planned.recipe, planned.phase, self.workdir, planned.reached, said)
        self.begun.cleanup.keep()

    def _first_figures(self, tracker: Function | None) -> None:
        """What goes on from the checkpoint: files are cut to its step, counts continue."""
        begun, reached = self.begun, self.planned.reached
        counts = {} if begun.parent else begun.meta  # a fork starts its own
        self.guard = Guard(self.config.guard, self.workdir, begun.decided, counts, reached)
        # A run that ended as unhealthy resumes with its count one below the limit: one more bad
        # step ends it.
        unsound = min(counts.get("unsound", 0), UNHEALTHY_AFTER - 1)
        self.profile = Profile(self.config.log.profile, self.workdir)
        self.trackers = Trackers(self.config, self.workdir, reached, tracker)
        self.figures = Figures(begun, unsound, self.pace, self.guard, self.trackers)
        self.timer = multihost.Timer(60 * self.config.checkpoint.every_minutes)

    def run(self, stop: multihost.StopSignal) -> int | None:
        """Trains to an end; its exit code, or None where the run goes back and begins again."""
        self.stop = stop
        if fault := self.try_step():
            return self._end(self.planned.reached, cli.HARDWARE, fault)
        self.before_the_first_step()
        for number in range(self.planned.reached + 1, self.planned.end + 1):
            now = self.plan.step(number)
            if self.faults:
                self.faults.before_step(number)
            with self.pace.outside_a_step():
                self.profile.before_step(number, self.state)
            with jax.profiler.StepTraceAnnotation("step", step_num=number):
                batch = self.step(now)
            multihost.collect_garbage(number)
            stopping = stop.after(number)
            owed = self.measure_and_save(now, stopping)
            if wrong := self.compute_again(now, batch):
                return self.wrong_device(wrong)
            self.pace.lap()
            if self.guard.spike:  # normally of the step before
                return self.go_back(number)
            # Before a signal, after which the same command would go on; the last step ends by itself.
            if self.ended and number < self.planned.recipe.last_step:
                return self._end(
                    number, cli.DONE, f"{self.ended}: ends after step {number}; saved", again=True
                )
            if stopping:
                return self.stopped(number, owed)
            if self.figures.unsound >= UNHEALTHY_AFTER:
                return self.unhealthy(number)
        return (
            self.done() if self.planned.end == self.planned.recipe.last_step else self.at_border()
        )

    def try_step(self) -> str:
        """Tries the step of a small model where this machine has not seen it right; a line if it is
        wrong."""
        placed = self.planned.phase
        # With several micro-batches gradients are added up, another program than with one.
        micro_batches = max(segment.micro_batches for segment in placed.segments)
        with self.pace.outside_a_step():
            self.pace.begin("evaluate", self.planned.reached, ("a small step",))
            return first_step.fault(placed.config, self.mesh, micro_batches, logs.say)

    def before_the_first_step(self) -> None:
        """A fork's first save, an evaluation that the last start postponed, or given weights' loss
        before training."""
        begun, reached = self.begun, self.planned.reached
        if begun.parent:  # from here on it is a run of its own
            self.save(reached, begun.meta["tokens"], begun.meta["metrics"], last=False)
        elif begun.meta.get("evaluation_owed"):
            self.evaluation.make_up(self.state, reached, self.figures.writer)
        elif begun.way in ("imported", "initial weights"):
            self.evaluation.before_training(self.state, self.figures.writer)
        self.pace.start()

    def step(self, now: Step) -> Any:
        """Fetches a batch, dispatches the step, then reads the figures of the step before; gives
        the batch."""
        self.pace.begin("step", now.number, (now.phase_index, now.sequences))
        batch = next(self.stream)
        self.pace.dispatch()
        self.state, figures = self.program(now.phase_index)(self.state, batch, np.float32(now.lr))
        self.pace.at("step", now.number, "wait")
        self.figures.dispatched(now, figures)
        return batch

    def measure_and_save(self, now: Step, stopping: bool) -> bool:
        """Evaluates, calls observers, and saves, each if due; True if a stopping run leaves the
        evaluation to the next start."""
        number, last = now.number, now.number == self.planned.end or stopping
        due_save = self.timer.after(number) or number % self.config.checkpoint.every_steps == 0
        due_eval = number % self.config.eval.every == 0 or number == self.planned.recipe.last_step
        with self.pace.outside_a_step():  # a phase's held-out text is read when it is first due
            due_eval = due_eval and bool(self.evaluation.windows(now.phase))
        owed = due_eval and stopping and number < self.planned.end
        observers = [x for x in self.observers if number % x.every == 0]
        if not (due_eval or due_save or observers or last):
            return False
        self.pace.mark("wait")
        jax.block_until_ready(self.state)
        _, figures = self.figures.read()
        measured: dict[str, Any] = {}
        observed: dict[str, Any] = {}
        try:
            measured = multihost.reduce_figures(self.stream.metrics(), pipeline.OVER_PROCESSES)
            with self.pace.outside_a_step():
                if due_eval and not owed:
                    measured |= self.evaluation.losses(self.state, now)
                observed = self.observe(observers, number, figures | measured)
        finally:  # the step's own figures are written whatever fails
            self.figures.write(now, observed | figures | measured)
        # After a spike the run goes back.
        if (due_save or last or self.ended) and not self.guard.spike:
            judged = {name: float(figures[name]) for name in retention.FIGURES}
            self.kept = judged | measured | self.guard.checkpoint_figures()
            self.save(number, now.tokens_after, self.kept, bool(last or self.ended), owed)
        return owed

    def observe(self, observers: Sequence[Observer], number: int, figures: dict) -> dict:
        """Calls the observers; gives their figures, by which nothing here judges."""
        found: dict[str, Any] = {}
        for observer in observers:
            self.pace.begin("evaluate", number, id(observer))
            try:
                found |= observer.after_step(number, self.state, found | figures) or {}
            except EndRun as end:
                self.ended = str(end) or "no reason given"
        return found

    def save(self, number: int, tokens: int, figures: dict, last: bool, owed: bool = False) -> None:
        """Begins a save of the state, with all that a resumed run needs; only the last is waited
        for."""
        self.pace.at("save", number)
        self.figures.writer.flush()
        if not last and not self.store.wait_for_room(number):
            return
        meta = {
            "step": number,
            "tokens": tokens,
            "data": self.stream.get_state(),
            "config": config_lib.to_dict(self.config),
            "tokenizer": self.planned.tokenizer.sha256,
            "version": __version__,
            "metrics": figures,
            "lineage": self.begun.meta.get("lineage", []),
            "evaluation_owed": owed,
            "unsound": self.figures.unsound,
            **self.named,
            **self.guard.checkpoint_fields(),
            **kernels.meta(self.begun.kernels),
        }
        # Before the first step the devices do not show yet what memory a step needs.
        before_a_step = number == self.planned.reached
        take = self.copies.on_host if before_a_step else self.copies.take
        save = self.store.save_now if last else self.store.save
        save(number, take(self.state), meta, self.copies.held)

    def compute_again(self, now: Step, batch: Any) -> dict | None:
        """If due, computes gradients with the new weights repeatedly, on the same and on other
        devices, and compares.

        Returns the decision to go back if a device is wrong.
        """
        if not self.guard.take_replay_request(now.number):
            return None
        with self.pace.outside_a_step():
            self.pace.begin("evaluate", now.number, (now.phase_index, now.sequences, "again"))
            params, bias, frozen = (
                self.state["params"],
                self.state["balance"].bias,
                self.state.get("frozen"),
            )
            finding = self.program(now.phase_index, again=True)(params, bias, batch, frozen)
            return self.guard.record_replay(
                now.number, finding, self.mesh, self.saved_steps, self.plan.begin
            )

    def saved_steps(self) -> list[int]:
        """The checkpoints here, once the save in flight has ended."""
        self.store.wait_for_save()
        return self.store.steps()

    def _put(self, batch: dict, number: int) -> Any:
        """Puts a step's batch on the devices; called ahead of the step, in a thread."""
        if number > self.planned.end:  # read ahead beyond this mesh's last step, and never used
            return batch
        if self.faults:
            batch = self.faults.batch(batch, number, decisions.skipped_batches(self.begun.decided))
        micro_batches = self.plan.step(number).micro_batches
        return steps.put_batch(self.mesh, batch, micro_batches, self.planned.setup.spread)

    def _program(self, phase_index: int, again: bool = False) -> Any:
        """A phase's training step, or the check that computes gradients repeatedly."""
        own = self.planned.recipe.phases[phase_index].config
        hook = self.faults and self.faults.gradients(self.mesh, again)
        if again:
            return Replay(own, self.planned.setup, hook)
        logs.say("compiling the training step; the next start on this machine finds it compiled")
        return steps.make_train_step(own, self.planned.setup, hook)

    # Its ends

    def done(self) -> int:
        """All steps are trained and saved: writes a sample and the report."""
        last = self.planned.end
        self.pace.at("end", last)
        self.figures.close()
        code = final_code(self.kept, self.figures.unsound, last - self.plan.begin)
        # it returns the steps without a durable copy
        code = cli.STORAGE if self.store.close() else code
        self.state = None  # frees its memory for the sample
        if multihost.is_writer():
            phase_config = self.planned.recipe.phase_of_step(last).config
            try:
                weights = with_base(SealedSource(self.workdir, last))
                write_sample(self.workdir, phase_config, self.planned.tokenizer, weights)
            except Exception as error:  # as where the device has no room for it: the run is whole
                logs.say(f"warning: no sample ({config_lib.first_line(error)})")
            write_report(self.workdir)
        logs.say(
            notes.done(last, self.plan.tokens_of_step(last), self.figures.unsound, self.workdir)
        )
        return code

    def at_border(self) -> int:
        """The next phase has another mesh, which needs a new start."""
        end = self.planned.end
        return self._end(end, cli.PREEMPTED, notes.border(self.planned.recipe, end), again=True)

    def stopped(self, number: int, owed: bool) -> int:
        """A signal came, and the step is saved."""
        more = f", first with the evaluation of step {number}" if owed else ""
        line = (
            f"stopped by {self.stop.asked} after step {number}; saved. The same command"
            f" continues{more}."
        )
        return self._end(number, cli.PREEMPTED, line)

    def unhealthy(self, number: int) -> int:
        """Too many steps in a row had no sound update."""
        what, path = notes.without_effect(self.figures.unsound), self.figures.writer.path
        line = f"error: {what}; see loss and grad_norm in {path}."
        return self._end(number, cli.UNHEALTHY, line, again=True, way_back=True)

    def wrong_device(self, wrong: dict) -> int:
        """A device computes wrongly: the agent, or the person who started this run, can leave it
        out."""
        line = (
            f"error: {wrong['seen']}. Exclude it and repeat the command: it continues from step"
            f" {wrong['step']}"
        )
        return self._end(wrong["at"], cli.HARDWARE, line)

    def go_back(self, number: int) -> int | None:
        """After a spike: records the step to go back to. None to begin again there; a code if the
        run ends.

        After a signal that code is 75, and nothing is saved: the next start goes back.
        """
        self.pace.at("end", number)
        decision = self.guard.go_back(self.saved_steps(), self.plan.begin)
        if decision is None:
            times = f"config.guard.rollbacks={self.config.guard.rollbacks} times"
            line = f"error: {self.guard.spike}; the run went back {times}, so it ends."
            return self._end(number, cli.UNHEALTHY, line, way_back=True)
        self.store.close(retry_copies=False)
        batches = f"the {decision['batches']} batches since"
        logs.say(
            f"{self.guard.spike}: back to step {decision['step']}, continuing without {batches}"
        )
        self.state = None  # frees its memory for the next state
        self.figures.drop()
        return cli.PREEMPTED if self.stop.anywhere() else None

    def failed(self, kind: type | None, *_: object) -> None:
        """The callback of an ExitStack: an error ends the run. A disk that hangs must not delay the
        message."""
        if kind:
            leaving.within(leaving.PATIENCE, self._wind_up)
            self.trackers.end()

    def _end(
        self, number: int, code: int, line: str, again: bool = False, way_back: bool = False
    ) -> int:
        """Ends after a step with this last line; `again`: tries failed durable copies once more.

        A failed copy is no error where a next start tries it again.
        """
        self.pace.at("end", number)
        if self.store.close(retry_copies=again) and code == cli.DONE:
            code = cli.STORAGE
        self._wind_up()
        logs.say(f"{line} {self.store.advice_on_return()}" if way_back else line)
        return code

    def _wind_up(self) -> None:
        """Writes the last figures and a report, at every end but `done` and going back."""
        self.figures.close()
        # after it every second counts
        if multihost.is_writer() and "SIGTERM" not in self.stop.asked:
            with contextlib.suppress(Exception):
                write_report(self.workdir)
