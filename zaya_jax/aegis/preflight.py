"""Checks nodes before a start, in under a minute: whether each computes correctly and reaches its
neighbours.

    check(expected=8)                       list[Finding] of this node: devices, products, watchers
    rounds([0, 1, 2, 3])                    the pairs of nodes that try their link in each round
    link(coordinator, index)                one of a pair; a Tried
    judge([((0, 1), tried), ...])           findings, each with the node that it names (-1: none alone)
    Checking(...)                           the leader's part: orders all of that, and gathers the findings

Anything that may hang runs in a process of its own, this module as a program, with a time limit: a
device that does not answer is a finding too. Each part of that program's work prints a line of JSON
with its name when it ends:

    python -m zaya_jax.aegis.preflight devices
    python -m zaya_jax.aegis.preflight link COORDINATOR INDEX SECONDS
"""

import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zaya_jax.aegis import machine, watch
from zaya_jax.cluster.events import Finding
from zaya_jax.cluster.rank import join_address

SECONDS = 50.0  # for all of a node's check
LINK_SECONDS = 50.0  # for a pair's
SLOW_LINK = 0.5  # of all links' median: rings share switches
ANSWER = (
    10.0  # seconds that an answer to the leader may take beyond the time that a node gives itself
)
TAIL = 300  # characters of a probe's last line on stderr

# Of the probe, on a CPU and elsewhere
SIZE = {"cpu": 128}  # of a matrix's side
SIZE_ELSEWHERE = 2048  # fills every compute unit of a GPU
ROUNDS = 4  # of products, with other numbers each
SENT = {"cpu": 1 << 22}  # bytes that each device sends its partner
SENT_ELSEWHERE = 1 << 26
SENDS = 8
LAST_WORDS = 2.0  # seconds for those of a killed probe

Environ = Mapping[str, str] | None  # of a probe; None: this process's
Pair = tuple[int, int]  # of nodes


class Probed(NamedTuple):
    """The parts of its work that a probe has reported; and how it failed ("" where it did not),
    with the words."""

    parts: dict[str, Any]
    failed: str = ""
    seen: str = ""


class Tried(NamedTuple):
    """How a pair's link did, seen from one end: bytes a second, 0 where it failed; and the
    reason."""

    bandwidth: float
    wrong: str = ""


def check(
    expected: int | None = None,
    root: str | Path = "/",
    seconds: float = SECONDS,
    environ: Environ = None,
) -> list[Finding]:
    """The faults of this node."""
    watchers = watch.Watchers(root)
    watchers.look()
    probed = _probe("devices", seconds=seconds, environ=environ)
    found = judge_devices(probed.parts, expected)
    if probed.failed:
        action = "warn" if probed.failed == "could not begin" else "exclude"
        found.append(Finding(f"check of devices {probed.failed}", "critical", action, probed.seen))
    return found + [one for one in watchers.look() if one.group != "note"]


def judge_devices(parts: Mapping[str, Any], expected: int | None) -> list[Finding]:
    """Findings by what the devices' probe has reported."""
    found = []
    there = parts.get("devices", {})
    if there and expected is not None and there["count"] != expected:
        seen = f"{there['count']} devices ({there['platform']}) are there, {expected} are expected"
        found.append(Finding("gpu missing", "critical", "exclude", seen))
    for words in parts.get("products", {}).get("wrong", []):
        device = words.partition(":")[0]
        found.append(Finding("gpu computes wrongly", "critical", "exclude", words, -1, device))
    return found


def rounds(nodes: Sequence[int]) -> list[list[Pair]]:
    """Rounds of disjoint pairs along a ring: each node tries two others, so that judge can tell
    nodes from links.

    Two rounds, three for an odd number of nodes; one for two nodes, whose faults look alike.
    """
    if len(nodes) < 3:
        return [[(nodes[0], nodes[1])]] if len(nodes) == 2 else []
    ring = [*itertools.pairwise(nodes), (nodes[0], nodes[-1])]
    last = [ring.pop()] if len(nodes) % 2 else []
    return [one for one in (ring[0::2], ring[1::2], last) if one]


def link(
    coordinator: str, index: int, seconds: float = LINK_SECONDS, environ: Environ = None
) -> Tried:
    """One of a pair, 0 at the coordinator's address: joins the other, exchanges known numbers and
    checks them."""
    joins = str(max(int(seconds - 10), 5))
    parts, _, seen = _probe(
        "link", coordinator, str(index), joins, seconds=seconds, environ=environ
    )
    wrong = parts.get("exchanged", {}).get("wrong", [])
    if wrong:
        return Tried(0.0, "; ".join(wrong))
    # A probe that reports a bandwidth has done its work, however its process ends.
    return Tried(parts["measured"]["bandwidth"]) if "measured" in parts else Tried(0.0, seen)


