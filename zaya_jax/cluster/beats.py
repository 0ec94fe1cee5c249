"""Heartbeats: a process tells its watcher how far it is, by a few words of memory in a file, 5 us a call.

    beats.begin(index)                  opens beat-INDEX in the folder that ZAYA_BEATS names; without it nothing is done
    beats.at("step", 17, "dispatch")    section, step and mark that the main thread has come to
    beats.lap(17, whole, own, data)     seconds of a step: whole, this process's own work, waiting for data
    beats.read(path)                    another process's last report, whole, or None

A second thread says every PULSE seconds that the process is alive. If marks stand still while the pulse goes on, the
main thread waits or hangs; without a pulse the process was stopped, or its interpreter lock is held. Times are of
CLOCK_MONOTONIC, which all processes of a machine share.
"""

import math
import mmap
import os
import struct
import threading
import time
from pathlib import Path
from typing import NamedTuple

from zaya_jax.config import files

FOLDER = "ZAYA_BEATS"  # the variable
SECTIONS = ("start", "compile", "step", "evaluate", "save", "end")
# Inside a step, in their order: only at "wait" do processes wait for each other.
MARKS = ("", "fetch", "dispatch", "wait", "figures")
PULSE = 0.5
LAPS = 64  # steps that are remembered

_TURN, _REST = (struct.Struct("<Q"), struct.Struct("<qqqqqddQ"))  # pid, index, section, step, mark, since, pulse, laps
_HEAD = struct.Struct("<QqqqqqddQ")  # both
_LAP = struct.Struct("<qddd")
SIZE = _HEAD.size + LAPS * _LAP.size


class Lap(NamedTuple):
    """A step's seconds: all of it, this process's own work, and its wait for data."""

    step: int
    whole: float
    own: float
    data: float


class Beat(NamedTuple):
    """A process's progress."""

    pid: int
    process: int
    section: str
    step: int
    mark: str
    since: float  # when it came there
    pulse: float  # when it last showed life
    laps: tuple[Lap, ...]  # the newest last

    @property
    def place(self) -> tuple[int, int, int]:
        """How far it has come, to be compared among processes of one start."""
        return self.step, SECTIONS.index(self.section), MARKS.index(self.mark)


class Beats:
    """The writer of one file."""

    def __init__(self, folder: str | Path, index: int):
        path = Path(folder) / f"beat-{index:05d}"
        path.parent.mkdir(parents=True, exist_ok=True)
        # A reader never sees half a file, or a mixture of two starts.
        new = path.with_suffix(f".{os.getpid()}")
        with new.open("w+b") as file:
            # On a full file system, missing pages would be a SIGBUS at the first word instead of an error here.
            file.write(bytes(SIZE))
            file.flush()
            self._memory = mmap.mmap(file.fileno(), SIZE)
        new.replace(path)
        self._lock = threading.Lock()
        self._turn, self._index, self._laps = 0, index, 0
        self._where = (0, 0, 0, 0.0)
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
        with self._lock:
            section, step, mark, since = self._where  # read here: another thread may have moved it meanwhile
            self._turn += 2
            _TURN.pack_into(self._memory, 0, self._turn - 1)  # an odd turn: being written
            if lap:
                _LAP.pack_into(self._memory, _HEAD.size + self._laps % LAPS * _LAP.size, *lap)
                self._laps += 1
            # Packed apart from the turn, since packing clears its bytes before it writes.
            _REST.pack_into(
                self._memory, _TURN.size, os.getpid(), self._index, section, step, mark,
                since, time.monotonic(), self._laps,
            )  # fmt: skip
            _TURN.pack_into(self._memory, 0, self._turn)

    def _live(self) -> None:
        while True:
            time.sleep(PULSE)
            self._write()


_beats: list[Beats] = []


def begin(index: int) -> None:
    """From now on this process reports its progress, if ZAYA_BEATS asks for it."""
    if os.environ.get(FOLDER) and not _beats:
        _beats.append(Beats(os.environ[FOLDER], index))


def at(section: str, step: int | None = None, mark: str = "") -> None:
    """See `Beats`."""
    for one in _beats:
        one.at(section, step, mark)


def lap(step: int, whole: float, own: float, data: float) -> None:
    """See `Beats`."""
    for one in _beats:
        one.lap(step, whole, own, data)


def read(path: str | Path) -> Beat | None:
    """A process's last report; None if its file holds no whole and plausible one: it may have been overwritten."""
    for _ in range(100):
        raw, again = _bytes(path), _bytes(path)
        if len(raw) != SIZE or len(again) != SIZE:
            return None
        turn, pid, index, section, step, mark, since, pulse, laps = _HEAD.unpack_from(raw)
        if turn and turn % 2 == 0 and raw[:8] == again[:8]:
            break
    else:
        return None
    kept = range(max(laps - LAPS, 0), laps)
    found = tuple(Lap(*_LAP.unpack_from(raw, _HEAD.size + i % LAPS * _LAP.size)) for i in kept)
    possible = 0 <= section < len(SECTIONS) and 0 <= mark < len(MARKS)
    possible = possible and all(0 <= t < time.monotonic() + 1 for t in (since, pulse))
    if not possible or not all(0 <= t < math.inf for one in found for t in one):
        return None
    return Beat(pid, index, SECTIONS[section], step, MARKS[mark], since, pulse, found)


def _bytes(path: str | Path) -> bytes:
    """The file's bytes, at most one more than a heartbeat has: its path may hold a pipe, or an endless file."""
    try:
        with files.opened(path) as file:
            return file.read(SIZE + 1)
    except OSError:
        return b""
