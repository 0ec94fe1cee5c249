"""Hands a run's figures to trackers: TensorBoard, W&B, MLflow and trackio by name, and a function
of the caller's own.

Each has its own thread, so a slow server delays no step. If a tracker fails, a warning says so and
the run continues: metrics.jsonl has every figure. The trackers' own environment variables say where
they write. tracker.id in the run's folder is the run's id there, under which a resumed run
continues.
"""

import contextlib
import functools
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zaya_jax.cluster import leaving
from zaya_jax.cluster.multihost import is_writer
from zaya_jax.config import Config, fields, files, to_dict
from zaya_jax.training import workdir
from zaya_jax.training.logs import say

MAX_QUEUED_STEPS = 10_000  # further ones are dropped
PATIENCE = 60.0  # seconds for a tracker to take the last figures of a run that is done
PROJECT = "zaya_jax"  # where no environment variable names another

type Function = Callable[[int, dict[str, Any]], None]  # called with a step and its figures
# An open tracker: what is called after each step, and what is called with the exit code.
type Callbacks = tuple[Function, Callable[[int], None]]


def _wandb(folder: Path, config: dict[str, Any], run_id: str) -> Callbacks:
    import wandb

    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=folder.name,
        id=run_id,
        resume="allow",
        config=config,
        dir=str(folder),
        settings=wandb.Settings(console="off"),
    )
    run.define_metric("*", step_metric="step")  # its own counter refuses a step that comes again

    def end(code: int) -> None:
        if code == leaving.PREEMPTED:
            run.mark_preempting()
        run.finish(exit_code=code)

    return lambda step, figures: run.log({"step": step, **figures}), end


def _mlflow(folder: Path, config: dict[str, Any], run_id: str) -> Callbacks:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    client, project = MlflowClient(), os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    known = client.get_experiment_by_name(project)
    experiment = known.experiment_id if known else client.create_experiment(project)
    runs = client.search_runs([experiment], f"tags.{PROJECT} = '{run_id}'")
    if runs:
        run = runs[0].info.run_id
    else:  # only a new run gets the config: MLflow refuses a changed value
        tags = {PROJECT: run_id}
        run = client.create_run(experiment, tags=tags, run_name=folder.name).info.run_id
        params = [Param(key, str(value)) for key, value in config.items()]
        for i in range(0, len(params), 100):  # MLflow's limit
            client.log_batch(run, params=params[i : i + 100])
    client.update_run(run, status="RUNNING")

    def log(step: int, figures: dict[str, Any]) -> None:
        now = int(1000 * time.time())
        client.log_batch(run, [Metric(name, value, now, step) for name, value in figures.items()])

    ends = {leaving.DONE: "FINISHED", leaving.PREEMPTED: "KILLED"}
    return log, lambda code: client.set_terminated(run, ends.get(code, "FAILED"))


def _trackio(folder: Path, config: dict[str, Any], run_id: str) -> Callbacks:
    import trackio

    project = os.environ.get("TRACKIO_PROJECT", PROJECT)
    run = trackio.init(
        project, name=f"{folder.name}-{run_id[:6]}", resume="allow", config=config, embed=False
    )
    return lambda step, figures: run.log(figures, step=step), lambda code: run.finish()


def _tensorboard(folder: Path, reached: int) -> Callbacks:
    from tensorboardX import SummaryWriter

    # Its own thread ends at its first error. A queue that nothing empties would then block this
    # one, and the exit.
    purge = reached + 1 if reached else 0
    events = SummaryWriter(str(folder), purge_step=purge, max_queue=20_000)

    def log(step: int, figures: dict[str, Any]) -> None:
        if not events.file_writer.event_writer._worker.is_alive():
            raise OSError("its thread has ended, as on a full disk")
        for name, value in figures.items():
            events.add_scalar(name, value, step)
        events.flush()

    return log, lambda code: events.close()


OPENERS = {"wandb": _wandb, "mlflow": _mlflow, "trackio": _trackio}


class Trackers:
    """All trackers of one start; only the process that writes the files has any."""

    def __init__(
        self, config: Config, folder: Path, reached: int, function: Function | None = None
    ):
        self._each: list[_Tracker] = []
        if not is_writer():
            return
        openers: dict[str, Callable[[], Callbacks]] = {
            "TensorBoard": lambda: _tensorboard(folder, reached)
        }
        if function:
            openers["function"] = lambda: (function, lambda code: None)
        if config.log.trackers:
            if not (path := folder / "tracker.id").exists():
                files.write(path, uuid.uuid4().hex.encode())
            run = folder, workdir.flat(to_dict(config)), path.read_text()
            for name in config.log.trackers:
                openers[name] = functools.partial(OPENERS[name], *run)
        self._each = [_Tracker(name, opener) for name, opener in openers.items()]
        leaving.before(self.end)

    def write(self, step: int, figures: dict[str, Any]) -> None:
        """Hands on a step's figures, which are single numbers."""
        for tracker in self._each:
            tracker.write(step, dict(figures))

    def end(self, code: int = leaving.FAILED) -> None:
        """Ends the run in each tracker, once: by its exit code as finished, to be continued or failed."""
        ended, self._each = self._each, []
        leaving.forget(self.end)
        for tracker in ended:
            tracker.end(code)


class _Tracker(threading.Thread):
    def __init__(self, name: str, opener: Callable[[], Callbacks]):
        super().__init__(name=name, daemon=True)
        self._opener, self._items = opener, queue.Queue[tuple[int | None, Any]](MAX_QUEUED_STEPS)
        self.start()

    def run(self) -> None:
        try:
            log, end = self._opener()
            step, figures = self._items.get()
            while step is not None:
                log(step, figures)
                step, figures = self._items.get()
            end(figures)  # the exit code
        except BaseException as error:
            say(
                f"warning: the tracker {self.name} failed and gets no further metrics; the run"
                f" continues ({type(error).__name__}: {fields.first_line(error)})"
            )

    def write(self, step: int | None, figures: Any) -> None:
        with contextlib.suppress(queue.Full):
            self._items.put_nowait((step, figures))

    def end(self, code: int) -> None:
        seconds = PATIENCE if code == leaving.DONE else leaving.PATIENCE / 2
        self.write(None, code)
        self.join(seconds)
        if self.is_alive():
            say(f"warning: the tracker {self.name} did not take all figures within {seconds:.0f} s")
