"""Watches the node's ports of InfiniBand and RoCE through the kernel's files.

The names of retransmission counters differ from driver to driver (mlx5, bnxt_re, ionic, irdma), so that they are
recognised by parts of their names.
"""

import re
from collections.abc import Iterator

from zaya_jax.aegis.events import Finding
from zaya_jax.aegis.reading import Judge, Tree

INFINIBAND = "sys/class/infiniband"
# The finding that a counter of a port belongs to; the first pattern that fits.
KINDS = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("nic flaps", r"link_downed"),
        ("nic symbol errors", r"symbol_error"),
        ("nic link errors", r"link_error_recovery|local_link_integrity_errors|port_rcv_errors|rx_icrc_encapsulated"),
        ("nic time-outs", r"local_ack_timeout|ack_timeout|retry_exc|max_retry|req_transport_retries_exceeded"),
        (
            "nic retransmissions",
            r"packet_seq_err|seq_err_nak|implied_nak_seq|to_retrans|retransmit|_retx|roce_adp_retrans",
        ),
    )
)


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
        yield from slow(judge, rates, self._rates)


def gone(judge: Judge, before: set[str], now: set[str]) -> Iterator[Finding]:
    """Devices that were active and are not there any more."""
    for device in sorted(before):
        words = f"{device} is {'here' if device in now else 'no longer here'}"
        yield from judge.state("nic gone", device, device not in now, words)


def slow(judge: Judge, rates: dict[str, float], before: dict[str, float]) -> Iterator[Finding]:
    """Ports slower than they were, in Gb/s."""
    for device, rate in rates.items():
        usual = before[device] = max(before.get(device, 0.0), rate)
        yield from judge.state("nic slow", device, rate < usual, f"{rate:g} Gb/s, before {usual:g}")
