"""Agents of the stand-in program as real processes, one per "node" of this machine."""

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import multiprocess_runs
from waiting import until

from zaya_jax.aegis import machine
from zaya_jax.cluster import events

STAND_IN = Path(__file__).with_name("stand_in.py")
STEPS = 25


def command(workdir: Path, steps: int, seconds: float, *options: str) -> list:
    """An agent's command line."""
    run = [f"--workdir={workdir}", str(steps), str(seconds)]
    return [sys.executable, STAND_IN, "agent", *options, "--", *run]


class Agents(multiprocess_runs.Run):
    """Those of one run."""

    workdir: Path

    def codes(self, seconds: float = 60, of: Sequence[int] | None = None) -> list[int]:
        """Their exit codes."""
        return [result.code for result in self.wait(seconds, of)]

    def until_step(self, step: int, seconds: float = 60) -> None:
        """Returns when the run has come there."""
        path = self.workdir / "metrics.jsonl"
        wanted = f'"step": {step}}}'
        until(lambda: path.exists() and wanted in path.read_text(), seconds, self.err)

    def events(self, kind: str) -> list[events.RunEvent]:
        """Those of a kind."""
        return [event for event in events.read(self.workdir) if event.kind == kind]

    def steps(self) -> list[int]:
        """All that were begun, in their order."""
        lines = (self.workdir / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["step"] for line in lines]

    def until_gone(self, seconds: float = 10) -> None:
        """Returns when all processes of the run have ended, whatever their parent."""

        def any_runs() -> bool:
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    words = path.read_bytes().split(b"\0")
                    if b"train" in words and str(self.workdir).encode() in words:
                        return True
            return False

        until(lambda: not any_runs(), seconds)


@contextlib.contextmanager
def start(
    folder: Path,
    *options: str,
    agents: int = 1,
    befalls: dict[int, str] | None = None,
    steps: int = STEPS,
    seconds: float = 0.05,
    variables: dict[str, str] | None = None,
) -> Iterator[Agents]:
    """So many agents with these options and variables; what befalls a process is in its
    words, see stand_in."""
    workdir = folder / "run"
    workdir.mkdir(parents=True)
    for process, words in (befalls or {}).items():
        (workdir / f"do-{process}").write_text(words)
    arguments = command(workdir, steps, seconds, *options)[1:]
    given = {"ZAYA_JOIN_SECONDS": "30", machine.ROOT: "/nowhere", **(variables or {})}
    # Their processes end with them, whatever the test does.
    with multiprocess_runs.start(arguments, agents, folder, variables=given, kind=Agents) as run:
        run.workdir = workdir
        yield run
