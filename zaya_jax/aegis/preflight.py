"""Checks nodes before a start, in under a minute: whether each computes correctly and reaches its
neighbours.

    check(expected=8)                    list[Finding] of this node: devices, products, watchers
    rounds([0, 1, 2, 3])                 the pairs of nodes that test their link in each round
    link(coordinator, index)             one of a pair: why the link fails, "" if it works
    judge_links({(0, 1): why, ...})      findings, each with the node that it names (-1: of no single one)
    NodeCheck(...)                       the leader's part: orders all of that, and gathers the findings

Anything that may hang runs in a process of its own, this module as a program, with a time limit: a
device that does not answer is a finding too. The program prints one line of JSON, after REPORT:

    python -m zaya_jax.aegis.preflight devices
    python -m zaya_jax.aegis.preflight link COORDINATOR INDEX
"""

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zaya_jax.aegis import machine, watch
from zaya_jax.aegis.cause import exit_words
from zaya_jax.cluster.events import Finding
from zaya_jax.cluster.rank import join_address

SECONDS = 50.0  # for all of a node's check, and for a pair's
JOIN_SECONDS = 40  # of a pair's: for the other one to come
# Seconds that an answer to the leader may take beyond the time that a node gives itself.
ANSWER = 10.0
TAIL = 300  # characters of a probe's last line on stderr
REPORT = "preflight: "  # a library prints lines too

# Of the probe, on a CPU and elsewhere: a matrix's side, which fills every compute unit of a GPU, and
# the bytes that each device sends its partner
SIZES = {"cpu": (128, 1 << 22)}
SIZES_ELSEWHERE = (2048, 1 << 26)
ROUNDS = 4  # of products, with other numbers each
LAST_WORDS = 2.0  # seconds for those of a killed probe

Pair = tuple[int, int]  # of nodes
NodeFinding = tuple[int, Finding]  # with its node, -1 if it is of no single one


def check(expected: int | None = None, root: str | Path = "/") -> list[Finding]:
    """The faults of this node."""
    watchers = watch.Watchers(root)
    watchers.poll()
    report, failed, seen = _probe("devices")
    findings = judge_devices(report, expected)
    if failed:
        findings.append(Finding(f"check of devices {failed}", "critical", "exclude", seen))
    return findings + [finding for finding in watchers.poll() if finding.group != "note"]


def judge_devices(report: Mapping[str, Any], expected: int | None) -> list[Finding]:
    """Findings by what the devices' probe has reported."""
    findings = []
    if report and expected is not None and report["count"] != expected:
        seen = f"{report['count']} devices ({report['platform']}) are there, {expected} expected"
        findings.append(Finding("gpu missing", "critical", "exclude", seen))
    name = "gpu computes wrongly"
    findings += [
        Finding(name, "critical", "exclude", seen, -1, seen.partition(":")[0])
        for seen in report.get("wrong", ())
    ]
    return findings


def rounds(nodes: Sequence[int]) -> list[list[Pair]]:
    """Rounds of disjoint pairs along a ring: each node tests two links, so that judge_links can
    tell nodes from links.

    Two rounds, three for an odd number of nodes; one for two nodes, whose faults look alike.
    """
    ring = list(itertools.pairwise(nodes))
    if len(nodes) > 2:
        ring.append((nodes[0], nodes[-1]))
    even = len(ring) // 2 * 2
    return list(filter(None, (ring[:even:2], ring[1:even:2], ring[even:])))


def link(coordinator: str, index: int) -> str:
    """One of a pair, 0 at the coordinator's address: joins the other, exchanges known numbers and
    checks them. Returns why the link fails, "" if it works."""
    report, _, seen = _probe("link", coordinator, str(index))
    # A probe that reports the exchange has done its work, however its process ends.
    return "; ".join(report.get("wrong", [seen]))


def judge_links(results: Mapping[Pair, str]) -> list[NodeFinding]:
    """Which nodes are bad (all of their links fail, two at least), and which links are bad (both
    ends work with other nodes)."""
    failures = {pair: why for pair, why in results.items() if why}
    if len(results) > 1 and len(failures) == len(results):
        why = next(iter(failures.values()))
        return [(-1, Finding("no link works", "distributed", "stop", why, -1, "all nodes"))]
    findings: list[NodeFinding] = []
    bad_nodes = set()
    for node in sorted({node for pair in results for node in pair}):
        links = [pair for pair in results if node in pair]
        if len(links) > 1 and all(pair in failures for pair in links):
            bad_nodes.add(node)
            seen = "; ".join(f"nodes {a} and {b}: {failures[a, b]}" for a, b in links)
            name = "links of a node fail"
            findings.append((node, Finding(name, "critical", "exclude", seen, -1, f"node {node}")))
    return findings + [
        (-1, Finding("link fails", "distributed", "warn", why, -1, f"node {a}-node {b}"))
        for (a, b), why in sorted(failures.items())
        if not bad_nodes & {a, b}
    ]


