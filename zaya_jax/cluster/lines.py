"""Connections between the agents, or the processes, of one job: lists of JSON over TCP, one a line.

    Line(connection)                   say(...), flush(), read(); neither ever waits
    fits(value, shape)                 whether JSON's value is what a message must have there
    Door(selector, digest, ...)        all lines of one end: greets callers, hears, hangs up
    call(address, index, digest, ...)  the others' connection to number 0

An empty line asks for, or gives, a sign of life. Both ends prove that they know the job's key (HMAC
of the other's random number) before either trusts the other. The key is ZAYA_SECRET, or else the
number of the Slurm job, which keeps out mistakes but not attackers. A stranger's bytes close the
stranger's connection and do nothing else.
"""

import contextlib
import hmac
import json
import os
import resource
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

from zaya_jax.cluster.rank import LostProcess, split_address
from zaya_jax.config import UserError

SECRET = "ZAYA_SECRET"
SHORT, LONG = 1 << 12, 1 << 24  # bytes of a message before and after the greeting
GREETING = 10.0  # seconds that a caller has for it
STRANGERS = 256  # at once
MOST = 1e15  # of any number in a message: seconds, steps, bytes a second


def key() -> bytes:
    """The secret that all processes of a job share."""
    return (os.environ.get(SECRET) or os.environ.get("SLURM_JOB_ID") or "zaya_jax").encode()


def fits(value: Any, shape: Any) -> bool:
    """Whether a value is of a type (numbers: finite, and no larger than MOST), one of a set or range,
    a list of one shape ([int]), of several in their order ((int, str)), or a dict of named fields.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    match shape:
        case type() if shape in (int, float):
            return number and -MOST < value < MOST and isinstance(value, int | shape)
        case type():
            return isinstance(value, shape)
        case range():
            return fits(value, int) and value in shape
        case frozenset():
            return isinstance(value, str) and value in shape
        case dict():
            return (
                isinstance(value, dict)
                and value.keys() == shape.keys()
                and all(fits(value[name], shape[name]) for name in shape)
            )
        case list():
            return isinstance(value, list | tuple) and all(fits(one, shape[0]) for one in value)
        case tuple():
            return (
                isinstance(value, list | tuple)
                and len(value) == len(shape)
                and all(map(fits, value, shape))
            )
    return False


def _proof(secret: bytes, *parts: Any) -> str:
    return hmac.new(secret, json.dumps(parts).encode(), "sha256").hexdigest()


class OddMessage(Exception):
    """The other end sent something that no agent or process of this version sends."""


class Line:
    """One connection, cut into messages. `answers`: whether an empty line is answered with one."""

    def __init__(
        self, connection: socket.socket, address: str = "", limit: int = LONG, answers: bool = False
    ):
        self.connection, self.address, self.limit, self.answers = (
            connection,
            address,
            limit,
            answers,
        )
        self.name = ""  # of the other end's host
        self.heard = self.opened = time.monotonic()
        self.index: int | None = None  # of the other end, once that has proved to be of this job
        self.nonce = secrets.token_hex(16)
        self._in, self._out = b"", bytearray()
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def say(self, *message: Any) -> None:
        """Sends a message, or without one a sign of life, as far as the other end takes it."""
        self._out += (json.dumps(message) if message else "").encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Sends the rest; if the other end is gone, reading will show it."""
        with contextlib.suppress(OSError):
            while self._out:
                del self._out[: self.connection.send(self._out)]

    def read(self) -> list[list] | None:
        """The messages that have arrived; None if the other end has hung up, or sends anything
        else."""
        try:
            data = self.connection.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data or len(self._out) > LONG:
            return None
        self.heard = time.monotonic()
        *whole, self._in = (self._in + data).split(b"\n")
        if max(map(len, [*whole, self._in])) > self.limit:
            return None
        if self.answers and b"" in whole:
            self.say()
        try:
            found = [json.loads(line) for line in whole if line]
        except (ValueError, RecursionError):
            return None
        return (
            found
            if all(isinstance(m, list) and m and isinstance(m[0], str) for m in found)
            else None
        )


