"""Hands a run's figures to trackers: TensorBoard, W&B, MLflow and trackio by name, and a function
of the caller's own.

Each has its own thread, so a slow server delays no step. A tracker that fails costs a warning and
never the run: metrics.jsonl has every figure. The package's own environment variables settle where
a tracker writes. tracker.id in the run's folder is the run's id there, by which a run that goes on
finds itself again.
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

WAITING = 10_000  # steps that a tracker may lag behind; it does not get those beyond
PATIENCE = 60.0  # seconds for a tracker to take the last figures of a run that is done
PROJECT = "zaya_jax"  # where no environment variable names another

type Function = Callable[[int, dict[str, Any]], None]  # of a step and its figures
type Opened = tuple[Function, Callable[[int], None]]  # for each step, and for the exit code


def _wandb(folder: Path, config: dict[str, Any], run_id: str) -> Opened:
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


def _mlflow(folder: Path, config: dict[str, Any], run_id: str) -> Opened:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    client, project = MlflowClient(), os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    known = client.get_experiment_by_name(project)
    experiment = known.experiment_id if known else client.create_experiment(project)
    found = client.search_runs([experiment], f"tags.{PROJECT} = '{run_id}'")
    new = (
        []
        if found
        else [client.create_run(experiment, tags={PROJECT: run_id}, run_name=folder.name)]
    )
    run = [*found, *new][0].info.run_id
    client.update_run(run, status="RUNNING")
    # a changed one is refused
    params = [Param(key, str(value)) for key, value in config.items()] if new else []
    for i in range(0, len(params), 100):  # its limit
        client.log_batch(run, params=params[i : i + 100])

    def log(step: int, figures: dict[str, Any]) -> None:
        now = int(1000 * time.time())
        client.log_batch(run, [Metric(name, value, now, step) for name, value in figures.items()])

    ends = {leaving.DONE: "FINISHED", leaving.PREEMPTED: "KILLED"}
    return log, lambda code: client.set_terminated(run, ends.get(code, "FAILED"))


def _trackio(folder: Path, config: dict[str, Any], run_id: str) -> Opened:
    import trackio

    project = os.environ.get("TRACKIO_PROJECT", PROJECT)
    run = trackio.init(
        project, name=f"{folder.name}-{run_id[:6]}", resume="allow", config=config, embed=False
    )
    return lambda step, figures: run.log(figures, step=step), lambda code: run.finish()


def _tensorboard(folder: Path, reached: int) -> Opened:
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


OPEN = {"wandb": _wandb, "mlflow": _mlflow, "trackio": _trackio}


class Trackers:
    """All trackers of one start; only the process that writes the files has any."""

    def __init__(
        self, config: Config, folder: Path, reached: int, function: Function | None = None
    ):
        self._each: list[_Tracker] = []
        if not is_writer():
            return
        found: dict[str, Callable[[], Opened]] = {
            "TensorBoard": lambda: _tensorboard(folder, reached)
        }
        if function:
            found["function"] = lambda: (function, lambda code: None)
        if config.log.trackers:
            if not (path := folder / "tracker.id").exists():
                files.write(path, uuid.uuid4().hex.encode())
            run = folder, workdir.flat(to_dict(config)), path.read_text()
            found |= {name: functools.partial(OPEN[name], *run) for name in config.log.trackers}
        self._each = [_Tracker(name, opened) for name, opened in found.items()]
        leaving.before(self.end)

    def write(self, step: int, figures: dict[str, Any]) -> None:
        """Hands on a step's figures, which are single numbers."""
        for tracker in self._each:
            tracker.write(step, dict(figures))

    def end(self, code: int = leaving.FAILED) -> None:
        """Ends the run there, once: as finished, to be continued or failed, by its exit code."""
        ended, self._each = self._each, []
        leaving.forget(self.end)
        for tracker in ended:
            tracker.end(code)


class _Tracker(threading.Thread):
    def __init__(self, name: str, opened: Callable[[], Opened]):
        super().__init__(name=name, daemon=True)
        self._opened, self._items = opened, queue.Queue[tuple[int | None, Any]](WAITING)
        self.start()

    def run(self) -> None:
        try:
            log, end = self._opened()
            step, figures = self._items.get()
            while step is not None:
                log(step, figures)
                step, figures = self._items.get()
            end(figures)  # the exit code
        except BaseException as error:
            found = f"{type(error).__name__}: {fields.first_line(error)}"
            say(
                f"warning: the tracker {self.name} fails and gets no more figures; the run goes on"
                f" ({found})"
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
