"""Pre-training, from a config to a report; read it from top to bottom.

    python -m experiments.pretrain [--config=experiments/configs/tiny.py] [--workdir=runs/tiny] [--config.KEY=VALUE ...]
        [--coordinator=HOST:PORT --num_processes=N --process_id=I]     (or from Slurm or variables: docs/clusters.md)
    python -m experiments.pretrain --config=FILE --describe            the run's phases, and nothing else

Without options it trains `tiny`. Everything a run leaves is under its workdir; the same command on a workdir that has
checkpoints goes on from the newest as if it had never stopped: bit for bit on CPUs, docs/checkpoints.md says when else.
Exit codes: 0 done, 2 bad input, 3 unhealthy (no finite gradient for many steps, no finite loss at the end, or a loss
that jumps again and again: docs/guard.md), 4 storage that fails or is damaged, 5 a device computes wrongly, 75 saved,
start me again (stopped by a signal, or at the border to a phase with another mesh), 130 and 143 stopped by a second
signal, at once.
"""

import contextlib
import functools
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

import zaya_jax
from zaya_jax import cli, schedule
from zaya_jax import config as config_lib
from zaya_jax.aegis import decisions, faults
from zaya_jax.aegis.guard import Guard
from zaya_jax.aegis.replay import Replay
from zaya_jax.checkpoint import keep, partial
from zaya_jax.checkpoint.store import Store, read_meta
from zaya_jax.cluster import leaving, multihost
from zaya_jax.config import Config, UserError
from zaya_jax.data import named, pipeline, token_ids, tokenizers
from zaya_jax.data.prefetch import DevicePrefetch
from zaya_jax.hardware import host, sizing_rules
from zaya_jax.hardware.chips import model_flops, peak_flops
from zaya_jax.model import zaya
from zaya_jax.parallel import spread as spread_lib
from zaya_jax.parallel.mesh import make_mesh, rows_of_process
from zaya_jax.report import write_report
from zaya_jax.train import fork, logs, memory, recipe, snapshot
from zaya_jax.train import state as states
from zaya_jax.train import step as steps
from zaya_jax.train.eta import Remaining
from zaya_jax.train.metrics import PER_LAYER_EVERY, Console, Writer
from zaya_jax.train.sample import write_sample
from zaya_jax.train.where import Where
from zaya_jax.train.workdir import AsItWas, check_same, folder_of, open_workdir, record, write_json

CONFIG = cli.define_config(str(Path(__file__).parent / "configs" / "tiny.py"))
WORKDIR = flags.DEFINE_string(
    "workdir", None, "Where the run keeps everything; by default runs/<config name>."
)
DESCRIBE = flags.DEFINE_bool("describe", False, "Print the phases of the run and end.")
multihost.define_flags()

UNHEALTHY_AFTER = 50  # steps in a row whose update was skipped or not finite


def main() -> int:
    """The program: its options are --config, the config's keys, --workdir, and which of several processes this is."""
    config = config_lib.check(CONFIG.value)
    if DESCRIBE.value:
        config = fork.settle(config, fork.find(config, folder_of(config, WORKDIR.value)))
        plan = schedule.make_plan(config)
        recipe.check(config, plan, config.run.fork_step)
        print(recipe.table(config, plan))
        return cli.DONE
    return multihost.together(lambda: train(config, WORKDIR.value))


def train(config: Config, workdir: str | Path | None = None) -> int:
    """One run, or the rest of one; returns the exit code. However it ends, its figures are written."""
    code, stops = None, list[multihost.StopSignal]()
    while code is None:  # it has gone back to an earlier step
        with contextlib.ExitStack() as at_end:
            code = _train(config, workdir, at_end, stops)
    return code