def judge(results: Iterable[tuple[Pair, Tried]]) -> list[tuple[int, Finding]]:
    """Which nodes are bad (all their links fail) and which links (their ends are well with others);
    then slow ones.

    The views of both ends of a pair may be given. Each finding has its node, -1 where it names none
    alone.
    """
    pairs: dict[Pair, list[Tried]] = {}
    for pair, tried in results:
        pairs.setdefault(pair, []).append(tried)
    bad = {pair: "; ".join(t.wrong for t in tried if t.wrong) for pair, tried in pairs.items()}
    bad = {pair: words for pair, words in bad.items() if words}
    if len(pairs) > 1 and len(bad) == len(pairs):
        return [
            (
                -1,
                Finding(
                    "no link works",
                    "distributed",
                    "stop",
                    next(iter(bad.values())),
                    -1,
                    "all nodes",
                ),
            )
        ]
    rates = {
        pair: min(t.bandwidth for t in tried) for pair, tried in pairs.items() if pair not in bad
    }
    usual = statistics.median(rates.values()) if len(rates) > 2 else 0.0
    slow = {
        pair: f"{rate / 1e9:.1f} GB/s, the median is {usual / 1e9:.1f}"
        for pair, rate in rates.items()
        if rate < SLOW_LINK * usual
    }
    return [
        *_named(bad, pairs, "links of a node fail", "link fails", "exclude"),
        *_named(slow, rates, "links of a node are slow", "link is slow", "warn"),
    ]


def _named(
    bad: Mapping[Pair, str], pairs: Iterable[Pair], node_name: str, link_name: str, action: str
) -> list[tuple[int, Finding]]:
    """A node for which nothing goes well, of two tries at least; otherwise the links."""
    tries: dict[int, dict[int, Pair]] = {}  # of each node, by its partner
    for a, b in pairs:
        tries.setdefault(a, {})[b] = a, b
        tries.setdefault(b, {})[a] = a, b
    culprits = sorted(
        node for node, own in tries.items() if len(own) > 1 and set(own.values()) <= bad.keys()
    )
    found = []
    for node in culprits:
        seen = "; ".join(f"with node {other}: {bad[pair]}" for other, pair in tries[node].items())
        found.append((node, Finding(node_name, "critical", action, seen, -1, f"node {node}")))
    return found + [
        (
            -1,
            Finding(
                link_name, "distributed", "warn", bad[pair], -1, "node {}-node {}".format(*pair)
            ),
        )
        for pair in sorted(bad)
        if not set(culprits) & set(pair)
    ]


def _probe(*arguments: str, seconds: float, environ: Environ) -> Probed:
    """Runs a probe to its end, or kills it when its time is up."""
    variables = {
        **(os.environ if environ is None else environ),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    command = [
        *machine.ends_with_this(),
        sys.executable,
        "-m",
        "zaya_jax.aegis.preflight",
        *arguments,
    ]
    try:
        probe = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            cwd=Path(__file__).parents[2],
        )
    except OSError as error:
        return Probed({}, "could not begin", f"{type(error).__name__}: {error}")
    code: int | None = None
    try:
        out, err = probe.communicate(timeout=seconds)
        code = probe.returncode
    except subprocess.TimeoutExpired:
        probe.kill()
        try:
            out, err = probe.communicate(timeout=LAST_WORDS)
        except subprocess.TimeoutExpired as late:  # in a driver it may outlive the kill
            out, err = late.stdout or b"", late.stderr or b""
    parts = dict[str, Any]()
    for line in out.decode(errors="replace").splitlines():
        # A library prints lines too, and a kill leaves half of one.
        with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError):
            given = json.loads(line)
            parts[given.pop("part")] = given
    if "end" in parts and code == 0:
        return Probed(parts)
    after = f"after {next(reversed(parts))!r}" if parts else "before anything was done"
    last = err.decode(errors="replace").strip().rpartition("\n")[2][-TAIL:]
    if code is None:
        return Probed(parts, "hangs", f"no answer for {seconds:.0f} s, {after}. {last}".strip())
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return Probed(parts, "failed", f"{how} {after}: {last}")


