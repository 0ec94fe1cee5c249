"""Connections between the agents, or the processes, of one job: lists of JSON over TCP, one a line.

    Connection(peer)                      send(...), flush(), read(); neither ever waits
    matches_shape(value, shape)           whether JSON's value is what a message must have there
    Hub(selector, digest, ...)            all connections of one end: greets callers or calls number 0,
                                          reads, hangs up
    connect(address, index, digest, ...)  the others' connection to number 0

An empty line asks for, or gives, a sign of life. Both ends prove that they know the job's key (HMAC
of the other's random number) before either trusts the other. The key is ZAYA_SECRET, or else the
number of the Slurm job, which keeps out mistakes but not attackers. A stranger's bytes close the
stranger's connection and do nothing else. The greeting:

    number 0                                     a caller
    ["who", nonce]                        ->
                                          <-     ["here", index, host, digest, nonce, proof]
    ["welcome", proof] or ["refused", why] ->
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
LONGEST_GREETING = 1 << 12  # bytes of a message
LONGEST_MESSAGE = 1 << 24  # after the greeting
GREETING = 10.0  # seconds that a caller has for it
STRANGERS = 256  # at once
LARGEST = 1e15  # of any number in a message: seconds, steps, bytes a second
HELLO = (frozenset(("here",)), int, str, str, str, str)


def job_key() -> bytes:
    """The secret that all processes of a job share."""
    return (os.environ.get(SECRET) or os.environ.get("SLURM_JOB_ID") or "zaya_jax").encode()


def matches_shape(value: Any, shape: Any) -> bool:
    """Whether a value is of a type (numbers: finite, and no larger than LARGEST), one of a set or
    range, a list of one shape ([int]), of several in their order ((int, str)), or a dict of named
    fields."""
    match shape:
        case type() if shape in (int, float):
            is_number = isinstance(value, int | shape) and not isinstance(value, bool)
            return is_number and -LARGEST < value < LARGEST
        case type():
            return isinstance(value, shape)
        case range():
            return matches_shape(value, int) and value in shape
        case frozenset():
            return isinstance(value, str) and value in shape
        case dict():
            has_fields = isinstance(value, dict) and value.keys() == shape.keys()
            return has_fields and all(matches_shape(value[name], shape[name]) for name in shape)
        case list():
            is_list = isinstance(value, list | tuple)
            return is_list and all(matches_shape(item, shape[0]) for item in value)
        case tuple():
            fits = isinstance(value, list | tuple) and len(value) == len(shape)
            return fits and all(map(matches_shape, value, shape))
    return False


def _proof(key: bytes, *parts: Any) -> str:
    return hmac.new(key, json.dumps(parts).encode(), "sha256").hexdigest()


class OddMessage(Exception):
    """The other end sent something that no agent or process of this version sends."""


class Connection:
    """One connection, cut into messages."""

    def __init__(self, peer: socket.socket, address: str, limit: int = LONGEST_MESSAGE):
        self.socket, self.address = peer, address
        self.limit = limit
        self.host = ""  # of the other end
        self.index: int | None = None  # of the other end, once that has proved to be of this job
        self.nonce = secrets.token_hex(16)
        self.opened = self.last_heard = time.monotonic()
        self._received, self._unsent = b"", bytearray()
        peer.setblocking(False)
        with contextlib.suppress(OSError):
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, *message: Any) -> None:
        """Sends a message, or without one a sign of life, as far as the other end takes it."""
        text = json.dumps(message) if message else ""
        self._unsent += text.encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Sends the rest; if the other end is gone, reading will show it."""
        with contextlib.suppress(OSError):
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]

    def read(self) -> list[list] | None:
        """The messages that have arrived; None if the other end has hung up, or sends anything
        else."""
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data or len(self._unsent) > LONGEST_MESSAGE:
            return None
        self.last_heard = time.monotonic()
        *lines, self._received = (self._received + data).split(b"\n")
        if max(map(len, [*lines, self._received])) > self.limit:
            return None
        if self.index == 0 and b"" in lines:  # number 0 asks, and the others answer
            self.send()
        try:
            messages = [json.loads(line) for line in lines if line]
        except (ValueError, RecursionError):
            return None
        if not all(isinstance(m, list) and m and isinstance(m[0], str) for m in messages):
            return None
        return messages


