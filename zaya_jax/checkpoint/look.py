"""What a run's checkpoints hold and what their saving took, from small files alone; a run may be writing there.

print(look.steps_text(workdir))            a line per step
print(look.arrays_text(workdir, step))     a line an array of one
"""

import dataclasses
import datetime
import math
import operator
import re
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from zaya_jax.checkpoint import keep, layout, store, writing
from zaya_jax.checkpoint.times import STAGES, Event, read
from zaya_jax.config import StorageError, UserError, files, shown


@dataclasses.dataclass(frozen=True)
class Seen:
    """One checkpoint, as its small files tell."""

    step: int
    meta: dict[str, Any]
    files: dict[str, list[int]]
    arrays: list[dict[str, Any]]  # name, shape, dtype, chunk, chunks, bytes
    saved: float  # unix seconds of its completion

    @property
    def bytes(self) -> int:
        """Its size on disk."""
        return sum(entry[0] for entry in self.files.values())

    def part_bytes(self) -> dict[str, int]:
        """Bytes of parameters, optimizer and balancing."""
        parts: dict[str, int] = defaultdict(int)
        for array in self.arrays:
            parts[array["name"].split(".")[0]] += array["bytes"]
        return dict(parts)


def see(workdir: str | Path, step: int) -> Seen:
    """Looks at one step; StorageError where its small files are damaged."""
    folder = store.step_folder(workdir, step)
    try:
        sums, saved = writing.read_seal(folder).files, (folder / layout.MARKER).stat().st_mtime
        meta = files.read_json(folder / layout.META)
        chunks: dict[str, int] = defaultdict(int)
        for name in sums:
            parts = name.split("/")
            if parts[0] == layout.STATE and parts[-1].split(".")[0] == "c":
                chunks[parts[1]] += 1
        arrays = []
        for name in sorted(n.split("/")[1] for n in sums if n.endswith("/zarr.json")):
            about = files.read_json(folder / layout.STATE / name / "zarr.json")
            shape = _lengths(about["shape"])
            chunk = _lengths(about["chunk_grid"]["configuration"]["chunk_shape"])
            itemsize = np.dtype(about["data_type"]).itemsize
            arrays.append(
                {
                    "name": name, "shape": shape, "dtype": about["data_type"], "chunk": chunk, "chunks": chunks[name],
                    "bytes": math.prod(shape) * itemsize,
                }
            )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError) as error:
        if not folder.is_dir():
            raise UserError(
                f"{folder} has gone meanwhile, as old steps of a run do; take a newer one"
            ) from None
        raise StorageError(
            f"{folder} cannot be looked at: {writing.reason(error)}; "
            f"`python -m experiments.checkpoint verify --workdir={workdir} --step={step}` says what is damaged"
        ) from None
    return Seen(step, meta, sums, arrays, saved)


def _lengths(given: list) -> list[int]:
    """A shape as it was read; TypeError or ValueError where it is none."""
    shape = [operator.index(length) for length in given]
    if any(not 0 <= length < 2**63 for length in shape):
        raise ValueError(f"{shown(given)} is no shape")
    return shape


def see_all(workdir: str | Path) -> list[Seen]:
    """Looks at all steps, oldest first; one that the run deletes meanwhile is none."""
    found = []
    for step in writing.steps_in(Path(workdir) / "checkpoints"):
        try:
            found.append(see(workdir, step))
        except (StorageError, UserError):
            if store.step_folder(workdir, step).is_dir():
                raise
    return found


