"""Summarises a run's checkpoints from their small files alone, for `inspect` and its page; a run
may be writing."""

import dataclasses
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from zaya_jax.checkpoint import layout, writing
from zaya_jax.checkpoint.run import retention
from zaya_jax.checkpoint.source import Source
from zaya_jax.config import StorageError, UserError

# Beginnings of the names of other folders among the checkpoints, and their meaning.
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
            parts[array.name.split(".")[0]] += array.bytes
        return dict(parts)


def see(workdir: str | Path, step: int | None) -> Seen:
    """Looks at one step, by default the newest; StorageError where its small files are damaged."""
    source = Source(workdir, step)
    arrays, meta = list(source.arrays().values()), source.meta()
    saved = (Path(workdir) / "checkpoints" / str(source.step) / layout.MARKER).stat().st_mtime
    sums = source.files
    chunks = Counter(name.split("/")[1] for name in sums if re.search(r"/c[.\d]*$", name))
    size = sum(entry[0] for entry in sums.values())
    return Seen(source.step, meta, size, len(sums) + 1, arrays, chunks, saved)


def see_all(workdir: str | Path) -> tuple[list[Seen], list[int]]:
    """Looks at all steps, oldest first: those whose small files can be read, and those that are
    damaged.

    A step that its run deletes meanwhile is neither.
    """
    seen, damaged = [], []
    for step in writing.numbered(Path(workdir) / "checkpoints"):
        try:
            seen.append(see(workdir, step))
        except (UserError, FileNotFoundError):
            pass
        except StorageError:
            damaged.append(step)
    return seen, damaged


def remarks(workdir: str | Path, seen_all: list[Seen], damaged: list[int]) -> list[str]:
    """Sentences on steps that are damaged or doubtful, and on other folders among them."""
    root = Path(workdir) / "checkpoints"
    figures = {str(seen.step): seen.meta.get("metrics") or {} for seen in seen_all}
    doubtful = [step for step, of_step in figures.items() if of_step.get("suspicious")]
    unsound = [
        s for s, of_step in figures.items() if not retention.sound(of_step) and s not in doubtful
    ]
    names = sorted(path.name for path in root.iterdir())
    found = {
        "DAMAGED, `verify` says where": list(map(str, damaged)),
        "Saved after an update that was skipped or not finite": unsound,
        "Saved among losses or gradients that were too high": doubtful,
        **{
            what: [name for name in names if name.startswith(begins)]
            for begins, what in OTHERS.items()
        },
    }
    return [f"{what}: {', '.join(which)}." for what, which in found.items() if which]


def loss_text(seen: Seen) -> str:
    """Its held-out loss, where the run evaluated at its step."""
    loss = (seen.meta.get("metrics") or {}).get("eval/loss")
    return f"{loss:.4f}" if isinstance(loss, float | int) else ""
