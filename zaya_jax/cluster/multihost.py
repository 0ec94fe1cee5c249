"""Runs several processes as one: they start together, wait for each other by name, stop at one
step, and end together.

    multihost.together(program)     finds the other processes, runs the program, and returns their common exit code
    is_writer()                     whether this process writes the files that exist once
    from_first(name, function)      the result of `function` in process 0, in every process
    to_first(name, value)           all processes' values, in process 0
    barrier(name)                   LostProcess names the absent
    StopSignal, Timer               the same decision after the same step in every process

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
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from zaya_jax.cluster import beats, jax_repairs, leaving
from zaya_jax.cluster.lifelines import NO_PROCESS, End, Lifelines
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
_errors: list[BaseException] = []  # the error that ended the program here
_calls: collections.Counter[str] = collections.Counter()
_lines: list[Lifelines] = []  # of several processes: by them an error here ends all


def together(program: Callable[[], int], options: argparse.Namespace | None = None) -> int:
    """Runs a program as one of the processes that its options, variables or Slurm name, or alone.

    An error in one process ends all of them with its exit code; that process and process 0 print
    the line.
    """
    given = {name: getattr(options, name, None) for name in NAMES}
    rank = find_rank(os.environ, given)
    beats.begin(rank.index if rank else 0)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Until StopSignal takes over there is nothing to save. Python's own handler would raise
        # KeyboardInterrupt wherever it is: one in a callback of XLA's was lost, one in JAX's cache
        # became a ValueError of 159 lines.
        signal.signal(signal.SIGINT, lambda *_: None)
        leaving.at_signal(1, _interrupted)
    if rank is None:
        return program()
    lines = Lifelines(rank, seconds_of(HEARTBEAT), _leave)
    _lines.append(lines)
    try:
        lines.roll_call(seconds_of(JOIN))
    except LostProcess as error:
        leaving.complain(f"error: {error}")
        return 1
    try:
        _join(rank)
        code = program()
        jax.distributed.shutdown()
    except BaseException as error:
        _because(error)
        raise
    lines.hang_up()
    return code


def _join(rank: Rank) -> None:
    """Joins JAX's distributed runtime."""
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


def place() -> tuple[int, int]:
    """This process's index and the number of processes, without starting JAX's backend, which takes
    the devices."""
    from jax._src import distributed  # JAX's public functions start it

    return distributed.global_state.process_id or 0, distributed.global_state.num_processes or 1


def is_writer() -> bool:
    """Whether this process writes the files that a run has once: metrics, config, report."""
    return place()[0] == 0


def from_first(name: str, function: Callable[[], Any]) -> Any:
    """The result of `function` in process 0 (JSON), in every process; an error there ends all."""
    if place()[1] == 1:
        return function()
    key = f"{_PREFIX}/first/{name}/{_turn(name)}"
    if is_writer():
        value = function()
        _client().key_value_set(key, json.dumps(value))
        return value
    return _wait_for(key, 0, name)


def _forget_first(name: str) -> None:
    """Deletes the last result of `from_first` under this name, which all have read."""
    if _calls[name]:
        _client().key_value_delete(f"{_PREFIX}/first/{name}/{_calls[name]}")


def to_first(name: str, value: Any) -> list[Any] | None:
    """All processes' values (JSON), in their order, in process 0; None elsewhere."""
    index, count = place()
    if count == 1:
        return [value]
    here = f"{_PREFIX}/all/{name}/{_turn(name)}"
    if index:
        _client().key_value_set(f"{here}/{index}", json.dumps(value))
        return None
    values = [value]
    for other in range(1, count):
        values.append(_wait_for(f"{here}/{other}", other, name))
        _client().key_value_delete(f"{here}/{other}")
    return values


def barrier(name: str, seconds: float | None = None) -> None:
    """Returns when every process has called it; LostProcess names those that have not within
    `seconds`."""
    count, index = jax.process_count(), jax.process_index()
    if count == 1:
        return
    seconds = seconds_of(WAIT) if seconds is None else seconds
    here = f"{_PREFIX}/barrier/{name}/{_turn(name)}"
    _client().key_value_set(f"{here}/{index}", socket.gethostname())
    try:
        _client().wait_at_barrier(here, int(1000 * seconds))
    except jax.errors.JaxRuntimeError as error:
        came = {int(key.rsplit("/", 1)[1]) for key, _ in _client().key_value_dir_get(here)}
        absent = [i for i in range(count) if i not in came]
        if not absent:
            raise LostProcess(f"{name!r}: {first_line(error)}") from error
        raise LostProcess(
            f"{name_processes(absent)} of {count} did not come to {name!r} within {seconds:g} s;"
            " see logs/ there"
        ) from error
    _client().key_value_delete(f"{here}/{index}")


def over_processes(figures: dict[str, float], how: dict[str, Callable]) -> dict[str, float]:
    """Each figure of all processes as one, by the NumPy function that `how` names for it, otherwise
    the mean."""
    if jax.process_count() == 1:
        return figures
    # Through the coordinator, with its timeout: a collective on the devices would wait for the
    # steps in flight.
    every = to_first("figures", list(figures.values())) or []
    if every:  # whoever has sent its figures has read the last result, which would stay for good
        _forget_first("figures: joined")
    columns = dict(zip(figures, zip(*every, strict=True), strict=False))

    def joined():
        return {name: float(how.get(name, np.mean)(column)) for name, column in columns.items()}

    return from_first("figures: joined", joined)


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