def steps_text(workdir: str | Path) -> str:
    """A table of all steps."""
    root = Path(workdir) / "checkpoints"
    saves = read(Path(workdir)).get("save", {})
    seen_all = see_all(workdir)
    head = ["step", "tokens", "size", "arrays", "files", "processes", "held-out", "saved at", "version"]
    rows = [[*head, *STAGES]]
    for seen in seen_all:
        when = datetime.datetime.fromtimestamp(seen.saved)
        rows.append(
            [
                str(seen.step), f"{seen.meta.get('tokens', 0):,}", size_text(seen.bytes), str(len(seen.arrays)),
                str(len(seen.files) + 1), str(seen.meta.get("processes", 1)), loss_text(seen),
                f"{when:%Y-%m-%d %H:%M:%S}", str(seen.meta.get("version", "")),
                *[_stage_text(saves.get(seen.step), stage) for stage in STAGES],
            ]
        )  # fmt: skip
    if len(rows) == 1:
        raise UserError(f"--workdir={workdir} has no checkpoint; train first, or give the folder of a run")
    left = sorted(p.name for p in root.iterdir() if p.name.startswith((writing.SAVING, writing.DELETING)))
    odd = writing.odd_names(root)
    text = _table(rows)
    if any(save.processes > 1 for save in saves.values()):
        text += "\nStages: seconds of the slowest process (median)."
    figures = {str(seen.step): seen.meta.get("metrics") or {} for seen in seen_all}
    doubtful = [step for step, of_step in figures.items() if of_step.get("suspicious")]
    unsound = [step for step, of_step in figures.items() if not keep.sound(of_step) and step not in doubtful]
    if unsound:
        text += f"\nSaved after an update that was skipped or not finite: {', '.join(unsound)}."
    if doubtful:
        text += f"\nSaved among losses or gradients that were too high: {', '.join(doubtful)}."
    if left:
        text += (
            f"\nNot complete: {', '.join(left)} (being written or deleted, or left by a run that was killed)."
        )
    if odd:
        text += f"\nNo checkpoints' names: {', '.join(odd)}."
    aside = sorted(p.name for p in root.iterdir() if p.name.startswith(writing.DAMAGED))
    if aside:
        text += f"\nSet aside as damaged: {', '.join(aside)}."
    stale = sorted(p.name for p in root.iterdir() if p.name.startswith(writing.STALE))
    if stale:
        text += f"\nSet aside since the run went back behind them: {', '.join(stale)}."
    return text


def arrays_text(workdir: str | Path, step: int) -> str:
    """A table of the arrays of a step, with sums of its parts."""
    seen = see(workdir, step)
    rows = [["array", "shape", "type", "size", "chunk", "chunks", "on the mesh"]]
    where = seen.meta.get("layout", {})
    for part in dict.fromkeys(array["name"].split(".")[0] for array in seen.arrays):
        rows += [
            [
                array["name"], _shape(array["shape"]), array["dtype"], size_text(array["bytes"]),
                _shape(array["chunk"]), str(array["chunks"]), mesh_text(where.get(array["name"])),
            ]
            for array in seen.arrays
            if array["name"].split(".")[0] == part
        ]  # fmt: skip
        rows.append([f"= {part}", "", "", size_text(seen.part_bytes()[part]), "", "", ""])
    return (
        f"step {step}, by {seen.meta.get('processes', 1)} process(es), version {seen.meta.get('version')}\n"
        + _table(rows, right=(3, 5))
    )


def mesh_text(lay: dict[str, Any] | None) -> str:
    """`data x expert, -` for an array whose first dim lies over two mesh axes and whose second over none."""
    if not lay:
        return ""
    # layout.spread cuts axes into prime factors: data/0, data/1; together they are data again.
    whole: dict[str, list[str]] = defaultdict(list)
    for axis in lay["mesh"]:
        whole[axis.split("/")[0]].append(axis)
    dims = []
    for text in lay["axes"]:
        names = re.findall(r"[\w/]+", text) if text != "None" else []
        used: dict[str, list[str]] = defaultdict(list)
        for name in names:
            used[name.split("/")[0]].append(name)
        told = []
        for axis, parts in used.items():
            count = math.prod(lay["mesh"][p] for p in parts)
            full = math.prod(lay["mesh"][p] for p in whole[axis])
            if count > 1:
                told.append(axis if count == full else f"{axis} ({count} of {full})")
        dims.append(" x ".join(told) or "-")
    return ", ".join(dims) if any(dim != "-" for dim in dims) else "whole"


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
    if len(seconds) == 1:
        return f"{seconds[0]:.3f} s"
    return f"{max(seconds):.3f} s ({statistics.median(seconds):.3f})"


def _shape(shape: list[int]) -> str:
    return " x ".join(map(str, shape)) or "()"


def _table(rows: list[list[str]], right: tuple[int, ...] = ()) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