class Hub:
    """All connections of one end: greets callers at number 0, reads each connection when the
    selector says so, and hangs up.

    These are called for connections of the job only: `connected(connection, before)`, with the one
    that had this number before; `received(connection, message)`, which raises OddMessage to hang
    up; `lost(connection)` if the other end has hung up. `refused(why)`: a caller knows the key and
    is not expected. `digest` must be the same at both ends; `differs` is the message if it is not.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        digest: str,
        count: int,
        differs: str,
        connected: Callable[[Connection, Connection | None], None],
        received: Callable[[Connection, list], None],
        lost: Callable[[Connection], None],
        refused: Callable[[str], None] = lambda why: None,
    ):
        self._selector = selector
        self._digest, self._differs = digest, differs
        self._count = count
        self._connected, self._received = connected, received
        self._lost, self._refused = lost, refused
        self._key = job_key()
        self._server: socket.socket | None = None
        self.strangers: list[Connection] = []  # that have not proved to be of this job
        self.by_index: dict[int, Connection] = {}  # by the number of the other end
        self.asked = 0.0  # when signs of life were asked for

    def listen(self, port: int, owner: str, hint: str) -> None:
        """Lets callers in; UserError with the way out if the port cannot be opened."""
        # One connection here and one of JAX's for each process: 1,024 open files, as is usual, are
        # few.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        # macOS says "without limit" and takes no such number
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        try:
            self._server = socket.create_server(
                ("", port), family=family, dualstack_ipv6=dual, backlog=1024
            )
        except OSError as error:
            raise UserError(
                f"{owner} port {port} cannot be opened ({error.strerror}); {hint}"
            ) from None
        self._server.setblocking(False)
        self._selector.register(self._server, selectors.EVENT_READ, self._accept)

    def call(self, address: str, index: int, seconds: float, kind: str = "process") -> None:
        """Connects to number 0, however late that starts (`connect`), and reads it."""
        connection = self.by_index[0] = connect(address, index, self._digest, seconds, kind)
        self.register(connection)

    def stop_listening(self) -> None:
        """Lets no more callers in; the port is free again."""
        if self._server:
            self._selector.unregister(self._server)
            self._server.close()
        for stranger in list(self.strangers):
            self.hang_up(stranger)

    def register(self, connection: Connection) -> None:
        """Reads a connection from now on."""
        self._selector.register(
            connection.socket, selectors.EVENT_READ, lambda: self._read(connection)
        )

    def hang_up(self, connection: Connection) -> bool:
        """Closes a connection; whether it was one of the job."""
        with contextlib.suppress(KeyError, ValueError):  # it is unregistered already
            self._selector.unregister(connection.socket)
        connection.socket.close()
        if connection in self.strangers:
            self.strangers.remove(connection)
        if connection.index is None or self.by_index.get(connection.index) is not connection:
            return False
        del self.by_index[connection.index]
        return True

    def poll(self, now: float, every: float) -> None:
        """Asks for signs of life, and drops strangers that have been silent for too long, or are
        too many."""
        late = [stranger for stranger in self.strangers if now - stranger.opened > GREETING]
        too_many = self.strangers[: max(len(self.strangers) - STRANGERS, 0)]
        for stranger in late + too_many:
            self.hang_up(stranger)
        if now - self.asked >= every:
            self.asked = now
            for connection in self.by_index.values():
                connection.send()

    def reset_silence(self, now: float) -> None:
        """This end stood still: no other was silent in that time."""
        for connection in self.by_index.values():
            connection.last_heard = now

    def wait_for_hangups(self, seconds: float) -> list[int]:
        """Waits until the others have hung up, so that messages on their way arrive; returns the
        silent. For the last moments of a process, with which all connections are closed."""
        until = time.monotonic() + seconds
        while self.by_index and time.monotonic() < until:
            for index, connection in list(self.by_index.items()):
                connection.flush()
                if connection.read() is None:
                    del self.by_index[index]
            time.sleep(0.02)
        return sorted(self.by_index)

    def _accept(self) -> None:
        assert self._server
        try:
            peer, address = self._server.accept()
        except OSError:
            return
        # Asked for here, since a caller that is gone has no address any more.
        stranger = Connection(peer, address[0].removeprefix("::ffff:"), LONGEST_GREETING)
        self.strangers.append(stranger)
        self.register(stranger)
        stranger.send("who", stranger.nonce)

    def _read(self, connection: Connection) -> None:
        messages = connection.read()
        try:
            for message in messages or ():
                if connection in self.strangers:
                    self._greet(connection, message)
                else:
                    self._received(connection, message)
        except OddMessage:  # whatever the other end sends, this one goes on
            messages = None
        if messages is None and self.hang_up(connection):
            self._lost(connection)

    def _greet(self, caller: Connection, message: list) -> None:
        """Admits a caller; OddMessage sends it away."""
        if not matches_shape(message, HELLO):
            raise OddMessage
        _, index, host, digest, nonce, proof = message
        expected = _proof(self._key, "caller", caller.nonce, index, host, digest)
        if not hmac.compare_digest(proof, expected):
            caller.send("refused", f"wrong job: its {SECRET}, or SLURM_JOB_ID, differs")
            raise OddMessage
        if digest != self._digest or not 0 < index < self._count:
            why = f"{index} is not a number from 1 to {self._count - 1}"
            if digest != self._digest:
                why = self._differs.format(index=index, host=host, digest=digest)
            caller.send("refused", why)
            self._refused(why)
            raise OddMessage
        self.strangers.remove(caller)
        caller.index, caller.host = index, host
        caller.limit = LONGEST_MESSAGE
        caller.send("welcome", _proof(self._key, "called", nonce))
        before, self.by_index[index] = self.by_index.get(index), caller
        self._connected(caller, before)


def connect(
    address: str, index: int, digest: str, seconds: float, kind: str = "process"
) -> Connection:
    """The connection to number 0, however late that starts.

    UserError if it refuses this one; LostProcess if it does not answer within `seconds`.
    """
    until = time.monotonic() + seconds
    why = "no answer"
    while time.monotonic() < until:
        with contextlib.ExitStack() as on_failure:
            try:
                peer = socket.create_connection(split_address(address), timeout=GREETING)
                on_failure.enter_context(peer)
                refusal = _introduce(peer, index, digest, until)
            except OSError as error:
                why = error.strerror or str(error)
            except (ValueError, TypeError, RecursionError):
                why = "something else listens there"
            else:
                if refusal:
                    raise UserError(f"{kind} 0 at {address} refuses {kind} {index}: {refusal}")
                on_failure.pop_all()  # it stays open
                connection = Connection(peer, address)
                connection.index = 0
                return connection
        time.sleep(0.2)
    raise LostProcess(
        f"{kind} {index}: {kind} 0 does not answer at {address} within {seconds:g} s ({why}); see"
        " its log, and whether the address can be reached from here"
    )


def _introduce(peer: socket.socket, index: int, digest: str, until: float) -> str:
    """The caller's part of the greeting; returns why it is refused, "" if it is welcome."""
    key, host, nonce = job_key(), socket.gethostname(), secrets.token_hex(16)
    answer, theirs = _read_greeting(peer)
    if answer != "who":
        raise ValueError(answer)
    proof = _proof(key, "caller", theirs, index, host, digest)
    peer.sendall(json.dumps(["here", index, host, digest, nonce, proof]).encode() + b"\n")
    # From here on it knows this end and would count a hang-up as a loss.
    peer.settimeout(max(until - time.monotonic(), GREETING))
    answer, text = _read_greeting(peer)
    if answer == "refused":
        return text
    if answer != "welcome" or not hmac.compare_digest(text, _proof(key, "called", nonce)):
        raise ValueError(answer)
    return ""


def _read_greeting(peer: socket.socket) -> tuple[str, str]:
    """One message of a greeting; without a buffer, since what follows is the connection's."""
    kind, text = json.loads(peer.makefile("rb", buffering=0).readline(LONGEST_GREETING))
    return str(kind), str(text)
