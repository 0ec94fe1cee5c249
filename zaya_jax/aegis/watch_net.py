"""The node's network cards: ports of InfiniBand and RoCE, and Ethernet interfaces, by the kernel's files.

Which retransmission and pause counters a card has, and how they are called, differs from driver to driver (mlx5,
bnxt_re, ionic, irdma): they are known by parts of their names. Priority flow control is counted in `ethtool -S`, which
is read where it lies in a file (DRIVERS below), and asked of the kernel otherwise.
"""

import array
import fcntl
import re
import socket
import statistics
import struct
from collections.abc import Iterator
from pathlib import Path

from zaya_jax.aegis.events import Finding
from zaya_jax.aegis.reading import Judge, Tree

INFINIBAND = "sys/class/infiniband"
NET = "sys/class/net"
DRIVERS = "ethtool"  # ROOT/ethtool/eth0: what `ethtool -S eth0` printed, in recorded trees
# The finding that a counter of a port belongs to; the first pattern that fits.
KINDS = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("nic flaps", r"link_downed"),
        ("nic symbol errors", r"symbol_error"),
        (
            "nic link errors",
            r"link_error_recovery|local_link_integrity_errors|port_rcv_errors|rx_icrc_encapsulated",
        ),
        ("nic discards", r"port_xmit_discards|rx_discards|out_of_buffer"),
        (
            "nic time-outs",
            r"local_ack_timeout|ack_timeout|retry_exc|max_retry|req_transport_retries_exceeded",
        ),
        ("nic paused", r"rnr_nak_retry|rnr_naks?_"),
        (
            "nic retransmissions",
            r"packet_seq_err|seq_err_nak|implied_nak_seq|to_retrans|retransmit|_retx|roce_adp_retrans",
        ),
    )
)
STATISTICS = {
    "rx_crc_errors": "nic link errors",
    "rx_frame_errors": "nic link errors",
    "tx_carrier_errors": "nic link errors",
    "rx_missed_errors": "nic discards",
    "rx_fifo_errors": "nic discards",
    "tx_dropped": "nic discards",
    "rx_dropped": "nic discards",
}
PAUSED = re.compile(r"^(?:rx_prio\d_pause|rx_pfc_ena_frames_pri\d|frames_rx_pripause|rx_pause_\d_frames)$")


def kind_of(counter: str) -> str | None:
    """The finding that a counter of a port belongs to."""
    return next((name for name, pattern in KINDS if pattern.search(counter)), None)


class Ports:
    """Of InfiniBand's class in the kernel, which RoCE cards have as well."""

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
        yield from gone(judge, self._active, set(now))
        rates = {}
        for device, place in now.items():
            state = tree.text(f"{place}/state")
            if state is None:
                continue
            up = "ACTIVE" in state
            if up:
                self._active.add(device)
                rate = re.match(r"[\d.]+", tree.text(f"{place}/rate") or "")
                if rate:
                    rates[device] = float(rate[0])
            physical = tree.text(f"{place}/phys_state") or "?"
            seen = f"state {state}, physically {physical}"
            yield from judge.state("nic down", device, device in self._active and not up, seen)
            for folder in ("counters", "hw_counters"):
                for counter in tree.names(f"{place}/{folder}"):
                    name = kind_of(counter)
                    if name:
                        value = tree.number(f"{place}/{folder}/{counter}")
                        yield from judge.counter(name, device, counter, value)
        yield from slow(judge, rates, self._rates, "Gb/s")