class _Ahead:
    """A wish of one process that all follow after the same step.

    A process with a wish at step n writes n + 2 into the store before it dispatches step n + 1. No
    process ends step n + 1 without the others, so at step n + 2 all know; the loop must read each
    step's figures before it asks about the next step but one.
    """

    def __init__(self, name: str):
        self._key, self._known = f"{_PREFIX}/{name}/{_turn(name)}", False

    def after(self, step: int, wish: str) -> str:
        """The wish to follow after this step, "" where none is; `wish` is this process's own."""
        if jax.process_count() == 1:
            return wish
        if wish and not self._known:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # another process was first
                _client().key_value_set(f"{self._key}/wish", json.dumps([step + 2, wish]))
        found = _client().key_value_dir_get(self._key)
        if not found:
            return ""
        self._known = True
        last, wish = json.loads(found[0][1])
        return wish if step >= last else ""


class StopSignal:
    """SIGTERM, SIGINT or SIGHUP as a wish that the loop reads: it finishes and saves the step in
    flight, everywhere."""

    def __init__(self) -> None:
        self.asked, self._ahead = "", _Ahead("stop")
        for number in leaving.STOPPING:
            signal.signal(number, self._ask)
        # a terminal that closes, without nohup
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self._ask)
        leaving.at_signal(2, _interrupted)

    def after(self, step: int) -> bool:
        """Whether to stop after this step; the same answer in every process. Called once a step."""
        several = f" to process {jax.process_index()}" if jax.process_count() > 1 else ""
        wish = self._ahead.after(step, self.asked and self.asked + several)
        self.asked = wish or self.asked
        return bool(wish)

    def anywhere(self) -> bool:
        """Whether a process is asked to stop by now; all processes together."""
        return bool(over_processes({"asked": float(bool(self.asked))}, {"asked": np.max})["asked"])

    def _ask(self, number: int, frame: Any) -> None:
        self.asked = self.asked or signal.Signals(number).name


class Timer:
    """Every so many seconds of process 0, after the same step in all processes; 0 seconds:
    never."""

    def __init__(self, seconds: float):
        self._seconds, self._begun, self._ahead = seconds, time.monotonic(), _Ahead("timer")

    def after(self, step: int) -> bool:
        """Whether the time is up after this step; called once a step."""
        due = self._seconds and is_writer() and time.monotonic() - self._begun >= self._seconds
        if not self._seconds or not self._ahead.after(step, "due" if due else ""):
            return False
        self._begun, self._ahead = time.monotonic(), _Ahead("timer")
        return True


def _because(error: BaseException) -> None:
    """Ends all processes."""
    code, text = leaving.code_of(error)
    _errors.append(error)
    # An unexpected error may follow from the loss of another process.
    _lines[-1].report(code, text, certain=code != 1)
    leaving.now(code)


def _leave(end: End) -> None:
    """Ends this process with a line in its log and, in process 0 and the one that reports, on the
    terminal."""
    lines = _lines[-1]
    me = lines.index  # JAX may not have begun
    mine = end.process == me
    who = "" if mine or end.process == NO_PROCESS else f"process {end.process} on {end.host}: "
    line = f"error: {who}{end.text}"

    def say() -> None:
        if mine and end.code == 1 and _errors and not isinstance(_errors[0], LostProcess):
            _log.error("unexpected", exc_info=_errors[0])
            traceback.print_exception(_errors[0])
        _log.error(line)
        logged = any(isinstance(handler, logging.FileHandler) for handler in _log.handlers)
        if mine or me == 0 or lines.lost or not logged:
            print(line, file=sys.stderr)

    leaving.within(leaving.PATIENCE, say)
    silent = lines.see_off()
    if silent:
        leaving.complain(f"error: {name_processes(silent)} gave no answer")
    leaving.now(end.code)  # an orderly end would wait for the others


def _interrupted(number: signal.Signals) -> None:
    """Ends all processes at once, on a second signal."""
    error = KeyboardInterrupt(number)
    if _lines:
        _because(error)
    code, text = leaving.code_of(error)
    leaving.now(code, f"error: {text}")


def _client() -> Any:
    from jax._src import distributed  # JAX has no public name for its coordinator's client

    return distributed.global_state.client


def _wait_for(key: str, process: int, name: str) -> Any:
    """A process's value in the store; LostProcess if it does not come within the seconds of
    WAIT."""
    try:
        return json.loads(_client().blocking_key_value_get(key, 1000 * seconds_of(WAIT)))
    except jax.errors.JaxRuntimeError as error:
        raise LostProcess(
            f"process {process} did not come to {name!r} within {seconds_of(WAIT)} s"
        ) from error


def _turn(name: str) -> int:
    """How often a name has been used: the same in all processes, since they run the same
    program."""
    _calls[name] += 1
    return _calls[name]


def seconds_of(setting: tuple[str, int]) -> int:
    """The seconds of JOIN, WAIT or HEARTBEAT by the environment; UserError if it is not a number
    of seconds."""
    name, usual = setting
    given = os.environ.get(name) or str(usual)
    if not given.isdecimal() or not 0 < int(given[:9]) <= NEVER:
        raise UserError(f"{name}={given!r} is not a whole number of seconds from 1 to {NEVER}")
    return int(given)