class Door:
    """All lines of one end: greets callers at number 0, hears each line when the selector says so,
    and hangs up.

    For lines of the job alone are called `came(line, before)`, with the line that had this number
    before; `hear(line, message)`, which raises OddMessage to hang up; and `lost(line)`,
    where the other end has hung up. `refused(words)`: a caller knows the key and is
    not expected. `digest` must be the same at both ends; `differs` is the message if it is not.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        digest: str,
        count: int,
        differs: str,
        came: Callable[[Line, Line | None], None],
        hear: Callable[[Line, list], None],
        lost: Callable[[Line], None],
        refused: Callable[[str], None] = lambda words: None,
    ):
        self._selector, self._digest, self._count, self._differs = selector, digest, count, differs
        self._came, self._hear, self._lost, self._refused = came, hear, lost, refused
        self._key = key()
        self._server: socket.socket | None = None
        self.strangers: list[Line] = []
        self.known: dict[int, Line] = {}  # by the number of the other end
        self.asked = 0.0  # when signs of life were asked for

    def open(self, port: int, whose: str, way: str) -> None:
        """Lets callers in; UserError with the way out where the port cannot be opened."""
        # A line here and one of JAX's for each process: 1,024 open files, as is usual, are few.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        # macOS says "without limit" and takes no such number
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        try:
            server = socket.create_server(
                ("", port), family=family, dualstack_ipv6=dual, backlog=1024
            )
        except OSError as error:
            raise UserError(
                f"{whose} port {port} cannot be opened ({error.strerror}); {way}"
            ) from None
        server.setblocking(False)
        self._server = server
        self._selector.register(server, selectors.EVENT_READ, self._accept)

    def shut(self) -> None:
        """Lets no more callers in; the port is free again."""
        if self._server:
            self._selector.unregister(self._server)
            self._server.close()
        for stranger in list(self.strangers):
            self.drop(stranger)

    def attend(self, line: Line) -> None:
        """Hears a line from now on."""
        self._selector.register(line.connection, selectors.EVENT_READ, lambda: self._read(line))

    def drop(self, line: Line) -> bool:
        """Hangs up; whether it was a line of the job."""
        with contextlib.suppress(KeyError, ValueError):  # it is unregistered already
            self._selector.unregister(line.connection)
        line.connection.close()
        if line in self.strangers:
            self.strangers.remove(line)
        known = line.index is not None and self.known.get(line.index) is line
        if known:
            del self.known[line.index or 0]
        return known

    def turn(self, now: float, every: float) -> None:
        """Asks for signs of life, and drops strangers that have been silent for too long, or are
        too many."""
        late = [line for line in self.strangers if now - line.opened > GREETING]
        for line in late + self.strangers[: max(len(self.strangers) - STRANGERS, 0)]:
            self.drop(line)
        asks = now - self.asked >= every
        self.asked = now if asks else self.asked
        for line in self.known.values():
            line.say() if asks else line.flush()

    def forgive(self, now: float) -> None:
        """This end stood still: no other was silent in that time."""
        for line in self.known.values():
            line.heard = now

    def see_off(self, seconds: float) -> list[int]:
        """Waits until the others have hung up, so that messages on their way arrive; returns the
        silent."""
        until = time.monotonic() + seconds
        while self.known and time.monotonic() < until:
            for index, line in list(self.known.items()):
                line.flush()
                if line.read() is None:
                    del self.known[index]
            time.sleep(0.02)
        return sorted(self.known)

    def _accept(self) -> None:
        assert self._server
        try:
            connection, address = self._server.accept()
        except OSError:
            return
        # Asked for here, since a caller that is gone has no address any more.
        line = Line(connection, address[0].removeprefix("::ffff:"), SHORT)
        self.strangers.append(line)
        self.attend(line)
        line.say("who", line.nonce)

    def _read(self, line: Line) -> None:
        messages = line.read()
        try:
            for message in messages or ():
                if line in self.strangers:
                    self._greet(line, message)
                else:
                    self._hear(line, message)
        except OddMessage:  # whatever the other end says, this one goes on
            messages = None
        if messages is None and self.drop(line):
            self._lost(line)

    def _greet(self, line: Line, message: list) -> None:
        """Admits a caller; OddMessage sends it away."""
        if not fits(message, (frozenset(("here",)), int, str, str, str, str)):
            raise OddMessage
        _, index, line.name, digest, nonce, shown = message
        if not hmac.compare_digest(
            shown, _proof(self._key, "caller", line.nonce, index, line.name, digest)
        ):
            line.say(
                "refused", f"it is not of this job: {SECRET}, or SLURM_JOB_ID, is another there"
            )
            raise OddMessage
        words = ""
        if digest != self._digest:
            words = self._differs.format(index=index, host=line.name, digest=digest)
        elif not 0 < index < self._count:
            words = f"{index} is not a number from 1 to {self._count - 1}"
        if words:
            line.say("refused", words)
            self._refused(words)
            raise OddMessage
        self.strangers.remove(line)
        line.index, line.limit = index, LONG
        line.say("welcome", _proof(self._key, "called", nonce))
        before, self.known[index] = self.known.get(index), line
        self._came(line, before)


def call(address: str, index: int, digest: str, seconds: float, kind: str = "process") -> Line:
    """The line to number 0, however late that starts.

    UserError if it refuses this one; LostProcess if it does not answer within `seconds`.
    """
    who, whom, secret = f"{kind} {index}", f"{kind} 0", key()
    host, port = split_address(address)
    here, until, why = socket.gethostname(), time.monotonic() + seconds, "no answer"
    while time.monotonic() < until:
        connection = None
        try:
            connection = socket.create_connection((host, port), timeout=GREETING)
            answer, theirs = _first(connection)
            nonce = secrets.token_hex(16)
            if answer == "who":
                shown = _proof(secret, "caller", theirs, index, here, digest)
                connection.sendall(
                    json.dumps(["here", index, here, digest, nonce, shown]).encode() + b"\n"
                )
                # From here on it knows this end and would count a hang-up as a loss.
                connection.settimeout(max(until - time.monotonic(), GREETING))
                answer, word = _first(connection)
                if answer == "refused":
                    raise UserError(f"{whom} at {address} refuses {who}: {word}")
                if answer == "welcome" and hmac.compare_digest(
                    word, _proof(secret, "called", nonce)
                ):
                    line = Line(connection, host, answers=True)
                    line.index, connection = 0, None
                    return line
            why = "something else listens there"
        except OSError as error:
            why = error.strerror or str(error)
        except (ValueError, TypeError, RecursionError) as error:
            if isinstance(error, UserError):
                raise
            why = "something else listens there"
        finally:
            if connection:
                connection.close()
        time.sleep(0.2)
    raise LostProcess(
        f"{who}: {whom} does not answer at {address} within {seconds:g} s ({why}); see its log, and"
        " whether the address can be reached from here"
    )


def _first(connection: socket.socket) -> tuple[str, str]:
    """One message of a greeting, byte by byte: the bytes after it belong to the line."""
    found = b""
    while not found.endswith(b"\n") and len(found) < SHORT:
        byte = connection.recv(1)
        if not byte:
            raise ValueError("it hung up")
        found += byte
    kind, word = json.loads(found)
    return str(kind), str(word)