class Interfaces:
    """Ethernet cards; bridges, tunnels and the loopback have no device and are passed over."""

    name = "interfaces"

    def __init__(self, tree: Tree):
        self._tree = tree
        self._active: set[str] = set()
        self._speeds: dict[str, float] = {}

    def look(self, judge: Judge) -> Iterator[Finding]:
        """See `limits`."""
        tree = self._tree
        now = [name for name in tree.names(NET) if (tree.root / NET / name / "device").exists()]
        yield from gone(judge, self._active, set(now))
        speeds = {}
        for device in now:
            place = f"{NET}/{device}"
            state = tree.text(f"{place}/operstate")
            if state in ("up", "down", "lowerlayerdown", "dormant"):
                if state == "up":
                    self._active.add(device)
                    speed = tree.number(f"{place}/speed")
                    if speed and speed > 0:  # -1: not known
                        speeds[device] = speed / 1000
                down = device in self._active and state != "up"
                yield from judge.state("nic down", device, down, f"operstate {state}")
            if device not in self._active:
                continue  # it reports EINVAL, or what it counted years ago
            changes = tree.number(f"{place}/carrier_changes")
            flaps = changes // 2 if changes is not None else None
            yield from judge.counter("nic flaps", device, "carrier_changes / 2", flaps)
            for counter, name in STATISTICS.items():
                value = tree.number(f"{place}/statistics/{counter}")
                yield from judge.counter(name, device, counter, value)
            for counter, count in self._driver(device).items():
                yield from judge.counter("nic paused", device, counter, count)
        yield from slow(judge, speeds, self._speeds, "Gb/s")

    def _driver(self, device: str) -> dict[str, float]:
        """Pauses received by priority, from the driver's counters."""
        text = self._tree.text(f"{DRIVERS}/{device}")
        if text is not None:
            pairs = re.findall(r"^\s*(\w+): (\d+)$", text, re.M)
            found = {name: float(value) for name, value in pairs}
        elif self._tree.root == Path("/"):
            found = driver_statistics(device)
        else:
            found = {}
        return {name: value for name, value in found.items() if PAUSED.search(name)}


def gone(judge: Judge, before: set[str], now: set[str]) -> Iterator[Finding]:
    """Devices that were active and are not there any more."""
    for device in sorted(before):
        words = f"{device} is {'here' if device in now else 'no longer here'}"
        yield from judge.state("nic gone", device, device not in now, words)


def slow(judge: Judge, rates: dict[str, float], before: dict[str, float], unit: str) -> Iterator[Finding]:
    """Ports slower than they were."""
    for device, rate in rates.items():
        usual = before[device] = max(before.get(device, 0.0), rate)
        yield from judge.state("nic slow", device, rate < usual, f"{rate:g} {unit}, before {usual:g}")


def odd_rates(rates: dict[str, float]) -> list[str]:
    """Ports that are slower than most of the node's: for the check before a start, when there is no before."""
    usual = statistics.median_high(rates.values()) if len(rates) > 2 else 0.0
    return [device for device, rate in rates.items() if rate < usual]


def driver_statistics(device: str) -> dict[str, float]:
    """The output of `ethtool -S`, asked of the kernel; {} where there is none, or no leave."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            # ETHTOOL_GSSET_INFO of ETH_SS_STATS, then its names, then its values.
            info = array.array("B", struct.pack("@IIQI", 0x37, 0, 1 << 1, 0))
            _ioctl(asked, device, info)
            count = struct.unpack_from("@I", info, 16)[0]
            if not 0 < count < 100_000:
                return {}
            names = array.array("B", struct.pack("@III", 0x1B, 1, count) + bytes(32 * count))
            values = array.array("B", struct.pack("@II", 0x1D, count) + bytes(8 * count))
            _ioctl(asked, device, names)
            _ioctl(asked, device, values)
    except OSError:
        return {}
    words = names.tobytes()[12:]
    keys = [words[32 * i : 32 * (i + 1)].partition(b"\0")[0].decode(errors="replace") for i in range(count)]
    return dict(zip(keys, map(float, struct.unpack_from(f"@{count}Q", values, 8)), strict=True))


def _ioctl(asked: socket.socket, device: str, data: array.array) -> None:
    address = data.buffer_info()[0]
    fcntl.ioctl(asked, 0x8946, struct.pack("16sP16x", device.encode()[:15], address))  # SIOCETHTOOL