def _probe(*arguments: str) -> tuple[dict[str, Any], str, str]:
    """Runs a probe to its end, or kills it when its time is up: what it has reported, if anything,
    and how it failed ("" where it did not), with the words."""
    module = [sys.executable, "-m", "zaya_jax.aegis.preflight"]
    probe = subprocess.Popen(
        [*machine.die_with_parent_prefix(), *module, *arguments],
        env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        cwd=Path(__file__).parents[2],
    )
    code, out, err = _communicate(probe)
    lines = re.findall(rf"{REPORT}(.*)\n", out.decode(errors="replace"))
    report = json.loads(lines[-1]) if lines else {}
    if report and code == 0:
        return report, "", ""
    last = err.decode(errors="replace").strip().rpartition("\n")[2][-TAIL:]
    if code is None:
        return report, "hangs", f"no answer for {SECONDS:g} s. {last}".strip()
    return report, "failed", f"{exit_words(code)}: {last}"


def _communicate(probe: subprocess.Popen) -> tuple[int | None, bytes, bytes]:
    """A probe's exit code, stdout and stderr; no code if it had to be killed."""
    try:
        out, err = probe.communicate(timeout=SECONDS)
        return probe.returncode, out, err
    except subprocess.TimeoutExpired:
        probe.kill()
    try:
        return None, *probe.communicate(timeout=LAST_WORDS)
    except subprocess.TimeoutExpired as late:  # in a driver it may outlive the kill
        return None, late.stdout or b"", late.stderr or b""


class NodeCheck:
    """The check of a start's nodes as the leader sees it: all test themselves, then in pairs the
    links between them.

    node_check = NodeCheck(tickets, nodes, addresses, order, now)
    node_check.node_answered(node, ticket, findings, port); node_check.link_answered(node, ticket, why)
    node_check.poll(now)       findings by node (-1: of no single one), once all is over; else None

    A node that gives no answer in time is found too. `order` carries ["check", ticket] and ["link",
    ticket, coordinator, index]; an answer to an earlier order is ignored.
    """

    def __init__(
        self,
        tickets: Iterator[int],
        nodes: Sequence[int],
        addresses: Mapping[int, str],
        order: Callable[[int, list], None],
        now: float,
    ):
        self.begun = now
        self._nodes = tuple(nodes)
        self._addresses, self._order = addresses, order
        self._tickets, self._ticket = tickets, next(tickets)
        # This stage: all nodes, then a round of links
        self._waiting = set(nodes)
        self._until = now + SECONDS + ANSWER
        self._pairs: list[Pair] = []
        # Results
        self._findings: list[NodeFinding] = []
        self._ports: dict[int, int] = {}
        self._rounds: list[list[Pair]] | None = None  # until all nodes have tested themselves
        self._links: dict[Pair, str] = {}  # why each fails
        for node in nodes:
            order(node, ["check", self._ticket])

    def node_answered(self, node: int, ticket: int, findings: Sequence[dict], port: int) -> None:
        """A node has tested itself."""
        if self._answers(node, ticket):
            self._ports[node] = port
            self._findings += [(node, Finding(**fields)) for fields in findings]

    def link_answered(self, node: int, ticket: int, why: str) -> None:
        """A node has tested its link in this round."""
        if self._answers(node, ticket):
            (pair,) = [pair for pair in self._pairs if node in pair]
            # One reason is enough; the other end may know no more than that it waited.
            self._links[pair] = self._links.get(pair) or why

    def _answers(self, node: int, ticket: int) -> bool:
        if ticket != self._ticket or node not in self._waiting:
            return False
        self._waiting.remove(node)
        return True

    def woke(self, seconds: float) -> None:
        """An agent stood still for so long: an answer is not late by that."""
        self._until += seconds

    def poll(self, now: float) -> list[NodeFinding] | None:
        """Orders the next round, or returns the findings."""
        if self._waiting and now < self._until:
            return None
        if self._rounds is None:
            self._end_of_nodes()
        for pair in self._pairs:
            if self._waiting & set(pair) and not self._links.get(pair):
                self._links[pair] = f"no answer within {SECONDS + ANSWER:g} s"
        if not self._rounds:
            return self._findings + judge_links(self._links)
        self._ticket = next(self._tickets)
        self._pairs = self._rounds.pop(0)
        self._waiting = {node for pair in self._pairs for node in pair}
        self._until = now + SECONDS + ANSWER
        for pair in self._pairs:
            address = join_address(self._addresses[pair[0]], self._ports[pair[0]])
            for index, node in enumerate(pair):
                self._order(node, ["link", self._ticket, address, index])
        return None

    def _end_of_nodes(self) -> None:
        """All have tested themselves, or not answered; the fit ones test their links."""
        seen = f"no answer within {SECONDS + ANSWER:g} s"
        hangs = Finding("check of the node hangs", "critical", "exclude", seen)
        self._findings += [(node, hangs) for node in self._waiting]
        unfit = {node for node, finding in self._findings if finding.action == "exclude"}
        self._rounds = rounds([node for node in self._nodes if node not in unfit])


