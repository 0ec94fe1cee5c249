"""Runs several processes as one: they start together, wait for each other by name, stop at one
step, and end together.

    run_distributed(program)               finds the others, runs the program, returns their exit code
    is_writer()                            whether this process writes the files that exist once
    broadcast_from_zero(name, function)    the result of `function` in process 0, in every process
    gather_to_zero(name, value)            all processes' values, in process 0
    barrier(name)                          LostProcess names the absent
    StopSignal, Timer                      the same decision after the same step in every process

Messages go through the key-value store of JAX's coordinator, in process 0. With one process all of
this is free and needs no set-up.
"""

import argparse
import collections
import contextlib
import gc
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import distributed  # the coordinator's client has no public name

from zaya_jax.cluster import beats, jax_repairs, leaving
from zaya_jax.cluster.lifelines import NO_PROCESS, Lifelines, RunEnd
from zaya_jax.cluster.rank import NAMES, LostProcess, Rank, find_rank, name_processes, split_address
from zaya_jax.config import UserError, first_line

# Seconds, each the environment's to change: at 1,024 processes the slowest image pull or disk
# decides.
JOIN = ("ZAYA_JOIN_SECONDS", 600)  # until all processes have come
# at a barrier, or for process 0: restoring and reporting take their time
WAIT = ("ZAYA_WAIT_SECONDS", 3600)
HEARTBEAT = ("ZAYA_HEARTBEAT_SECONDS", 60)  # after which a silent process counts as dead
NEVER = 10**6  # for JAX's own heartbeats, which end a process with SIGABRT and no name
GARBAGE_EVERY = 100  # steps; a collection takes 20 to 100 ms, and delays all processes

_PREFIX = "zaya_jax"
_log = logging.getLogger("zaya_jax")
_log.addHandler(logging.NullHandler())  # this process's file, once `logs` has opened it
_log.propagate = False  # libraries give the root logger a handler that prints
_calls: collections.Counter[str] = collections.Counter()
_error: BaseException | None = None  # that ended the program here
_lifelines: Lifelines | None = None  # of several processes: by them an error here ends all


def run_distributed(program: Callable[[], int], options: argparse.Namespace | None = None) -> int:
    """Runs a program as one of the processes that its options, variables or Slurm name, or alone.

    An error in one process ends all of them with its exit code; that process and process 0 print
    the line.
    """
    global _lifelines
    rank = find_rank(os.environ, {name: getattr(options, name, None) for name in NAMES})
    beats.begin(rank.index if rank else 0)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Until StopSignal takes over there is nothing to save. Python's own handler would raise
        # KeyboardInterrupt wherever it is: one in a callback of XLA's was lost, one in JAX's cache
        # became a ValueError of 159 lines.
        signal.signal(signal.SIGINT, lambda *_: None)
        leaving.at_signal(1, _interrupted)
    if rank is None:
        return program()
    _lifelines = Lifelines(rank, seconds_of(HEARTBEAT), _exit_with)
    try:
        _lifelines.roll_call(seconds_of(JOIN))
        _join(rank)
        code = program()
        jax.distributed.shutdown()
    except BaseException as error:
        _end_all(_lifelines, error)
        raise
    _lifelines.hang_up()
    return code


def _join(rank: Rank) -> None:
    address = rank.coordinator
    if rank.index:
        address = jax_repairs.through(*split_address(address))
    jax.distributed.initialize(
        address,
        rank.count,
        rank.index,
        local_device_ids=list(rank.devices) or None,
        cluster_detection_method="deactivate",
        initialization_timeout=seconds_of(JOIN),
        heartbeat_timeout_seconds=NEVER,
        shutdown_timeout_seconds=seconds_of(WAIT),
    )
    jax_repairs.compile_together(barrier)
    # JAX has SIGTERM only noted, for its own protocol; until StopSignal takes over there is nothing
    # to save.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def process_index_and_count() -> tuple[int, int]:
    """This process's index and the number of processes, without starting JAX's backend, which takes
    the devices, as JAX's public functions do."""
    return distributed.global_state.process_id or 0, distributed.global_state.num_processes or 1


def is_writer() -> bool:
    """Whether this process writes the files that a run has once: metrics, config, report."""
    return process_index_and_count()[0] == 0


