"""A training run, from a config to a report; read it from top to bottom.

    train                           repeats the following until there is an exit code
      open_run                      opens the folder, finds out how the run starts, checks everything
      prepare                       records the start, makes the state, says how the run starts
      Loop.run                      per step: train_step, measure_and_save, replay, then perhaps an end
        done, stopped, unhealthy, wrong_device                    ends with an exit code
        go_back                                                   after a loss spike: None, start over

After going back, the run starts over from an earlier checkpoint, or without one from its beginning.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
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
from zaya_jax.model import own_parts
from zaya_jax.pytorch.any_model import open_weights, with_base
from zaya_jax.report import write_report
from zaya_jax.schedule import Step
from zaya_jax.training import fork, kernels, logs, notes, snapshot, start
from zaya_jax.training import step as steps
from zaya_jax.training.evaluation import Evaluation
from zaya_jax.training.figures import Figures, final_code
from zaya_jax.training.observers import Observer, Observers
from zaya_jax.training.pace import Pace
from zaya_jax.training.profile import Profile
from zaya_jax.training.sample import write_sample
from zaya_jax.training.trackers import Function, Trackers
from zaya_jax.training.workdir import TakenFolder, check_same, open_workdir, record_start
from zaya_jax.version import __version__

UNHEALTHY_AFTER = 50  # steps in a row without a sound update (`retention.is_sound`)


def train(
    config: Config,
    folder: Path,
    faults: Any = None,
    tracker: Function | None = None,
    observers: Sequence[Observer] = (),
) -> int:
    """Trains a run from its beginning or from where it stopped; returns the exit code.

    Once the loop has begun, every end but going back writes the last figures to metrics.jsonl.
    `tracker` is called with each step and its figures; each of `observers` after every `every`
    steps, with the state too. `faults` are for tests: `tools.faults.Faults`.
    """
    host.require_x32()
    host.keep_compiled()
    stop, code = None, None
    while code is None:  # the first time, and each time that the run went back
        # Callbacks run in reverse: the profile, the loop, its stream, and at last the folder's lock.
        with contextlib.ExitStack() as at_end:
            opened = open_run(config, folder, at_end)
            if opened.planned.reached == opened.planned.recipe.last_step:
                return already_complete(opened)
            loop = prepare(opened, faults, tracker, observers)
            # Until here a signal ends the process at once, since there is nothing to save; from here
            # on the loop saves, then stops. Made once: a signal before a rollback still counts.
            stop = stop or multihost.StopSignal()
            # Within PATIENCE, since a reader may wait for a disk that hangs.
            at_end.callback(leaving.within, leaving.PATIENCE, loop.stream.close)
            at_end.push(loop.on_exit)
            at_end.callback(loop.profile.stop)
            code = loop.run(stop)
            # After going back the next loop continues the trackers' runs.
            loop.trackers.end(cli.PREEMPTED if code is None else code)
    return code


# ################################################################################################
# How it starts
# ##################################################################################################


@dataclasses.dataclass(frozen=True)
class OpenedRun:
    """A run whose folder is open and locked, and how it starts."""

    kind: start.StartKind
    planned: start.PlannedStart  # after step `planned.reached`
    parent: fork.Parent | None  # of a fork
    meta: dict[str, Any]  # of the checkpoint that it resumes or forks from; otherwise empty
    decided: list[decisions.Decision]  # its earlier rollbacks
    tiles: kernels.Tiles
    workdir: Path
    taken_folder: TakenFolder
    store: Store


def open_run(config: Config, folder: Path, at_end: contextlib.ExitStack) -> OpenedRun:
    """Opens the folder, finds out how the run starts, and checks everything that can be checked
    before anything is compiled.

    A newly created folder is removed if a check fails.

    The first of these that applies:
    1. resumed: from its own newest checkpoint, on this machine's disks or in the durable store;
    2. imported: with the weights that `experiments.checkpoint from_hf` or `model.save` has put
       there as step 0;
    3. forked: with the state and data position of `run.fork` at `run.fork_step`, continued as a
       separate run;
    4. initial weights: those of `run.init_from`, with a fresh optimizer;
    5. fresh.
    If the run has gone back before, abandoned checkpoints are set aside first, and skipped batches
    are removed from the stream at the end.
    """
    recipe, tokenizer = start.load_recipe(config, folder)
    config = recipe.config  # with the keys that a fork and a tokenizer fill in
    # Before anything is compiled, and by all processes together.
    tiles = kernels.choose_tiles(config, jax.devices()[0], collective=True)
    taken_folder = TakenFolder(folder)
    folder = open_workdir(folder, config, taken_folder.note_if_new)
    at_end.push(taken_folder)  # only now: a folder that another run has locked must stay
    decided = multihost.broadcast_from_zero("decisions", functools.partial(decisions.read, folder))

    def accept(saved: dict[str, Any]) -> str:
        return check_same(config_lib.check(saved.get("config")), config, folder, saved["step"])

    store = Store(folder, config.checkpoint, logs.say, accept)
    # Here or in the durable place, verified; all processes together.
    newest = store.find_newest(decided)
    kind: start.StartKind = "fresh"
    reached, parent, meta = 0, None, dict[str, Any]()
    if newest is not None:
        saved, name = read_meta(folder, newest), f"{folder}@{newest}"
        own_parts.require_same_source(
            config.model, saved, name, config.run.changed_source, logs.say
        )
        if newest:
            kind, reached, meta = "resumed", newest, saved
        else:
            kind = "imported"
    elif config.run.fork:
        parent = fork.Parent(config, tokenizer)
        kind, reached, meta = "forked", config.run.fork_step, parent.meta
    elif config.run.init_from:
        kind = "initial weights"
    planned = start.plan_start(reached, recipe, tokenizer)
    if parent:
        planned.notes.append(parent.note(recipe.plan))
    if 0 < reached < recipe.last_step:  # a complete run is not trained on
        # The checkpoint's config, since a start that never saved may have written config.json. A
        # fork's is its own.
        planned.notes.append(check_same(config_lib.check(meta["config"]), config, folder, reached))
        planned.notes.append(planned.stream.set_state(meta["data"]))
    devices = planned.placed.mesh.size
    planned.notes.append(tiles.summary)
    planned.notes.append(notes.other_rounding(meta, devices, tiles.kernels, reached))
    decided = decisions.merge(decided, meta.get("decisions", []), folder)
    if decided:
        planned.stream.skip_batches(decisions.skipped_batches(decided))
    return OpenedRun(kind, planned, parent, meta, decided, tiles, folder, taken_folder, store)


def already_complete(opened: OpenedRun) -> int:
    """Handles a start after the last step: writes a missing tokenizer, report or durable copy, and
    says so."""
    recipe = opened.planned.recipe
    updates = opened.planned.reached - recipe.plan.steps_before
    figures = opened.meta.get("metrics") or {}
    code = final_code(figures, opened.meta.get("unsound", 0), updates)
    uncopied_steps = opened.store.close()
    if uncopied_steps:
        code = cli.STORAGE  # the next start copies again, and judges the run again
    if multihost.is_writer():
        # Missing if the run came from its durable place, where only checkpoints are.
        tokenizer, saved = opened.planned.tokenizer, opened.workdir / "tokenizer"
        if not saved.exists() and tokenizer.sha256 == opened.meta.get("tokenizer"):
            tokenizer.save(saved)
        logs.say(notes.complete_line(recipe, opened.workdir, write_report(opened.workdir)))
    return code


# ################################################################################################
# The loop
# ##################################################################################################


def prepare(
    opened: OpenedRun,
    faults: Any = None,
    tracker: Function | None = None,
    observers: Sequence[Observer] = (),
) -> "Loop":
    """Records the start, makes the state, and says how the run starts. A part that must come where
    it does says why."""
    planned, workdir, reached = opened.planned, opened.workdir, opened.planned.reached
    config, plan = planned.recipe.config, planned.recipe.plan
    pace = Pace(jax.devices()[0])
    evaluation = Evaluation(planned, pace)
    tasks = None
    if config.eval.tasks:
        from zaya_jax.evaluate.during_training import TaskScores  # imports the library

        tasks = TaskScores(planned, pace)
    record_start(workdir, config, planned.tokenizer, opened.meta.get("lineage", []))
    if opened.decided and multihost.is_writer():
        decisions.write(workdir, opened.decided)
    # Other processes read what process 0 has just written.
    multihost.barrier("set-up")
    snapshots = snapshot.Snapshots(planned.setup.optimizer, planned.abstract_state, logs.say)
    state, frozen_fields = start.first_state(
        opened.kind, planned, opened.parent, opened.meta, opened.store, snapshots, open_weights
    )
    # After the state, whose making needs more memory than a step.
    planned.stream.send_with(functools.partial(put_batch, opened, faults))
    # Unreadable held-out text is an error now, not at the first evaluation.
    evaluation.batches(plan.step(reached + 1).phase)
    # Until all processes have come so far nothing is said, and a new folder is not kept.
    multihost.barrier("the first step")
    all_notes = planned.notes + evaluation.notes
    notes.describe_start(planned.recipe, planned.placed, workdir, reached, all_notes)
    opened.taken_folder.run_began()
    # After the last check that can refuse the run, since it cuts files to the checkpoint's step.
    counts = {} if opened.parent else opened.meta  # a fork starts its own
    guard = Guard(config.guard, workdir, opened.decided, counts, reached, plan.steps_before)
    # A run that ended as unhealthy resumes with its count one below the limit: one more bad step
    # ends it.
    unsound = min(counts.get("unsound", 0), UNHEALTHY_AFTER - 1)
    trackers = Trackers(config, workdir, reached, tracker)
    return Loop(
        opened,
        faults,
        state,
        frozen_fields,
        snapshots,
        pace,
        evaluation,
        tasks,
        Observers(observers, pace),
        guard,
        trackers,
        Figures(opened, unsound, pace, guard, trackers),
        Profile(config.log.profile, workdir),
        multihost.Timer(60 * config.checkpoint.every_minutes),
    )


def put_batch(opened: OpenedRun, faults: Any, batch: dict, number: int) -> Any:
    """Puts a step's batch on the devices; called ahead of the step, in a thread."""
    planned = opened.planned
    if number > planned.last_step_here:  # read ahead, and never used
        return batch
    if faults:
        batch = faults.batch(batch, number, decisions.skipped_batches(opened.decided))
    step = planned.recipe.plan.step(number)
    return steps.put_batch(planned.placed.mesh, batch, step.micro_batches, planned.setup.spread)


