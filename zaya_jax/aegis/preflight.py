"""Checks nodes before a start, in under a minute: whether each computes correctly and reaches its neighbours.

    check(expected=8, workdir=...)          list[Finding] of this node: devices, products, bandwidth, watchers
    rounds(["a", "b", "c", "d"])            the pairs of nodes that try their link in each round
    link(coordinator, index)                one of a pair; a Tried
    judge([("a", "b", tried), ...])         list[Finding] that name a node or a link in `device`
    Checking(...)                           the leader's part: orders all of that, and gathers the findings

Anything that may hang runs in a process of its own, this module as a program, with a time limit: a device that does not
answer is a finding too. Each part of that program's work prints a line of JSON with its name when it ends:

    python -m zaya_jax.aegis.preflight devices
    python -m zaya_jax.aegis.preflight link COORDINATOR INDEX SECONDS
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

# Of the probe, on a CPU and elsewhere
SIZE = {"cpu": 128}  # of a matrix's side
SIZE_ELSEWHERE = 2048  # fills every compute unit of a GPU
ROUNDS = 4  # of products, with other numbers each
STREAM = {"cpu": 1 << 24}  # bytes that are copied
STREAM_ELSEWHERE = 1 << 28  # beyond every cache, MI300X's 256 MiB together with its copy included
COPYING = 0.2  # seconds, on a device
SENT = {"cpu": 1 << 22}  # bytes that each device sends its partner
SENT_ELSEWHERE = 1 << 26
SENDS = 8


def check(
    expected: int | None = None, workdir: str | Path | None = None, root: str | Path = "/",
    seconds: float = SECONDS, environ: Mapping[str, str] | None = None,
) -> list[Finding]:  # fmt: skip
    """The faults of this node. `environ`: the environment of the probe, by default this process's."""
    try:
        probe = _Probe("devices", environ=environ)
    except OSError as error:  # no room for its lines, no process more: that is no hang
        return [Finding("check of the node failed", "critical", "warn", f"{type(error).__name__}: {error}")]
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
    try:
        probe = _Probe("link", coordinator, str(index), str(max(int(seconds - 10), 5)), environ=environ)
    except OSError as error:  # as above
        return Tried(0.0, f"{type(error).__name__}: {error}")
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
            [*machine.ends_with_this(), sys.executable, "-m", "zaya_jax.aegis.preflight", *arguments],
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


def say(part: str, **given: Any) -> None:
    """A part has ended."""
    print(json.dumps({"part": part, **given}), flush=True)


