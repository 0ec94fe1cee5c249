"""Programs as several processes of one run on this machine, over JAX's distributed runtime and
gloo.

with multiprocess_runs.start(["-m", "experiments.pretrain", ...], count=2, devices=2) as run:
    results = run.wait()          [Result(code, out, err), ...]
"""

import dataclasses
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Bytes of strangers, for a port on which processes or agents call.
STRANGE = (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"[" * 100_000 + b"\n",
    b'{"a":' * 100_000,
    os.urandom(1 << 16),
    b"x" * 20_000_000,
    b"null\n[]\n{}\n",
    b'"here"\n',
    b'["here", 1, 99, "x"]\n',
    b'["ready", 5]\n',
    b'["here", 1, 2, 3, 4, 5]\n',
    b'["here", "1", "h", "d", "n", "p"]\n',
    b'["here", 1, "h", "99", "n", "p"]\n',
    b'["end", 2, 0, "h", "no"]\n',
)
GLOO = re.compile(r"^\[Gloo\].*\n", re.M)  # says on stdout that it is connected


@dataclasses.dataclass(frozen=True)
class Result:
    """A process's exit code and output."""

    code: int
    out: str
    err: str


class Run:
    """The processes of one run; `process_id` is their place in `processes`."""

    def __init__(self, processes: list[subprocess.Popen], folder: Path, port: int):
        self.processes, self._folder = processes, folder
        self.port = port  # on which they, or their agents, meet

    def out(self, index: int = 0) -> str:
        """A process's output so far."""
        return GLOO.sub("", (self._folder / f"{index}.out").read_text())

    def err(self, index: int = 0) -> str:
        """And its errors."""
        return (self._folder / f"{index}.err").read_text()

    def wait_for(self, text: str, index: int = 0, seconds: float = 600) -> None:
        """Returns when a process has printed `text`."""
        deadline = time.monotonic() + seconds
        while text not in self.out(index) + self.err(index):
            ended = self.processes[index].poll()
            assert ended is None, f"ended with {ended} before {text!r}:\n{self._output(index)}"
            assert time.monotonic() < deadline, (
                f"no {text!r} within {seconds} s:\n{self._output(index)}"
            )
            time.sleep(0.05)

    def wait(self, seconds: float = 600, indices: Sequence[int] | None = None) -> list[Result]:
        """The results of all, or of these, when they have ended."""
        deadline = time.monotonic() + seconds
        results = []
        for index in range(len(self.processes)) if indices is None else indices:
            process = self.processes[index]
            try:
                code = process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                outputs = "\n".join(self._output(i) for i in range(len(self.processes)))
                raise AssertionError(
                    f"process {index} still runs after {seconds} s:\n{outputs}"
                ) from None
            results.append(Result(code, self.out(index), self.err(index)))
        return results

    def _output(self, index: int) -> str:
        return f"--- {index}\n{self.out(index)}\n{self.err(index)[-3000:]}"


@contextmanager
def start(
    arguments: Sequence[str | Path],
    count: int,
    folder: Path,
    devices: int = 1,
    variables: dict[str, str] | None = None,
    kind: type[Run] = Run,
) -> Iterator[Any]:
    """`python ARGUMENTS` as `count` processes (or agents) of `devices` virtual CPU devices each;
    their output goes to `folder`. The run is of the class `kind`.

    One process gets no coordinator. Whatever still runs at the end is killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    processes = []
    for index in range(count):
        environ = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": flags(devices),
            "ZAYA_JOIN_SECONDS": "120",
            "ZAYA_WAIT_SECONDS": "120",
            "PYTHONPATH": os.pathsep.join(
                [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
        }
        if count > 1:
            environ |= {
                "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
                "JAX_NUM_PROCESSES": str(count),
                "JAX_PROCESS_ID": str(index),
                "NODES": str(count),
                "NODE": str(index),
            }
        with (folder / f"{index}.out").open("w") as out, (folder / f"{index}.err").open("w") as err:
            command = [sys.executable, *map(str, arguments)]
            processes.append(
                subprocess.Popen(
                    command, cwd=ROOT, env=environ | (variables or {}), stdout=out, stderr=err
                )
            )
    try:
        yield kind(processes, folder, port)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def pretrain(
    workdir: Path, count: int, devices: int, keys: dict[str, object], **variables: str
) -> AbstractContextManager[Run]:
    """The training program with these config keys; its output goes to a folder beside the run."""
    options = [f"--config.{key}={value}" for key, value in keys.items()]
    arguments = ["-m", "experiments.pretrain", f"--workdir={workdir}", *options]
    folder = workdir.with_name(f"out-{workdir.name}-{count}")
    return start(arguments, count, folder, devices, variables)


def flags(devices: int) -> str:
    """XLA_FLAGS of a program on so many virtual CPU devices; the tests' own otherwise, so that it
    compiles as fast."""
    return re.sub(r"(device_count)=\d+", rf"\1={devices}", os.environ["XLA_FLAGS"])


def free_port() -> int:
    """A port without a listener now."""
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]
