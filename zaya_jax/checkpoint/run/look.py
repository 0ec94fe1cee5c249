"""Summarises a run's checkpoints from their small files alone, for `inspect` and its page; a run
may be writing."""

import dataclasses
from collections import defaultdict
from pathlib import Path
from typing import Any

from zaya_jax.checkpoint import folders, layout
from zaya_jax.checkpoint.run import retention
from zaya_jax.checkpoint.source import SealedSource
from zaya_jax.config import StorageError, UserError

# The meaning of other folders among the checkpoints, by the beginnings of their names.
OTHER_FOLDERS = {
    "Not complete (being written or deleted, or left by a run that was killed)": (
        folders.SAVING,
        folders.DELETING,
    ),
    "Set aside as damaged": (folders.DAMAGED,),
    "Set aside since the run went back behind them": (folders.STALE,),
}


@dataclasses.dataclass(frozen=True)
class Summary:
    """One checkpoint, as its small files tell."""

    step: int
    meta: dict[str, Any]
    num_bytes: int  # on the disk
    arrays: list[layout.StoredArray]
    saved: float  # unix seconds of its completion

    def part_bytes(self) -> dict[str, int]:
        """Bytes of parameters, optimizer and balancing."""
        parts: dict[str, int] = defaultdict(int)
        for array in self.arrays:
            parts[array.name.split(".")[0]] += array.num_bytes
        return dict(parts)


def summarise(workdir: str | Path, step: int | None) -> Summary:
    """One step, by default the newest; StorageError if its small files are damaged."""
    source = SealedSource(workdir, step)
    marker = Path(workdir) / "checkpoints" / str(source.step) / layout.SEAL_FILE
    return Summary(
        step=source.step,
        meta=source.meta(),
        num_bytes=sum(entry[0] for entry in source.files.values()),
        arrays=list(source.arrays.values()),
        saved=marker.stat().st_mtime,
    )


def summarise_all(workdir: str | Path) -> tuple[list[Summary], list[int]]:
    """All steps, oldest first: those whose small files can be read, and those that are damaged.

    A step that its run deletes meanwhile is neither.
    """
    root = Path(workdir) / "checkpoints"
    summaries, damaged = [], []
    for step in folders.numbered(root):
        try:
            summaries.append(summarise(workdir, step))
        except (UserError, FileNotFoundError):
            pass
        except StorageError:
            if (root / str(step)).exists():
                damaged.append(step)
    return summaries, damaged


def remarks(workdir: str | Path, summaries: list[Summary], damaged: list[int]) -> list[str]:
    """Sentences on steps that are damaged or doubtful, and on other folders among them."""
    suspicious, unsound = [], []
    for summary in summaries:
        figures = summary.meta.get("metrics") or {}
        if figures.get("suspicious"):
            suspicious.append(str(summary.step))
        elif not retention.is_sound(figures):
            unsound.append(str(summary.step))
    names = {
        "DAMAGED, `verify` says where": [str(step) for step in damaged],
        "Saved after an update that was skipped or not finite": unsound,
        "Saved among losses or gradients that were too high": suspicious,
    }
    folder_names = sorted(path.name for path in (Path(workdir) / "checkpoints").iterdir())
    for meaning, prefixes in OTHER_FOLDERS.items():
        names[meaning] = [name for name in folder_names if name.startswith(prefixes)]
    return [f"{what}: {', '.join(which)}." for what, which in names.items() if which]


def loss_text(summary: Summary) -> str:
    """Its held-out loss, if the run evaluated at its step."""
    loss = (summary.meta.get("metrics") or {}).get("eval/loss")
    return f"{loss:.4f}" if isinstance(loss, float | int) else ""
