"""The folders of a run's checkpoints, by their names: only `STEP` is a checkpoint.

STEP                  a checkpoint, complete: it gets this name with its seal in it
.saving-STEP          one being written
.deleting-STEP        one being deleted
.damaged-STEP         a damaged one, kept for inspection
.stale-N-STEP         one of a branch that the run's first N decisions abandoned
.run                  the run's name
"""

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path

from zaya_jax.checkpoint.layout import SEAL_FILE
from zaya_jax.checkpoint.seal import RUN, Seal
from zaya_jax.checkpoint.writing import write_files
from zaya_jax.config import files

SAVING, DELETING, DAMAGED, STALE = ".saving-", ".deleting-", ".damaged-", ".stale-"


def steps_in(root: Path) -> list[int]:
    """The complete checkpoints of a folder, oldest first."""
    return [step for step in numbered(root) if (root / str(step) / SEAL_FILE).is_file()]


def numbered(root: Path) -> list[int]:
    """All folders named like a step, oldest first."""
    return steps_of(path.name for path in root.iterdir()) if root.is_dir() else []


def steps_of(names: Iterable[str]) -> list[int]:
    """The steps among some names, oldest first."""
    steps = [step_of(name) for name in names]
    return sorted(step for step in steps if step is not None)


def step_of(name: str) -> int | None:
    """The step that a name is: 40 of "40", none of "040" and "٤٠", which are other folders."""
    is_number = name.isascii() and name.isdigit()
    return int(name) if is_number and str(int(name)) == name else None


def commit(folder: Path, target: Path, listed: Seal) -> None:
    """Gives a written folder its seal and its final name; when this returns, it outlives a power
    cut.

    An error may come after the renaming. A second attempt finds its own seal at the target then, and
    deletes what it has written.
    """
    content = listed.to_bytes()
    write_files(folder, {SEAL_FILE: content})
    sync_folders(folder, listed)  # before the name says that all is there
    if (target / SEAL_FILE).is_file() and (target / SEAL_FILE).read_bytes() == content:
        shutil.rmtree(folder)
    else:
        folder.rename(target)
    sync_folder(target.parent)


def remove(root: Path, step: int) -> None:
    """Deletes a checkpoint; killed meanwhile, it leaves nothing that looks like one."""
    target = root / f"{DELETING}{step}"
    shutil.rmtree(target, ignore_errors=True)
    (root / str(step)).rename(target)
    shutil.rmtree(target)


def rename_damaged(root: Path, step: int) -> Path | None:
    """Renames a damaged checkpoint, which is kept for inspection, if it is there."""
    if not (root / str(step)).exists():
        return None
    target = root / f"{DAMAGED}{step}"
    shutil.rmtree(target, ignore_errors=True)  # an earlier one of this step
    return (root / str(step)).rename(target)


def rename_stale(root: Path, steps: Iterable[int], num_decisions: int) -> None:
    """Renames checkpoints that the last decision has abandoned, and deletes those that were renamed
    for an earlier one."""
    for step in steps:
        target = root / f"{STALE}{num_decisions}-{step}"
        shutil.rmtree(target, ignore_errors=True)
        (root / str(step)).rename(target)
    for path in root.glob(f"{STALE}*"):
        if not path.name.startswith(f"{STALE}{num_decisions}-"):
            shutil.rmtree(path, ignore_errors=True)


def remove_unfinished(root: Path) -> None:
    """Deletes folders that killed runs left half-written or half-deleted."""
    for path in root.iterdir():
        if path.name.startswith((SAVING, DELETING)):
            shutil.rmtree(path, ignore_errors=True)


def run_of(root: Path) -> str:
    """The name of the run whose checkpoints lie here, made when it begins; "" before."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return (root / RUN).read_bytes().decode("utf-8").strip()
    return ""


def name_run(root: Path, run: str = "") -> str:
    """Gives a folder of checkpoints a run's name, by default a new one."""
    root.mkdir(parents=True, exist_ok=True)
    run = run or uuid.uuid4().hex
    files.write(root / RUN, run.encode())
    return run


def sync_folders(folder: Path, listed: Seal) -> None:
    """Has the names of all files of a checkpoint outlive a power cut."""
    for path in {folder, folder / "state", *(folder / Path(name).parent for name in listed.files)}:
        sync_folder(path)


def sync_folder(folder: Path) -> None:
    """Has the names of its files outlive a power cut."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
