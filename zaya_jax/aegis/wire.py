"""The lines between agents: lists of JSON over TCP, one to a line, after both ends have shown that they are of one job.

    Line(connection)        say(...), flush(), read(); neither ever waits
    listen(port)            the leader's socket
    Door(key, digest)       what the leader asks of who comes, until it knows them
    call(address, ...)      a member finds its leader

A stranger's bytes close his connection and do nothing else. Both ends prove that they know the job's key (HMAC of the
other's random number): ZAYA_SECRET, or the number of the Slurm job, which keeps mistakes out but nobody who means harm.
"""

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from zaya_jax.cluster import lifelines
from zaya_jax.cluster.place import LostProcess
from zaya_jax.config import UserError

SECRET = "ZAYA_SECRET"
SHORT, LONG = 1 << 12, 1 << 24  # bytes of a message before and after the greeting
GREETING = 10.0  # seconds for it
STRANGERS = 256  # at once


def key_of(environ: Mapping[str, str]) -> bytes:
    """What all agents of one job know."""
    return (environ.get(SECRET) or environ.get("SLURM_JOB_ID") or "zaya_jax").encode()


def digest_of(command: Sequence[str]) -> str:
    """By which agents see that they were started with the same command."""
    return hashlib.sha256(json.dumps(list(command)).encode()).hexdigest()[:16]


def proof(key: bytes, *what: Any) -> str:
    """That somebody knows the key."""
    return hmac.new(key, json.dumps(what).encode(), "sha256").hexdigest()


class Line:
    """One connection, cut into messages."""

    def __init__(self, connection: socket.socket):
        self.connection, self.limit = connection, SHORT
        self.heard = self.opened = time.monotonic()
        self.node: int | None = None
        self.nonce = secrets.token_hex(16)
        self.greeting: list = []  # what it said of itself
        self._in, self._out = b"", bytearray()
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def say(self, *message: Any) -> None:
        """Sends a message, or without one a sign of life, as far as the other end takes it."""
        self._out += (json.dumps(message) if message else "").encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Sends what has not gone yet; if the other end is gone, reading will tell."""
        with contextlib.suppress(OSError):
            while self._out:
                del self._out[: self.connection.send(self._out)]

    @property
    def waiting(self) -> bool:
        """Whether something has not gone yet."""
        return bool(self._out)

    def read(self) -> list[list] | None:
        """The messages that have come; None where the other end has hung up, or says what is none."""
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
        try:
            found = [json.loads(line) for line in whole if line]
        except (ValueError, RecursionError):
            return None
        return found if all(isinstance(m, list) and m and isinstance(m[0], str) for m in found) else None

    def close(self) -> None:
        """Hangs up."""
        self.connection.close()


def listen(port: int) -> socket.socket:
    """The socket on which a leader is found."""
    way = "give another in JAX_COORDINATOR_ADDRESS, or as JAX_COORDINATOR_PORT under Slurm"
    return lifelines.listen(port, "the agents'", way)


class Door:
    """In the leader: who comes, until it is known."""

    def __init__(self, key: bytes, digest: str, agents: int):
        self._key, self._digest, self._agents = key, digest, agents
        self.strangers: list[Line] = []

    def open(self, connection: socket.socket) -> Line:
        """Somebody has come."""
        line = Line(connection)
        self.strangers.append(line)
        line.say("who", line.nonce)
        return line

    def hear(self, line: Line, message: list) -> bool:
        """Whether this greeting makes an agent of the line; ValueError sends it away."""
        kind, node, host, digest, nonce, shown = message
        if kind != "here" or not isinstance(node, int) or not all(isinstance(x, str) for x in message[2:]):
            raise ValueError(kind)
        if not hmac.compare_digest(shown, proof(self._key, "agent", line.nonce, node, host, digest)):
            line.say("refused", f"it is not of this job: {SECRET}, or SLURM_JOB_ID, is another there")
            raise ValueError("proof")
        if digest != self._digest:
            line.say("refused", "it was started with another command; start all agents with the same one")
            raise ValueError("command")
        if not 0 < node < self._agents:
            line.say("refused", f"node {node} is none of {self._agents}; the leader is node 0")
            raise ValueError("node")
        self.strangers.remove(line)
        line.node, line.limit, line.greeting = node, LONG, [host]
        line.say("welcome", proof(self._key, "leader", nonce))
        return True

    def due(self, now: float) -> list[Line]:
        """Who has said nothing for too long, or is one too many."""
        late = [line for line in self.strangers if now - line.opened > GREETING]
        return late + self.strangers[: max(len(self.strangers) - STRANGERS, 0)]


def call(address: str, node: int, digest: str, key: bytes, seconds: float) -> Line:
    """In a member: the line to the leader, however late that comes; UserError where it refuses, else LostProcess."""
    host, port = address.rsplit(":", 1)
    here, nonce = socket.gethostname(), secrets.token_hex(16)
    until, why = time.monotonic() + seconds, "no answer"
    while time.monotonic() < until:
        try:
            with contextlib.closing(
                socket.create_connection((host, int(port)), timeout=GREETING)
            ) as connection:
                file = connection.makefile("rb", buffering=0)
                kind, theirs = _listen_to(file)
                if kind != "who":
                    raise ValueError(kind)
                shown = proof(key, "agent", theirs, node, here, digest)
                connection.sendall(json.dumps(["here", node, here, digest, nonce, shown]).encode() + b"\n")
                kind, word = _listen_to(file)
                if kind == "refused":
                    raise UserError(f"the leader at {address} refuses node {node}: {word}")
                if kind == "welcome" and hmac.compare_digest(word, proof(key, "leader", nonce)):
                    line = Line(socket.socket(fileno=os.dup(connection.fileno())))
                    line.limit = LONG
                    return line
                why = "something else listens there"
        except OSError as error:
            why = error.strerror or str(error)
        except UserError:
            raise
        except (ValueError, TypeError, RecursionError):
            why = "something else listens there"
        time.sleep(0.2)
    raise LostProcess(
        f"node {node}: the leader does not answer at {address} within {seconds:g} s ({why}); see whether node 0's "
        "agent runs, and whether the address can be reached from here"
    )


def _listen_to(file: Any) -> tuple[str, str]:
    """One message of a greeting, byte by byte: what follows it is for whoever takes the line over."""
    found = b""
    while not found.endswith(b"\n") and len(found) < SHORT:
        byte = file.read(1)
        if not byte:
            raise ValueError("it hung up")
        found += byte
    kind, word = json.loads(found)
    return str(kind), str(word)
