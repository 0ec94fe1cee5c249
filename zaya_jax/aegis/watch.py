"""Looks at the node's hardware every few seconds: GPUs, network cards, memory, disks, all from a given root.

    watchers = Watchers("/", folders=[workdir, "/tmp"])
    watchers.look()        list[Finding]; the first call only remembers what is there

What may be how is in `limits`. A counter is judged by its growth over a window, never by its value: what a node has
seen before the run is no news. Counters that fall (reset, wrapped) begin anew. A state is told when it begins and, as a
note, when it is over. What cannot be read is told once and is no error.

Every watcher is read in a thread of its own: a driver that hangs is a finding, and holds up nobody.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

from zaya_jax.aegis.finding import Finding
from zaya_jax.aegis.limits import BY_NAME

MOST_READ = 1 << 20  # bytes of a file


class Tree:
    """Files below a root, as text and numbers; what is there and cannot be read is noted once."""

    def __init__(self, root: str | Path):
        self.root, self._prefix = (
            Path(root),
            f"{str(root).rstrip('/')}/",
        )  # pathlib takes longer than the reading
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
            # Drivers answer EINVAL or EOPNOTSUPP for what a card does not have: no news either, but said once.
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
        """What a folder holds, in order."""
        try:
            return sorted(os.listdir(f"{self._prefix}{path}"))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            self.note(f"{path}: {error.strerror}")
            return []

    def note(self, words: str) -> None:
        """To be said once."""
        if words not in self._noted and len(self._noted) < 1000:
            self._noted.add(words)
            self._new.append(words)

    def notes(self) -> list[Finding]:
        """What is new of that, as one finding."""
        if not self._new:
            return []
        more = f", and {len(self._new) - 8} more" if len(self._new) > 8 else ""
        seen, self._new = "; ".join(self._new[:8]) + more, []
        return [Finding("not readable", "note", "note", seen)]


class Judge:
    """Remembers counters and states between looks, and says what is over its limit."""

    def __init__(self) -> None:
        self.first = True  # the first look only remembers
        self.now = 0.0
        self._counters: dict[tuple[str, str, str], deque[tuple[float, float]]] = {}
        self._told: dict[tuple[str, str, str], tuple[float, float]] = {}  # when, and how many
        self._states: dict[tuple[str, str], tuple[int, float, bool]] = {}  # looks in a row, since, told
        self._reset: set[tuple[str, str, str]] = set()

    def counter(self, name: str, device: str, source: str, value: float | None) -> Iterator[Finding]:
        """A counter's value now; a finding where it has grown too much within its window."""
        if value is None:
            return
        limit, key = BY_NAME[name], (name, device, source)
        past = self._counters.setdefault(key, deque())
        if past and value < past[-1][1]:
            past.clear()
            self._told.pop(key, None)
            if key not in self._reset:
                self._reset.add(key)
                yield Finding(
                    "counter began anew", "note", "note", f"{source} of {device} is {value:g}", -1, device
                )
        if not past or value != past[-1][1]:
            past.append((self.now, value))
        while len(past) > 1 and past[1][0] <= self.now - limit.within:
            past.popleft()
        if len(past) > 512:  # a counter that always moves is kept coarser
            kept = [item for i, item in enumerate(past) if i % 2 == 0 or i == len(past) - 1]
            past.clear()
            past.extend(kept)
        grown, before = value - past[0][1], past[0]
        told_at, told = self._told.get(key, (-1e18, 0.0))
        if grown < limit.at:
            return
        if self.now - told_at < limit.within and grown < 10 * told:
            return
        self._told[key] = self.now, grown
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
        looks, since, told = self._states.get(key, (0, self.now, False))
        if on:
            looks, since = looks + 1, since if looks else self.now
            needed = limit.within if limit.within < 60 else 1
            if looks >= needed and not told and not self.first:
                told = True
                yield Finding(name, limit.group, limit.action, seen, -1, device)
            self._states[key] = looks, since, told
        else:
            if told:
                words = f"{name} is over, after {_time(self.now - since)}; {seen}"
                yield Finding(f"{name}: over", "note", "note", words, -1, device)
            self._states.pop(key, None)


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


