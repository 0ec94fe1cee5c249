"""A program in place of training, quick to start, with an agent around it: `stand_in.py agent
WORKDIR OPTIONS`.

Its "run" is a counter: all processes of a start meet at each step through files, every fifth step
is a checkpoint, and a file WORKDIR/do-INDEX says what befalls process INDEX once, and at which
step:
`STEP kill|stop|exit N|spin|lock|orphan`.
"""

import dataclasses
import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

EVERY = 5


def train(workdir: Path, steps: int, seconds: float) -> int:
    """The counter."""
    from zaya_jax.cluster import beats

    index, count = (
        int(os.environ.get(f"JAX_{name}", 0)) for name in ("PROCESS_ID", "NUM_PROCESSES")
    )
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    logs = workdir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    log = (logs / f"process-{index:05d}.log").open("a")
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    beats.begin(index)
    (workdir / "config.json").write_text("{}")
    begun = max((int(path.name) for path in (workdir / "checkpoints").glob("*")), default=0)
    meeting = workdir / "meet" / os.environ["JAX_COORDINATOR_ADDRESS"]
    meeting.mkdir(parents=True, exist_ok=True)
    print(f"process {index} of {count} begins after {begun}", flush=True)
    for step in range(begun + 1, steps + 1):
        began = time.monotonic()
        beats.at("step", step, "fetch")
        if index == 0:
            (workdir / "metrics.jsonl").open("a").write(json.dumps({"step": step}) + "\n")
        beats.at("step", step, "dispatch")
        befall(workdir / f"do-{index}", step)
        time.sleep(seconds)
        own = time.monotonic() - began
        beats.at("step", step, "wait")
        (meeting / f"{step}-{index}").write_text("stop" if asked else "")
        here = [meeting / f"{step}-{i}" for i in range(count)]
        while not all(path.exists() for path in here):
            time.sleep(0.002)
        beats.lap(step, time.monotonic() - began, own, 0.0)
        stops = any(path.read_text() for path in here)
        if index == 0 and (stops or step % EVERY == 0):
            beats.at("save", step)
            save(workdir, step)
        if stops:
            return 75
    beats.at("end")
    return 0


def save(workdir: Path, step: int) -> None:
    """A whole checkpoint, as far as its names go."""
    folder = workdir / "checkpoints" / str(step)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "checksums.json").write_text("{}")


def befall(file: Path, step: int) -> None:
    """Carries out the fault asked for at this step, once."""
    if not file.exists():
        return
    when, what, *how = file.read_text().split(maxsplit=2)
    if int(when) != step:
        return
    file.rename(file.with_name(f"done-{file.name}-{time.monotonic_ns()}"))
    match what:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exit":
            os._exit(int(how[0]))
        case "spin":
            stand_still_here()
        case "lock":  # the interpreter's lock is held: no thread of Python's goes on
            import ctypes

            ctypes.PyDLL(None).sleep(1000)
        case "orphan":  # a child that leaves the group prints for as long as the pipe is there
            subprocess.Popen(["yes"], start_new_session=True)
            os._exit(9)


def stand_still_here() -> None:
    """The function that the event should name."""
    while True:
        time.sleep(0.1)


def watched(argv: list[str]) -> int:
    """An agent around it, with pretrain's options for an agent; after -- steps and seconds a
    step."""
    from experiments import supervise
    from zaya_jax import cli
    from zaya_jax.aegis import agent

    class Instead(agent.Agent):
        def __init__(self, options, rank, heartbeat):
            words = argv[argv.index("--") + 2 :]
            command = [sys.executable, __file__, "train", str(options.workdir), *words]
            super().__init__(dataclasses.replace(options, command=command), rank, heartbeat)

    agent.Agent = Instead
    sys.argv = ["supervise", *argv]
    return cli.exit_code(supervise.main)


if __name__ == "__main__":
    if sys.argv[1] == "train":
        sys.exit(train(Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))
    sys.exit(watched(sys.argv[2:]))
