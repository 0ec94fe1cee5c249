"""Keeps a connection from each process of a run to process 0, so that a killed or stopped process
is noticed.

    lines = Lifelines(rank, seconds, leave)    a thread of its own, whatever the main one is doing
    lines.roll_call(seconds)                   returns when all are there; LostProcess names the absent
    lines.report(code, text)                   this process must end: so do all, with the first report's code
    lines.hang_up()                            the orderly end

The system closes a killed process's line at once. A stopped one's stays silent: process 0 asks each
process every tenth of `seconds`, and one that is silent for `seconds` is lost. Then `leave` is
called with the reason in all others.

The lines (`lines`) are connections to the coordinator's port, which JAX's service takes over once
all have called. Only a process that knows the job's key counts; nothing that strangers send to that
port has an effect.
"""

import contextlib
import json
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from zaya_jax.cluster import lines
from zaya_jax.cluster.lines import Line
from zaya_jax.cluster.rank import LostProcess, Rank, name_processes, split_address
from zaya_jax.config import UserError

ALLOWED = 0.9  # of the seconds of silence; the rest is for noticing and leaving
GOODBYE = 10.0  # seconds that process 0 waits for the others to hang up
NO_PROCESS = -1  # in place of a process's index: process 0 found it out
# The fields of each message.
FIELDS = {"all": (str,), "bye": ()} | dict.fromkeys(("end", "doubt"), (range(256), int, str, str))
_log = logging.getLogger("zaya_jax")


class End(NamedTuple):
    """Why all processes end: the exit code, the process that reports it, its host, and the text."""

    code: int
    process: int
    host: str
    text: str


