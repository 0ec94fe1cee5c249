"""The limits for hardware counters and levels, and how the node's files are compared with them.

    tree = Tree("/"); tree.number("proc/loadavg")    an unreadable file is noted once, and no error
    judge.counter(name, device, source, value)       a finding, if it has grown too much
    judge.state(name, device, on, seen)              a finding, if it is so for too long
    judge.gone(name, present)                        findings, for devices that are there no more
    judge.findings                                   what it has found

A counter is judged by its growth over a window, never by its value: errors before the run do not
count, but a state from before the run does. A counter is reported once in a window, and begins anew
when it falls (reset, wrapped). A state is reported once, until it is over.

docs/watching.md has the source, the unit and the reason of each limit. A fault that only slows a
node down, or needs a person some day, is a note: a process that ends soon after has not ended for
it.
"""

import os
from collections import deque
from collections.abc import Container
from pathlib import Path
from typing import NamedTuple

from zaya_jax.cluster.events import Finding

HOUR = 3600.0
MOST_READ = 1 << 20  # bytes of a file


class Limit(NamedTuple):
    """So much of a counter within so many seconds, or such a level over so many looks, is a
    finding."""

    name: str  # of the finding
    least: float  # from this on
    within: float  # so many seconds (of a counter), or in so many looks in a row (a level, a state)
    group: str
    action: str


LIMITS = (
    # GPUs
    Limit("gpu uncorrectable memory error", 1, HOUR, "critical", "exclude"),
    Limit("gpu uncorrectable error", 1, HOUR, "critical", "exclude"),
    Limit("gpu deferred error", 1, HOUR, "critical", "warn"),
    Limit("gpu page not retired", 1, 1, "critical", "exclude"),
    Limit("gpu slow clock", 0.7, 6, "critical", "note"),
    Limit("gpu lost", 1, 2, "critical", "exclude"),
    Limit("gpu does not answer", 10, 1, "critical", "exclude"),
    # Network
    Limit("nic down", 1, 1, "distributed", "warn"),
    Limit("nic flaps", 3, HOUR, "distributed", "exclude"),
    Limit("nic gone", 1, 2, "distributed", "exclude"),
    Limit("nic link errors", 10, HOUR, "distributed", "note"),
    Limit("nic time-outs", 10, 600, "distributed", "warn"),
    # The host
    Limit("oom killer", 1, HOUR, "critical", "warn"),
    Limit("host uncorrectable memory error", 1, HOUR, "critical", "exclude"),
)
BY_NAME = {limit.name: limit for limit in LIMITS}
assert len(BY_NAME) == len(LIMITS)


class Tree:
    """Files below a root, as text and numbers; an unreadable one is noted once."""

    def __init__(self, root: str | Path):
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
            # Drivers answer EINVAL or EOPNOTSUPP for a feature that a card lacks: no news either,
            # but said once.
            self.note(f"{path}: {error.strerror}")
            return None

    def number(self, path: str) -> float | None:
        """A file's number; an empty file and "N/A" are no news, since not every card has every
        figure."""
        text = self.text(path)
        if not text or text.upper().startswith(("N/A", "UNKNOWN")):
            return None
        return self.parse(text.split()[0], path)

    def parse(self, text: str, path: str) -> float | None:
        """A number in a text; None, and a note, where it is none."""
        try:
            value = float(text)
            if abs(value) < 2**65:  # neither NaN nor more than a counter can be
                return value
        except ValueError:
            pass
        self.note(f"{path}: {text[:40]!r} is not a number")
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
        """Adds a note, `source: what is wrong`, to report once for each source."""
        source = words.partition(": ")[0]
        if source not in self._noted and len(self._noted) < 1000:
            self._noted.add(source)
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
        self._quiet_until: dict[tuple[str, str, str], float] = {}  # once it is reported
        # looks in a row, and whether it is reported
        self._states: dict[tuple[str, str], tuple[int, bool]] = {}
        self.devices: dict[str, str] = {}  # those that were there, and their whole names
        self.findings: list[Finding] = []

    def counter(self, name: str, device: str, source: str, value: float | None) -> None:
        """A counter's value now; a finding where it has grown too much within its window."""
        if value is None:
            return
        limit, key = BY_NAME[name], (name, device, source)
        past = self._counters.setdefault(key, deque())
        if past and value < past[-1][1]:
            past.clear()
            self._quiet_until.pop(key, None)
        if not past or value != past[-1][1]:
            past.append((self.now, value))
        while len(past) > 1 and past[1][0] <= self.now - limit.within:
            past.popleft()
        grown, before = value - past[0][1], past[0]
        if grown < limit.least or self.now < self._quiet_until.get(key, -1e18):
            return
        self._quiet_until[key] = self.now + limit.within
        seen = (
            f"{source}: {before[1]:g} -> {value:g} in"
            f" {_time(min(self.now - before[0], limit.within))}; limit {limit.least:g} in"
            f" {_time(limit.within)}"
        )
        self.findings.append(Finding(name, limit.group, limit.action, seen, -1, device))

    def state(self, name: str, device: str, on: bool, seen: str) -> None:
        """Whether something is so now; a finding when it has been for so many looks."""
        limit, key = BY_NAME[name], (name, device)
        if not on:
            self._states.pop(key, None)
            return
        looks, reported = self._states.get(key, (0, False))
        due = looks + 1 >= limit.within and not reported and not self.first
        self._states[key] = looks + 1, reported or due
        if due:
            self.findings.append(Finding(name, limit.group, limit.action, seen, -1, device))

    def gone(self, name: str, present: Container[str]) -> None:
        """Findings for those of `devices` that are not present now."""
        for device, whole_name in self.devices.items():
            seen = f"{whole_name} is no longer here"
            self.state(name, device, device not in present, seen)


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"