# The probe


def tell(**fields: Any) -> None:
    """The work is done; what follows only ends the program."""
    print(f"{REPORT}{json.dumps(fields)}", flush=True)


def products(devices: list) -> list[str]:
    """Multiplies on every device in bfloat16 and float32, and compares with NumPy: the differences
    in words."""
    import jax  # here and below: an agent, which starts these parts, imports none of it
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    count = len(devices)
    side, _ = SIZES.get(devices[0].platform, SIZES_ELSEWHERE)
    by_device = NamedSharding(Mesh(np.array(devices), ("devices",)), P("devices"))

    # One program for all: every device multiplies the same matrices, and compares by itself.
    def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.matmul(a, b, precision="highest", preferred_element_type=jnp.float32)

    program = jax.jit(multiply, in_shardings=(by_device, by_device), out_shardings=by_device)
    wrong = []
    for seed in range(ROUNDS):
        # Whole numbers from -3 to 3: sums of so few products are exact in float32, in any order.
        a, b = np.random.default_rng(seed).integers(-3, 4, (2, side, side))
        # NumPy multiplies whole numbers slowly; float64 holds them exactly and goes through BLAS.
        right = np.matmul(a.astype(np.float64), b.astype(np.float64)).astype(np.float32)
        for dtype in (jnp.bfloat16, jnp.float32):
            factors = [
                jax.device_put(np.broadcast_to(x.astype(dtype), (count, side, side)), by_device)
                for x in (a, b)
            ]
            for shard in program(*factors).addressable_shards:
                out = np.asarray(shard.data)[0]
                differs = out != right
                if differs.any():
                    first = tuple(np.argwhere(differs)[0])
                    wrong.append(
                        f"device {shard.device.id}: {differs.sum()} of {out.size} sums of a"
                        f" {np.dtype(dtype).name} product are wrong, such as {out[first]:g} in"
                        f" place of {right[first]:g}"
                    )
    return wrong


def try_devices() -> None:
    """All devices of this process."""
    import jax

    devices = jax.local_devices()
    tell(count=len(devices), platform=devices[0].platform, wrong=products(devices))


def try_link(coordinator: str, index: str) -> None:
    """One of two nodes: every device sends known numbers to its partner on the other one, and
    checks what it receives."""
    import jax
    import numpy as np
    from jax import lax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    jax.distributed.initialize(
        coordinator,
        2,
        int(index),
        initialization_timeout=JOIN_SECONDS,
        cluster_detection_method="deactivate",
        shutdown_timeout_seconds=10,
    )
    devices = jax.devices()
    count, local = len(devices), len(jax.local_devices())
    if count != 2 * local:
        raise RuntimeError(f"{local} devices here, {count - local} on the other node")
    _, sent = SIZES.get(devices[0].platform, SIZES_ELSEWHERE)
    length = sent // 4
    mesh = Mesh(np.array(devices), ("devices",))
    base = np.arange(length, dtype=np.uint32) * np.uint32(2654435761)

    def numbers_of(device: int) -> np.ndarray:
        return (base + np.uint32(device))[None]

    by_device = NamedSharding(mesh, P("devices"))
    rows = [jax.device_put(numbers_of(devices.index(d)), d) for d in jax.local_devices()]
    x = jax.make_array_from_single_device_arrays((count, length), by_device, rows)
    pairs = [(i, (i + local) % count) for i in range(count)]
    exchange = jax.shard_map(
        lambda x: lax.ppermute(x, "devices", pairs),
        mesh=mesh,
        in_specs=P("devices"),
        out_specs=P("devices"),
    )
    wrong = []
    for shard in jax.jit(exchange)(x).addressable_shards:
        sender = (devices.index(shard.device) - local) % count
        different = (np.asarray(shard.data) != numbers_of(sender)).sum()
        if different:
            wrong.append(f"device {shard.device.id}: {different} of {length} numbers came wrong")
    tell(wrong=wrong)
    jax.distributed.shutdown()


if __name__ == "__main__":
    probes: dict[str, Callable[..., None]] = {"devices": try_devices, "link": try_link}
    probes[sys.argv[1]](*sys.argv[2:])