def _train(
    config: Config,
    workdir: str | Path | None,
    at_end: contextlib.ExitStack,
    stops: list[multihost.StopSignal],
) -> int | None:
    ####################################################################################################################
    # Everything that can be wrong is checked before anything is compiled or written
    ####################################################################################################################
    host.require_x32()
    host.keep_compiled()
    place = folder_of(config, workdir)
    config = fork.settle(config, multihost.from_first("fork", functools.partial(fork.find, config, place)))
    plan, devices = schedule.make_plan(config), jax.devices()
    where = Where(devices[0])  # said to whoever watches this process
    last_step = min(plan.total_steps, config.run.num_steps)
    tokenizer = tokenizers.load(config.data.tokenizer)
    config = token_ids.agree(config, tokenizer)
    named_notes = named.notes(config, tokenizer)  # what of them cannot be evaluated on is refused

    def lay_out(reached: int):
        """Everything that the mesh of the phase after step `reached` decides."""
        notes = recipe.check(config, plan, reached, devices)
        notes += memory.check_phases(config, plan, reached, devices)
        begin = min(reached + 1, last_step)
        here = schedule.phase_config(config, plan.step(begin).phase)
        end = min(recipe.last_step_here(config, plan, begin, len(devices)), last_step)
        mesh = make_mesh(here.mesh, devices)
        spread, rows = spread_lib.of(here.mesh, mesh.shape), rows_of_process(mesh)
        source = pipeline.train_stream(config, tokenizer, rows)
        notes += source.batches.notes

        def put(batch):
            number = int(source.get_state()["step"])
            batch = faults.of_data(batch, number, decisions.left_out(made))
            if number > end:  # fetched ahead of need: it is for the next phase's mesh, and never given out
                return batch
            return steps.put_batch(mesh, batch, plan.step(number).micro_batches, spread)

        return notes, end, here, mesh, spread, rows, DevicePrefetch(source, put)

    looked = multihost.from_first("look", functools.partial(recipe.peek, place)) or config.run.fork_step
    memory.check_host_batch(plan, jax.process_count())
    notes, end, here, mesh, spread, rows, stream = lay_out(looked)
    begun = multihost.from_first("begun", functools.partial(fork.begun, place, config))
    parent = fork.parent_of(config, tokenizer, begun)

    multihost.barrier("checks")  # nobody writes before all have passed theirs
    as_it_was = AsItWas(place)
    workdir = open_workdir(place, config, as_it_was.locked)
    at_end.push(as_it_was)
    made = multihost.from_first("decisions", functools.partial(decisions.read, workdir))
    ours = lambda m: check_same(config_lib.check(m.get("config")), config, workdir, m["step"])  # noqa: E731
    store = Store(workdir, config.checkpoint, logs.say, ours)
    if made:  # a start before this one may have been killed while it did what was decided
        store.drop_stale(made)
    newest = store.newest()
    reached = config.run.fork_step if newest is None else newest
    if bool(parent) == (newest is not None):  # its own checkpoint lay where it was not seen, or is none
        parent = fork.parent_of(config, tokenizer, newest is not None)
    if reached > last_step:
        raise UserError(
            f"config.run.num_steps={last_step}, but {workdir} has already reached step {reached}; "
            "give at least as many steps, or a new workdir"
        )
    if reached == last_step:
        code = cli.STORAGE if store.close() else ended_well(read_meta(workdir, reached).get("metrics"))
        if multihost.is_writer():
            report = write_report(workdir)
            more = (
                "another of schedule.phases" if reached == plan.total_steps and config.schedule.phases else ""
            )
            more = more or "--config.run.num_steps=N"
            logs.say(f"{workdir} is complete: {reached} steps done. More: {more}.  Report: {report}")
        return code
    if reached != looked:  # it lay in another tier, or a damaged one was set aside
        notes, end, here, mesh, spread, rows, stream = lay_out(reached)
    meta: dict[str, Any] = {}
    if reached:
        # A checkpoint's own config: config.json may be of a start that saved nothing.
        meta = parent.meta if parent else read_meta(workdir, reached)
        notes.append(parent.note(config) if parent else "")
        notes.append(check_same(config_lib.check(meta["config"]), config, workdir, reached))
        notes.append(stream.set_state(meta["data"]))
        notes.append(new_length(meta, config, last_step))
    made = decisions.agreed(made, meta.get("decisions", []), workdir)
    if made:
        stream.leave_out(decisions.left_out(made))
    lineage = meta.get("lineage", [])
    logs.open_log(workdir)
    if multihost.is_writer():
        record(workdir, config)
        if made:
            decisions.write(workdir, made)
        tokenizer.save(workdir / "tokenizer")
        write_json(workdir / "environment.json", environment())
        if lineage:
            write_json(workdir / fork.FILE, {"forked": lineage})
        else:  # a fork may have been killed here before it saved anything
            (workdir / fork.FILE).unlink(missing_ok=True)
    multihost.barrier("set-up")

    ####################################################################################################################
    # The state: fresh, that of the newest checkpoint, or the one that is forked
    ####################################################################################################################
    shapes = zaya.abstract(config.model, config.precision)
    optimizer = states.build_optimizer(here, mesh)
    copies = snapshot.of_run(here, optimizer, mesh, logs.say)
    begin = None
    if newest is None and config.run.init_from:  # what does not fit is refused before anything is compiled
        begin = partial.Beginning(config.run.init_from, copies.held, config.run.init_grow)
    if parent:
        state = copies.place(parent.load(copies.like, copies.held))
    elif reached:
        state, _ = store.restore(reached, copies.like, copies.held, copies.place)
    else:
        state = states.init(here, optimizer, mesh)
    if newest == 0:  # an imported model's: weights and biases, no optimizer yet
        state = copies.with_weights_of(state, lambda like, held: store.restore(0, like, held)[0])
    elif begin is not None:
        state = copies.place(begin.of(copies.on_devices(state), logs.say))

    def save(number: int, tokens: int, figures: dict, last: bool, owed: bool = False) -> None:
        """Begins to save what a run needs to go on, or a reader to know what it was; the last time, sees it through."""
        where.at("save", number)
        writer.flush()
        if not last and not store.free(number):
            return
        meta = {
            "step": number, "tokens": tokens, "data": stream.get_state(), "config": config_lib.to_dict(config),
            "tokenizer": tokenizer.sha256, "version": zaya_jax.__version__, "metrics": figures, "lineage": lineage,
            "evaluation_owed": owed, **guard.meta(),
        }  # fmt: skip
        (store.save_now if last else store.save)(number, copies.take(state, store.spare()), meta, copies.held)

    ####################################################################################################################
    # The programs: one training step for each phase, one evaluation step
    ####################################################################################################################
    @functools.cache
    def program(phase_index: int, evaluation: bool = False):
        phase = next(s.phase for s in plan.segments if s.phase_index == phase_index)
        own = schedule.phase_config(config, phase)
        make = steps.make_eval_step if evaluation else steps.make_train_step
        return make(own, own.model, optimizer, mesh, *([] if evaluation or not hook else [hook]))

    hook = faults.hook(mesh.axis_names, mesh.devices.shape)  # None, but in tests

    @functools.lru_cache(1)
    def replay(phase_index: int) -> Replay:
        phase = next(s.phase for s in plan.segments if s.phase_index == phase_index)
        again = faults.hook(mesh.axis_names, mesh.devices.shape, again=True)
        return Replay(schedule.phase_config(config, phase), mesh, again)

    def check(now: schedule.Step, batch) -> dict | None:
        """Whether the devices compute what they should; what was decided if one does not."""
        where.evaluate(now.number, (now.phase_index, now.sequences, "again"))
        found = replay(now.phase_index)(state["params"], state["balance"].bias, batch)
        return guard.checked(now.number, found, mesh, saved_steps, config.run.fork_step)

    @functools.lru_cache(1)
    def windows(phase: config_lib.Phase) -> dict[str, list]:
        """The batches that a phase is evaluated on, on the devices: what is held out, and what is named."""
        count, own = recipe.eval_rows(config, phase, spread), pipeline.eval_config(config, phase)
        found = {"eval/loss": pipeline.eval_batches(own, tokenizer, rows, count)}
        found |= named.batches(own, tokenizer, rows, count)
        put = functools.partial(steps.put_batch, mesh, micro_batches=1, spread=spread)
        return {name: [put(batch) for batch in batches] for name, batches in found.items() if batches}

    windows(plan.step(reached + 1).phase)  # what of them cannot be read is known now

    def evaluate(state, now: schedule.Step) -> dict[str, float]:
        """Mean losses over the targets of the windows, in nats."""
        where.evaluate(now.number, (now.phase_index, "evaluation"))
        step, losses = program(now.phase_index, evaluation=True), {}
        sums = {name: [step(state, batch) for batch in found] for name, found in windows(now.phase).items()}
        where.evaluating()
        for name, parts in jax.device_get(sums).items():
            loss, count = np.asarray(parts, np.float64).sum(0)
            losses[name] = float(loss / max(count, 1.0))
        return losses

    ####################################################################################################################
    # The loop: a step is dispatched before the figures of the one before are read, so the device never waits
    ####################################################################################################################
    multihost.barrier("the first step")
    if config.schedule.phases:
        logs.say(recipe.table(config, plan, len(devices)))
    logs.say(describe_run(config, mesh, shapes, plan, last_step, workdir, reached))
    notes = [*notes, *named_notes, unknown_peak(), *sizing_rules.notes(here, devices)]
    for note in filter(None, dict.fromkeys(notes)):
        logs.say(note)
    as_it_was.begun()
    guard = Guard(config.guard, workdir, made, {} if parent else meta, reached)
    writer = Writer(workdir, reached)
    remaining = Remaining(plan, reached, last_step, config.eval.every)
    console = Console(reached, last_step, config.log.every, remaining.after)
    stop, timer = multihost.StopSignal(*stops[-1:]), multihost.Timer(60 * config.checkpoint.every_minutes)
    stops.append(stop)
    pending: tuple[schedule.Step, Any, dict, float | None] | None = None
    if reached and not parent and meta.get("evaluation_owed"):
        before = plan.step(reached)
        if schedule.phase_config(config, before.phase).mesh != here.mesh:
            logs.say(f"note: step {reached} stays without a held-out loss: its phase had another mesh")
        elif windows(before.phase):
            losses = evaluate(state, before)
            writer.write(reached, losses)
            first = losses.get("eval/loss", np.nan)  # nan: nothing is held out, all is named
            logs.say(f"step {reached} | held-out {first:.4f}, which the stop after that step had put off")
    if not reached and (begin is not None or newest == 0) and windows(plan.step(1).phase):
        first = evaluate(state, plan.step(1)).get("eval/loss", np.nan)
        logs.say(f"step 0 | held-out {first:.4f}, with the weights as they came")
    if parent:  # from here on it is a run of its own
        save(reached, meta["tokens"], meta["metrics"], last=False)
    peak, unsound_in_a_row = peak_flops(devices[0], config.precision), 0
    clock = time.perf_counter()

    def lap() -> float:
        """Seconds since the last lap."""
        nonlocal clock
        last, clock = clock, time.perf_counter()
        return clock - last

    def finish(pending) -> None:
        """Reads a step's figures and hands them on."""
        nonlocal unsound_in_a_row
        now, figures, extra, seconds = pending
        where.mark("wait")
        figures = jax.device_get(figures)
        where.mark("figures")
        seconds = seconds or lap()
        tokens = now.tokens_after - now.tokens_before
        figures = {"tokens": now.tokens_after, **figures, **extra}
        figures |= {"step_seconds": seconds, "tokens_per_second": tokens / seconds}
        if peak:
            flops = model_flops(schedule.phase_config(config, now.phase).model, now.phase.seq_len) * tokens
            figures["mfu"] = flops / seconds / peak / len(jax.devices())
        unsound_in_a_row = 0 if keep.sound(figures) else unsound_in_a_row + 1
        if now.number % PER_LAYER_EVERY and now.number not in (1, last_step):
            figures.pop("load", None)
        figures |= store.figures() | guard.figures(now.number)
        guard.see(now.number, now.phase_index, figures)
        writer.write(now.number, figures)
        remaining.step(now.number, seconds)
        console.step(now.number, figures)

    def wind_up() -> None:
        """However the run ends: the figures that are not read yet, all lines that are not written, and a report."""
        if pending and pending[0].number > writer.last_step:
            with contextlib.suppress(Exception):
                finish(pending)
        console.close()
        writer.close()
        if multihost.is_writer() and "SIGTERM" not in stop.asked:  # then seconds count
            with contextlib.suppress(Exception):
                write_report(workdir)

    def failed(kind, *_) -> None:
        if kind:  # a disk that hangs must not hold up what is to be said of it
            leaving.within(leaving.PATIENCE, wind_up)

    at_end.push(failed)

    def saved_steps() -> list[int]:
        """The checkpoints that are here when what is being saved is."""
        store.wait(copies=False)
        return store.steps()

    def end_for(wrong: dict) -> int:
        """A device computes wrongly: whoever started this run can leave it out."""
        where.at("end", wrong["at"])
        store.close(again=False)
        wind_up()
        console.say(f"error: {wrong['seen']}. Without it the same command goes on from step {wrong['step']}")
        return cli.HARDWARE

    def go_back(number: int) -> int | None:
        """After a spike: what is done about it is decided and written down; None: the run begins again before it."""
        nonlocal state, pending
        where.at("end", number)
        decision = guard.go_back(saved_steps(), config.run.fork_step)
        store.close(again=False)
        if decision is None:
            wind_up()
            console.say(
                f"error: {guard.spike}; the run went back config.guard.rollbacks={config.guard.rollbacks} times, "
                f"so it ends. {store.way_back()}"
            )
            return cli.UNHEALTHY
        console.say(
            f"{guard.spike}: back to step {decision['step']}, and on without the {decision['batches']} batches since"
        )
        pending = state = None  # their memory is the next state's
        store.spare()
        stream.close()
        console.close()
        writer.close()
        asked = multihost.over_processes({"asked": float(bool(stop.asked))}, {"asked": np.max})["asked"]
        if asked:
            logs.say(f"stopped by {stop.asked or 'a signal to another process'}; the same command goes on")
        return cli.PREEMPTED if asked else None

    for number in range(reached + 1, end + 1):
        now = plan.step(number)
        faults.in_step(number)
        where.fetch(number, (now.phase_index, now.sequences))
        batch = next(stream)
        where.dispatch()
        state, figures = program(now.phase_index)(state, batch, np.float32(now.lr))
        where.came()
        if pending:
            finish(pending)
        where.mark("figures")
        # A CPU is done with the step by now, an accelerator when its figures have come.
        pending = (now, figures, {}, lap() if figures["loss"].is_ready() else None)
        multihost.collect_garbage(number)
        stopping = stop.after(number)
        due_eval = number % config.eval.every == 0 or number == last_step
        due_eval = due_eval and bool(windows(now.phase))
        owed = due_eval and stopping and number < end  # who stops it may not wait so long
        due_eval = due_eval and not owed
        due_save = timer.after(number) or number % config.checkpoint.every_steps == 0
        last = number == end or stopping
        if due_eval or due_save or last:
            where.mark("wait")
            jax.block_until_ready(state)
            extra = multihost.over_processes(stream.metrics(), pipeline.OVER_PROCESSES)
            begun = time.perf_counter()
            if due_eval:
                extra |= evaluate(state, now)
                remaining.evaluation(now.phase_index, time.perf_counter() - begun)
            clock += time.perf_counter() - begun  # evaluation is not the step's time
            finish((now, figures, extra, pending[-1]))
            pending = None
            if (due_save or last) and not guard.spike:
                kept = {name: float(figures[name]) for name in keep.FIGURES} | extra | guard.doubt()
                save(number, now.tokens_after, kept, last, owed)
        if guard.due(number):
            begun = time.perf_counter()
            wrong = check(now, batch)
            clock += time.perf_counter() - begun
            if wrong:
                return end_for(wrong)
        where.lap()
        if guard.spike:
            return go_back(number)
        if stopping:
            where.at("end", number)
            store.close(again=False)
            wind_up()
            more = f", first with the evaluation of step {number}" if owed else ""
            console.say(
                f"stopped by {stop.asked} after step {number}; saved. The same command goes on{more}."
            )
            return cli.PREEMPTED
        if unsound_in_a_row >= UNHEALTHY_AFTER:
            where.at("end", number)
            store.close()
            wind_up()
            console.say(
                f"error: the last {unsound_in_a_row} updates were skipped or not finite; see grad_norm in "
                f"{writer.path}. {store.way_back()}"
            )
            return cli.UNHEALTHY

    where.at("end", end)
    if end < last_step:
        store.close()
        wind_up()
        console.say(recipe.border(config, plan, end))
        return cli.PREEMPTED

    ####################################################################################################################
    # The end: the last checkpoint, a sample, the report
    ####################################################################################################################
    console.close()
    writer.close()
    stream.close()
    code = cli.STORAGE if store.close() else ended_well(kept)  # what has no durable copy is said
    state = None  # its memory is the sample's

    def round_off() -> None:
        write_sample(workdir, config, tokenizer, last_step)
        if multihost.is_writer():
            write_report(workdir)

    rounded = leaving.unless(lambda: bool(stop.asked), round_off)
    logs.say(
        f"done: {last_step} steps, {plan.tokens_of_step(last_step):,} tokens. "
        + (f"Report: {workdir / 'report.html'}" if rounded else without_report(stop.asked, workdir))
    )
    return code