class Watcher(Protocol):
    """One thing that is watched."""

    name: str

    def look(self, judge: Judge) -> Iterable[Finding]:
        """What is to be said of it now."""


class Host:
    """Memory, pressure, load, the OOM killer, ECC of the host's memory."""

    name = "host"

    def __init__(self, tree: Tree):
        self._tree = tree

    def look(self, judge: Judge) -> Iterator[Finding]:
        """See `limits`."""
        tree = self._tree
        memory = self._pairs("proc/meminfo")
        whole, left = memory.get("MemTotal"), memory.get("MemAvailable")
        if whole and left is not None:
            low = left / whole <= BY_NAME["host memory short"].at
            seen = f"{left / 2**20:.1f} of {whole / 2**20:.1f} GiB are available"
            yield from judge.state("host memory short", "memory", low, seen)
        for name, place in (("host memory pressure", "memory"), ("host storage pressure", "io")):
            full = self._pressure(place)
            if full is not None:
                seen = f"all tasks stood still for {full:g} % of a minute ({place})"
                yield from judge.state(name, place, full >= BY_NAME[name].at, seen)
        load = tree.number("proc/loadavg")
        cpus = sum(n[3:].isdigit() for n in tree.names("sys/devices/system/cpu") if n.startswith("cpu"))
        if load is not None and cpus:
            high = load / cpus >= BY_NAME["host overloaded"].at
            yield from judge.state("host overloaded", "cpu", high, f"load {load:g} on {cpus} CPUs")
        for place in ("proc/vmstat", "sys/fs/cgroup/memory.events"):
            yield from judge.counter("oom killer", place, "oom_kill", self._pairs(place).get("oom_kill"))
        edac = "sys/devices/system/edac/mc"
        for mc in tree.names(edac):
            if mc.startswith("mc") and mc[2:].isdigit():
                uncorrected, corrected = (tree.number(f"{edac}/{mc}/{kind}_count") for kind in ("ue", "ce"))
                yield from judge.counter("host uncorrectable memory error", mc, "ue_count", uncorrected)
                yield from judge.counter("host correctable error rate", mc, "ce_count", corrected)

    def _pairs(self, path: str) -> dict[str, float]:
        """`name value` or `name: value kB`, a line each."""
        found = {}
        for line in (self._tree.text(path) or "").splitlines():
            words = line.split()
            if len(words) > 1:
                value = self._tree.parse(words[1], f"{path} {words[0]}")
                if value is not None:
                    found[words[0].rstrip(":")] = value
        return found

    def _pressure(self, place: str) -> float | None:
        path = f"proc/pressure/{place}"
        for line in (self._tree.text(path) or "").splitlines():
            if line.startswith("full"):
                given = dict(word.partition("=")[::2] for word in line.split()[1:])
                return self._tree.parse(given.get("avg60", ""), path)
        return None


class Disks:
    """Room and rights of the folders that a run writes to."""

    name = "disks"

    def __init__(self, tree: Tree, folders: Iterable[str | Path], statvfs: Callable = os.statvfs):
        self._tree, self._folders, self._statvfs = tree, [str(folder) for folder in folders], statvfs
        self._writable: set[str] = set()

    def look(self, judge: Judge) -> Iterator[Finding]:
        """See `limits`."""
        for folder in self._folders:
            try:
                at = self._statvfs(folder)
            except OSError as error:
                self._tree.note(f"{folder}: {error.strerror}")
                continue
            read_only = bool(at.f_flag & os.ST_RDONLY)
            if not read_only:
                self._writable.add(folder)
            yield from judge.state(
                "disk read-only",
                folder,
                read_only and folder in self._writable,
                f"{folder} is read-only: {read_only}",
            )
            # Some systems of files (btrfs, Lustre, object stores) count no inodes.
            shares = {"blocks": (at.f_bavail, at.f_blocks), "inodes": (at.f_favail, at.f_files)}
            known = {name: free / whole for name, (free, whole) in shares.items() if whole}
            if not known:
                continue
            least = min(known, key=lambda name: known[name])
            seen = f"{known[least]:.2%} of the {least} of {folder} are free, {at.f_bavail * at.f_frsize / 1e9:.1f} GB"
            full = known[least] <= BY_NAME["disk full"].at
            nearly = known[least] <= BY_NAME["disk nearly full"].at
            yield from judge.state("disk full", folder, full, seen)
            yield from judge.state("disk nearly full", folder, nearly and not full, seen)


