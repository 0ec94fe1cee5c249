"""Watches the node's hardware: GPUs, network cards, memory and disks, all below a given root.

    watchers = Watchers("/", folders=[workdir, "/tmp"])
    watchers.look()        list[Finding]; the first call only remembers the state that it finds

`limits` has the limits, and compares counters and states with them. Each watcher has a thread of its own: a
driver that hangs is a finding, and delays nothing else.
"""

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

from zaya_jax.aegis import watch_gpu
from zaya_jax.aegis.events import Finding
from zaya_jax.aegis.limits import BY_NAME, Judge, Tree

INFINIBAND = "sys/class/infiniband"
# The finding that a port's counter belongs to, by the first pattern that fits. The names of retransmission counters
# differ from driver to driver (mlx5, bnxt_re, ionic, irdma).
KINDS = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("nic flaps", r"link_downed"),
        ("nic symbol errors", r"symbol_error"),
        ("nic link errors", r"link_error_recovery|local_link_integrity_errors|port_rcv_errors|rx_icrc_encapsulated"),
        ("nic time-outs", r"local_ack_timeout|ack_timeout|retry_exc|max_retry|req_transport_retries_exceeded"),
        ("nic retransmissions", r"packet_seq_err|(seq_err|implied)_nak|to_retrans|retransmit|_retx|roce_adp_retrans"),
    )
)


def kind_of(counter: str) -> str | None:
    """The finding that a counter of a port belongs to."""
    return next((name for name, pattern in KINDS if pattern.search(counter)), None)


class Watcher(Protocol):
    """One thing that is watched."""

    name: str

    def look(self, judge: Judge) -> Iterable[Finding]:
        """Its findings now."""


class Host:
    """Free memory, the OOM killer, ECC of the host's memory."""

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
        for place in ("proc/vmstat", "sys/fs/cgroup/memory.events"):
            yield from judge.counter("oom killer", place, "oom_kill", self._pairs(place).get("oom_kill"))
        edac = "sys/devices/system/edac/mc"
        for mc in tree.names(edac):
            if mc.startswith("mc") and mc[2:].isdigit():
                uncorrected = tree.number(f"{edac}/{mc}/ue_count")
                yield from judge.counter("host uncorrectable memory error", mc, "ue_count", uncorrected)

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


class Disks:
    """Room in the folders that a run writes to."""

    name = "disks"

    def __init__(self, tree: Tree, folders: Iterable[str | Path], statvfs: Callable = os.statvfs):
        self._tree, self._folders, self._statvfs = tree, [str(folder) for folder in folders], statvfs

    def look(self, judge: Judge) -> Iterator[Finding]:
        """See `limits`."""
        for folder in self._folders:
            try:
                at = self._statvfs(folder)
            except OSError as error:
                self._tree.note(f"{folder}: {error.strerror}")
                continue
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


class Ports:
    """The node's ports of InfiniBand and RoCE, through the kernel's files."""

    name = "ports"

    def __init__(self, tree: Tree):
        self._tree = tree
        self._active: set[str] = set()
        self._rates: dict[str, float] = {}

    def look(self, judge: Judge) -> Iterator[Finding]:
        """See `limits`."""
        tree, now = self._tree, {}
        for card in tree.names(INFINIBAND):
            for port in tree.names(f"{INFINIBAND}/{card}/ports"):
                now[f"{card}/{port}"] = f"{INFINIBAND}/{card}/ports/{port}"
        for device in sorted(self._active):
            words = f"{device} is {'here' if device in now else 'no longer here'}"
            yield from judge.state("nic gone", device, device not in now, words)
        for device, place in now.items():
            state = tree.text(f"{place}/state")
            if state is None:
                continue
            up = "ACTIVE" in state
            if up:
                self._active.add(device)
                rate = re.match(r"[\d.]+", tree.text(f"{place}/rate") or "")
                if rate:
                    usual = self._rates[device] = max(self._rates.get(device, 0.0), float(rate[0]))
                    words = f"{float(rate[0]):g} Gb/s, before {usual:g}"
                    yield from judge.state("nic slow", device, float(rate[0]) < usual, words)
            physical = tree.text(f"{place}/phys_state") or "?"
            seen = f"state {state}, physically {physical}"
            yield from judge.state("nic down", device, device in self._active and not up, seen)
            for folder in ("counters", "hw_counters"):
                for counter in tree.names(f"{place}/{folder}"):
                    name = kind_of(counter)
                    if name:
                        value = tree.number(f"{place}/{folder}/{counter}")
                        yield from judge.counter(name, device, counter, value)


class Watchers:
    """All of a node. `nvml`, `statvfs` and `clock` are given by tests."""

    def __init__(
        self, root: str | Path = "/", folders: Iterable[str | Path] = ("/tmp",), nvml: object | None = None,
        statvfs: Callable = os.statvfs, clock: Callable[[], float] = time.monotonic,
    ):  # fmt: skip
        self._clock, self._patience = clock, BY_NAME["gpu does not answer"].at
        self._slots = [
            _Slot(make(tree), tree)
            for make, tree in (
                (watch_gpu.Amd, Tree(root)),
                (lambda tree: watch_gpu.Nvidia(tree, nvml), Tree(root)),
                (Ports, Tree(root)),
                (Host, Tree(root)),
                (lambda tree: Disks(tree, folders, statvfs), Tree(root)),
            )
        ]

    def look(self) -> list[Finding]:
        """Findings now; at the first call only about unreadable files."""
        for slot in self._slots:
            slot.begin(self._clock())
        until = time.monotonic() + self._patience
        return [found for slot in self._slots for found in slot.end(max(until - time.monotonic(), 0.0))]


class _Slot:
    """A watcher, its memory, and the thread that reads it."""

    def __init__(self, watcher: Watcher, tree: Tree):
        self._watcher, self._tree, self._judge = watcher, tree, Judge()
        self._thread: threading.Thread | None = None
        self._found: list[Finding] = []
        self._since, self._running, self._reported = 0.0, False, False

    def begin(self, now: float) -> None:
        """Starts reading, unless the last time goes on still."""
        if self._running:
            return
        self._running = True
        self._found, self._since, self._judge.now = [], time.monotonic(), now
        self._thread = threading.Thread(target=self._read, name=f"watch {self._watcher.name}", daemon=True)
        self._thread.start()

    def end(self, seconds: float) -> list[Finding]:
        """The findings, or once that it takes too long."""
        assert self._thread
        self._thread.join(0.0 if self._reported else seconds)  # one that hangs is waited for once
        if self._thread.is_alive():
            if self._reported:
                return []
            self._reported = True
            return [self._late()]
        found, self._found, self._running, self._reported = self._found, [], False, False
        self._judge.first = False
        return found + self._tree.notes()

    def _late(self) -> Finding:
        seen = f"reading of {self._watcher.name} has not ended after {time.monotonic() - self._since:.0f} s"
        if self._watcher.name in ("amd", "nvidia"):
            limit = BY_NAME["gpu does not answer"]
            return Finding(limit.name, limit.group, limit.action, seen, -1, self._watcher.name)
        # A dead server of files, for one, holds up a question for its free space.
        group = "storage" if self._watcher.name == "disks" else "critical"
        return Finding("watcher does not answer", group, "warn", seen, -1, self._watcher.name)

    def _read(self) -> None:
        try:
            self._found.extend(self._watcher.look(self._judge))
        except Exception as error:  # a watcher's defect is a note, and ends nothing
            self._tree.note(f"{self._watcher.name}: {type(error).__name__}: {error}")