class Lifelines:
    """This process's lines. `leave` is called in a thread, and should not return."""

    def __init__(self, rank: Rank, seconds: float, leave: Callable[[End], None]):
        self.index, self._place, self._seconds, self._leave = rank.index, rank, seconds, leave
        self._host = socket.gethostname()
        self._selector = selectors.DefaultSelector()
        self.lost: list[int] = []  # processes that this one found to be lost
        differs = "process {index} on {host} counts {digest} processes, process 0 counts " + str(
            rank.count
        )
        self._door = lines.Door(
            self._selector,
            str(rank.count),
            rank.count,
            differs,
            self._came,
            self._take,
            self._gone,
            self._refused,
        )
        self._lines = self._door.known  # in process 0 to all others, in the others to process 0
        self._called = threading.Event()
        self._refusal: End | None = None
        self._ended, self._parted = threading.Event(), 0.0
        self._slept = self._woke = self._allowed = self._deadline = 0.0
        self._doubt: tuple[float, End] | None = None
        self._thread = threading.Thread(target=self._run, name="lifelines", daemon=True)

    def roll_call(self, seconds: float) -> None:
        """Returns on every process when all have called; LostProcess names those that did not
        within `seconds`."""
        self._allowed, self._deadline = seconds, time.monotonic() + seconds
        if self.index == 0:
            way = "give another, as JAX_COORDINATOR_PORT or in the coordinator's address"
            _, port = split_address(self._place.coordinator)
            self._door.open(port, "the coordinator's", way)
        self._main, inside = socket.socketpair()  # on it the main thread speaks to this one
        self._inside = Line(inside)
        self._door.attend(self._inside)
        self._thread.start()
        self._called.wait()
        if self._refusal:
            self._thread.join()
            raise (
                UserError(self._refusal.text)
                if self._refusal.code == 2
                else LostProcess(self._refusal.text)
            )

    def report(self, code: int, text: str, certain: bool) -> None:
        """Ends all processes with this code, and waits for the end.

        An uncertain error may follow from the loss of another process, which then is the cause: the
        report counts once all others have given a later sign of life.
        """
        end = End(code, self.index, self._host, text)
        with contextlib.suppress(OSError):
            self._main.sendall((json.dumps(["end" if certain else "doubt", *end]) + "\n").encode())
        self._thread.join(self._seconds + 2 * GOODBYE)
        if not self._ended.is_set():  # process 0 gives no answer, and is not lost either
            self._leave(end)

    def hang_up(self) -> None:
        """The orderly end, which is no loss."""
        with contextlib.suppress(OSError):
            self._main.sendall(b'["bye"]\n')
        self._thread.join()

    def _run(self) -> None:
        try:
            if self.index:
                self._call()
            while not self._ended.is_set():
                self._turn(min(self._seconds / 10, 1.0))
        except Exception as error:  # a run never goes on without its lines
            self._end(End(1, self.index, self._host, f"lifelines: {type(error).__name__}: {error}"))
        finally:
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
            self._main.close()
            self._called.set()

    def _turn(self, patience: float) -> None:
        begun = time.monotonic()
        for key, _ in self._selector.select(patience):
            if not self._ended.is_set():
                key.data()
        now = time.monotonic()
        if now - begun - patience > self._seconds / 2:
            self._slept, self._woke = now - begun, now
            _log.warning(
                "this process stood still for %.0f s: stopped, or its machine was", self._slept
            )
            self._door.forgive(now)
        if not self._ended.is_set():
            self._look(now)

    def _look(self, now: float) -> None:
        """Asks for signs of life, and looks for silent processes."""
        if self._parted:
            if not self._lines or now - self._parted > GOODBYE:
                self._ended.set()
            return None
        if self.index == 0:
            self._door.turn(now, self._seconds / 10)
        if not self._called.is_set() and self.index == 0 and now > self._deadline:
            absent = [i for i in range(self._place.count) if i and i not in self._lines]
            text = (
                f"{name_processes(absent)} of {self._place.count} did not come within"
                f" {self._allowed:.0f} s"
            )
            return self._end(End(1, NO_PROCESS, self._host, text))
        limit = ALLOWED * self._seconds
        if any(now - line.heard > limit for line in self._lines.values()):
            silent = [line for line in self._lines.values() if now - line.heard > 0.8 * limit]
            return self._lost(
                silent, f"silent for {limit:.0f} s: stopped, or machine or network down"
            )
        if self._doubt and all(
            line.heard > self._doubt[0]
            for line in self._lines.values()
            if line.index != self._doubt[1].process
        ):
            return self._end(self._doubt[1])
        return None

    def _take(self, line: Line, message: list) -> None:
        kind, *rest = message
        if not lines.fits(rest, FIELDS.get(kind)):
            raise lines.OddMessage
        if kind == "all":
            (line.name,) = rest
            self._called.set()
        elif kind == "bye" and line is self._inside:
            self._parted = time.monotonic()
            if self.index:
                self._lines.pop(0).say("bye")
        elif kind == "bye":
            self._door.drop(line)
        elif kind in ("end", "doubt"):
            end = End(*rest)
            if self.index and line is self._inside:  # process 0 decides which end counts
                self._lines[0].say(kind, *end)
            elif kind == "end":
                self._end(end)
            elif not self._doubt:
                self._doubt, self._door.asked = (time.monotonic(), end), 0.0

    def _came(self, line: Line, before: Line | None) -> None:
        """In process 0: another one has called."""
        if before:
            words = f"process {line.index} is there twice, on {before.name} and on {line.name}"
            before.say("end", *End(2, NO_PROCESS, self._host, words))
            return self._refused(words)
        if len(self._lines) < self._place.count - 1:
            return None
        self._door.shut()  # JAX's service listens there next
        for other in self._lines.values():
            other.say("all", self._host)
        self._called.set()
        return None

    def _refused(self, words: str) -> None:
        """A process of this job that is not expected: all must know."""
        self._end(End(2, NO_PROCESS, self._host, words))

    def _gone(self, line: Line) -> None:
        if not self._parted:
            self._lost([line], f"gone: killed, or crashed; see logs/process-{line.index:05d}.log")

    def _call(self) -> None:
        """In the others: finds process 0, however late it comes."""
        address, count = self._place.coordinator, str(self._place.count)
        try:
            line = lines.call(address, self.index, count, self._allowed)
        except (LostProcess, UserError) as error:
            code = 2 if isinstance(error, UserError) else 1
            self._refusal = End(code, self.index, self._host, str(error))
            self._ended.set()
            return
        self._lines[0] = line
        self._door.attend(line)

    def _lost(self, lost: list[Line], what: str) -> None:
        names = [f"process {line.index} on {line.name}" for line in lost[:16]]
        text = f"{', '.join(names)} {'are' if len(lost) > 1 else 'is'} {what}"
        if self._slept > 0.8 * self._seconds > time.monotonic() - self._woke:
            text = (
                f"this process stood still for {self._slept:.0f} s, and the others ended without it"
            )
        for line in lost:
            self._lines.pop(line.index or 0, None)
        self.lost = [line.index or 0 for line in lost]
        self._end(End(1, NO_PROCESS, self._host, text))

    def _end(self, end: End) -> None:
        """Ends all processes; the first call counts."""
        if self._ended.is_set():
            return
        self._ended.set()
        for line in self._lines.values() if self.index == 0 else ():
            line.say("end", *end)
        if self._called.is_set():
            self._leave(end)
        else:
            self._refusal = end
            self.see_off()

    def see_off(self) -> list[int]:
        """Process 0 waits until the others have hung up, so that messages on their way arrive;
        returns the silent."""
        return self._door.see_off(GOODBYE) if self.index == 0 else []