def ended_well(figures: dict | None) -> int:
    """The exit code that the last step's figures ask for; a loss that is no number is said."""
    if keep.finite(figures or {}):
        return cli.DONE
    logs.say("error: the loss of the last step is not finite; see loss and grad_norm in metrics.jsonl")
    return cli.UNHEALTHY


def without_report(asked: str, workdir: Path) -> str:
    """How to come to what a signal after the last save has left out."""
    return (
        f"{asked} came before sample and report were made: the same command makes the report, "
        f"python -m experiments.generate --workdir={workdir} a sample"
    )


def new_length(meta: dict, config: Config, last_step: int) -> str:
    """A note where another number of steps than before changes the learning rate's course."""
    before = meta["config"]["run"]["num_steps"]
    if before == config.run.num_steps or config.schedule.phases:
        return ""
    return (
        f"note: run.num_steps was {before}, now it is {last_step}; the learning rate follows the new length"
    )


def unknown_peak() -> str:
    """Why no MFU is shown, on an accelerator whose peak is not known; a CPU has none that would mean something."""
    device = jax.devices()[0]
    if device.platform == "cpu" or peak_flops(device, config_lib.Precision()):
        return ""
    return f"MFU is not shown: peak rate of {device.device_kind} unknown (zaya_jax/hardware/chips.py)"


def environment() -> dict[str, str]:
    """What the run ran on."""
    device = jax.devices()[0]
    return {
        "device": f"{jax.device_count()} x {device.device_kind}",
        "processes": str(jax.process_count()),
        "jax": jax.__version__,
        "python": sys.version.split()[0],
        "zaya_jax": zaya_jax.__version__,
        **({"mfu": unknown_peak()} if unknown_peak() else {}),
    }


def describe_run(config: Config, mesh, shapes, plan, last_step: int, workdir: Path, reached: int) -> str:
    """The line that a run begins with."""
    counts = zaya.param_counts(config.model)
    sizes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1) or "one device"
    return (
        f"{config.name}: {counts['total']:,} parameters ({counts['active']:,} active) on {sizes} "
        f"({jax.devices()[0].device_kind}), {last_step} steps of {plan.step(last_step).sequences} x "
        f"{plan.step(last_step).phase.seq_len} tokens, in {workdir}"
        + (f", from step {reached}" if reached else "")
    )


if __name__ == "__main__":
    cli.leave(cli.run(main))
