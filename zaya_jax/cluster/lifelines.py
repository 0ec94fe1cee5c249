"""Keeps a connection from each process of a run to process 0, so that a killed or stopped process
is noticed.

    lifelines = Lifelines(rank, seconds, leave)    a thread of its own, whatever the main one is doing
    lifelines.roll_call(seconds)                   returns when all are there; if not, `leave` names the absent
    lifelines.report(code, text, certain)          this process must end: so do all, with the first report's code
    lifelines.hang_up()                            the orderly end

The system closes a killed process's connection at once. A stopped one's stays silent: process 0
asks each process every tenth of `seconds`, and one that is silent for `seconds` is lost. Then
`leave` is called with the reason in all others.

The connections go to the coordinator's port, which JAX's service takes over once all have joined.
Only a process that knows the job's key counts; nothing that strangers send to that port has an
effect. The main thread speaks to the thread of the lifelines over a connection too.
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

from zaya_jax.cluster.connections import Connection, Hub, OddMessage, matches_shape
from zaya_jax.cluster.leaving import BAD_INPUT, FAILED
from zaya_jax.cluster.rank import Rank, name_processes, split_address

ALLOWED = 0.9  # of the seconds of silence; the rest is for noticing and leaving
GOODBYE = 10.0  # seconds that process 0 waits for the others to hang up
NO_PROCESS = -1  # in place of a process's index: no process reported it, one found it out
REPORT = (range(256), int, str, str)
FIELDS = {"all": (str,), "bye": (), "end": REPORT, "doubt": REPORT}  # of each message
_log = logging.getLogger("zaya_jax")


class RunEnd(NamedTuple):
    """Why all processes end: the exit code, the process that reports it, its host, and the text."""

    code: int
    process: int
    host: str
    text: str


class Lifelines:
    """This process's connections. `leave` is called in a thread, and should not return."""

    def __init__(self, rank: Rank, seconds: float, leave: Callable[[RunEnd], None]):
        self.index = rank.index
        self.lost: list[int] = []  # processes that this one found to be lost
        self._rank, self._seconds, self._leave = rank, seconds, leave
        self._host = socket.gethostname()
        self._selector = selectors.DefaultSelector()
        self._hub = Hub(
            self._selector,
            str(rank.count),
            rank.count,
            "process {index} on {host} counts {digest} processes, process 0 counts "
            + str(rank.count),
            self._connected,
            self._received,
            self._disconnected,
            self._refused,
        )
        # In process 0 to all others, in the others to process 0.
        self._connections = self._hub.by_index
        # The main thread's words to this one's
        self._main, inside = socket.socketpair()
        self._inside = Connection(inside, "")
        self._hub.register(self._inside)
        # The roll call
        self._allowed = self._deadline = 0.0  # its seconds, and when they are over
        self._decided = threading.Event()  # all are there, or all leave
        # The end
        self._ended = threading.Event()
        self._hung_up_at = 0.0
        self._doubt: tuple[float, RunEnd] | None = None  # a report that counts if nobody is lost
        # This process's own sleep
        self._slept = self._woke = 0.0
        self._thread = threading.Thread(target=self._run, name="lifelines", daemon=True)

    def roll_call(self, seconds: float) -> None:
        """Returns on every process when all have called; all leave if some did not within
        `seconds`. LostProcess and UserError are of process 0: no answer, or a refusal."""
        self._allowed, self._deadline = seconds, time.monotonic() + seconds
        try:
            if self.index == 0:
                _, port = split_address(self._rank.coordinator)
                hint = "give another, as JAX_COORDINATOR_PORT or in the coordinator's address"
                self._hub.listen(port, "the coordinator's", hint)
            else:
                self._hub.call(self._rank.coordinator, self.index, seconds)
        except BaseException:  # the thread that would do so never begins
            self._close()
            raise
        self._thread.start()
        self._decided.wait()

    def report(self, code: int, text: str, certain: bool) -> None:
        """Ends all processes with this code, and waits for the end.

        An uncertain error may follow from the loss of another process, which then is the cause: the
        report counts once all others have given a later sign of life.
        """
        end = RunEnd(code, self.index, self._host, text)
        self._say("end" if certain else "doubt", *end)
        if self._thread.is_alive():  # otherwise it looks for process 0 still
            self._thread.join(self._seconds + 2 * GOODBYE)
        if not self._ended.is_set():  # process 0 gives no answer, and is not lost either
            self._leave(end)

    def hang_up(self) -> None:
        """The orderly end, which is no loss."""
        self._say("bye")
        self._thread.join()

    def _say(self, *message: object) -> None:
        with contextlib.suppress(OSError):
            self._main.sendall(json.dumps(message).encode() + b"\n")

    # In the thread

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                self._poll(min(self._seconds / 10, 1.0))
        except Exception as error:  # a run never goes on without its lifelines
            self._end(self._found_out(FAILED, f"lifelines: {type(error).__name__}: {error}"))
        finally:
            self._close()
            self._decided.set()

    def _close(self) -> None:
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._main.close()

    def _poll(self, patience: float) -> None:
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
            self._hub.reset_silence(now)
        if self._ended.is_set():
            return
        if self._hung_up_at:
            if not self._connections or now - self._hung_up_at > GOODBYE:
                self._ended.set()
            return
        if self.index == 0:
            self._hub.poll(now, self._seconds / 10)
            if not self._decided.is_set() and now > self._deadline:
                count = self._rank.count
                absent = [i for i in range(1, count) if i not in self._connections]
                late = f"did not come within {self._allowed:.0f} s"
                text = f"{name_processes(absent)} of {count} {late}"
                self._end(self._found_out(FAILED, text))
                return
        self._check_silence(now)

    def _check_silence(self, now: float) -> None:
        """Ends the run if a process is silent, or for a doubtful report if none is."""
        limit = ALLOWED * self._seconds
        connections = self._connections.values()
        if any(now - c.last_heard > limit for c in connections):
            # Those that will be over the limit in a moment stopped with it.
            silent = [c for c in connections if now - c.last_heard > 0.8 * limit]
            self._lose(silent, f"silent for {limit:.0f} s: stopped, or machine or network down")
        elif self._doubt:
            reported, end = self._doubt
            others = [c for c in connections if c.index != end.process]
            if all(c.last_heard > reported for c in others):
                self._end(end)

    def _received(self, connection: Connection, message: list) -> None:
        kind, *fields = message
        if not matches_shape(fields, FIELDS.get(kind)):
            raise OddMessage
        from_main = connection is self._inside
        match kind:
            case "all":
                connection.host = fields[0]
                self._decided.set()
            case "bye" if from_main:
                self._hung_up_at = time.monotonic()
                if self.index:
                    self._connections.pop(0).send("bye")
            case "bye":
                self._hub.hang_up(connection)
            case _ if self.index and from_main:  # process 0 decides which end counts
                self._connections[0].send(*message)
            case "end":
                self._end(RunEnd(*fields))
            case "doubt" if not self._doubt:
                self._doubt = time.monotonic(), RunEnd(*fields)
                self._hub.asked = 0.0  # all give a sign of life now

    def _connected(self, connection: Connection, before: Connection | None) -> None:
        if before:
            hosts = f"{before.host} and on {connection.host}"
            text = f"process {connection.index} is there twice, on {hosts}"
            before.send("end", *self._found_out(BAD_INPUT, text))
            self._refused(text)
        elif len(self._connections) == self._rank.count - 1:
            self._hub.stop_listening()  # JAX's service listens there next
            for other in self._connections.values():
                other.send("all", self._host)
            self._decided.set()

    def _refused(self, text: str) -> None:
        """A process of this job that is not expected: all must know."""
        self._end(self._found_out(BAD_INPUT, text))

    def _disconnected(self, connection: Connection) -> None:
        if not self._hung_up_at:
            log = f"logs/process-{connection.index:05d}.log"
            self._lose([connection], f"gone: killed, or crashed; see {log}")

    def _lose(self, lost: list[Connection], what: str) -> None:
        names = [f"process {connection.index} on {connection.host}" for connection in lost[:16]]
        text = f"{', '.join(names)} {'are' if len(lost) > 1 else 'is'} {what}"
        if self._slept > 0.8 * self._seconds > time.monotonic() - self._woke:
            text = (
                f"this process stood still for {self._slept:.0f} s, and the others ended without it"
            )
        for connection in lost:
            self._connections.pop(connection.index or 0, None)
        self.lost = [connection.index or 0 for connection in lost]
        self._end(self._found_out(FAILED, text))

    def _found_out(self, code: int, text: str) -> RunEnd:
        return RunEnd(code, NO_PROCESS, self._host, text)

    def _end(self, end: RunEnd) -> None:
        """Ends all processes; the first call counts."""
        if self._ended.is_set():
            return
        self._ended.set()
        if self.index == 0:
            for connection in self._connections.values():
                connection.send("end", *end)
        self._leave(end)

    def wait_for_hangups(self) -> list[int]:
        """Process 0 waits until the others have hung up, so that messages on their way arrive;
        returns the silent."""
        return self._hub.wait_for_hangups(GOODBYE) if self.index == 0 else []
