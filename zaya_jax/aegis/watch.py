"""Watches the node's hardware: GPUs, network cards and memory, all below a given root.

    watchers = Watchers("/")
    watchers.poll()        list[Finding]; the first call only remembers the state that it finds

`limits` has the limits, and compares counters and states with them. Each watcher reads in a thread
of its own: a driver that hangs is a finding, is waited for once, and keeps no other from being read.
"""

import re
import time
from collections.abc import Callable
from pathlib import Path

from zaya_jax.aegis import watch_gpu
from zaya_jax.aegis.limits import BY_NAME, Judge, Tree
from zaya_jax.cluster import leaving
from zaya_jax.cluster.events import Finding

Poll = Callable[[Tree, Judge], None]  # a watcher: has the judge look at what the files say now
INFINIBAND = "sys/class/infiniband"
# The finding that a port's counter belongs to, by the first pattern that fits. The names of
# time-outs differ from driver to driver (mlx5, bnxt_re, ionic, irdma).
KINDS = {
    "nic flaps": r"link_downed",
    "nic link errors": (
        r"symbol_error|link_error_recovery|local_link_integrity_errors|port_rcv_errors|rx_icrc"
    ),
    "nic time-outs": (
        r"local_ack_timeout|ack_timeout|retry_exc|max_retry|req_transport_retries_exceeded"
    ),
}


def poll_host(tree: Tree, judge: Judge) -> None:
    """The OOM killer, ECC of the host's memory."""
    for place in ("proc/vmstat", "sys/fs/cgroup/memory.events"):
        found = re.search(r"^oom_kill (\S+)", tree.text(place) or "", re.M)
        if found:
            count = tree.parse(found[1], f"{place} oom_kill")
            judge.counter("oom killer", place, "oom_kill", count)
    edac = "sys/devices/system/edac/mc"
    for mc in tree.names(edac):
        if mc.startswith("mc") and mc[2:].isdigit():
            uncorrected = tree.number(f"{edac}/{mc}/ue_count")
            name = "host uncorrectable memory error"
            judge.counter(name, mc, "ue_count", uncorrected)


def poll_ports(tree: Tree, judge: Judge) -> None:
    """The node's ports of InfiniBand and RoCE, through the kernel's files."""
    places = {
        f"{card}/{port}": f"{INFINIBAND}/{card}/ports/{port}"
        for card in tree.names(INFINIBAND)
        for port in tree.names(f"{INFINIBAND}/{card}/ports")
    }
    judge.gone("nic gone", places)
    for device, place in places.items():
        state = tree.text(f"{place}/state")
        if state is None:
            continue
        up = "ACTIVE" in state
        if up:  # a port that never was is not missed
            judge.devices[device] = device
        physical = tree.text(f"{place}/phys_state") or "?"
        seen = f"state {state}, physically {physical}"
        judge.state("nic down", device, device in judge.devices and not up, seen)
        for folder in ("counters", "hw_counters"):
            for counter in tree.names(f"{place}/{folder}"):
                names = [name for name in KINDS if re.search(KINDS[name], counter)]
                if names:
                    value = tree.number(f"{place}/{folder}/{counter}")
                    judge.counter(names[0], device, counter, value)


class Watchers:
    """All of a node."""

    def __init__(self, root: str | Path = "/"):
        self._patience = BY_NAME["gpu does not answer"].least
        watchers: dict[str, Poll] = {
            "amd": watch_gpu.poll_amd,
            "nvidia": watch_gpu.poll_nvidia,
            "ports": poll_ports,
            "host": poll_host,
        }
        self._readers = [_Reader(name, poll, Tree(root)) for name, poll in watchers.items()]

    def poll(self) -> list[Finding]:
        """Findings now; at the first call only about unreadable files."""
        now = time.monotonic()
        return [found for reader in self._readers for found in reader.look(now, self._patience)]


class _Reader:
    """A watcher and its memory. It reads in a thread of its own, which is left behind if it
    hangs."""

    def __init__(self, name: str, poll: Poll, tree: Tree):
        self._name, self._poll = name, poll
        self._tree, self._judge = tree, Judge()
        self._reads = False

    def look(self, now: float, seconds: float) -> list[Finding]:
        """The findings, those of a late reading too; or once that it takes too long."""
        if self._reads:  # still, and that is said
            return []
        self._reads, self._judge.now = True, now
        if not leaving.within(seconds, self._read):
            return [self._is_late(seconds)]
        found, self._judge.findings = self._judge.findings, []
        return found + self._tree.notes()

    def _is_late(self, seconds: float) -> Finding:
        seen = f"reading of {self._name} has not ended after {seconds:.0f} s"
        if self._name in ("amd", "nvidia"):
            limit = BY_NAME["gpu does not answer"]
            return Finding(limit.name, limit.group, limit.action, seen, -1, self._name)
        return Finding("watcher does not answer", "critical", "warn", seen, -1, self._name)

    def _read(self) -> None:
        try:
            self._poll(self._tree, self._judge)
        except Exception as error:  # a watcher's defect is a note, and ends nothing
            self._tree.note(f"{self._name}: {type(error).__name__}: {error}")
        self._reads = self._judge.first = False
