"""Saves to a fast folder of each node first; a save is over when all parts are there, before `workdir/checkpoints`.

    local.staging(step), local.written(step, files)     a process's folder for its part, and the list of its files
    local.saved(step), local.publish_own(step)          when all have written: copies it into workdir/checkpoints
    local.rescue_newest(here)                           assembles the newest step of a killed run

All processes call the last two together. Any process that sees a part can copy it.
"""

import contextlib
import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import jax

from zaya_jax.checkpoint import claims, stale, writing
from zaya_jax.checkpoint.seal import Seal, Sums, signed, unsigned
from zaya_jax.checkpoint.vault import Vault, each
from zaya_jax.cluster import multihost
from zaya_jax.config import Checkpoint, files

PART = "part.json"  # of one process: its files, and of how many parts it is one


def local_folder(root: Path, settings: Checkpoint) -> Path | None:
    """The folder of a run's parts in the fast folder; its name has a checksum of the workdir's path."""
    if not settings.local:
        return None
    own = f"{root.parent.name}-{google_crc32c.value(str(root).encode()):08x}"
    return Path(settings.local).absolute() / own


class Local:
    """A run's part of the fast folder; `root` is workdir/checkpoints."""

    def __init__(self, root: Path, folder: Path, option: str, say: Callable[[str], None]):
        claims.require_writable(folder, option)
        self.root, self.folder, self._say = root, folder, say

    @property
    def mine(self) -> Path:
        """This process's."""
        return self.folder / f"process-{jax.process_index()}"

    def staging(self, step: int) -> Path:
        """The folder in which this process writes its pieces of a step."""
        return self.mine / f"{writing.SAVING}{step}"

    def written(self, step: int, files: Sums, decisions: list) -> None:
        """Records the files that this process has written, and the run's decisions (`stale`)."""
        part = {
            "step": step, "process": jax.process_index(), "count": jax.process_count(), "files": files,
            "run": writing.run_of(self.root), stale.KEY: decisions,
        }  # fmt: skip
        writing.write_files(self.staging(step), {PART: signed(part)})

    def known(self) -> Iterator[stale.Known]:
        """All visible parts, with the decisions recorded in them."""
        for folder, step in self._visible():
            with contextlib.suppress(OSError, ValueError):
                yield folder, step, _read_part(folder)[stale.KEY]

    def _visible(self) -> list[tuple[Path, int]]:
        """The folder and step of each visible part."""
        processes = sorted(self.folder.glob("process-*"))
        return [(own / str(step), step) for own in processes for step in writing.numbered(own)]

    def saved(self, step: int) -> None:
        """All processes have written."""
        target = self.mine / str(step)
        shutil.rmtree(target, ignore_errors=True)
        with contextlib.suppress(OSError):  # a reader will miss it
            self.staging(step).rename(target)

    def publish_own(self, step: int) -> str | None:
        """Makes a step whole in workdir/checkpoints, each process with its own part; older parts then go."""
        error = self._publish("publish", step, [self.mine / str(step)])
        if not error:
            for old in writing.numbered(self.mine):
                if old < step:
                    writing.remove(self.mine, old)
        return error

    def _publish(self, name: str, step: int, parts: list[Path]) -> str | None:
        """Copies parts of a step into workdir/checkpoints and makes it whole there; returns an error, if any."""
        folder, here = self.root / f"{writing.SAVING}{step}", Vault(self.root)

        def put(part: Path, its: Sums, name: str) -> None:
            here.put(folder.name, name, Vault(part.parent).checked(part.name, name, its))

        def work() -> Sums:
            sums = Sums()
            for part in parts:
                its = _read_part(part)["files"]
                each(functools.partial(put, part, its), list(its))
                sums |= its
            return sums

        def end(listed: list[Sums]) -> None:
            if not (self.root / str(step)).exists():
                whole = {name: entry for part in listed for name, entry in part.items()}
                writing.commit(folder, self.root / str(step), Seal(whole, step, writing.run_of(self.root)))

        error = writing.together(name, work, end)
        if error and multihost.is_writer():
            shutil.rmtree(folder, ignore_errors=True)
        return error

    def rescue_newest(self, here: int) -> None:
        """Puts together the newest step that only the local folders have, after step `here`."""
        writing.clear(self.mine)
        views = multihost.to_first("local", self._seen()) or []

        def choose(failed: list[int]) -> list:
            """[the newest step that all parts of are seen and that has not failed, by part the process to copy it]."""
            for step in sorted({int(s) for view in views for s in view}, reverse=True):
                seen = [view.get(str(step), []) for view in views]
                count = max(count for parts in seen for _, count in parts)
                who = {p: i for i, parts in reversed(list(enumerate(seen))) for p, c in parts if c == count}
                if step > here and step not in failed and len(who) == count:
                    return [step, who]
            return [None, {}]

        failed: list[int] = []
        while True:
            step, who = multihost.from_first("local step", functools.partial(choose, failed))
            if step is None:
                return
            mine = [int(part) for part, reader in who.items() if reader == jax.process_index()]
            error = self._publish("rescue", step, [self.folder / f"process-{i}" / str(step) for i in mine])
            if multihost.is_writer():
                self._say(
                    f"warning: step {step} of the local folders could not be put together: {error}"
                    if error
                    else f"step {step} was only in the local folders; it is put together in {self.root}"
                )
            if not error:
                return
            failed.append(step)

    def _seen(self) -> dict[str, list]:
        """For each step, [its writer, the number of writers] of each visible part; parts of other runs are deleted."""
        seen: dict[str, list] = {}
        run = writing.run_of(self.root)
        for folder, step in self._visible():
            try:
                part = _read_part(folder)
                if part["run"] != run:
                    shutil.rmtree(folder, ignore_errors=True)
                elif part["step"] != step:
                    raise ValueError(f"of step {part['step']}")
                else:
                    seen.setdefault(str(step), []).append([part["process"], part["count"]])
            except (OSError, ValueError) as damage:
                self._say(f"warning: {folder / PART} is not taken: {writing.reason(damage)}")
        return seen


def _read_part(folder: Path) -> dict[str, Any]:
    return unsigned(files.read(folder / PART))
