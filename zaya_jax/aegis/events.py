"""What befell a run and what was done about it: lines of JSON below WORKDIR/aegis, which report and agent read again.

    log = Log(workdir, "agent"); log.add("died", node=..., process=3, seen="SIGKILL", done="restart", seconds=4.1)
    read(workdir)                  the lines of all writers, by time

Each writer has a file of its own, since appends of two machines to one file of a shared system may lose each other:
`events.jsonl` is the leading agent's, `events-run.jsonl` that of process 0 of the training.
"""

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


def read(workdir: str | Path) -> list[Event]:
    """All events of a run by their time; a line that is half written, or of a later version, is passed over."""
    found, names = [], {field.name for field in dataclasses.fields(Event)}
    for name in FILES.values():
        path = Path(workdir) / FOLDER / name
        for line in path.read_bytes().splitlines() if path.exists() else ():
            try:
                given = fields.parse_json(line)
                found.append(Event(**{key: given[key] for key in given if key in names}))
            except (ValueError, TypeError):
                continue
    return sorted(found, key=lambda event: event.time)
