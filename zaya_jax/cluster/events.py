"""Writes and reads a run's events: lines of JSON below WORKDIR/aegis.

    add(workdir, "spike", step=..., seen="loss 9.1", done="back to step 60")    of process 0 of the training
    read(workdir)                  the lines of all writers, by time

Each writer has a file of its own, since appends of two machines to one file of a shared system may
lose each other: `events.jsonl` is the leading agent's, `events-run.jsonl` that of process 0 of the
training.
"""

import contextlib
import dataclasses
import json
import logging
import time
from pathlib import Path
from typing import Any

from zaya_jax.cluster.connections import matches_shape
from zaya_jax.config import files

FOLDER = "aegis"
OF_AGENT, OF_RUN = "events.jsonl", "events-run.jsonl"
LARGEST = 1e11  # seconds or steps in an event; a wall clock comes there in the year 5138
_log = logging.getLogger("zaya_jax")
# critical: of one node, which is judged; distributed: at several, and the first one counts;
# storage; data; user.
GROUPS = ("critical", "distributed", "storage", "data", "user", "numbers", "note")


@dataclasses.dataclass(frozen=True)
class RunEvent:
    """One line. `kind` is a word such as died, hangs, straggles, spike, corrupt, hardware, log,
    started, ended."""

    kind: str
    time: float  # of the wall clock
    group: str = "note"  # one of GROUPS
    node: str = ""
    process: int = -1
    step: int = -1
    seen: str = ""  # the evidence
    concluded: str = ""
    done: str = ""
    seconds: float = 0.0  # how long it took, or lasted
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)

    def line(self) -> str:
        """The event's line of a file."""
        return json.dumps(dataclasses.asdict(self)) + "\n"

    def text(self) -> str:
        """The event in one line for people, whatever its words are from."""
        who = f"process {self.process}" if self.process >= 0 else ""
        where = f"on {self.node}" if self.node else ""
        step = f"at step {self.step}" if self.step >= 0 else ""
        head = " ".join(filter(None, (self.kind, who, where, step)))
        words = "; ".join(filter(None, (self.seen, self.concluded, self.done)))
        return printable(f"{head}: {words}" if words else head)


_FIELDS = {field.name: field.type for field in dataclasses.fields(RunEvent)} | {"facts": dict}
# "note": only written down; "warn": it may explain an end; "exclude": restart without the node;
# "stop": a person is wanted.
ACTIONS = ("note", "warn", "restart", "exclude", "stop")


@dataclasses.dataclass(frozen=True)
class Finding:
    """An observation, and the action that it calls for."""

    name: str  # of the rule or watcher: "gpu uncorrectable memory error", "nic down", ...
    group: str  # one of GROUPS
    action: str  # one of ACTIONS
    seen: str  # the evidence: the line, or the counter with before and after
    process: int = -1
    device: str = ""  # "card0", "mlx5_1", ...


def add(workdir: str | Path, kind: str, **fields: Any) -> None:
    """Writes an event of now, of the training; an error of the disk is no reason to end a run."""
    folder = Path(workdir) / FOLDER
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / OF_RUN).open("a") as file:
            file.write(RunEvent(kind, time.time(), **fields).line())


def printable(text: str) -> str:
    """Without the characters that steer a terminal, or turn its text around: events are read on
    terminals."""
    return "".join(c if c.isprintable() or c == "\t" else "�" for c in text)


def read(workdir: str | Path) -> list[RunEvent]:
    """All events of a run by their time; lines that cannot be read are counted and left out. A line
    that was cut short takes no other with it."""
    events: list[RunEvent] = []
    left_out = 0
    for name in (OF_AGENT, OF_RUN):
        path = Path(workdir) / FOLDER / name
        for line in path.read_bytes().splitlines() if path.exists() else ():
            try:
                events.append(_event(line))
            except (ValueError, TypeError, AttributeError, RecursionError):
                left_out += 1
    if left_out:
        _log.warning(
            "%d lines of %s cannot be read and are left out",
            left_out,
            Path(workdir) / FOLDER / "events*.jsonl",
        )
    return sorted(events, key=lambda event: event.time)


def _event(line: bytes) -> RunEvent:
    """An error if a field is of another type, or a number that others compute with is not valid."""
    message = files.last_record(line)
    fields = {name: message[name] for name in _FIELDS if name in message}
    for name, value in fields.items():
        if isinstance(value, str):
            fields[name] = printable(value)  # events are read on terminals
    if not matches_shape(fields, {name: _FIELDS[name] for name in fields}):
        raise ValueError("odd fields")
    event = RunEvent(**fields)
    numbers = [event.time, event.seconds, event.step]
    numbers += [event.facts.get(name, 0) for name in ("decision", "from", "start", "step", "stop")]
    numbers += event.facts.get("sections", {}).values()
    if not all(-1 <= n < LARGEST for n in numbers):  # NaN is not
        raise ValueError("not a valid number of seconds or steps")
    return event