def broadcast_from_zero(name: str, function: Callable[[], Any]) -> Any:
    """The result of `function` in process 0 (JSON), in every process; an error there ends all."""
    if process_index_and_count()[1] == 1:
        return function()
    key = f"{_PREFIX}/first/{name}/{_nth_use(name)}"
    if is_writer():
        value = function()
        _client().key_value_set(key, json.dumps(value))
        return value
    return _wait_for(key, 0, name)


def gather_to_zero(name: str, value: Any) -> list[Any] | None:
    """All processes' values (JSON), in their order, in process 0; None elsewhere."""
    index, count = process_index_and_count()
    if count == 1:
        return [value]
    key = f"{_PREFIX}/all/{name}/{_nth_use(name)}"
    if index:
        _client().key_value_set(f"{key}/{index}", json.dumps(value))
        return None
    values = [value]
    for other in range(1, count):
        values.append(_wait_for(f"{key}/{other}", other, name))
        _client().key_value_delete(f"{key}/{other}")
    return values


def barrier(name: str) -> None:
    """Returns when every process has called it; LostProcess names those that have not within the
    seconds of WAIT."""
    count = jax.process_count()
    if count == 1:
        return
    seconds = seconds_of(WAIT)
    key = f"{_PREFIX}/barrier/{name}/{_nth_use(name)}"
    mine = f"{key}/{jax.process_index()}"
    _client().key_value_set(mine, "here")
    try:
        _client().wait_at_barrier(key, 1000 * seconds)
    except jax.errors.JaxRuntimeError as error:
        present = {int(path.rsplit("/", 1)[1]) for path, _ in _client().key_value_dir_get(key)}
        absent = [i for i in range(count) if i not in present]
        if not absent:
            raise LostProcess(f"{name!r}: {first_line(error)}") from error
        raise LostProcess(
            f"{name_processes(absent)} of {count} did not reach {name!r} within {seconds} s;"
            " see their logs"
        ) from error
    _client().key_value_delete(mine)


def reduce_figures(figures: dict[str, float], how: dict[str, Callable]) -> dict[str, float]:
    """Each figure of all processes as one, by the NumPy function that `how` names for it, otherwise
    the mean."""
    if jax.process_count() == 1:
        return figures
    # Through the coordinator, with its timeout: a collective on the devices would wait for the
    # steps in flight.
    every = gather_to_zero("figures", list(figures.values())) or []
    if every and _calls["figures: joined"]:
        # Whoever has sent its figures has read the last result, which would stay for good.
        last = f"{_PREFIX}/first/figures: joined/{_calls['figures: joined']}"
        _client().key_value_delete(last)
    columns = dict(zip(figures, zip(*every, strict=True), strict=False))

    def joined() -> dict[str, float]:
        return {name: float(how.get(name, np.mean)(column)) for name, column in columns.items()}

    return broadcast_from_zero("figures: joined", joined)


def collect_garbage(step: int) -> None:
    """Collects Python's garbage after the same steps in all processes, since a pause of one delays
    all."""
    if jax.process_count() == 1:
        return
    if gc.isenabled():
        gc.disable()
        gc.collect()
        gc.freeze()  # modules and objects of the set-up: never looked through again
    elif step % GARBAGE_EVERY == 0:
        gc.collect()


class _AgreedStep:
    """A wish of one process that all follow after the same step.

    A process with a wish at step n writes n + 2 into the store before it dispatches step n + 1. No
    process ends step n + 1 without the others, so at step n + 2 all know; the loop must read each
    step's figures before it asks about the next step but one.
    """

    def __init__(self, name: str):
        self._key = f"{_PREFIX}/{name}/{_nth_use(name)}"
        self._known = False

    def after(self, step: int, wish: str) -> str:
        """The wish to follow after this step, "" where none is; `wish` is this process's own."""
        if jax.process_count() == 1:
            return wish
        if wish and not self._known:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # another process was first
                _client().key_value_set(f"{self._key}/wish", json.dumps([step + 2, wish]))
        wishes = _client().key_value_dir_get(self._key)
        if not wishes:
            return ""
        self._known = True
        last, wish = json.loads(wishes[0][1])
        return wish if step >= last else ""


