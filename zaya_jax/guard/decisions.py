"""Records decisions to go back: on disk before they take effect, and in every later checkpoint.

    decided = decisions.read(workdir)
    decisions.write(workdir, [*decided, new])      in process 0; when this returns, it outlives a power cut
    decisions.skipped_batches(decided)             the batches that the data's order passes over

A decision says to which step the run goes back, and how many batches it skips there:

    {"kind": "spike" or "corrupt", "step", "batches", "seen", "at": the step after which it was made}

A checkpoint holds all decisions that were made when it was saved. A checkpoint of a later step than
a decision that it lacks belongs to an abandoned past: `checkpoint.run.retention` sets it aside,
however the run is started again.
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
    """Returns all decisions in their order; StorageError if the file is damaged."""
    path = Path(workdir) / events.FOLDER / FILE
    try:
        decided = files.read_json(path)
        for decision in decided:
            if not 0 <= decision["step"] <= decision["at"] or decision["batches"] < 0:
                raise ValueError(f"impossible numbers: {decision}")
        return decided
    except FileNotFoundError:
        return []
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise StorageError(
            f"{path} cannot be read ({error}); it says which checkpoints are given up: restore it,"
            " each checkpoint has the decisions made before it, in meta/data.json under"
            ' "decisions"'
        ) from None


def write(workdir: str | os.PathLike, decided: Sequence[Decision]) -> None:
    """Writes the file; when this returns, it outlives a power cut."""
    folder = Path(workdir) / events.FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    files.write(folder / FILE, (json.dumps(list(decided), indent=1) + "\n").encode())
    for path in (folder, folder.parent):
        folders.sync_folder(path)


def merge(
    on_file: Sequence[Decision], saved: Sequence[Decision], workdir: str | Path
) -> list[Decision]:
    """Merges the decisions of the run's file with those of the checkpoint that it resumes from.

    Either may hold more than the other; UserError if they contradict each other.
    """
    shorter, longer = sorted([list(on_file), list(saved)], key=len)
    if longer[: len(shorter)] != shorter:
        raise UserError(
            f"{workdir}/{events.FOLDER}/{FILE} and the newest checkpoint hold different decisions;"
            ' restore the file that belongs to it, or copy "decisions" of the checkpoint\'s'
            " meta/data.json into it"
        )
    return longer


def skipped_batches(decided: Sequence[Decision]) -> list[list[int]]:
    """The [step, batches] that the data's order skips."""
    return [[decision["step"], decision["batches"]] for decision in decided if decision["batches"]]


def after_spike(
    spike: Spike, saved: Sequence[int], decided: Sequence[Decision], steps_before: int
) -> Decision:
    """Back to the newest checkpoint before the spike began.

    If a spike comes soon after the run went back for another, it goes back further, if there is an
    older checkpoint.
    """
    candidates = [step for step in saved if step < spike.began]
    earlier_targets = [decision["step"] for decision in decided if decision["kind"] == "spike"]
    if earlier_targets and spike.began - earlier_targets[-1] <= SETTLE:
        candidates = [step for step in candidates if step < earlier_targets[-1]] or candidates
    step = max(candidates, default=steps_before)
    return {
        "kind": "spike",
        "step": step,
        "batches": spike.step - step,
        "at": spike.step,
        "began": spike.began,
        "seen": str(spike),
    }


def after_mismatch(step: int, clean: int, saved: Sequence[int], steps_before: int) -> Decision:
    """Back to the newest checkpoint that is not later than the last clean check, or else to the
    oldest.

    If no check has passed since the start of the run, the run restarts: none of its checkpoints is
    known to be right.
    """
    right = [saved_step for saved_step in saved if saved_step <= clean]
    if right:
        target = max(right)
    elif clean <= steps_before:
        target = steps_before
    else:
        target = min(saved, default=steps_before)
    return {"kind": "corrupt", "step": target, "batches": 0, "at": step, "clean": clean}


def write_events(workdir: str | Path, decided: Sequence[Decision]) -> None:
    """Writes an event for each decision that has none yet: it may have been made just before a
    kill."""
    written = {event.facts.get("decision") for event in events.read(workdir)}
    for number, decision in enumerate(decided):
        if number in written:
            continue
        processes = decision.get("processes", [])
        done = f"back to step {decision['step']}"
        if decision["batches"]:
            done += f", {decision['batches']} batches left out"
        facts = {key: decision[key] for key in decision if key not in ("kind", "seen")}
        events.add(
            workdir,
            decision["kind"],
            group="critical" if decision["kind"] == "corrupt" else "numbers",
            step=decision["at"],
            seen=decision.get("seen", ""),
            process=processes[0] if len(processes) == 1 else -1,
            node=", ".join(decision.get("hosts", [])),
            done=done,
            facts={"decision": number, **facts},
        )
