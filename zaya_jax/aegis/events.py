"""Writes and reads a run's events: lines of JSON below WORKDIR/aegis.

    log = Log(workdir, "agent"); log.add("died", node=..., process=3, seen="SIGKILL", done="restart", seconds=4.1)
    read(workdir)                  the lines of all writers, by time

Each writer has a file of its own, since appends of two machines to one file of a shared system may lose each other:
`events.jsonl` is the leading agent's, `events-run.jsonl` that of process 0 of the training.
"""

import contextlib
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from zaya_jax.config import fields

FOLDER = "aegis"
FILES = {"agent": "events.jsonl", "run": "events-run.jsonl"}
# critical: of one node, which is judged; distributed: at several, and the first one counts; storage; data; user.
CLASSES = ("critical", "distributed", "storage", "data", "user", "numbers", "note")


@dataclasses.dataclass(frozen=True)
class Event:
    """One line. `kind` is a word such as died, hangs, straggles, spike, corrupt, hardware, log, started, ended."""

    kind: str
    time: float  # of the wall clock
    group: str = "note"  # one of CLASSES
    node: str = ""
    process: int = -1
    step: int = -1
    seen: str = ""  # the evidence
    concluded: str = ""
    done: str = ""
    seconds: float = 0.0  # how long it took, or lasted
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


# "note": only written down; "warn": it may explain an end; "exclude": restart without the node; "stop": a person is
# wanted.
ACTIONS = ("note", "warn", "restart", "exclude", "stop")


@dataclasses.dataclass(frozen=True)
class Finding:
    """An observation, and the action that it calls for."""

    name: str  # of the rule or watcher: "gpu uncorrectable memory error", "nic down", ...
    group: str  # one of CLASSES
    action: str  # one of ACTIONS
    seen: str  # the evidence: the line, or the counter with before and after
    process: int = -1
    device: str = ""  # "card0", "mlx5_1", ...

    def __post_init__(self):
        words = (self.name, self.seen, self.device)
        if not isinstance(self.process, int) or not all(isinstance(word, str) for word in words):
            raise ValueError(f"{self.process!r}, {words!r}")
        if self.group not in CLASSES or self.action not in ACTIONS:
            raise ValueError(f"{self.group!r}, {self.action!r}")


class Log:
    """Appends events; an error of the disk is no reason to end a run, and is counted."""

    def __init__(self, workdir: str | Path, writer: str):
        self.path, self.lost = Path(workdir) / FOLDER / FILES[writer], 0

    def add(self, kind: str, **given: Any) -> Event:
        """Writes one line at once."""
        event = Event(kind, given.pop("time", time.time()), **given)
        line = json.dumps(dataclasses.asdict(event)) + "\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(line)
        except OSError:
            self.lost += 1
        return event


def printable(text: str) -> str:
    """Without the characters that steer a terminal, or turn its text around: events are read on terminals."""
    return "".join(c if c.isprintable() or c == "\t" else "�" for c in text)


def read(workdir: str | Path) -> list[Event]:
    """All events of a run by their time; a line that is half written, or of a later version, is passed over."""
    found = []
    for name in FILES.values():
        path = Path(workdir) / FOLDER / name
        for line in path.read_bytes().splitlines() if path.exists() else ():
            with contextlib.suppress(ValueError, TypeError, RecursionError):
                found.append(_event(fields.parse_json(line)))
    return sorted(found, key=lambda event: event.time)


def _event(given: dict[str, Any]) -> Event:
    """TypeError where a field is of another type, ValueError where a time is none."""
    if not isinstance(given, dict):
        raise TypeError("no object")
    kinds = {field.name: type(getattr(_PLAIN, field.name)) for field in dataclasses.fields(Event)}
    given = {name: printable(x) if isinstance(x, str) else x for name, x in given.items() if name in kinds}
    for name, value in given.items():
        if not isinstance(value, (int, float) if kinds[name] is float else kinds[name]):
            raise TypeError(name)
    event = Event(**given)
    shares = event.facts.get("sections", {})
    counts = [event.facts[name] for name in ("step", "batches", "from", "start", "stop") if name in event.facts]
    if not isinstance(shares, dict) or not all(isinstance(x, int | float) for x in (*counts, *shares.values())):
        raise TypeError("facts")  # numbers that accounts and pages count with
    numbers = (event.time, event.seconds, event.step or 0, *counts, *shares.values())
    if not all(abs(number) < LATEST for number in numbers):
        raise ValueError("a number is out of range")
    return event


_PLAIN = Event("", 0.0)
LATEST = 2.0**37  # seconds: about the year 6000, the last that every calendar can print
