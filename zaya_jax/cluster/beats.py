"""Heartbeats: a process tells its watcher how far it is, by a few words of shared memory, 5 us a
call.

    beats.begin(index)                  from now on writes its slot of the file that ZAYA_BEATS names, if there is one
    beats.at("step", 17, "dispatch")    section, step and mark that the main thread has come to
    beats.lap(17, whole, own, data)     seconds of a step: whole, this process's own work, waiting for data
    beats.read(path, index)             another process's last report, whole, or None

A second thread says every PULSE seconds that the process is alive. If marks stand still while the
pulse goes on, the main thread waits or hangs; without a pulse the process was stopped, or its
interpreter lock is held. Times are of CLOCK_MONOTONIC, which all processes of a machine share.
"""

import mmap
import os
import struct
import threading
import time
from pathlib import Path
from typing import NamedTuple

VARIABLE = "ZAYA_BEATS"  # names the file
SECTIONS = ("start", "compile", "step", "evaluate", "save", "end")
# Inside a step, in their order: only at "wait" do processes wait for each other.
MARKS = ("", "fetch", "dispatch", "wait", "figures")
PULSE = 0.5
LAPS = 64  # steps that are remembered
MOST = 2**40  # steps or seconds; more are none

# pid, section, step, mark, since, pulse, laps
_TURN, _REST = (struct.Struct("<Q"), struct.Struct("<qqqqddQ"))
_HEAD = struct.Struct("<QqqqqddQ")  # both
_LAP = struct.Struct("<qddd")
SIZE = _HEAD.size + LAPS * _LAP.size  # of a slot


class Lap(NamedTuple):
    """A step's seconds: all of it, this process's own work, and its wait for data."""

    step: int
    whole: float
    own: float
    data: float


class Beat(NamedTuple):
    """A process's progress."""

    pid: int
    section: str
    step: int
    mark: str
    since: float  # when it came there
    pulse: float  # when it last showed life
    laps: tuple[Lap, ...]  # the newest last
    lapped: int  # how many there were in all


class Beats:
    """The writer of one slot, once `begin` has found that somebody reads it."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._lock = threading.Lock()
        self._turn = self._slot = self._laps = 0
        self._where = (0, 0, 0, 0.0)

    def begin(self, index: int) -> None:
        """From now on this process reports its progress, if ZAYA_BEATS asks for it."""
        path = os.environ.get(VARIABLE)
        if path and self._memory is None:
            with open(path, "r+b") as file:
                self._memory = mmap.mmap(file.fileno(), 0)
            self._slot = index * SIZE
            self.at("start")
            threading.Thread(target=self._live, name="pulse", daemon=True).start()

    def at(self, section: str, step: int | None = None, mark: str = "") -> None:
        """The main thread has come here; without a step, the last one counts."""
        last = self._where[1] if step is None else step
        self._where = SECTIONS.index(section), last, MARKS.index(mark), time.monotonic()
        self._write()

    def lap(self, step: int, whole: float, own: float, data: float) -> None:
        """A step has ended."""
        self._write((step, whole, own, data))

    def _write(self, lap: tuple[int, float, float, float] | None = None) -> None:
        if self._memory is None:
            return
        with self._lock:
            # read here: another thread may have moved it meanwhile
            section, step, mark, since = self._where
            self._turn += 2
            _TURN.pack_into(self._memory, self._slot, self._turn - 1)  # an odd turn: being written
            if lap:
                place = self._slot + _HEAD.size + self._laps % LAPS * _LAP.size
                _LAP.pack_into(self._memory, place, *lap)
                self._laps += 1
            # Packed apart from the turn, since packing clears its bytes before it writes.
            now, place = time.monotonic(), self._slot + _TURN.size
            _REST.pack_into(
                self._memory, place, os.getpid(), section, step, mark, since, now, self._laps
            )
            _TURN.pack_into(self._memory, self._slot, self._turn)

    def _live(self) -> None:
        while True:
            time.sleep(PULSE)
            self._write()


_writer = Beats()  # this process's
begin, at, lap = _writer.begin, _writer.at, _writer.lap


def read(path: str | Path, index: int) -> Beat | None:
    """A process's last report; None if it has not made one, or something else wrote there."""
    with open(path, "rb") as file:
        for _ in range(100):
            raw, again = (os.pread(file.fileno(), SIZE, index * SIZE) for _ in range(2))
            if len(raw) < SIZE:
                return None
            turn, pid, section, step, mark, since, pulse, laps = _HEAD.unpack_from(raw)
            if turn and turn % 2 == 0 and raw[: _TURN.size] == again[: _TURN.size]:
                break
        else:
            return None
    newest = range(max(laps - LAPS, 0), laps)
    every = (Lap(*_LAP.unpack_from(raw, _HEAD.size + i % LAPS * _LAP.size)) for i in newest)
    # A lap stays for many steps, and the rest is soon written anew: odd laps alone are dropped.
    found = tuple(lap for lap in every if all(0 <= n < MOST for n in lap))
    sound = all(0 <= n < MOST for n in (step, since, pulse, time.monotonic() - max(since, pulse)))
    if not sound or section not in range(len(SECTIONS)) or mark not in range(len(MARKS)):
        return None
    return Beat(pid, SECTIONS[section], step, MARKS[mark], since, pulse, found, laps)