class Watchers:
    """All of a node. `nvml`, `amdsmi`, `statvfs` and `clock` are given by tests."""

    def __init__(
        self,
        root: str | Path = "/",
        folders: Iterable[str | Path] = ("/tmp",),
        nvml: object | None = None,
        amdsmi: object | None = None,
        statvfs: Callable = os.statvfs,
        clock: Callable[[], float] = time.monotonic,
        patience: float | None = None,
    ):
        # Imported here: they use this module's Tree and Judge.
        from zaya_jax.aegis import watch_gpu, watch_net

        self._clock = clock
        self._patience = BY_NAME["gpu does not answer"].at if patience is None else patience
        self._slots = [
            _Slot(make(tree), tree)
            for make, tree in (
                (lambda tree: watch_gpu.Amd(tree, amdsmi), Tree(root)),
                (lambda tree: watch_gpu.Nvidia(tree, nvml), Tree(root)),
                (watch_net.Ports, Tree(root)),
                (watch_net.Interfaces, Tree(root)),
                (Host, Tree(root)),
                (lambda tree: Disks(tree, folders, statvfs), Tree(root)),
            )
        ]

    def look(self) -> list[Finding]:
        """What is to be said now; nothing at the first call but what cannot be read."""
        for slot in self._slots:
            slot.begin(self._clock())
        until = time.monotonic() + self._patience
        return [found for slot in self._slots for found in slot.end(max(until - time.monotonic(), 0.0))]


class _Slot:
    """A watcher, what it remembers, and the thread that reads it."""

    def __init__(self, watcher: Watcher, tree: Tree):
        self._watcher, self._tree, self._judge = watcher, tree, Judge()
        self._thread: threading.Thread | None = None
        self._found: list[Finding] = []
        self._since, self._running, self._told = 0.0, False, False

    def begin(self, now: float) -> None:
        """Starts reading, unless the last time goes on still."""
        if self._running:
            return
        self._running = True
        self._found, self._since, self._judge.now = [], time.monotonic(), now
        self._thread = threading.Thread(target=self._read, name=f"watch {self._watcher.name}", daemon=True)
        self._thread.start()

    def end(self, seconds: float) -> list[Finding]:
        """What was found, or once that it takes too long."""
        assert self._thread
        self._thread.join(0.0 if self._told else seconds)  # one that hangs is waited for once
        if self._thread.is_alive():
            if self._told:
                return []
            self._told = True
            return [self._late()]
        found, self._found, self._running, self._told = self._found, [], False, False
        self._judge.first = False
        return found + self._tree.notes()

    def _late(self) -> Finding:
        seen = f"reading of {self._watcher.name} has not ended after {time.monotonic() - self._since:.0f} s"
        if self._watcher.name in ("amd", "nvidia"):
            limit = BY_NAME["gpu does not answer"]
            return Finding(limit.name, limit.group, limit.action, seen, -1, self._watcher.name)
        # A dead server of files, for one, holds up whoever asks how full it is.
        group = "storage" if self._watcher.name == "disks" else "critical"
        return Finding("watcher does not answer", group, "warn", seen, -1, self._watcher.name)

    def _read(self) -> None:
        try:
            self._found.extend(self._watcher.look(self._judge))
        except Exception as error:  # a watcher's defect is said, and is nobody's end
            self._tree.note(f"{self._watcher.name}: {type(error).__name__}: {error}")
