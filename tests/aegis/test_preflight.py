"""The check before a start: a healthy machine passes, each fault is named, and what hangs is a
finding; the leader orders nodes to test themselves, then links in pairs, and the run starts without
the unfit ones.
"""

import itertools
import os
from concurrent import futures

import jax
import multiprocess_runs
import numpy as np
import pytest
import watched
from agents import STEPS, start

from zaya_jax.aegis import preflight
from zaya_jax.aegis.preflight import ANSWER, NodeCheck

BROKEN = "no answer for 50 s"


def test_a_node_is_fit_but_for_missing_devices_and_what_the_watchers_find(tmp_path):
    tree = watched.lay(tmp_path / "tree", "mi300x")
    watched.lay(tree, "not-retired")
    missing, page = preflight.check(9, tree)
    assert (missing.name, missing.group, missing.action) == ("gpu missing", "critical", "exclude")
    assert "8 devices (cpu) are there, 9 expected" in missing.seen
    assert (page.name, page.device) == ("gpu page not retired", "card5")
    assert [path.name for path in tmp_path.iterdir()] == ["tree"]  # nothing is left


def test_a_check_that_hangs_or_dies_says_how(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "nonsense")
    (died,) = preflight.check(root=tmp_path)
    assert (died.name, died.action) == ("check of devices failed", "exclude")
    assert "nonsense" in died.seen
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(60)\n")  # as a driver does
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(preflight, "SECONDS", 2.0)
    (hung,) = preflight.check(root=tmp_path)
    assert (hung.name, hung.action) == ("check of devices hangs", "exclude")
    assert hung.seen == "no answer for 2 s."


def test_products_are_exact_and_a_wrong_one_is_named(monkeypatch):
    devices, matmul = jax.local_devices()[:2], np.matmul
    assert preflight.products(devices) == []

    def off(a, b):
        out = matmul(a, b)
        out[3, 5] += 1
        return out

    monkeypatch.setattr(np, "matmul", off)
    wrong = preflight.products(devices)
    assert len(wrong) == 2 * 2 * preflight.ROUNDS
    assert wrong[0].startswith("device 0: 1 of 16384 sums of a bfloat16 product are wrong")
    (found,) = preflight.judge_devices({"count": 8, "wrong": wrong[:1]}, 8)
    assert (found.name, found.device, found.action) == (
        "gpu computes wrongly",
        "device 0",
        "exclude",
    )


@pytest.mark.parametrize("count", range(2, 12))
def test_rounds_are_disjoint_and_each_node_tries_two(count):
    nodes = range(3, 3 + count)
    rounds = preflight.rounds(nodes)
    assert len(rounds) == (1 if count == 2 else 3 if count % 2 else 2)
    for one in rounds:
        assert len({node for pair in one for node in pair}) == 2 * len(one)
    pairs = [frozenset(pair) for one in rounds for pair in one]
    assert len(set(pairs)) == len(pairs)
    assert all(sum(node in pair for pair in pairs) == min(2, count - 1) for node in nodes)
    assert preflight.rounds(nodes[:1]) == [] == preflight.rounds([])


def named(count, bad_nodes=(), bad_links=()):
    """The findings where all links of these nodes are bad, and these links."""
    pairs, bad_links = itertools.chain(*preflight.rounds(range(count))), [*map(set, bad_links)]
    results = {
        pair: BROKEN if {*pair} & {*bad_nodes} or {*pair} in bad_links else "" for pair in pairs
    }
    return [
        (node, finding.name, finding.device, finding.action)
        for node, finding in preflight.judge_links(results)
    ]


@pytest.mark.parametrize("count", [3, 4, 5, 8, 9])
def test_every_bad_node_and_every_bad_link_is_told_apart(count):
    assert named(count) == []
    for i in range(count):
        assert named(count, bad_nodes=[i]) == [(i, "links of a node fail", f"node {i}", "exclude")]
        a, b = sorted((i, (i + 1) % count))
        assert named(count, bad_links=[(a, b)]) == [
            (-1, "link fails", f"node {a}-node {b}", "warn")
        ]


