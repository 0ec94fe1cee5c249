"""A training run, from a config to a report; read it from top to bottom.

    code = train(config, workdir)      what experiments.pretrain and zaya_jax.train call

`begin` finds out how the run begins and gives one `Beginning`; a `Loop` trains from there to one of its ends. A loop
that goes back behind a spike gives no exit code: the run then begins once more, before it.
"""

import contextlib
import dataclasses
import functools
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zaya_jax import __version__, cli
from zaya_jax import config as config_lib
from zaya_jax.aegis import decisions
from zaya_jax.aegis.guard import Guard
from zaya_jax.aegis.replay import Replay
from zaya_jax.checkpoint import partial
from zaya_jax.checkpoint.store import Store, read_meta
from zaya_jax.cluster import leaving, multihost
from zaya_jax.config import Config
from zaya_jax.data import pipeline
from zaya_jax.data.prefetch import DevicePrefetch
from zaya_jax.hardware import host
from zaya_jax.report import write_report
from zaya_jax.schedule import Step
from zaya_jax.training import fork, layout, logs, notes, recipe, snapshot
from zaya_jax.training import state as states
from zaya_jax.training import step as steps
from zaya_jax.training.evaluation import Evaluation
from zaya_jax.training.figures import Figures, ended_well
from zaya_jax.training.pace import Pace
from zaya_jax.training.sample import write_sample
from zaya_jax.training.workdir import AsItWas, check_same, folder_of, open_workdir, record_start

UNHEALTHY_AFTER = 50  # steps in a row whose update had no effect


def train(config: Config, workdir: str | Path | None = None, hook: Any = None) -> int:
    """One run, or the rest of one; returns the exit code. However it ends, its figures are written.

    `hook` is where tests reach into a run: `tools.faults.Faults`.
    """
    host.require_x32()
    host.keep_compiled()
    stop, code = None, None
    while code is None:  # it begins for the first time, or has gone back behind a spike
        with contextlib.ExitStack() as at_end:
            begun = begin(config, workdir, at_end)
            if begun.reached == begun.recipe.last_step:
                return complete(begun)
            loop = Loop(begun, hook)
            stop = stop or multihost.StopSignal()  # from here on there is something to save
            at_end.push(loop.failed)
            code = loop.run(stop)
    return code


########################################################################################################################
# How it begins
########################################################################################################################


@dataclasses.dataclass(frozen=True)
class Beginning(layout.Layout):
    """How a run begins; `reached` updates were made before."""

    way: str  # "resumed", "imported", "forked", "weights" or "fresh"
    parent: fork.Parent | None  # of a fork
    meta: dict[str, Any]  # of the checkpoint that it goes on from
    made: list[decisions.Decision]
    workdir: Path
    as_it_was: AsItWas
    store: Store


def begin(config: Config, workdir: str | Path | None, at_end: contextlib.ExitStack) -> Beginning:
    """Checks what can be wrong before anything is compiled, opens the folder, and finds out how the run begins.

    If the run decided to go back, the steps that it gave up are set aside, and the batches to leave out are skipped.
    Then the first of these that applies:
    1. resumed: from the newest checkpoint of its own, in whatever tier it is;
    2. imported: with weights that `experiments.checkpoint from_hf` or `model.save` has put there as step 0;
    3. forked: from the state of `run.fork`, at its place in the data, as a run of its own;
    4. weights: those of `run.init_from`;
    5. fresh.
    """
    laid = layout.check(config, folder := folder_of(config, workdir))
    multihost.barrier("checks")  # no process writes before all have passed theirs
    folder, as_it_was, store, made = _open(folder, laid.recipe.config, at_end)
    config, newest, parent, meta = laid.recipe.config, store.newest(), None, dict[str, Any]()
    if newest:
        way, reached, meta = "resumed", newest, read_meta(folder, newest)
    elif newest == 0:
        way, reached = "imported", 0
    elif config.run.fork:
        way, reached, parent = "forked", config.run.fork_step, fork.Parent(config, laid.tokenizer)
        meta = parent.meta
    else:
        way, reached = "weights" if config.run.init_from else "fresh", 0
    if reached != laid.reached:  # the checkpoint was in another tier, or turned out invalid
        laid = layout.lay_out(laid.recipe, laid.tokenizer, reached)
    more = [parent.note(laid.recipe.plan)] if parent else []
    if 0 < reached < laid.recipe.last_step:
        # A checkpoint's own config: config.json may be of a start that saved nothing.
        more.append(check_same(config_lib.check(meta["config"]), config, folder, reached))
        more.append(laid.stream.set_state(meta["data"]))
        more.append(notes.new_length(meta, config, laid.recipe.last_step))
    made = decisions.agreed(made, meta.get("decisions", []), folder)
    if made:
        laid.stream.leave_out(decisions.left_out(made))
    return Beginning(
        **vars(laid) | {"notes": laid.notes + more}, way=way, parent=parent, meta=meta, made=made, workdir=folder,
        as_it_was=as_it_was, store=store,
    )  # fmt: skip


