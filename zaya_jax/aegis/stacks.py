"""Collects the stacks of hanging processes before they are killed.

    collect(targets)        {process: Stack} of {process: StackTarget}; a second or two, in whatever state they are

First from the process itself: faulthandler at SIGUSR1, which answers as long as the process takes
signals, even while the interpreter's lock is held. Otherwise from the system: the state, and the
position and stack in the kernel.
"""

import contextlib
import os
import re
import signal
import time
from pathlib import Path
from typing import NamedTuple

ANSWER = 1.5  # seconds for faulthandler to begin
OURS = re.compile(r"[/\\](zaya_jax|experiments|pallas_kernels)[/\\]")
FRAME = re.compile(r'^\s*File "(.+)", line (\d+) in (.+)$', re.M)


class StackTarget(NamedTuple):
    """A process, and the file to which its faulthandler writes."""

    pid: int
    log: Path


class Stack(NamedTuple):
    """Where it is from, the main thread's line in short, and all that was learned."""

    how: str
    line: str
    text: str


def state(pid: int | str) -> str:
    """R, S, D, T, t or Z of a process, or PID/task/NUMBER, as the system has it; "?" where there is
    none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "?"


def collect(targets: dict[int, StackTarget]) -> dict[int, Stack]:
    """The stacks of all, asked at once."""
    dumps = _faulthandler_dumps(targets)
    stacks = {}
    for process, target in targets.items():
        how, text = "faulthandler", dumps.get(process, "")
        line = _innermost_line(text) or _where_in_kernel(target.pid)
        if not text:
            how, text = "/proc", _proc_stacks(target.pid)
        stacks[process] = Stack(how, line, text.strip() + "\n")
    return stacks


def _faulthandler_dumps(targets: dict[int, StackTarget]) -> dict[int, str]:
    """The output of faulthandler."""
    begun: dict[int, int] = {}
    for process, target in targets.items():
        with contextlib.suppress(OSError):
            # The signal would kill others, or wait for them.
            if state(target.pid) not in "TtZX?" and catches(target.pid, signal.SIGUSR1):
                begun[process] = target.log.stat().st_size
                os.kill(target.pid, signal.SIGUSR1)
    dumps: dict[int, str] = {}
    until = time.monotonic() + ANSWER
    while begun and time.monotonic() < until:
        time.sleep(0.05)
        for process, size in list(begun.items()):
            with contextlib.suppress(OSError), targets[process].log.open("rb") as file:
                file.seek(size)
                text = file.read(1 << 20).decode(errors="replace")
                if text and text == dumps.get(process):
                    del begun[process]  # it grows no more
                elif text:
                    dumps[process] = text
    return dumps


def catches(pid: int, signum: signal.Signals) -> bool:
    """Whether a process has a handler for this signal; OSError where it is gone."""
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text(), re.M)
    return bool(caught and int(caught[1], 16) >> (signum - 1) & 1)


def _proc_stacks(pid: int) -> str:
    """Each thread as the system has it."""
    lines = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*"), key=lambda path: int(path.name)):
        words = [f"thread {task.name}", f"state {state(f'{pid}/task/{task.name}')}"]
        for name in ("comm", "wchan", "stack"):
            with contextlib.suppress(OSError):
                words.append(f"{name} {' '.join((task / name).read_text().split())}")
        lines.append(", ".join(words))
    return "\n".join(lines) or f"process {pid} is not there"


def _where_in_kernel(pid: int) -> str:
    where = ""
    with contextlib.suppress(OSError):
        where = Path(f"/proc/{pid}/wchan").read_text().strip("0\n")
    return f"state {state(pid)}" + (f" in the kernel's {where}" if where else "")


def _innermost_line(text: str) -> str:
    """The innermost line of the main thread, and the innermost that is this project's."""
    # the main one, "Thread 0x" or "Current thread 0x", is last
    frames = FRAME.findall(text[text.rfind("hread 0x") :])
    if not frames:
        return ""
    first = frames[0]
    ours = next((frame for frame in frames if OURS.search(frame[0])), None)
    words = "{}:{} in {}".format(*first)
    if ours and ours != first:
        words += ", from {}:{} in {}".format(*ours)
    return words
