"""The fast folder before `workdir/checkpoints`, each node's own: with one, a save is over when all parts lie there.

    local.staging(step), local.written(step, files)     where a process writes its part, and what it has written
    local.saved(step), local.publish_own(step)          all have written: into workdir/checkpoints with it
    local.rescue_newest(here)                           what a killed run had nowhere else

Parts are put together by whoever sees them. The last two are for all processes together.
"""

import concurrent.futures
import contextlib
import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import jax

from zaya_jax.checkpoint import stale, writing
from zaya_jax.checkpoint.seal import Seal, Sums, signed, unsigned, wrong_with
from zaya_jax.cluster import multihost
from zaya_jax.config import Checkpoint, StorageError, files
from zaya_jax.config.fields import parse_json

PART = "part.json"  # of one process: its files, and of how many parts it is one


class Local:
    """A run's part of the fast folder; `root` is workdir/checkpoints."""

    def __init__(
        self,
        root: Path,
        folder: Path,
        option: str,
        say: Callable[[str], None],
        delete_old: Callable[[], None],
    ):
        writing.require_writable(folder, option)
        self.root, self.folder, self._say, self._delete_old = root, folder, say, delete_old

    @property
    def mine(self) -> Path:
        """This process's."""
        return self.folder / f"process-{jax.process_index()}"

    def staging(self, step: int) -> Path:
        """Where this process writes its pieces of a step."""
        return self.mine / f"{writing.SAVING}{step}"

    def written(self, step: int, files: Sums, decisions: int = 0) -> None:
        """Notes what this process has written, and how many decisions the run has made (`stale`)."""
        part = {
            "step": step, "process": jax.process_index(), "count": jax.process_count(), "files": files,
            "run": writing.run_of(self.root), **({stale.KEY: decisions} if decisions else {}),
        }  # fmt: skip
        writing.write_files(self.staging(step), {PART: signed(part)})

    def decisions_of(self, folder: Path) -> int:
        """How many decisions a part knows of."""
        return _read_part(folder).get(stale.KEY, 0)

    def give_up(self, step: int) -> None:
        """Clears this process's folder of a step that others could not write."""
        shutil.rmtree(self.staging(step), ignore_errors=True)

    def saved(self, step: int) -> None:
        """All processes have written."""
        target = self.mine / str(step)
        shutil.rmtree(target, ignore_errors=True)
        with contextlib.suppress(OSError):  # it is then missed where it is read
            self.staging(step).rename(target)

    def publish_own(self, step: int) -> str | None:
        """Makes a step whole in workdir/checkpoints, each process with its own part; older parts then go."""
        error = self.publish("publish", step, {jax.process_index(): self.mine / str(step)})
        if not error:
            for old in writing.numbered(self.mine):
                if old < step:
                    writing.remove(self.mine, old)
        return error

    def publish(self, name: str, step: int, parts: dict[int, Path]) -> str | None:
        """Copies parts of a step into workdir/checkpoints and makes it whole there; what went wrong, if anything."""
        files, error = Sums(), None
        folder = self.root / f"{writing.SAVING}{step}"
        try:
            for part in parts.values():
                sums = _read_part(part)["files"]
                with concurrent.futures.ThreadPoolExecutor(writing.THREADS, "publish") as pool:
                    list(pool.map(lambda item, part=part: _copy(part, folder, *item), sums.items()))
                files |= sums
        except (OSError, ValueError, StorageError) as failure:
            error = writing.reason(failure)
        told = multihost.to_first(f"{name} part", [error, files])

        def end() -> str | None:
            errors = [part[0] for part in told or [] if part[0]]
            try:
                if not errors and not (self.root / str(step)).exists():
                    whole = {k: v for part in told or [] for k, v in part[1].items()}
                    writing.commit(
                        folder, self.root / str(step), Seal(whole, step, writing.run_of(self.root))
                    )
                    self._delete_old()
            except OSError as failure:
                errors.append(writing.reason(failure))
            if errors:
                shutil.rmtree(folder, ignore_errors=True)
            return errors[0] if errors else None

        return multihost.from_first(f"{name} end", end)

    def rescue_newest(self, here: int) -> None:
        """Puts together the newest step that only the local folders have, after step `here`."""
        writing.clear(self.mine)
        seen: dict[int, list] = {}  # by step: [process that wrote it, of how many]
        run = writing.run_of(self.root)
        for folder in sorted(self.folder.glob("process-*")):
            for step in writing.numbered(folder):
                try:
                    part = _read_part(folder / str(step))
                    if part["run"] != run:
                        shutil.rmtree(folder / str(step), ignore_errors=True)
                    elif part["step"] != step:
                        raise ValueError(f"of step {part['step']}")
                    else:
                        seen.setdefault(step, []).append([part["process"], part["count"]])
                except (OSError, ValueError, KeyError, TypeError) as damage:
                    self._say(f"warning: {folder / str(step) / PART} is not taken: {writing.reason(damage)}")
        told = multihost.to_first("local", {str(step): parts for step, parts in seen.items()})

        def choose(failed: list[int]) -> list:
            for step in sorted({int(s) for view in told or [] for s in view}, reverse=True):
                if step <= here:
                    break
                if step in failed:
                    continue
                views = [view.get(str(step), []) for view in told or []]
                count = max(c for parts in views for _, c in parts)
                # Each part is copied by the first process that sees it.
                who = {p: i for i, parts in reversed(list(enumerate(views))) for p, c in parts if c == count}
                if len(who) == count:
                    return [step, who]
            return [None, {}]

        failed: list[int] = []
        while True:
            step, who = multihost.from_first("local step", functools.partial(choose, failed))
            if step is None:
                return
            mine = [int(part) for part, reader in who.items() if reader == jax.process_index()]
            error = self.publish("rescue", step, {i: self.folder / f"process-{i}" / str(step) for i in mine})
            if multihost.is_writer():
                self._say(
                    f"warning: step {step} of the local folders could not be put together: {error}"
                    if error
                    else f"step {step} was only in the local folders; it is put together in {self.root}"
                )
            if not error:
                return
            failed.append(step)


def local_folder(root: Path, settings: Checkpoint) -> Path | None:
    """Where a run's parts lie in the fast folder; runs that share one are told apart by where their workdirs are."""
    if not settings.local:
        return None
    return (
        Path(settings.local).absolute() / f"{root.parent.name}-{google_crc32c.value(str(root).encode()):08x}"
    )


def _read_part(folder: Path) -> dict[str, Any]:
    content = files.read(folder / PART)
    return unsigned(content) if b'"crc32c"' in content else parse_json(content)  # an older version's has none


def _copy(source: Path, target: Path, name: str, sums: list[int]) -> None:
    content = files.read(source / name)
    what = wrong_with([memoryview(content)], len(content), sums)
    if what:
        raise StorageError(f"{source / name} is not what was written there, but {what}")
    writing.write_files(target, {name: content})