@dataclasses.dataclass
class Loop:
    """The steps of one start. Each step is dispatched before the figures of the previous one are
    read: no accelerator waits."""

    opened: OpenedRun
    faults: Any  # for tests
    state: Any
    frozen_fields: dict[str, Any]  # how the metadata of saves names the frozen weights, if any
    snapshots: snapshot.Snapshots
    pace: Pace
    evaluation: Evaluation
    tasks: Any  # lm-eval's, or None
    observers: Observers
    guard: Guard
    trackers: Trackers
    figures: Figures
    profile: Profile
    timer: multihost.Timer
    stop: multihost.StopSignal = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.planned = self.opened.planned
        self.config, self.plan = self.planned.recipe.config, self.planned.recipe.plan
        self.store, self.workdir = self.opened.store, self.opened.workdir
        self.mesh, self.stream = self.planned.placed.mesh, self.planned.stream
        self.train_program = functools.cache(self._train_program)
        self.replay_program = functools.cache(self._replay_program)
        self.last_saved_figures: dict[str, float] = {}

    def run(self, stop: multihost.StopSignal) -> int | None:
        """Trains until an end. Returns the exit code, or None if the run goes back and must start
        over."""
        self.stop = stop
        if error := self.try_step():
            return self._end(self.planned.reached, cli.HARDWARE, error)
        self.before_the_first_step()
        self.pace.start()
        for number in range(self.planned.reached + 1, self.planned.last_step_here + 1):
            now = self.plan.step(number)
            if self.faults:
                self.faults.before_step(number)
            with self.pace.outside_a_step():
                self.profile.before_step(number, self.state)
            with jax.profiler.StepTraceAnnotation("step", step_num=number):
                batch = self.train_step(now)
            multihost.collect_garbage(number)
            stopping = stop.after(number)  # at each step: all processes agree on a later one
            self.measure_and_save(now, stopping)
            if wrong := self.replay(now, batch):
                return self.wrong_device(wrong)
            self.pace.lap()
            # Normally of the step before. Asked before all other ends: nothing is saved after a spike.
            if self.guard.spike:
                return self.go_back(number)
            # Checked before the stop signal, whose exit code makes a supervisor restart the run.
            # The last step ends by itself.
            if self.observers.end_reason and number < self.planned.recipe.last_step:
                line = f"{self.observers.end_reason}: ends after step {number}; saved"
                return self._end(number, cli.DONE, line, retry_copies=True)
            if stopping:
                return self.stopped(number)
            if self.figures.unsound >= UNHEALTHY_AFTER:
                return self.unhealthy(number)
        last = self.planned.last_step_here
        if last < self.planned.recipe.last_step:  # the next phase has another mesh
            line = notes.mesh_change_line(self.planned.recipe, last)
            return self._end(last, cli.PREEMPTED, line, retry_copies=True)
        return self.done()

    def try_step(self) -> str:
        """Tries the step of a small model, unless it was already right on this machine; returns an
        error line, or ""."""
        placed = self.planned.placed
        # With several micro-batches gradients are added up, another program than with one.
        micro_batches = max(segment.micro_batches for segment in placed.segments)
        with self.pace.outside_a_step():
            self.pace.begin("evaluate", self.planned.reached, ("a small step",))
            return first_step.try_step(placed.config, self.mesh, micro_batches, logs.say)

    def before_the_first_step(self) -> None:
        """Saves a fork, or evaluates given weights before they are trained."""
        meta = self.opened.meta
        if self.opened.parent:  # from here on it is a run of its own
            self.save(self.planned.reached, meta["tokens"], meta["metrics"], wait=False)
        elif self.opened.kind in ("imported", "initial weights"):
            now = dataclasses.replace(self.plan.step(1), number=0)
            measured: dict[str, float] = {}
            for evaluate in self.evaluations_due(now):
                measured |= evaluate(self.state, now)
            if "eval/loss" in measured:
                held_out = measured["eval/loss"]
                logs.say(f"step 0 | held-out {held_out:.4f}, before training")
            if measured:
                self.figures.write(0, measured)

    def train_step(self, now: Step) -> Any:
        """Fetches a batch, dispatches the step, then reads the figures of the step before.

        Returns the batch, with which a replay repeats the gradients.
        """
        self.pace.begin("step", now.number, (now.phase_index, now.sequences))
        batch = next(self.stream)
        self.pace.mark_dispatch()
        program = self.train_program(now.phase_index)
        self.state, figures = program(self.state, batch, np.float32(now.lr))
        self.pace.at("step", now.number, "wait")
        self.figures.take(now, figures)
        return batch

    def measure_and_save(self, now: Step, stopping: bool) -> None:
        """Evaluates, calls observers, and saves, each if due.

        A run that is stopping saves without an evaluation: its scheduler may kill it before that
        ends.
        """
        number = now.number
        ends_here = number == self.planned.last_step_here or stopping  # this start
        timer_due = self.timer.after(number)  # at each step: all processes agree on a later one
        due_save = timer_due or number % self.config.checkpoint.every_steps == 0
        evaluations = []
        if number == self.planned.last_step_here or not stopping:
            evaluations = self.evaluations_due(now)
        observers_due = self.observers.are_due(number)
        if not (evaluations or due_save or observers_due or ends_here):
            return
        self.pace.mark("wait")
        jax.block_until_ready(self.state)
        _, figures = self.figures.pop()
        measured: dict[str, Any] = {}
        observed: dict[str, Any] = {}
        try:
            measured = multihost.reduce_figures(self.stream.metrics(), pipeline.OVER_PROCESSES)
            with self.pace.outside_a_step():
                for evaluate in evaluations:
                    measured |= evaluate(self.state, now)
                observed = self.observers.figures(number, self.state, figures | measured)
        finally:  # the step's own figures are written whatever fails
            self.figures.record(now, observed | figures | measured)
        wait = ends_here or bool(self.observers.end_reason)
        # The step is judged by now. After a spike the run goes back, and saves nothing before.
        if (due_save or wait) and not self.guard.spike:
            judged = {name: float(figures[name]) for name in retention.FIGURES}
            self.last_saved_figures = judged | measured | self.guard.checkpoint_figures()
            self.save(number, now.tokens_after, self.last_saved_figures, wait)

    def evaluations_due(self, now: Step) -> list:
        """The evaluations of this step: of held-out text that could be read, and of tasks."""
        last = now.number == self.planned.recipe.last_step
        due: list[Callable[[Any, Step], dict[str, float]]] = []
        if last or now.number % self.config.eval.every == 0:
            with self.pace.outside_a_step():  # a phase's held-out text is read when it is first due
                if self.evaluation.batches(now.phase):
                    due.append(self.evaluation.losses)
        if self.tasks and (last or now.number % self.config.eval.tasks_every == 0):
            due.append(self.tasks.scores)
        return due

    def save(self, number: int, tokens: int, figures: dict, wait: bool) -> None:
        """Starts saving the state, with everything that a resumed run needs. With `wait` it returns
        when that is saved, as it must be before this start ends."""
        self.pace.at("save", number)
        self.figures.writer.flush()
        if not wait and not self.store.wait_for_room(number):
            return
        meta = {
            "step": number,
            "tokens": tokens,
            "data": self.stream.get_state(),
            "devices": self.mesh.size,
            "config": config_lib.to_dict(self.config),
            "tokenizer": self.planned.tokenizer.sha256,
            "version": __version__,
            "metrics": figures,
            "lineage": self.opened.meta.get("lineage", []),
            "unsound": self.figures.unsound,
            "own_parts": own_parts.sources(self.config.model),
            **self.frozen_fields,
            **self.guard.checkpoint_fields(),
            "kernels": self.opened.tiles.kernels,
        }
        # Before the first step the devices do not show yet what memory a step needs.
        before_a_step = number == self.planned.reached
        take = self.snapshots.on_host if before_a_step else self.snapshots.take
        save = self.store.save_now if wait else self.store.save
        save(number, take(self.state), meta, self.snapshots.locations)

    def replay(self, now: Step, batch: Any) -> dict | None:
        """If due, computes gradients with the new weights repeatedly, on the same and on other
        devices, and compares.

        Returns the decision to go back if a device is wrong.
        """
        if not self.guard.replay_is_due(now.number):
            return None
        with self.pace.outside_a_step():
            self.pace.begin("evaluate", now.number, (now.phase_index, now.sequences, "replay"))
            state = self.state
            program = self.replay_program(now.phase_index)
            finding = program(state["params"], state["balance"].bias, batch, state.get("frozen"))
            wait_for_saved_steps = self.store.wait_for_saved_steps  # only if a device is wrong
            return self.guard.record_replay(now.number, finding, self.mesh, wait_for_saved_steps)

    def _train_program(self, phase_index: int) -> Any:
        """A phase's training step."""
        logs.say("compiling the training step; the next start on this machine finds it compiled")
        phase_config = self.planned.recipe.phases[phase_index].config
        inject = self.faults and self.faults.gradients(self.mesh)
        return steps.make_train_step(phase_config, self.planned.setup, inject)

    def _replay_program(self, phase_index: int) -> Replay:
        """A phase's check that computes gradients repeatedly."""
        phase_config = self.planned.recipe.phases[phase_index].config
        inject = self.faults and self.faults.gradients(self.mesh, again=True)
        return Replay(phase_config, self.planned.setup, inject)

    # Its ends

    def done(self) -> int:
        """All steps are trained and saved: writes a sample and the report."""
        last = self.planned.last_step_here
        self.pace.at("end", last)
        self.figures.close()
        unsound = self.figures.unsound
        code = final_code(self.last_saved_figures, unsound, last - self.plan.steps_before)
        uncopied_steps = self.store.close()
        if uncopied_steps:
            code = cli.STORAGE  # the next start copies again, and judges the run again
        self.state = None  # frees its memory for the sample
        if multihost.is_writer():
            phase_config = self.planned.recipe.phase_of_step(last).config
            try:
                weights = with_base(SealedSource(self.workdir, last))
                write_sample(self.workdir, phase_config, self.planned.tokenizer, weights)
            except Exception as error:  # such as too little memory: the run itself is complete
                logs.say(f"warning: no sample ({config_lib.first_line(error)})")
            write_report(self.workdir)
        logs.say(notes.done_line(last, self.plan.tokens_of_step(last), unsound, self.workdir))
        return code

    def stopped(self, number: int) -> int:
        """A signal came, and the step is saved."""
        left_out = ""
        if number < self.planned.last_step_here and self.evaluations_due(self.plan.step(number)):
            left_out = ", without its evaluation"
        line = (
            f"stopped by {self.stop.asked} after step {number}; saved{left_out}. The same command"
            " continues."
        )
        return self._end(number, cli.PREEMPTED, line)

    def unhealthy(self, number: int) -> int:
        """Too many steps in a row had no sound update."""
        line = (
            f"error: {notes.no_effect_line(self.figures.unsound)}; see loss and grad_norm in"
            f" {self.figures.writer.path}."
        )
        return self._end(number, cli.UNHEALTHY, line, retry_copies=True, suggest_checkpoint=True)

    def wrong_device(self, wrong: dict) -> int:
        """A device computes wrongly: the agent, or the person who started this run, can exclude
        it. The decision to go back is on disk, and the next start follows it."""
        line = (
            f"error: {wrong['seen']}. Exclude it and repeat the command: it continues from step"
            f" {wrong['step']}"
        )
        return self._end(wrong["at"], cli.HARDWARE, line)

    def go_back(self, number: int) -> int | None:
        """After a spike: records the rollback. Returns None to start over from there, or an exit
        code: 3 if the run may not go back again, 75 if a signal has come; then the next start goes
        back.
        """
        self.pace.at("end", number)
        saved = self.store.wait_for_saved_steps()
        decision = self.guard.go_back(saved)
        if decision is None:
            limit = f"config.guard.rollbacks={self.config.guard.rollbacks}"
            line = f"error: {self.guard.spike}; the limit {limit} is reached, so the run ends."
            return self._end(number, cli.UNHEALTHY, line, suggest_checkpoint=True)
        self.store.close(retry_copies=False)
        logs.say(
            f"{self.guard.spike}: back to step {decision['step']}, skipping the"
            f" {decision['batches']} batches that followed it"
        )
        self.state = None  # frees its memory for the next state
        self.figures.drop()
        return cli.PREEMPTED if self.stop.anywhere() else None

    def on_exit(self, kind: type | None, *_: object) -> None:
        """An ExitStack's callback: winds up if an error ends the run. A disk that hangs must not
        delay the error's message."""
        if kind:
            leaving.within(leaving.PATIENCE, self._wind_up)
            self.trackers.end()

    def _end(
        self,
        number: int,
        code: int,
        line: str,
        retry_copies: bool = False,
        suggest_checkpoint: bool = False,
    ) -> int:
        """Ends after a step with this last line.

        A failed durable copy is no error if the next start tries it again; with `retry_copies` it
        is tried once more now. `suggest_checkpoint` adds with which checkpoint to begin a new run.
        """
        self.pace.at("end", number)
        uncopied_steps = self.store.close(retry_copies=retry_copies)
        if uncopied_steps and code == cli.DONE:
            code = cli.STORAGE
        self._wind_up()
        if suggest_checkpoint:  # now that no save is in flight
            line = f"{line} {self.store.advice_on_return()}"
        logs.say(line)
        return code

    def _wind_up(self) -> None:
        """Writes the last figures and a report, at every end but `done` and going back."""
        self.figures.close()
        # After SIGTERM every second counts.
        if multihost.is_writer() and "SIGTERM" not in self.stop.asked:
            with contextlib.suppress(Exception):
                write_report(self.workdir)
