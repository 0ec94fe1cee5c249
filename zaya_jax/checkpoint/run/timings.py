"""Records and reads how long saves and loads of checkpoints took, in
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

from zaya_jax.config import files

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
class StepTiming:
    """A save or load of a step: each process's bytes, and by stage each process's seconds."""

    step: int
    time: float  # when it began
    sizes: dict[int, float] = dataclasses.field(default_factory=dict)
    stages: dict[str, dict[int, float]] = dataclasses.field(default_factory=dict)

    @property
    def processes(self) -> int:
        """How many processes took part."""
        return max(self.sizes) + 1

    def by_process(self, stage: str) -> np.ndarray:
        """Seconds of a stage by process, NaN where it is not known."""
        seconds = self.stages.get(stage, {})
        return np.array([seconds.get(process, math.nan) for process in range(self.processes)])

    def slowest(self, stage: str) -> float:
        """The slowest process's seconds of a stage, NaN if unknown."""
        return max(self.stages.get(stage, {}).values(), default=math.nan)

    def total(self) -> float:
        """The time from begin to end: process 0's stages follow each other, and its commit waits
        for all others."""
        return sum(seconds.get(0, 0.0) for seconds in self.stages.values())


def read_timings(workdir: Path) -> dict[str, dict[int, StepTiming]]:
    """The newest record of each kind (save, load) and step: a resumed run may have saved a
    step again."""
    timings: dict[str, dict[int, StepTiming]] = defaultdict(dict)
    with contextlib.suppress(OSError), (workdir / TIMES).open("rb", 1 << 20) as file:
        for line in file:
            # neither a line nor a number of it need be whole
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                _add_line(line, timings)
    return {kind: dict(sorted(by_step.items())) for kind, by_step in timings.items()}


def _add_line(line: bytes, timings: dict[str, dict[int, StepTiming]]) -> None:
    fields = files.last_record(line)
    step, process, begun = fields["step"], fields["process"], fields["time"]
    num_bytes, stages = fields["bytes"], fields["stages"]
    by_step = timings[fields["kind"]]
    timing = by_step.get(step)
    if timing is None or begun > timing.time:
        timing = by_step[step] = StepTiming(step, begun)
    if begun == timing.time:
        timing.sizes[process] = num_bytes
        for stage, seconds in stages.items():
            timing.stages.setdefault(stage, {})[process] = seconds