class Checking:
    """The check of a start's nodes as the leader sees it: all try themselves, then in pairs the
    links between them.

    checking = Checking(tickets, nodes, addresses, order, now)
    checking.hear(node, message)        ["checked", number, findings, port] or ["linked", number, bandwidth, wrong]
    checking.turn(now)                  findings by node (-1: none alone), once all is over; else None

    A node that gives no answer in time is found too. `order` carries ["check", number] and ["link",
    number, coordinator, index].
    """

    def __init__(
        self,
        tickets: Iterator[int],
        nodes: Sequence[int],
        addresses: Mapping[int, str],
        order: Callable[[int, list], None],
        now: float,
    ):
        self.nodes, self.begun = tuple(nodes), now
        self._tickets, self._ticket = tickets, next(tickets)  # of the orders that are out
        self._addresses, self._order = addresses, order
        self._waiting, self._until = set(nodes), now + SECONDS + ANSWER
        self._found: list[tuple[int, Finding]] = []
        self._ports: dict[int, int] = {}
        self._rounds: list[list[Pair]] | None = None  # until all nodes have tried themselves
        self._pairs: list[Pair] = []  # of this round
        self._tried: dict[int, Tried] = {}  # by the nodes of this round
        self._links: list[tuple[Pair, Tried]] = []
        for node in nodes:
            order(node, ["check", self._ticket])

    def hear(self, node: int, message: list) -> None:
        """An answer; of an earlier order's nothing."""
        kind, number, *rest = message
        if number != self._ticket or node not in self._waiting:
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
            hung = Finding(
                "check of the node hangs",
                "critical",
                "exclude",
                f"no answer within {SECONDS + ANSWER:g} s",
            )
            self._found += [(node, hung) for node in self._waiting]
            unfit = {node for node, finding in self._found if finding.action == "exclude"}
            self._rounds = rounds([node for node in self.nodes if node not in unfit])
        silent = Tried(0.0, f"no answer within {LINK_SECONDS + ANSWER:g} s")
        self._links += [
            (pair, self._tried.get(node, silent)) for pair in self._pairs for node in pair
        ]
        if not self._rounds:
            return self._found + judge(self._links)
        self._pairs, self._tried = self._rounds.pop(0), {}
        self._ticket = next(self._tickets)
        self._waiting = {node for pair in self._pairs for node in pair}
        self._until = now + LINK_SECONDS + ANSWER
        for a, b in self._pairs:
            address = join_address(self._addresses[a], self._ports[a])
            self._order(a, ["link", self._ticket, address, 0])
            self._order(b, ["link", self._ticket, address, 1])
        return None


def say(part: str, **given: Any) -> None:
    """A part has ended."""
    print(json.dumps({"part": part, **given}), flush=True)


def products(devices: list, wanted: Callable | None = None) -> list[str]:
    """Multiplies on every device in bfloat16 and float32, and compares with NumPy: the differences
    in words."""
    import jax  # here and below: an agent, which starts these parts, imports none of it
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
        # Whole numbers from -3 to 3: sums of so few products are exact in float32, in any order.
        a, b = np.random.default_rng(turn).integers(-3, 4, (2, side, side))
        # NumPy multiplies whole numbers slowly; float64 holds them exactly and goes through BLAS.
        right = (wanted or np.matmul)(a.astype(np.float64), b.astype(np.float64)).astype(np.float32)
        for kind in (jnp.bfloat16, jnp.float32):
            each = [
                jax.device_put(np.broadcast_to(m.astype(kind), (count, side, side)), own)
                for m in (a, b)
            ]
            for shard in program(*each).addressable_shards:
                out = np.asarray(shard.data)[0]
                bad = int((out != right).sum())
                if bad:
                    where = np.argwhere(out != right)[0]
                    got, should = out[tuple(where)], right[tuple(where)]
                    wrong.append(
                        f"device {shard.device.id}: {bad} of {out.size} sums of a"
                        f" {np.dtype(kind).name} product are wrong, such as {got:g} in place of"
                        f" {should:g}"
                    )
    return wrong


def try_devices() -> None:
    """All devices of this process."""
    import jax

    here = jax.local_devices()
    say(
        "devices",
        count=len(here),
        platform=here[0].platform,
        kinds=sorted({d.device_kind for d in here}),
    )
    say("products", wrong=products(here))


def try_link(coordinator: str, index: str, seconds: str) -> None:
    """One of two nodes: every device sends known numbers to its partner on the other one, and
    checks its own."""
    import jax
    import numpy as np
    from jax import lax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    jax.distributed.initialize(
        coordinator,
        2,
        int(index),
        initialization_timeout=int(seconds),
        cluster_detection_method="deactivate",
        shutdown_timeout_seconds=10,
    )
    here, everything = len(jax.local_devices()), jax.devices()
    count = len(everything)
    say("joined", devices=here)
    if count != 2 * here:
        raise RuntimeError(f"{here} devices here, {count - here} on the other node")
    numbers = SENT.get(everything[0].platform, SENT_ELSEWHERE) // 4
    mesh = Mesh(np.array(everything), ("devices",))
    known = np.arange(numbers, dtype=np.uint32) * np.uint32(2654435761)

    def of_device(place: Any) -> np.ndarray:
        return (known + np.uint32(place))[None]

    def of_shard(index: Any) -> np.ndarray:
        return of_device(index[0].start)

    x = jax.make_array_from_callback((count, numbers), NamedSharding(mesh, P("devices")), of_shard)
    pairs = [(i, (i + here) % count) for i in range(count)]
    over = jax.shard_map(
        lambda x: lax.ppermute(x, "devices", pairs),
        mesh=mesh,
        in_specs=P("devices"),
        out_specs=P("devices"),
    )
    send = jax.jit(over).lower(x).compile()
    wrong = []
    for shard in jax.block_until_ready(send(x)).addressable_shards:
        bad = int(
            (
                np.asarray(shard.data) != of_device((everything.index(shard.device) - here) % count)
            ).sum()
        )
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
    parts: dict[str, Callable[..., None]] = {"devices": try_devices, "link": try_link}
    what, *given = arguments
    parts[what](*given)
    say("end")


if __name__ == "__main__":
    main(sys.argv[1:])
