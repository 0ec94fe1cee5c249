"""Faults done on purpose to a run of this machine: to its processes, their connections, their
files.

    for process in processes_of(agent): ...     the training's processes, by their index
    kill(victim), stop(victim), fill_disk(victim), cut(victim, other)
    store = Store(); store.variables; store.url; store.die(); store.live()

Nothing here needs more rights than over one's own processes.
"""

import ctypes
import logging
import os
import resource
import signal
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from zaya_jax.cluster import beats
from zaya_jax.cluster.beats import Beat

PIDFD_GETFD = 438  # the system call's number, on every architecture
SMALL = 4096  # bytes that a file may have on a disk that is full


class Victim(NamedTuple):
    """One of the training's processes."""

    number: int
    pid: int
    beats: str  # the file in memory to which it writes them

    def beat(self) -> Beat | None:
        """Its place; None until it has reported one."""
        found = beats.read(self.beats, self.number)
        return found if found and found.pid == self.pid else None


class Store:
    """A local S3 store that is unreachable between `die` and `live`, and keeps its content
    meanwhile."""

    BUCKET = "chaos"

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer  # of the development set

        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # otherwise a line for every request
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self._new = lambda: ThreadedMotoServer(
            ip_address="127.0.0.1", port=self._port, verbose=False
        )
        self.variables = {
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}",
        }
        self.live()
        urllib.request.urlopen(
            urllib.request.Request(
                f"{self.variables['AWS_ENDPOINT_URL']}/{self.BUCKET}", method="PUT"
            ),
            timeout=30,
        ).close()

    def live(self) -> None:
        """It answers."""
        self._server = self._new()
        self._server.start()

    def die(self) -> None:
        """It refuses connections."""
        self._server.stop()


def processes_of(agent: int) -> dict[int, Victim]:
    """The training's processes below an agent, by their index."""
    found = {}
    for pid in _below(agent):
        variables = _environ(pid)
        if beats.VARIABLE in variables and "JAX_PROCESS_ID" in variables:
            victim = Victim(int(variables["JAX_PROCESS_ID"]), pid, variables[beats.VARIABLE])
            if victim.beat():  # not the program that becomes it, nor a worker of its own
                found[victim.number] = victim
    return found


def kill(victim: Victim) -> None:
    """Kills as the OOM killer does."""
    os.kill(victim.pid, signal.SIGKILL)


def stop(victim: Victim) -> None:
    """It lives, and does nothing."""
    os.kill(victim.pid, signal.SIGSTOP)


def fill_disk(victim: Victim, full: bool = True) -> None:
    """Its files can grow no further: EFBIG, which goes the way of ENOSPC."""
    hard = resource.prlimit(victim.pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(victim.pid, resource.RLIMIT_FSIZE, (SMALL if full else hard, hard))


def flip(path: Path) -> None:
    """A bit in the middle of a file is another."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def cut(victim: Victim, other: Victim) -> int:
    """Breaks all connections between two processes, as a switch does that forgets them; how many
    there were."""
    ends = {frozenset(pair) for _, pair in _connections(other.pid)}
    count, handle = 0, os.pidfd_open(victim.pid)
    try:
        for number, pair in _connections(victim.pid):
            if frozenset(pair) in ends:
                own = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, handle, number, 0)
                if own < 0:
                    raise OSError(
                        ctypes.get_errno(),
                        os.strerror(ctypes.get_errno()),
                        f"pidfd_getfd({victim.pid})",
                    )
                with socket.socket(fileno=own) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
                count += 1
    finally:
        os.close(handle)
    return count


def _connections(pid: int) -> Iterator[tuple[int, tuple[str, str]]]:
    """The TCP connections of a process: descriptor, and the addresses of both ends as the kernel
    writes them."""
    by_inode = {}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "01":  # established
                by_inode[words[9]] = (_port(words[1]), _port(words[2]))
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        inode = target.removeprefix("socket:[").removesuffix("]")
        if inode in by_inode:
            yield int(entry.name), by_inode[inode]


def _port(address: str) -> str:
    """Of this machine's own connections the ports say which they are; an IPv4 end may be written as
    IPv6."""
    return address.rsplit(":", 1)[1]


def _below(pid: int) -> Iterator[int]:
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in map(int, found):
        yield child
        yield from _below(child)


def _environ(pid: int) -> dict[str, str]:
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in raw.split(b"\0") if b"=" in item)
    return {
        name.decode(errors="replace"): value.decode(errors="replace") for name, _, value in pairs
    }