def _open(folder: Path, config: Config, at_end: contextlib.ExitStack) -> tuple:
    """(folder, its state before this start, checkpoints, decisions of its run); locked until this start ends."""
    as_it_was = AsItWas(folder)
    folder = open_workdir(folder, config, as_it_was.locked)
    at_end.push(as_it_was)
    made = multihost.from_first("decisions", functools.partial(decisions.read, folder))
    ours = lambda m: check_same(config_lib.check(m.get("config")), config, folder, m["step"])  # noqa: E731
    store = Store(folder, config.checkpoint, logs.say, ours)
    if made:  # a start before this one may have been killed while it did what was decided
        store.drop_stale(made)
    return folder, as_it_was, store, made


def complete(begun: Beginning) -> int:
    """Answers a start after the last step: makes up a missing report or durable copy, and says that all is done."""
    figures, steps = begun.meta.get("metrics") or {}, begun.reached - begun.recipe.config.run.fork_step
    well = ended_well(figures, begun.meta.get("unsound", 0), steps)
    code = cli.STORAGE if begun.store.close() else well
    if multihost.is_writer():
        logs.say(notes.complete(begun.recipe, begun.workdir, write_report(begun.workdir)))
    return code


def first_state(begun: Beginning, optimizer: Any, copies: snapshot.Copies) -> Any:
    """The state before the first step."""
    run, here, weights = begun.recipe.config.run, begun.stage, None
    if begun.parent:
        return copies.place(begun.parent.load(copies.like, copies.held))
    if begun.way == "resumed":
        return begun.store.restore(begun.reached, copies.like, copies.held, copies.place)[0]
    if begun.way == "weights":  # what does not fit is refused before anything is compiled
        weights = partial.Beginning(run.init_from, copies.held, run.init_grow)
    state = states.init(here.config, optimizer, here.mesh)
    if begun.way == "imported":  # weights and biases, no optimizer yet
        return copies.with_weights_of(state, lambda like, held: begun.store.restore(0, like, held)[0])
    return copies.place(weights.of(copies.on_devices(state), logs.say)) if weights else state


########################################################################################################################
# The loop
########################################################################################################################


