"""Checks nodes before a start, in under a minute: whether each computes correctly and reaches its neighbours.

    check(expected=8, workdir=...)          list[Finding] of this node: devices, products, bandwidth, watchers
    rounds(["a", "b", "c", "d"])            the pairs of nodes that try their link in each round
    link(coordinator, index)                one of a pair; a Tried
    judge([("a", "b", tried), ...])         list[Finding] that name a node or a link in `device`
    Checking(...)                           the leader's part: orders all of that, and gathers the findings

Anything that may hang runs in a process of its own (`probe`) with a time limit: a device that does not answer is a
finding too.
"""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zaya_jax.aegis import machine, watch
from zaya_jax.aegis.events import Finding

SECONDS = 50.0  # for all of a node's check
LINK_SECONDS = 50.0  # for a pair's
SLOW = 0.7  # of the other devices' median bandwidth: a healthy node's differ by some 2 %
SLOW_LINK = 0.5  # of the other links' median: rings share switches
ANSWER = 10.0  # seconds that an answer to the leader may take beyond the time that a node gives itself
TAIL = 300  # characters of a probe's last line on stderr


def check(
    expected: int | None = None, workdir: str | Path | None = None, root: str | Path = "/",
    seconds: float = SECONDS, environ: Mapping[str, str] | None = None,
) -> list[Finding]:  # fmt: skip
    """The faults of this node. `environ`: the environment of the probe, by default this process's."""
    probe = _Probe("devices", environ=environ)
    watchers = watch.Watchers(root, [workdir] if workdir is not None else [])
    watchers.look()
    probe.wait(time.monotonic() + seconds)
    return judge_devices(probe, expected) + [one for one in watchers.look() if one.group != "note"]


def judge_devices(probe: "_Probe", expected: int | None) -> list[Finding]:
    """Findings by the devices' probe, or about the point where it stopped."""
    found = []
    there = probe.reports.get("devices", {})
    if "count" in there and expected is not None and there["count"] != expected:
        seen = f"{there['count']} devices ({there['platform']}) are there, {expected} are expected"
        found.append(Finding("gpu missing", "critical", "exclude", seen))
    for words in probe.reports.get("products", {}).get("wrong", []):
        device = words.partition(":")[0]
        found.append(Finding("gpu computes wrongly", "critical", "exclude", words, -1, device))
    rates = probe.reports.get("bandwidth", {}).get("rates", {})
    # Devices of a CPU are threads that share its memory.
    usual = statistics.median(rates.values()) if len(rates) > 2 and there["platform"] != "cpu" else 0.0
    for number, rate in rates.items():
        if rate < SLOW * usual:
            seen = f"{rate / 1e9:,.0f} GB/s; median of the node {usual / 1e9:,.0f}"
            found.append(Finding("gpu memory slow", "critical", "exclude", seen, -1, f"device {number}"))
    return found + probe.end("critical", "exclude")


class Tried(NamedTuple):
    """How a pair's link did, seen from one end: bytes a second, 0 where it failed; and the reason."""

    bandwidth: float
    wrong: str = ""


