"""Records decisions to go back: on disk before they take effect, and in every later checkpoint.

    made = decisions.read(workdir)
    made = decisions.add(workdir, decision)             in process 0; when this returns, it outlives a power cut
    decisions.left_out(made)                            the batches that the data's order passes over

A decision says to which step the run goes back, and how many batches it leaves out there:

    {"kind": "spike" or "corrupt", "step", "batches", "seen", "at": the step after which it was made}

A checkpoint has all that were made when it was saved. One of a later step than a decision that it
does not have is of a past that was given up (`checkpoint.stale`): it is set aside, however the run
is started again.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zaya_jax.checkpoint import folders
from zaya_jax.cluster import events
from zaya_jax.config import StorageError, UserError, files
from zaya_jax.guard.spikes import SETTLE, Spike

FILE = "decisions.json"
Decision = dict[str, Any]


def read(workdir: str | os.PathLike) -> list[Decision]:
    """All decisions, in their order; StorageError where the file is damaged."""
    path = Path(workdir) / events.FOLDER / FILE
    try:
        found = files.read_json(path)
        if not isinstance(found, list) or not all(_whole(one) for one in found):
            raise ValueError("no list of decisions")
        return found
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise StorageError(
            f"{path} cannot be read ({error}); it says which checkpoints are given up: restore it,"
            " each checkpoint has the decisions made before it, in meta/data.json under"
            ' "decisions"'
        ) from None


def _whole(one: Any) -> bool:
    """Whether a decision has the fields by which a run goes on."""
    if not isinstance(one, dict) or one.get("kind") not in ("spike", "corrupt"):
        return False
    numbers: list[Any] = [one.get(name) for name in ("step", "batches", "at")]
    return (
        all(type(number) is int and number >= 0 for number in numbers) and numbers[0] <= numbers[2]
    )


def add(workdir: str | os.PathLike, made: Sequence[Decision], new: Decision) -> list[Decision]:
    """Writes one more down; all of them."""
    write(workdir, [*made, new])
    return [*made, new]


def write(workdir: str | os.PathLike, made: Sequence[Decision]) -> None:
    """Writes the file; when this returns, it outlives a power cut."""
    folder = Path(workdir) / events.FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    files.write(folder / FILE, (json.dumps(list(made), indent=1) + "\n").encode())
    for path in (folder, folder.parent):
        folders.sync_folder(path)


def agreed(
    here: Sequence[Decision], saved: Sequence[Decision], place: str | Path
) -> list[Decision]:
    """All decisions, by the run's file and by the checkpoint that it goes on from: one of them may
    know more."""
    longer, shorter = (here, saved) if len(here) >= len(saved) else (saved, here)
    if list(longer[: len(shorter)]) != list(shorter):
        raise UserError(
            f"{place}/{events.FOLDER}/{FILE} and the newest checkpoint tell of other decisions;"
            ' restore the file that belongs to it, or copy "decisions" of the checkpoint\'s'
            " meta/data.json into it"
        )
    return list(longer)


def left_out(made: Sequence[Decision]) -> list[list[int]]:
    """The [step, batches] that the data's order skips."""
    return [[one["step"], one["batches"]] for one in made if one["batches"]]


def after_spike(
    spike: Spike, saved: Sequence[int], made: Sequence[Decision], begin: int
) -> Decision:
    """Back to the newest checkpoint before it began; further, if it came again soon after the last
    time."""
    before = [step for step in saved if step < spike.began]
    last = next((one for one in reversed(made) if one["kind"] == "spike"), None)
    if last and spike.began - last["step"] <= SETTLE:
        before = [step for step in before if step < last["step"]] or before
    step = max(before, default=begin)
    return {
        "kind": "spike",
        "step": step,
        "batches": spike.step - step,
        "at": spike.step,
        "began": spike.began,
        "seen": str(spike),
    }


def after_mismatch(step: int, clean: int, saved: Sequence[int], begin: int) -> Decision:
    """Back to the newest checkpoint from when all devices were last known to be right; otherwise
    the oldest there is.

    A run that is not older than that begins anew: nothing of it is known to be right.
    """
    before = [one for one in saved if one <= clean]
    oldest = begin if clean <= begin else min(saved, default=begin)
    return {
        "kind": "corrupt",
        "step": max(before, default=oldest),
        "batches": 0,
        "at": step,
        "clean": clean,
    }


def write_events(workdir: str | Path, made: Sequence[Decision]) -> None:
    """Writes an event for each decision that has none yet: it may have been made just before a
    kill."""
    written = {event.facts.get("decision") for event in events.read(workdir)}
    log = events.EventLog(workdir, "run")
    for number, one in enumerate(made):
        if number not in written:
            processes = one.get("processes", [])
            group = "critical" if one["kind"] == "corrupt" else "numbers"
            log.add(
                one["kind"],
                group=group,
                step=one["at"],
                seen=one.get("seen", ""),
                process=processes[0] if len(processes) == 1 else -1,
                node=", ".join(one.get("hosts", [])),
                done=f"back to step {one['step']}"
                + (f", {one['batches']} batches left out" if one["batches"] else ""),
                facts={
                    "decision": number,
                    **{key: one[key] for key in one if key not in ("kind", "seen")},
                },
            )