class Loop:
    """The steps of one start. Each is dispatched before the figures of the last one are read, so no device waits."""

    def __init__(self, begun: Beginning, hook: Any):
        self.begun, self.hook, self.config, self.plan = begun, hook, begun.recipe.config, begun.recipe.plan
        self.store, self.workdir, self.mesh = begun.store, begun.workdir, begun.stage.mesh
        record_start(self.workdir, self.config, begun.tokenizer, begun.meta.get("lineage", []))
        if begun.made and multihost.is_writer():
            decisions.write(self.workdir, begun.made)
        multihost.barrier("set-up")
        self.pace = Pace(jax.devices()[0])  # reported to the agent, if one watches this process
        self.optimizer = states.build_optimizer(begun.stage.config, self.mesh)
        self.copies = snapshot.of_run(begun.stage.config, self.optimizer, self.mesh, logs.say)
        self.state = first_state(begun, self.optimizer, self.copies)
        self.program = functools.cache(self._program)
        self.stream = DevicePrefetch(begun.stream, self._put)
        self.evaluation = Evaluation(begun.recipe, begun.stage, begun.tokenizer, self.optimizer, self.pace)
        self.evaluation.windows(self.plan.step(begun.reached + 1).phase)  # fail now if one is unreadable
        multihost.barrier("the first step")
        notes.describe_start(begun.recipe, begun.stage, self.workdir, begun.reached, begun.notes)
        begun.as_it_was.begun()
        own = {} if begun.parent else begun.meta
        self.guard = Guard(self.config.guard, self.workdir, begun.made, own, begun.reached)
        # One update without effect more ends a run again that was ended for them.
        unsound = min(own.get("unsound", 0), UNHEALTHY_AFTER - 1)
        self.figures = Figures(begun, unsound, self.pace, self.guard)
        self.timer = multihost.Timer(60 * self.config.checkpoint.every_minutes)
        self.kept: dict[str, float] = {}  # the figures of the last save

    def run(self, stop: multihost.StopSignal) -> int | None:
        """Trains to an end; its exit code, or None where the run goes back and begins again."""
        self.stop = stop
        self.before_the_first_step()
        for number in range(self.begun.reached + 1, self.begun.end + 1):
            now = self.plan.step(number)
            if self.hook:
                self.hook.before_step(number)
            batch = self.step(now)
            multihost.collect_garbage(number)
            stopping = stop.after(number)
            owed = self.evaluate_and_save(now, stopping)
            wrong = self.compute_again(now, batch)
            if wrong:
                return self.end_for(wrong)
            self.pace.lap()
            if self.guard.spike:
                return self.go_back(number)
            if stopping:
                return self.stopped(number, owed)
            if self.figures.unsound >= UNHEALTHY_AFTER:
                return self.unhealthy(number)
        return self.done() if self.begun.end == self.begun.recipe.last_step else self.at_border()

    def before_the_first_step(self) -> None:
        """A fork's own first save, an evaluation that the last start put off, or the loss of weights from elsewhere."""
        begun, reached = self.begun, self.begun.reached
        if begun.parent:  # from here on it is a run of its own
            self.save(reached, begun.meta["tokens"], begun.meta["metrics"], last=False)
        elif begun.meta.get("evaluation_owed"):
            self.evaluation.put_off(self.state, reached, self.figures.writer)
        elif begun.way in ("imported", "weights"):
            self.evaluation.as_they_came(self.state)
        self.figures.begin()

    def step(self, now: Step) -> Any:
        """Fetches a batch, dispatches the step, then reads the figures of the step before; gives the batch."""
        self.pace.fetch(now.number, (now.phase_index, now.sequences))
        batch = next(self.stream)
        self.pace.dispatch()
        self.state, figures = self.program(now.phase_index)(self.state, batch, np.float32(now.lr))
        self.pace.came()
        self.figures.dispatched(now, figures)
        return batch

    def evaluate_and_save(self, now: Step, stopping: bool) -> bool:
        """Evaluates and saves if due; True if a stopping run leaves the evaluation to the next start."""
        number, last = now.number, now.number == self.begun.end or stopping
        due_save = self.timer.after(number) or number % self.config.checkpoint.every_steps == 0
        due_eval = number % self.config.eval.every == 0 or number == self.begun.recipe.last_step
        due_eval = due_eval and bool(self.evaluation.windows(now.phase))
        owed = due_eval and stopping and number < self.begun.end
        if not (due_eval or due_save or last):
            return False
        self.pace.mark("wait")
        jax.block_until_ready(self.state)
        more = multihost.over_processes(self.stream.metrics(), pipeline.OVER_PROCESSES)
        if due_eval and not owed:
            begun = time.perf_counter()
            more |= self.evaluation.losses(self.state, now)
            self.figures.evaluated(now.phase_index, time.perf_counter() - begun)
        judged = self.figures.read(more)
        if (due_save or last) and not self.guard.spike:
            self.kept = judged | more | self.guard.doubt()
            self.save(number, now.tokens_after, self.kept, last, owed)
        return owed

    def save(self, number: int, tokens: int, figures: dict, last: bool, owed: bool = False) -> None:
        """Begins a save of the state, with all that a resumed run needs; the last save is seen through."""
        self.pace.at("save", number)
        self.figures.writer.flush()
        if not last and not self.store.free(number):
            return
        meta = {
            "step": number, "tokens": tokens, "data": self.stream.get_state(),
            "config": config_lib.to_dict(self.config), "tokenizer": self.begun.tokenizer.sha256,
            "version": __version__, "metrics": figures, "lineage": self.begun.meta.get("lineage", []),
            "evaluation_owed": owed, "unsound": self.figures.unsound, **self.guard.meta(),
        }  # fmt: skip
        save = self.store.save_now if last else self.store.save
        save(number, self.copies.take(self.state, self.store.spare()), meta, self.copies.held)

    def compute_again(self, now: Step, batch: Any) -> dict | None:
        """Computes the gradients again if due, and compares; the decision to go back if a device is wrong."""
        if not self.guard.due(now.number):
            return None
        begun = time.perf_counter()
        self.pace.evaluate(now.number, (now.phase_index, now.sequences, "again"))
        params, bias = self.state["params"], self.state["balance"].bias
        finding = self.program(now.phase_index, again=True)(params, bias, batch)
        number, begin = now.number, self.config.run.fork_step
        wrong = self.guard.checked(number, finding, self.mesh, self.saved_steps, begin)
        self.figures.left_out(time.perf_counter() - begun)
        return wrong

    def saved_steps(self) -> list[int]:
        """The checkpoints here, once the save in flight has ended."""
        self.store.wait(copies=False)
        return self.store.steps()

    def _put(self, batch: dict) -> Any:
        """A fetched batch on the devices."""
        number = int(self.begun.stream.get_state()["step"])
        if number > self.begun.end:  # fetched ahead of need, for the next phase's mesh, and never given out
            return batch
        if self.hook:
            batch = self.hook.batch(batch, number, decisions.left_out(self.begun.made))
        micro_batches = self.plan.step(number).micro_batches
        return steps.put_batch(self.mesh, batch, micro_batches, self.begun.stage.spread)

    def _program(self, phase_index: int, again: bool = False) -> Any:
        """A phase's training step, or the check that computes its gradients again."""
        own = self.begun.recipe.stages[phase_index].config
        faults = self.hook and self.hook.gradients(self.mesh, again)
        if again:
            return Replay(own, self.mesh, faults)
        return steps.make_train_step(own, own.model, self.optimizer, self.mesh, faults)

    # Every end

    def done(self) -> int:
        """All steps are trained and saved: writes a sample and the report."""
        whole, last = self.begun.recipe, self.begun.end
        self.pace.at("end", last)
        self.figures.close()
        self.stream.close()
        well = ended_well(self.kept, self.figures.unsound, last - self.config.run.fork_step)
        code = cli.STORAGE if self.store.close() else well  # what has no durable copy is said
        self.state = None  # its memory is the sample's

        def round_off() -> None:
            write_sample(self.workdir, whole.stage(last).config, self.begun.tokenizer, last)
            if multihost.is_writer():
                write_report(self.workdir)

        rounded = leaving.unless(lambda: bool(self.stop.asked), round_off)
        tokens, asked = self.plan.tokens_of_step(last), "" if rounded else self.stop.asked
        logs.say(notes.done(last, tokens, self.figures.unsound, self.workdir, asked))
        return code

    def at_border(self) -> int:
        """The next phase has another mesh, which another start makes."""
        self._close(self.begun.end).say(recipe.border(self.begun.recipe, self.begun.end))
        return cli.PREEMPTED

    def stopped(self, number: int, owed: bool) -> int:
        """A signal came, and the step is saved."""
        more = f", first with the evaluation of step {number}" if owed else ""
        line = f"stopped by {self.stop.asked} after step {number}; saved. The same command goes on{more}."
        self._close(number, again=False).say(line)
        return cli.PREEMPTED

    def unhealthy(self, number: int) -> int:
        """Too many updates in a row had no effect."""
        console, what = self._close(number), notes.without_effect(self.figures.unsound)
        path, way = self.figures.writer.path, self.store.way_back()
        console.say(f"error: {what}; see loss and grad_norm in {path}. {way}")
        return cli.UNHEALTHY

    def end_for(self, wrong: dict) -> int:
        """A device computes wrongly: the agent, or the person who started this run, can leave it out."""
        line = f"error: {wrong['seen']}. Without it the same command goes on from step {wrong['step']}"
        self._close(wrong["at"], again=False).say(line)
        return cli.HARDWARE

    def go_back(self, number: int) -> int | None:
        """After a spike: decides where to go back to and writes that down; None: the run begins again there."""
        self.pace.at("end", number)
        spike, console = self.guard.spike, self.figures.console
        decision = self.guard.go_back(self.saved_steps(), self.config.run.fork_step)
        if decision is None:
            self._close(number, again=False)
            times = f"config.guard.rollbacks={self.config.guard.rollbacks} times"
            console.say(f"error: {spike}; the run went back {times}, so it ends. {self.store.way_back()}")
            return cli.UNHEALTHY
        self.store.close(again=False)
        batches = f"the {decision['batches']} batches since"
        console.say(f"{spike}: back to step {decision['step']}, and on without {batches}")
        self.state = None  # its memory is the next state's
        self.store.spare()
        self.stream.close()
        self.figures.drop()
        asked = multihost.over_processes({"asked": float(bool(self.stop.asked))}, {"asked": np.max})["asked"]
        if not asked:
            return None
        logs.say(f"stopped by {self.stop.asked or 'a signal to another process'}; the same command goes on")
        return cli.PREEMPTED

    def failed(self, kind: type | None, *_: object) -> None:
        """For an ExitStack: an error ends the run. A disk that hangs must not delay the message."""
        if kind:
            leaving.within(leaving.PATIENCE, self._wind_up)

    def _close(self, number: int, again: bool = True) -> Any:
        """Ends after a step; `again`: tries failed durable copies once more. Gives the console, for the reason."""
        self.pace.at("end", number)
        self.store.close(again=again)
        self._wind_up()
        return self.figures.console

    def _wind_up(self) -> None:
        """Writes the last figures and a report, at every end but `done`."""
        self.figures.close()
        if multihost.is_writer() and "SIGTERM" not in self.stop.asked:  # then seconds count
            with contextlib.suppress(Exception):
                write_report(self.workdir)