def rounds(nodes: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Rounds of disjoint pairs along a ring: each node tries two others, so that judge can tell nodes from links.

    Two rounds, three for an odd number of nodes; one for two nodes, whose faults look alike.
    """
    count = len(nodes)
    if count < 2:
        return []
    if count == 2:
        return [[(nodes[0], nodes[1])]]
    ring = [(nodes[i], nodes[(i + 1) % count]) for i in range(count)]
    last = [ring.pop()] if count % 2 else []
    return [one for one in (ring[0::2], ring[1::2], last) if one]


def link(
    coordinator: str, index: int, seconds: float = LINK_SECONDS, environ: Mapping[str, str] | None = None
) -> Tried:
    """One of a pair, 0 at the coordinator's address: joins the other, exchanges known numbers and checks them."""
    probe = _Probe("link", coordinator, str(index), str(max(int(seconds - 10), 5)), environ=environ)
    probe.wait(time.monotonic() + seconds)
    wrong = probe.reports.get("exchanged", {}).get("wrong", [])
    if wrong:
        return Tried(0.0, "; ".join(wrong))
    # A probe that reports a bandwidth has done its work, however its process ends.
    if "measured" in probe.reports:
        return Tried(probe.reports["measured"]["bandwidth"])
    (end,) = probe.end("distributed", "warn")
    return Tried(0.0, end.seen)


def judge(results: Iterable[tuple[str, str, Tried]]) -> list[Finding]:
    """Which nodes are bad (all their links fail) and which links (their ends are well with others); then slow ones.

    Each result is (node, node, the view of one of them); the two ends of a pair may both be given.
    """
    pairs: dict[tuple[str, str], list[Tried]] = {}
    for a, b, tried in results:
        pairs.setdefault((min(a, b), max(a, b)), []).append(tried)
    words = {pair: "; ".join(t.wrong for t in tried if t.wrong) for pair, tried in pairs.items()}
    bad = {pair for pair in pairs if words[pair]}
    if len(pairs) > 1 and bad == set(pairs):
        return [Finding("no link works", "distributed", "stop", next(iter(words.values())), -1, "all nodes")]
    found = _named(bad, set(pairs), words, "links of a node fail", "link fails", "exclude")
    rates = {pair: min(t.bandwidth for t in tried) for pair, tried in pairs.items() if pair not in bad}
    usual = statistics.median(rates.values()) if len(rates) > 2 else 0.0
    slow = {pair for pair, rate in rates.items() if rate < SLOW_LINK * usual}
    words = {pair: f"{rates[pair] / 1e9:.1f} GB/s, the median is {usual / 1e9:.1f}" for pair in slow}
    return found + _named(slow, set(rates), words, "links of a node are slow", "link is slow", "warn")


def _named(
    bad: set, pairs: set, words: Mapping[tuple[str, str], str], node_name: str, link_name: str, action: str
) -> list[Finding]:
    """A node for which nothing goes well, of two tries at least; otherwise the links."""
    nodes = {node for pair in pairs for node in pair}
    culprits = {
        node for node in nodes
        if len(own := [pair for pair in pairs if node in pair]) > 1 and all(pair in bad for pair in own)
    }  # fmt: skip
    found = []
    for node in sorted(culprits):
        seen = "; ".join(f"with {'-'.join(n for n in p if n != node)}: {words[p]}" for p in sorted(bad) if node in p)
        found.append(Finding(node_name, "critical", action, seen, -1, node))
    return found + [
        Finding(link_name, "distributed", "warn", words[pair], -1, "-".join(pair))
        for pair in sorted(bad)
        if not culprits & set(pair)
    ]


class _Probe:
    """A process that reports each part of its work as a line."""

    def __init__(self, *arguments: str, environ: Mapping[str, str] | None = None):
        self.what, self.reports = arguments[0], dict[str, Any]()
        # Files, closed by wait: a pipe would be full when a library has much to say.
        self._out = tempfile.TemporaryFile()  # noqa: SIM115
        self._err = tempfile.TemporaryFile()  # noqa: SIM115
        given = {**(os.environ if environ is None else environ), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        self._begun = time.monotonic()
        self._process = subprocess.Popen(
            [*machine.ends_with_this(), sys.executable, "-m", "zaya_jax.aegis.probe", *arguments],
            env=given, stdin=subprocess.DEVNULL,
            stdout=self._out, stderr=self._err, start_new_session=True, cwd=Path(__file__).parents[2],
        )  # fmt: skip
        self._code: int | None = None
        self._error = ""

    def wait(self, until: float) -> None:
        """Until it ends or the time is up; it is killed then, and left if even that does not help."""
        try:
            self._code = self._process.wait(max(until - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            self._process.kill()
            try:
                self._process.wait(2)  # a process that hangs in a driver outlives SIGKILL
            except subprocess.TimeoutExpired:
                self._error = f"process {self._process.pid} cannot even be killed"
        self._seconds = time.monotonic() - self._begun
        for file in (self._out, self._err):
            file.seek(0)
        for line in self._out.read().decode(errors="replace").splitlines():
            # A library prints lines too, and a kill leaves half of one.
            with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError):
                given = json.loads(line)
                self.reports[given.pop("part")] = given
        last = [line for line in self._err.read().decode(errors="replace").splitlines() if line.strip()]
        self._error = self._error or (last[-1].strip()[-TAIL:] if last else "")
        self._out.close()
        self._err.close()

    def end(self, group: str, action: str) -> list[Finding]:
        """A finding where it did not come to its end."""
        if "end" in self.reports and self._code == 0:
            return []
        after = f"after {next(reversed(self.reports))!r}" if self.reports else "before anything was done"
        if self._code is None:
            seen = f"no answer for {self._seconds:.0f} s, {after}"
            return [Finding(f"check of {self.what} hangs", group, action, f"{seen}. {self._error}".strip())]
        how = signal.Signals(-self._code).name if self._code < 0 else f"exit code {self._code}"
        return [Finding(f"check of {self.what} failed", group, action, f"{how} {after}: {self._error}")]


class Checking:
    """The check of a start's nodes as the leader sees it: all try themselves, then in pairs the links between them.

    checking = Checking(number, nodes, addresses, order, now)
    checking.hear(node, message)        ["checked", number, findings, port] or ["linked", number, bandwidth, wrong]
    checking.turn(now)                  findings by node (-1: none alone), once all is over; else None

    A node that gives no answer in time is found too. `order` carries ["check", number] and
    ["link", number, coordinator, index].
    """

    def __init__(
        self, number: int, nodes: Sequence[int], addresses: Mapping[int, str], order: Callable[[int, list], None],
        now: float,
    ):  # fmt: skip
        self.number, self.nodes, self.begun = number, tuple(nodes), now
        self._addresses, self._order = addresses, order
        self._waiting, self._until = set(nodes), now + SECONDS + ANSWER
        self._found: list[tuple[int, Finding]] = []
        self._ports: dict[int, int] = {}
        self._rounds: list[list[tuple[int, int]]] | None = None  # until all nodes have tried themselves
        self._pairs: list[tuple[int, int]] = []  # of this round
        self._tried: dict[int, Tried] = {}  # by the nodes of this round
        self._links: list[tuple[str, str, Tried]] = []
        for node in nodes:
            order(node, ["check", number])

    def hear(self, node: int, message: list) -> None:
        """An answer; of an earlier check's nothing."""
        kind, number, *rest = message
        if number != self.number or node not in self._waiting:
            return
        self._waiting.discard(node)
        if kind == "checked":
            self._found += [(node, Finding(**given)) for given in rest[0]]
            self._ports[node] = rest[1]
        else:
            self._tried[node] = Tried(*rest)

    def woke(self, seconds: float) -> None:
        """An agent stood still for so long: an answer is not late by that."""
        self._until += seconds

    def turn(self, now: float) -> list[tuple[int, Finding]] | None:
        """Orders the next round, or returns the findings."""
        if self._waiting and now < self._until:
            return None
        if self._rounds is None:
            hung = f"no answer within {SECONDS + ANSWER:g} s"
            self._found += [
                (node, Finding("check of the node hangs", "critical", "exclude", hung)) for node in self._waiting
            ]
            unfit = {node for node, finding in self._found if finding.action == "exclude"}
            fit = [str(node) for node in self.nodes if node not in unfit]
            self._rounds = [[(int(a), int(b)) for a, b in pairs] for pairs in rounds(fit)]
        for pair in self._pairs:
            silent = Tried(0.0, f"no answer within {LINK_SECONDS + ANSWER:g} s")
            for node in pair:
                self._links.append((_name(pair[0]), _name(pair[1]), self._tried.get(node, silent)))
        if self._rounds:
            self._pairs, self._tried = self._rounds.pop(0), {}
            self._waiting = {node for pair in self._pairs for node in pair}
            self._until = now + LINK_SECONDS + ANSWER
            for a, b in self._pairs:
                host = self._addresses[a]
                address = f"{f'[{host}]' if ':' in host else host}:{self._ports[a]}"
                self._order(a, ["link", self.number, address, 0])
                self._order(b, ["link", self.number, address, 1])
            return None
        numbers = {_name(node): node for node in self.nodes}
        return self._found + [(numbers.get(f.device, -1), f) for f in judge(self._links)]


def _name(node: int) -> str:
    return f"node {node}"
