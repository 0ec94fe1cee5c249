"""Who runs a preparation's tasks: processes of this machine, or a Ray cluster. Both give the same files.

An engine takes the job, the tasks that are to be done, how many may run at once (0: as many as there are cores), and
`tell(bytes, tokens, tasks)`, which it calls about twice a second with what it has done so far. What a task raises,
it raises.
"""

import concurrent.futures
import importlib.util
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from zaya_jax.config import UserError
from zaya_jax.data import prepare_task
from zaya_jax.data.prepare_plan import Task
from zaya_jax.data.prepare_task import Job

Tell = Callable[[int, int, int], None]
# Of a task whose Ray worker or node died: one that always takes its worker along must end some day.
RETRIES = 3
# Tasks that wait in Ray for each core, at least QUEUE: a cluster that grows sees that there is work.
AHEAD = 4
QUEUE = 256

_shared: dict[str, Any] = {}


class Stopped(Exception):
    """Another task failed: this one is given up."""


def require(engine: str) -> None:
    """UserError where an engine is not here, before anything is written."""
    if engine == "ray" and importlib.util.find_spec("ray") is None:
        raise UserError("--engine=ray needs Ray, which is not installed: pip install 'zaya_jax[ray]'")


def run(engine: str, job: Job, todo: list[Task], at_once: int, tell: Tell) -> None:
    """Do these tasks with the engine of this name."""
    if todo:
        (run_on_ray if engine == "ray" else run_processes)(job, todo, at_once, tell)


def run_processes(job: Job, todo: list[Task], at_once: int, tell: Tell) -> None:
    """On this machine."""
    spawn = multiprocessing.get_context("spawn")
    done, tokens, stop = spawn.Value("q", 0), spawn.Value("q", 0), spawn.Event()
    finished_tasks = 0
    with concurrent.futures.ProcessPoolExecutor(
        min(at_once or os.cpu_count() or 1, len(todo)),
        spawn,
        _start_worker,
        (done, tokens, stop, os.getpid()),
    ) as pool:
        try:
            futures = {pool.submit(_work, task, job) for task in todo}
            while futures:
                finished, futures = concurrent.futures.wait(futures, 0.5, concurrent.futures.FIRST_EXCEPTION)
                finished_tasks += len(finished)
                tell(done.value, tokens.value, finished_tasks)
                for future in finished:
                    future.result()
        except concurrent.futures.process.BrokenProcessPool:
            raise UserError(
                "a worker process was killed (out of memory?); run the same command again, perhaps with fewer "
                "--processes"
            ) from None
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)


def _start_worker(done: Any, tokens: Any, stop: Any, parent: int) -> None:
    """In a worker: keep the shared counters, leave Ctrl-C to the parent, and end when the parent has."""
    _shared.update(done=done, tokens=tokens, stop=stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["RAYON_NUM_THREADS"] = "1"  # the tokenizers library's threads: processes share the cores here

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _count(done: int, tokens: int) -> None:
    if _shared["stop"].is_set():
        raise Stopped
    for name, value in (("done", done), ("tokens", tokens)):
        with _shared[name].get_lock():
            _shared[name].value += value


def _work(task: Task, job: Job) -> None:
    prepare_task.run(task, job, _count)


def run_on_ray(job: Job, todo: list[Task], at_once: int, tell: Tell) -> None:
    """On the Ray cluster that RAY_ADDRESS names, or that this machine belongs to; one core a task."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would send statistics to its makers
    import ray

    address = os.environ.get("RAY_ADDRESS") or "auto"
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error", ignore_reinit_error=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(
            f"no Ray cluster at RAY_ADDRESS={address} ({' '.join(str(error).split())[:150]}); begin one with ray "
            "start --head --disable-usage-stats --include-dashboard=false, or use --engine=processes"
        ) from None
    remote, shared = ray.remote(num_cpus=1, max_retries=RETRIES)(_ray_work), ray.put(job)
    waiting, running = list(reversed(todo)), dict[Any, Task]()
    done = tokens = 0
    try:
        while waiting or running:
            window = at_once or max(QUEUE, AHEAD * int(ray.cluster_resources().get("CPU", 1)))
            while waiting and len(running) < window:
                task = waiting.pop()
                running[remote.remote(task, shared, os.getcwd())] = task
            finished, _ = ray.wait(list(running), num_returns=len(running), timeout=0.5)
            for ref in finished:
                tokens += ray.get(ref)
                done += running.pop(ref).cost
            tell(done, tokens, len(todo) - len(waiting) - len(running))
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise UserError(
            f"Ray gave a task up after {RETRIES} retries ({type(error).__name__}: out of memory, or nodes lost?); run "
            "the same command again, perhaps with fewer --processes"
        ) from None
    finally:
        for ref in running:  # one failed: what others still wrote would stay behind
            ray.cancel(ref, force=True)
        if running:
            ray.wait(list(running), num_returns=len(running), timeout=30)


def _ray_work(task: Task, job: Job, folder: str) -> int:
    """A task in a Ray worker, whose paths are from this folder; its tokens."""
    os.chdir(folder)
    os.environ["RAYON_NUM_THREADS"] = "1"
    made: list[int] = []
    prepare_task.run(task, job, lambda _, tokens: made.append(tokens))
    return sum(made)