def test_several_faults_and_none_that_works():
    found = named(8, bad_nodes=[1, 2], bad_links=[(5, 6)])
    assert [(node, device) for node, _, device, _ in found] == [
        (1, "node 1"),
        (2, "node 2"),
        (-1, "node 5-node 6"),
    ]
    assert named(4, bad_nodes=range(4)) == [(-1, "no link works", "all nodes", "stop")]
    # Whose fault it is of two is not known.
    assert named(2, bad_links=[(0, 1)]) == [(-1, "link fails", "node 0-node 1", "warn")]


def test_a_pair_exchanges_known_numbers():
    address = f"localhost:{multiprocess_runs.free_port()}"
    with futures.ThreadPoolExecutor() as pool:
        assert [*pool.map(preflight.link, [address] * 2, range(2))] == ["", ""]


class Asked(NodeCheck):
    """A check whose nodes answer as the test says."""

    def __init__(self, count):
        self.orders: list = []
        addresses = {i: f"10.0.0.{i}" for i in range(count)}
        super().__init__(itertools.count(7), range(count), addresses, self.order, 0.0)

    def order(self, node, message):
        self.orders.append((node, message))

    def well(self, *nodes):
        for node in nodes:
            self.node_answered(node, 7, [], 1000 + node)

    def linked(self):
        """All that were ordered to try links answer."""
        orders, self.orders = self.orders, []
        for node, message in orders:
            if message[0] == "link":
                self.link_answered(node, message[1], "")


def links(ticket, *pairs):
    """The orders of a round."""
    return [
        (node, ["link", ticket, f"10.0.0.{pair[0]}:{1000 + pair[0]}", index])
        for pair in pairs
        for index, node in enumerate(pair)
    ]


def test_nodes_first_then_links_in_rounds_of_disjoint_pairs():
    asked = Asked(4)
    assert asked.orders == [(node, ["check", 7]) for node in range(4)]
    asked.orders = []
    asked.well(0, 1, 2)
    asked.node_answered(3, 6, [], 1)  # of an earlier check
    assert asked.poll(1.0) is None and asked.orders == []
    asked.well(3)
    assert asked.poll(2.0) is None and asked.orders == links(8, (0, 1), (2, 3))
    asked.link_answered(0, 7, "late")  # of the order before
    asked.linked()
    assert asked.poll(2.0) is None and asked.orders == links(9, (1, 2), (0, 3))
    asked.linked()
    assert asked.poll(3.0) == []


def test_a_node_that_does_not_answer_is_found_and_tries_no_link():
    asked = Asked(3)
    asked.well(0, 2)
    late = preflight.SECONDS + ANSWER
    assert asked.poll(late - 1) is None
    asked.orders = []
    assert asked.poll(late) is None and asked.orders == links(8, (0, 2))
    asked.linked()
    ((node, found),) = asked.poll(late + 1)
    assert (node, found.action) == (1, "exclude") and "no answer within 60 s" in found.seen


def test_time_that_an_agent_stood_still_is_nobody_s_silence():
    """A job that was suspended during a check found all of its nodes hanging."""
    asked = Asked(1)
    asked.woke(500.0)
    assert asked.poll(500.1) is None
    asked.well(0)
    assert asked.poll(501.0) == []


@pytest.mark.slow
def test_agents_leave_out_a_node_whose_devices_do_not_answer_and_try_the_link_of_the_others(
    tmp_path,
):
    """Real probes: those of the leader's own node cannot even begin, so that the spare takes its
    place."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nif os.environ.get('NODE') == '0':\n    os.environ['JAX_PLATFORMS'] = 'nonsense'"
    )
    path = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{multiprocess_runs.ROOT}"}
    with start(tmp_path, "--check=always", "--nodes=2", agents=3, variables=path) as run:
        assert run.codes(120) == [0, 0, 0]
    (check,) = run.events("check")  # no link failed
    assert "devices" in check.concluded and "nonsense" in check.seen
    assert run.events("checked")[-1].facts["places"] == [1, 2]
    assert [event.facts["places"] for event in run.events("started")] == [[1, 2]] and run.steps()[
        -1
    ] == STEPS
