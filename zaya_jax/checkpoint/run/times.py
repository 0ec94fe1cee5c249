"""Records and reads how long saves, loads and copies of checkpoints took, in
checkpoint_times.jsonl.

The file may be long (1,024 processes write as many lines a save), is read while a run writes, and
may hold lines that a kill has cut short. Needs no JAX: `inspect`, its page and the training report
all read it here.
"""

import contextlib
import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np

TIMES = "checkpoint_times.jsonl"
STAGES = ("copy", "serialise", "write", "commit")  # of a save, in their order


def record(workdir: Path, kind: str, step: int, begun: float, parts: Iterable) -> None:
    """Adds a line for each process's (seconds by stage, bytes), in process 0; an error stops
    nothing."""
    with contextlib.suppress(OSError), (workdir / TIMES).open("ab") as file:
        for process, (seconds, size) in enumerate(parts):
            line = {
                "kind": kind,
                "step": step,
                "process": process,
                "stages": seconds,
                "bytes": size,
                "time": begun,
            }
            file.write(f"{json.dumps(line)}\n".encode())


@dataclasses.dataclass
class Event:
    """A save, load or copy of a step: each process's bytes, and by stage each process's seconds."""

    step: int
    time: float  # when it began
    sizes: dict[int, float] = dataclasses.field(default_factory=dict)
    stages: dict[str, dict[int, float]] = dataclasses.field(default_factory=dict)

    @property
    def processes(self) -> int:
        """How many processes took part."""
        return max(self.sizes) + 1

    def of(self, stage: str) -> np.ndarray:
        """Seconds of a stage by process, NaN where it is not known."""
        found = self.stages.get(stage, {})
        return np.array([found.get(process, math.nan) for process in range(self.processes)])

    def slowest(self, stage: str) -> float:
        """The slowest process's seconds of a stage, NaN if unknown."""
        return max(self.stages.get(stage, {}).values(), default=math.nan)

    def whole(self) -> float:
        """The time from begin to end: process 0's stages follow each other, and its commit waits
        for all others."""
        sums = (
            np.nansum([self.of(stage) for stage in self.stages], axis=0)
            if self.stages
            else np.zeros(1)
        )
        return float(sums[0] or sums.max())


def read(workdir: Path) -> dict[str, dict[int, Event]]:
    """The newest event of each kind (save, load, copy) and step: a resumed run may have saved a
    step again."""
    found: dict[str, dict[int, Event]] = defaultdict(dict)
    try:
        with (workdir / TIMES).open("rb", 1 << 20) as file:
            for raw in file:
                _take(raw, found)
    except OSError:
        pass
    return {kind: dict(sorted(events.items())) for kind, events in found.items()}


def _take(raw: bytes, found: dict[str, dict[int, Event]]) -> None:
    begin = raw.rfind(b'{"kind"')  # a line cut short by a kill has the next one at its end
    try:
        line = json.loads(raw[max(begin, 0) :])
    except ValueError:
        return
    kind, step, process, time = line["kind"], line["step"], line["process"], line["time"]
    event = found[kind].get(step)
    if event is None or time > event.time:
        event = found[kind][step] = Event(step, time)
    if time == event.time:
        event.sizes[process] = line["bytes"]
        for stage, value in line["stages"].items():
            event.stages.setdefault(stage, {})[process] = value
