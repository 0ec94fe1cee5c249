"""Reads the node's files for the watchers, and compares the numbers with `limits`.

    tree = Tree("/"); tree.number("proc/loadavg")          an unreadable file is noted once, and is no error
    judge.counter(name, device, source, value)             findings, if it has grown too much
    judge.state(name, device, on, seen)                    findings, if it is so for too long

A counter is judged by its growth over a window, never by its value: errors before the run do not count. A counter that
falls (reset, wrapped) starts again. A state is reported when it begins and, as a note, when it is over.
"""

import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from zaya_jax.aegis.events import Finding
from zaya_jax.aegis.limits import BY_NAME

MOST_READ = 1 << 20  # bytes of a file


class Tree:
    """Files below a root, as text and numbers; an unreadable one is noted once."""

    def __init__(self, root: str | Path):
        self.root = Path(root)
        self._prefix = f"{str(root).rstrip('/')}/"  # pathlib takes longer than the reading
        self._noted: set[str] = set()
        self._new: list[str] = []

    def text(self, path: str) -> str | None:
        """A file's text, stripped; None where there is none, or it cannot be read."""
        try:
            with open(f"{self._prefix}{path}", "rb", buffering=0) as file:
                return file.read(MOST_READ).decode("utf-8", errors="replace").strip()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            # Drivers answer EINVAL or EOPNOTSUPP for a feature that a card lacks: no news either, but said once.
            self.note(f"{path}: {error.strerror}")
            return None

    def number(self, path: str) -> float | None:
        """A file's number."""
        text = self.text(path)
        if text is None:
            return None
        return self.parse(text.split()[0] if text else "", path)

    def parse(self, text: str, path: str) -> float | None:
        """A number in a text; None, and a note, where it is none."""
        try:
            value = float(text)
            if abs(value) < 2**65:  # neither NaN nor more than a counter can be
                return value
        except ValueError:
            pass
        self.note(f"{path}: {text[:40]!r} is no number")
        return None

    def names(self, path: str) -> list[str]:
        """The names in a folder, in order."""
        try:
            return sorted(os.listdir(f"{self._prefix}{path}"))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            self.note(f"{path}: {error.strerror}")
            return []

    def note(self, words: str) -> None:
        """Adds a note to report once."""
        if words not in self._noted and len(self._noted) < 1000:
            self._noted.add(words)
            self._new.append(words)

    def notes(self) -> list[Finding]:
        """The new notes, as one finding."""
        if not self._new:
            return []
        more = f", and {len(self._new) - 8} more" if len(self._new) > 8 else ""
        seen, self._new = "; ".join(self._new[:8]) + more, []
        return [Finding("not readable", "note", "note", seen)]


class Judge:
    """Remembers counters and states between looks, and finds those over their limits."""

    def __init__(self) -> None:
        self.first = True  # the first look only remembers
        self.now = 0.0
        self._counters: dict[tuple[str, str, str], deque[tuple[float, float]]] = {}
        self._reported: dict[tuple[str, str, str], tuple[float, float]] = {}  # when, and how many
        self._states: dict[tuple[str, str], tuple[int, float, bool]] = {}  # looks in a row, since, reported

    def counter(self, name: str, device: str, source: str, value: float | None) -> Iterator[Finding]:
        """A counter's value now; a finding where it has grown too much within its window."""
        if value is None:
            return
        limit, key = BY_NAME[name], (name, device, source)
        past = self._counters.setdefault(key, deque())
        if past and value < past[-1][1]:
            past.clear()
            self._reported.pop(key, None)
        if not past or value != past[-1][1]:
            past.append((self.now, value))
        while len(past) > 1 and past[1][0] <= self.now - limit.within:
            past.popleft()
        grown, before = value - past[0][1], past[0]
        last, reported = self._reported.get(key, (-1e18, 0.0))
        if grown < limit.at:
            return
        if self.now - last < limit.within and grown < 10 * reported:
            return
        self._reported[key] = self.now, grown
        yield Finding(
            name, limit.group, limit.action,
            f"{source}: {before[1]:g} -> {value:g} in {_time(min(self.now - before[0], limit.within))}; "
            f"limit {limit.at:g} in {_time(limit.within)}", -1, device,
        )  # fmt: skip

    def state(self, name: str, device: str, on: bool | None, seen: str) -> Iterator[Finding]:
        """Whether something is so now (None: not known); a finding when it has been for so many looks, and when not."""
        if on is None:
            return
        limit, key = BY_NAME[name], (name, device)
        looks, since, reported = self._states.get(key, (0, self.now, False))
        if on:
            looks, since = looks + 1, since if looks else self.now
            needed = limit.within if limit.within < 60 else 1
            if looks >= needed and not reported and not self.first:
                reported = True
                yield Finding(name, limit.group, limit.action, seen, -1, device)
            self._states[key] = looks, since, reported
        else:
            if reported:
                words = f"{name} is over, after {_time(self.now - since)}; {seen}"
                yield Finding(f"{name}: over", "note", "note", words, -1, device)
            self._states.pop(key, None)


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"
