"""Agents of the stand-in program as real processes, one per "node" of this machine."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import multiprocess_runs
from waiting import until

from zaya_jax.cluster import events

STAND_IN = Path(__file__).with_name("stand_in.py")
STEPS = 25


def command(workdir: Path, steps: int, seconds: float, *options: str) -> list:
    """An agent's command line."""
    run = [f"--workdir={workdir}", str(steps), str(seconds)]
    return [sys.executable, STAND_IN, "agent", *options, "--", *run]


class Agents(multiprocess_runs.Run):
    """Those of one run."""

    def __init__(self, workdir: Path, agents: list[subprocess.Popen], folder: Path, port: int):
        super().__init__(agents, folder)
        self.workdir, self.port = workdir, port

    def codes(self, seconds: float = 60, of: Sequence[int] | None = None) -> list[int]:
        """Their exit codes."""
        return [result.code for result in self.wait(seconds, of)]

    def until_step(self, step: int, seconds: float = 60) -> None:
        """Returns when the run has come there."""
        path = self.workdir / "metrics.jsonl"
        wanted = f'"step": {step}}}'
        until(lambda: path.exists() and wanted in path.read_text(), seconds, self.err)

    def first(self, kind: str, seconds: float = 60) -> events.RunEvent:
        """The first event of a kind, waited for: an event is written a moment after it happened."""
        return until(lambda: self.events(kind), seconds, self.err)[0]

    def events(self, kind: str = "") -> list[events.RunEvent]:
        """Those of a kind, or all."""
        return [event for event in events.read(self.workdir) if kind in ("", event.kind)]

    def steps(self) -> list[int]:
        """All that were begun, in their order."""
        lines = (self.workdir / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["step"] for line in lines]

    def running(self) -> list[int]:
        """The processes of the run that are there, whatever their parent."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (path / "cmdline").read_bytes().split(b"\0")
                if b"train" in words and str(self.workdir).encode() in words:
                    found.append(int(path.name))
        return found

    def until_gone(self, seconds: float = 10) -> None:
        """Returns when all of them have ended."""
        until(lambda: not self.running(), seconds)


@contextlib.contextmanager
def start(
    folder: Path,
    *options: str,
    agents: int = 1,
    befalls: dict[int, str] | None = None,
    steps: int = STEPS,
    seconds: float = 0.05,
    variables: dict[str, str] | None = None,
    own: dict[int, dict[str, str]] | None = None,
) -> Iterator[Agents]:
    """So many agents with these options and variables; what befalls a process is in its
    words, see stand_in."""
    workdir = folder / "run"
    workdir.mkdir(parents=True)
    for process, words in (befalls or {}).items():
        (workdir / f"do-{process}").write_text(words)
    port = multiprocess_runs.free_port()
    started, line = [], command(workdir, steps, seconds, *options)
    for i in range(agents):
        environ = os.environ | {
            "PYTHONPATH": str(multiprocess_runs.ROOT),
            "PCI_DEVICES": "none",
            "ZAYA_JOIN_SECONDS": "30",
        }
        if agents > 1:
            environ |= {
                "NODES": str(agents),
                "NODE": str(i),
                "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
            }
        with (folder / f"{i}.out").open("w") as out, (folder / f"{i}.err").open("w") as err:
            environ |= (variables or {}) | (own or {}).get(i, {})
            started.append(subprocess.Popen(line, env=environ, stdout=out, stderr=err))
    run = Agents(workdir, started, folder, port)
    try:
        yield run
    finally:
        for agent in started:
            if agent.poll() is None:
                agent.kill()
                agent.wait()
        for pid in run.running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
