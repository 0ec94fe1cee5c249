"""What a run's checkpoints hold and what their saving took, from small files alone; a run may be writing there.

print(look.steps_text(workdir))            a line per step
print(look.arrays_text(workdir, step))     a line an array of one
"""

import dataclasses
import datetime
import math
import re
import statistics
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from zaya_jax.checkpoint import layout, retention, store, writing
from zaya_jax.checkpoint.source import Source
from zaya_jax.checkpoint.times import STAGES, Event, read
from zaya_jax.config import StorageError, UserError

# How the names begin of what lies among the checkpoints and is none, and what to say of it.
OTHERS = {
    (
        writing.SAVING,
        writing.DELETING,
    ): "Not complete (being written or deleted, or left by a run that was killed)",
    (writing.DAMAGED,): "Set aside as damaged",
    (writing.STALE,): "Set aside since the run went back behind them",
}


@dataclasses.dataclass(frozen=True)
class Seen:
    """One checkpoint, as its small files tell."""

    step: int
    meta: dict[str, Any]
    bytes: int  # on the disk
    num_files: int
    arrays: list[layout.Array]
    chunks: Counter[str]  # by array
    saved: float  # unix seconds of its completion

    def part_bytes(self) -> dict[str, int]:
        """Bytes of parameters, optimizer and balancing."""
        parts: dict[str, int] = defaultdict(int)
        for array in self.arrays:
            parts[array.name.split(".")[0]] += _bytes(array)
        return dict(parts)


def see(workdir: str | Path, step: int) -> Seen:
    """Looks at one step; StorageError where its small files are damaged."""
    source = Source(workdir, step)
    with source.unless_deleted():
        arrays, meta = list(source.arrays().values()), source.json(layout.META)
        saved = (store.step_folder(workdir, step) / layout.MARKER).stat().st_mtime
    sums = source.files
    chunks = Counter(name.split("/")[1] for name in sums if re.search(r"/c[.\d]*$", name))
    size = sum(entry[0] for entry in sums.values())
    return Seen(step, meta, size, len(sums) + 1, arrays, chunks, saved)


def see_all(workdir: str | Path) -> tuple[list[Seen], list[int]]:
    """Looks at all steps, oldest first: those whose small files can be read, and those that are damaged.

    A step that its run deletes meanwhile is neither.
    """
    seen, damaged = [], []
    for step in writing.numbered(Path(workdir) / "checkpoints"):
        try:
            seen.append(see(workdir, step))
        except UserError:
            pass
        except StorageError:
            damaged.append(step)
    return seen, damaged


def steps_text(workdir: str | Path) -> str:
    """A table of all steps, and what else lies among them."""
    root = Path(workdir) / "checkpoints"
    saves = read(Path(workdir)).get("save", {})
    seen_all, damaged = see_all(workdir)
    if not seen_all and not damaged:
        raise UserError(f"--workdir={workdir} has no checkpoint; train first, or give the folder of a run")
    head = ["step", "tokens", "size", "arrays", "files", "processes", "held-out", "saved at", "version"]
    rows = [[*head, *STAGES]]
    for seen in seen_all:
        when = datetime.datetime.fromtimestamp(seen.saved)
        rows.append(
            [
                str(seen.step), f"{seen.meta.get('tokens', 0):,}", size_text(seen.bytes), str(len(seen.arrays)),
                str(seen.num_files), str(seen.meta.get("processes", 1)), loss_text(seen),
                f"{when:%Y-%m-%d %H:%M:%S}", str(seen.meta.get("version", "")),
                *[_stage_text(saves.get(seen.step), stage) for stage in STAGES],
            ]
        )  # fmt: skip
    notes = {"DAMAGED, `verify` says where": list(map(str, damaged))}
    figures = {str(seen.step): seen.meta.get("metrics") or {} for seen in seen_all}
    doubtful = [step for step, of_step in figures.items() if of_step.get("suspicious")]
    unsound = [
        step for step, of_step in figures.items() if not retention.sound(of_step) and step not in doubtful
    ]
    notes["Saved after an update that was skipped or not finite"] = unsound
    notes["Saved among losses or gradients that were too high"] = doubtful
    names = sorted(path.name for path in root.iterdir())
    for begins, what in OTHERS.items():
        notes[what] = [name for name in names if name.startswith(begins)]
    notes["No checkpoints' names"] = writing.odd_names(root)
    text = _table(rows)
    if any(save.processes > 1 for save in saves.values()):
        text += "\nStages: seconds of the slowest process (median)."
    return text + "".join(f"\n{what}: {', '.join(found)}." for what, found in notes.items() if found)


def arrays_text(workdir: str | Path, step: int) -> str:
    """A table of the arrays of a step, with sums of its parts."""
    seen = see(workdir, step)
    rows = [["array", "shape", "type", "size", "chunk", "chunks"]]
    for part, size in seen.part_bytes().items():
        rows += [
            [
                array.name, _shape(array.shape), array.dtype, size_text(_bytes(array)), _shape(array.chunk),
                str(seen.chunks[array.name]),
            ]
            for array in seen.arrays
            if array.name.split(".")[0] == part
        ]  # fmt: skip
        rows.append([f"= {part}", "", "", size_text(size), "", ""])
    head = f"step {step}, by {seen.meta.get('processes', 1)} process(es), version {seen.meta.get('version')}"
    return f"{head}\n{_table(rows, right=(3, 5))}"


def loss_text(seen: Seen) -> str:
    """Its held-out loss, where the run evaluated at its step."""
    loss = (seen.meta.get("metrics") or {}).get("eval/loss")
    return f"{loss:.4f}" if isinstance(loss, float | int) else ""


def size_text(size: float) -> str:
    """1.2 GB, 34 kB or 12 B."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{round(size)} B"


def _stage_text(save: Event | None, stage: str) -> str:
    seconds = [v for v in save.stages.get(stage, ()) if v == v] if save else []
    if not seconds:
        return ""
    return f"{max(seconds):.3f} s" + (f" ({statistics.median(seconds):.3f})" if len(seconds) > 1 else "")


def _bytes(array: layout.Array) -> int:
    return math.prod(array.shape) * np.dtype(array.dtype).itemsize


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "()"


def _table(rows: list[list[str]], right: tuple[int, ...] = ()) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]

    def line(row: list[str]) -> str:
        cells = (f"{cell:{'>' if i in right else '<'}{widths[i]}}" for i, cell in enumerate(row))
        return "  ".join(cells).rstrip()

    return "\n".join(map(line, rows))