def matrices(side: int, turn: int) -> tuple[Any, Any]:
    """Whole numbers from -3 to 3, other ones each turn: sums of their products are exact in float32 in any order."""
    import numpy as np  # here and below: an agent, which starts these parts, imports none of it

    assert 9 * side < 2**24
    i, j = np.meshgrid(np.arange(side), np.arange(side), indexing="ij")
    a, b = ((i * 7 + j * 3 + i * j + turn) % 7 - 3), ((i * 5 + j * 11 + i * j // 3 + 2 * turn) % 7 - 3)
    return a, b


def products(devices: list, wanted: Callable | None = None) -> list[str]:
    """Multiplies on every device in bfloat16 and float32, and compares with NumPy: the differences in words."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    platform, count = devices[0].platform, len(devices)
    side = SIZE.get(platform, SIZE_ELSEWHERE)
    mesh = Mesh(np.array(devices), ("devices",))
    own = NamedSharding(mesh, P("devices"))

    # One program for all: every device multiplies the same matrices, and compares by itself.
    def multiply(a, b):
        return jnp.matmul(a, b, precision="highest", preferred_element_type=jnp.float32)

    program = jax.jit(multiply, in_shardings=(own, own), out_shardings=own)
    wrong = []
    for turn in range(ROUNDS):
        a, b = matrices(side, turn)
        # NumPy multiplies whole numbers slowly; float64 holds them exactly and goes through BLAS.
        right = (wanted or np.matmul)(a.astype(np.float64), b.astype(np.float64)).astype(np.float32)
        for kind in (jnp.bfloat16, jnp.float32):
            each = [jax.device_put(np.broadcast_to(m.astype(kind), (count, side, side)), own) for m in (a, b)]
            for shard in program(*each).addressable_shards:
                out = np.asarray(shard.data)[0]
                bad = int((out != right).sum())
                if bad:
                    where = np.argwhere(out != right)[0]
                    got, should = out[tuple(where)], right[tuple(where)]
                    wrong.append(
                        f"device {shard.device.id}: {bad} of {out.size} sums of a {np.dtype(kind).name} product are "
                        f"wrong, such as {got:g} in place of {should:g}"
                    )
    return wrong


def bandwidth(device: Any) -> float:
    """Bytes read and written in a second by a copy on one device."""
    import jax
    import numpy as np

    from pallas_kernels import timing

    size = STREAM.get(device.platform, STREAM_ELSEWHERE)
    x = jax.device_put(np.ones(size // 4, np.float32), device)
    compiled = jax.jit(lambda x: -x).lower(x).compile()  # a pass that no compiler leaves out
    taken = timing.time_call(lambda: compiled(x), COPYING, device.platform != "cpu")
    return 2 * size / taken.median


def try_devices() -> None:
    """All devices of this process."""
    import jax

    here = jax.local_devices()
    say("devices", count=len(here), platform=here[0].platform, kinds=sorted({d.device_kind for d in here}))
    say("products", wrong=products(here))
    say("bandwidth", rates={str(d.id): bandwidth(d) for d in here})


def try_link(coordinator: str, index: int, seconds: int) -> None:
    """One of two nodes: every device sends known numbers to its partner on the other one, and checks its own."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    jax.distributed.initialize(
        coordinator, 2, index, initialization_timeout=seconds, cluster_detection_method="deactivate",
        shutdown_timeout_seconds=10,
    )  # fmt: skip
    here, everything = len(jax.local_devices()), jax.devices()
    say("joined", devices=here)
    if len(everything) != 2 * here:
        raise RuntimeError(f"{here} devices here, {len(everything) - here} on the other node")
    numbers = SENT.get(everything[0].platform, SENT_ELSEWHERE) // 4
    mesh = Mesh(np.array(everything), ("devices",))
    own = NamedSharding(mesh, P("devices"))
    count = len(everything)
    pairs = [(i, (i + here) % count) for i in range(count)]

    def values(rank):
        return jnp.arange(numbers, dtype=jnp.uint32) * jnp.uint32(2654435761) + rank[0].astype(jnp.uint32)

    def over(f):
        return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("devices"), out_specs=P("devices"), check_vma=False))

    ranks = jax.jit(lambda: jnp.arange(count), out_shardings=own)()
    x = over(values)(ranks)
    send = over(lambda x: lax.ppermute(x, "devices", pairs)).lower(x).compile()
    came = jax.block_until_ready(send(x))
    expected = np.arange(numbers, dtype=np.uint32) * np.uint32(2654435761)
    place = {device: i for i, device in enumerate(everything)}
    wrong = []
    for shard in came.addressable_shards:
        sender = (place[shard.device] - here) % count
        bad = int((np.asarray(shard.data) != expected + np.uint32(sender)).sum())
        if bad:
            wrong.append(f"device {shard.device.id}: {bad} of {numbers} numbers came wrong")
    say("exchanged", wrong=wrong)
    begin = time.perf_counter()
    for _ in range(SENDS):
        x = send(x)
    jax.block_until_ready(x)
    taken = time.perf_counter() - begin
    say("measured", bandwidth=SENDS * numbers * 4 * here / taken)  # of the node, in one direction
    jax.distributed.shutdown()


def main(arguments: list[str]) -> None:
    """The probe."""
    what, *rest = arguments
    if what == "devices":
        try_devices()
    else:
        try_link(rest[0], int(rest[1]), int(rest[2]))
    say("end")


if __name__ == "__main__":
    main(sys.argv[1:])
