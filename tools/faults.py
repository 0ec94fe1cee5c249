"""Faults on purpose, for tests and `tools.chaos`.

Inside a run: ZAYA_FAULTS names a file of them, which may change while the run goes on.

    [{"kind": "data", "first": 40, "last": 60},                       batches of noise, by their place in the order
     {"kind": "slow", "process": 1, "seconds": 0.5, "first": 3},      a process sleeps in each step
     {"kind": "flip", "device": 2, "times": 1},                       a bit of a device's gradient
     {"kind": "nonfinite", "device": 0, "first": 9, "last": 12}]      its gradient is no number

`first` and `last` are steps, both included; without them always. `times`: so often in all;
`passing`: not when gradients are computed again, to be compared (`replay`). Without the variable
nothing of this is in any program. What changes gradients enters a program when that is traced, and
asks the file whenever it runs.

From outside, to the processes of an agent, their connections and files, with no more rights than
over one's own processes:

    for process in processes_of(agent).values(): ...      the training's processes
    kill(process), stop(process), fill_disk(process), cut(process, other), flip(path)
    store = Store(); store.variables; store.die(); store.live()
"""

import collections
import ctypes
import json
import logging
import math
import os
import resource
import signal
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from zaya_jax.cluster import beats
from zaya_jax.cluster.beats import Beat

VARIABLE = "ZAYA_FAULTS"
PIDFD_GETFD = 438  # the system call's number, on every architecture
NAN = 0x7FC00000  # the bits of a float32 that is no number
SMALL = 4096  # bytes that a file may have on a disk that is full


def requested() -> "Faults | None":
    """The hooks that a program hands to its run; None where no faults are asked for."""
    return Faults() if os.environ.get(VARIABLE) else None


class Faults:
    """The faults as the `faults` of `zaya_jax.run.train`."""

    def __init__(self) -> None:
        self._step = 0  # that the loop has come to
        self._done = collections.Counter[str]()  # how often each would have struck

    def _now(self, kind: str, step: int) -> list[dict[str, Any]]:
        try:
            listed = json.loads(Path(os.environ[VARIABLE]).read_text())
        except (KeyError, OSError, ValueError):
            return []
        return [
            fault
            for fault in listed
            if fault["kind"] == kind and fault.get("first", 0) <= step <= fault.get("last", step)
        ]

    def before_step(self, number: int) -> None:
        """Runs in the host's loop. `strike` runs on the devices, which may be a step behind: they
        are waited for."""
        jax.effects_barrier()
        self._step = number
        for fault in self._now("slow", number):
            if fault["process"] == jax.process_index():
                time.sleep(fault["seconds"])

    def batch(
        self, batch: dict[str, np.ndarray], number: int, left_out: list[list[int]]
    ) -> dict[str, np.ndarray]:
        """The batch that a step is trained on; those asked for are noise, by their place in the
        data's order."""
        behind = max((i + 1 for i, (step, _) in enumerate(left_out) if step < number), default=0)
        position = number + sum(batches for _, batches in left_out[:behind])
        if not self._now("data", position):
            return batch
        targets = batch["targets"]
        noise = np.random.default_rng(position).integers(0, targets.max() + 1, targets.shape)
        return batch | {"targets": noise.astype(targets.dtype)}

    def gradients(self, mesh: jax.sharding.Mesh, again: bool = False) -> Callable[[Any], Any]:
        """The change of a device's gradients before anything is summed.

        Devices go by their places in the mesh. `again`: of gradients that are computed again, to be
        compared.
        """

        def strike(device: Any) -> np.ndarray:
            """(bits to flip in the first number, bits to set in it)"""
            masks = {"flip": 0, "nonfinite": 0}
            for kind, mask in (("flip", 1 << 22), ("nonfinite", NAN)):
                for fault in self._now(kind, self._step):
                    if fault["device"] != int(device) or (again and fault.get("passing")):
                        continue
                    self._done[json.dumps(fault)] += 1
                    if self._done[json.dumps(fault)] <= fault.get("times", math.inf):
                        masks[kind] = mask
            return np.array([*masks.values()], np.uint32)

        def spoil(gradients: Any) -> Any:
            device = jnp.zeros((), jnp.int32)
            for axis, size in mesh.shape.items():
                device = device * size + jax.lax.axis_index(axis)
            flipped, set_ = io_callback(strike, jax.ShapeDtypeStruct((2,), jnp.uint32), device)
            leaves, treedef = jax.tree.flatten(gradients)
            first = leaves[0].ravel()
            bits = jax.lax.bitcast_convert_type(first[0].astype(jnp.float32), jnp.uint32)
            value = jax.lax.bitcast_convert_type((bits ^ flipped) | set_, jnp.float32)
            leaves[0] = first.at[0].set(value.astype(first.dtype)).reshape(leaves[0].shape)
            return jax.tree.unflatten(treedef, leaves)

        return spoil


class Victim(NamedTuple):
    """One of the training's processes."""

    number: int
    pid: int
    beats: str  # the file in memory to which it writes them

    def beat(self) -> Beat | None:
        """Its place; None until it has reported one."""
        beat = beats.read(self.beats, self.number)
        return beat if beat and beat.pid == self.pid else None


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
    """The training's processes of an agent, by their index: those that write to its beats."""
    victims = {}
    for folder in Path("/proc").glob("[0-9]*"):
        variables = _environ(folder)
        path = variables.get(beats.VARIABLE, "")
        if path.startswith(f"/proc/{agent}/"):
            victim = Victim(int(variables["JAX_PROCESS_ID"]), int(folder.name), path)
            if victim.beat():  # not the program that becomes it, nor a worker of its own
                victims[victim.number] = victim
    return victims


def kill(victim: Victim) -> None:
    """Kills as the OOM killer does."""
    os.kill(victim.pid, signal.SIGKILL)


def stop(victim: Victim) -> None:
    """It lives, and does nothing."""
    os.kill(victim.pid, signal.SIGSTOP)


def fill_disk(victim: Victim) -> None:
    """Its files can grow no further: EFBIG, which goes the way of ENOSPC."""
    hard = resource.prlimit(victim.pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(victim.pid, resource.RLIMIT_FSIZE, (SMALL, hard))


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
                descriptor = ctypes.CDLL(None, use_errno=True).syscall(
                    PIDFD_GETFD, handle, number, 0
                )
                if descriptor < 0:
                    raise OSError(
                        ctypes.get_errno(),
                        os.strerror(ctypes.get_errno()),
                        f"pidfd_getfd({victim.pid})",
                    )
                with socket.socket(fileno=descriptor) as connection:
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


def _environ(process: Path) -> dict[str, str]:
    try:
        raw = (process / "environ").read_bytes()
    except OSError:  # it has ended, or is another user's
        return {}
    pairs = (item.partition(b"=") for item in raw.split(b"\0") if b"=" in item)
    return {
        name.decode(errors="replace"): value.decode(errors="replace") for name, _, value in pairs
    }
