"""A workdir that is read again and again while its run goes on: of metrics.jsonl only what is new.

The file may be cut, replaced, or rewritten by a run that goes back: then the bytes before the place where reading
stopped are others, and everything is read anew. A last line without its newline is left for the next time.
"""

import os
import pathlib

from zaya_jax.config import files
from zaya_jax.report.read import MAX_LINE_BYTES, Workdir, finish, take

REMEMBERED = 4096  # bytes before the place: a step's line has its time in it, unrounded
BESIDE = (
    "config.json", "environment.json", "lineage.json", "sample.txt", "samples.jsonl", "checkpoint_times.jsonl",
    "aegis/events.jsonl", "aegis/events-run.jsonl",
)  # fmt: skip


class Followed:
    """One run; `read` gives what is known of it now, and whether that is something else than the last time."""

    def __init__(self, path: pathlib.Path):
        self.path, self.run = path, Workdir(path)
        self._offset, self._before = 0, b""
        self._beside: list[tuple[int, int] | None] = []

    def read(self) -> tuple[Workdir, bool]:
        """The run, and whether anything in its files is new."""
        changed = self._metrics()
        beside = [_stamp(self.path / name) for name in BESIDE]
        beside.append(None if (self.path / "metrics.jsonl").is_file() else (0, 0))
        changed |= beside != self._beside
        self._beside = beside
        if changed:
            finish(self.run)
        return self.run, changed

    def begun(self) -> bool:
        """Whether there is a step to show, without reading further than that."""
        try:
            with files.opened(self.path / "metrics.jsonl", 1 << 20) as file:
                while not self.run.lines and (line := file.readline(MAX_LINE_BYTES)):
                    take(self.run, line)
        except OSError:
            return False
        return self.run.lines > 0

    def _metrics(self) -> bool:
        """Takes in the new whole lines."""
        changed = False
        try:
            file = files.opened(self.path / "metrics.jsonl", 1 << 20)
        except OSError:
            return self._anew()
        with file:
            begin = self._offset - len(self._before)
            file.seek(begin)
            if file.read(len(self._before)) != self._before:
                changed = self._anew()
                file.seek(0)
            while line := file.readline(MAX_LINE_BYTES):
                if not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:
                    break
                take(self.run, line)
                self._offset += len(line)
                self._before = (self._before + line[-REMEMBERED:])[-REMEMBERED:]
                changed = True
        return changed

    def _anew(self) -> bool:
        """Forgets what was read; whether there was anything."""
        there = self._offset > 0
        if there:
            self.run, self._offset, self._before = Workdir(self.path), 0, b""
            self._beside = []
        return there


def _stamp(path: pathlib.Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