class StopSignal:
    """SIGTERM, SIGINT or SIGHUP as a wish that the loop reads: it finishes and saves the step in
    flight, everywhere."""

    def __init__(self) -> None:
        self.asked = ""
        self._agreed = _AgreedStep("stop")
        for number in leaving.STOPPING:
            signal.signal(number, self._ask)
        # a terminal that closes, without nohup
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self._ask)
        leaving.at_signal(2, _interrupted)

    def after(self, step: int) -> bool:
        """Whether to stop after this step; the same answer in every process. Called once a step."""
        several = f" to process {jax.process_index()}" if jax.process_count() > 1 else ""
        wish = self._agreed.after(step, self.asked and self.asked + several)
        self.asked = wish or self.asked
        return bool(wish)

    def anywhere(self) -> bool:
        """Whether a process is asked to stop by now; all processes together."""
        return bool(reduce_figures({"asked": float(bool(self.asked))}, {"asked": np.max})["asked"])

    def _ask(self, number: int, frame: Any) -> None:
        self.asked = self.asked or signal.Signals(number).name


class Timer:
    """Every so many seconds of process 0, after the same step in all processes; 0 seconds:
    never."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._begun, self._agreed = time.monotonic(), _AgreedStep("timer")

    def after(self, step: int) -> bool:
        """Whether the time is up after this step; called once a step."""
        due = self._seconds and is_writer() and time.monotonic() - self._begun >= self._seconds
        if not self._seconds or not self._agreed.after(step, "due" if due else ""):
            return False
        self._begun, self._agreed = time.monotonic(), _AgreedStep("timer")
        return True


def _end_all(lifelines: Lifelines, error: BaseException) -> None:
    global _error
    _error = _error or error
    code, text = leaving.code_of(error)
    # An unexpected error may follow from the loss of another process.
    lifelines.report(code, text, certain=code != leaving.FAILED)
    leaving.now(code)


def _exit_with(end: RunEnd) -> None:
    """Ends this process with a line in its log and, in process 0 and the one that reports, on the
    terminal."""
    lifelines = _lifelines
    assert lifelines
    mine = end.process == lifelines.index
    line = f"error: {end.text}"
    if not mine and end.process != NO_PROCESS:
        line = f"error: process {end.process} on {end.host}: {end.text}"

    def write() -> None:
        unexpected = end.code == leaving.FAILED and not isinstance(_error, LostProcess)
        if mine and unexpected and _error:
            _log.error("unexpected", exc_info=_error)
            traceback.print_exception(_error)
        _log.error(line)
        logged = any(isinstance(handler, logging.FileHandler) for handler in _log.handlers)
        if mine or lifelines.index == 0 or lifelines.lost or not logged:
            print(line, file=sys.stderr)

    leaving.within(leaving.PATIENCE, write)
    silent = lifelines.wait_for_hangups()
    if silent:
        leaving.complain(f"error: {name_processes(silent)} gave no answer")
    leaving.now(end.code)  # an orderly end would wait for the others


def _interrupted(number: signal.Signals) -> None:
    """Ends all processes at once, on a second signal."""
    error = KeyboardInterrupt(number)
    if _lifelines:
        _end_all(_lifelines, error)
    code, text = leaving.code_of(error)
    leaving.now(code, f"error: {text}")


def _client() -> Any:
    return distributed.global_state.client


def _wait_for(key: str, process: int, name: str) -> Any:
    """A process's value in the store; LostProcess if it does not come within the seconds of
    WAIT."""
    try:
        return json.loads(_client().blocking_key_value_get(key, 1000 * seconds_of(WAIT)))
    except jax.errors.JaxRuntimeError as error:
        raise LostProcess(
            f"process {process} did not reach {name!r} within {seconds_of(WAIT)} s; see its log"
        ) from error


def _nth_use(name: str) -> int:
    """How often a name has been used: the same in all processes, since they run the same
    program."""
    _calls[name] += 1
    return _calls[name]


def seconds_of(setting: tuple[str, int]) -> int:
    """The seconds of JOIN, WAIT or HEARTBEAT by the environment; UserError if it is not a number
    of seconds."""
    name, usual = setting
    value = os.environ.get(name) or str(usual)
    if not value.isdecimal() or not 0 < int(value[:9]) <= NEVER:
        raise UserError(f"{name}={value!r} is not a whole number of seconds from 1 to {NEVER}")
    return int(value)
