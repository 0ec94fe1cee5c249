"""The check before each start: nodes test themselves, then links in pairs; the run starts without the unfit ones."""

import multiprocess_runs
import pytest
from agents import STEPS, start

from zaya_jax.aegis import preflight
from zaya_jax.aegis.decide import Rules
from zaya_jax.aegis.keeping import Keeper
from zaya_jax.aegis.leader import Leader
from zaya_jax.aegis.node import Plan
from zaya_jax.aegis.preflight import ANSWER, Checking


class Asking:
    """A check whose nodes answer as the test says."""

    def __init__(self, count):
        self.orders: list = []
        addresses = {i: f"10.0.0.{i}" for i in range(count)}
        self.checking = Checking(7, range(count), addresses, lambda n, m: self.orders.append((n, m)), 0.0)

    def well(self, *nodes):
        for node in nodes:
            self.checking.hear(node, ["checked", 7, [], 1000 + node])

    def linked(self, wrong=lambda node: ""):
        """All that were ordered to try links answer."""
        orders, self.orders = self.orders, []
        for node, message in orders:
            if message[0] == "link":
                self.checking.hear(node, ["linked", 7, 1e9, wrong(node)])


def test_nodes_first_then_links_in_rounds_of_disjoint_pairs():
    asked = Asking(4)
    assert asked.orders == [(node, ["check", 7]) for node in range(4)]
    asked.orders = []
    asked.well(0, 1, 2)
    assert asked.checking.turn(1.0) is None and not asked.orders
    asked.checking.hear(3, ["checked", 6, [], 1])  # of an earlier check
    assert asked.checking.turn(1.0) is None
    asked.well(3)
    tried = set()
    for _ in range(2):
        assert asked.checking.turn(2.0) is None
        nodes = [node for node, _ in asked.orders]
        assert sorted(nodes) == [0, 1, 2, 3]
        for (a, ours), (b, theirs) in zip(asked.orders[::2], asked.orders[1::2], strict=True):
            assert ours == ["link", 7, f"10.0.0.{a}:{1000 + a}", 0] and theirs == [*ours[:3], 1]
            tried.add(frozenset((a, b)))
        asked.linked()
    assert asked.checking.turn(3.0) == [] and len(tried) == 4


def test_a_node_that_does_not_answer_is_found_and_tries_no_link():
    asked = Asking(3)
    asked.well(0, 2)
    late = preflight.SECONDS + ANSWER
    assert asked.checking.turn(late - 1) is None
    asked.orders = []
    assert asked.checking.turn(late) is None
    assert [node for node, _ in asked.orders] == [0, 2]
    asked.linked()
    (found,) = asked.checking.turn(late + 1)
    assert found[0] == 1 and found[1].action == "exclude" and "no answer within 60 s" in found[1].seen


def test_a_node_all_of_whose_links_fail_is_named_by_its_number():
    asked = Asking(4)
    asked.well(0, 1, 2, 3)
    asked.orders = []
    for _ in range(2):
        asked.checking.turn(1.0)
        (theirs,) = [message[2] for node, message in asked.orders if node == 2]
        cut = [node for node, message in asked.orders if message[2] == theirs]
        asked.linked(wrong=lambda node, cut=cut: "cut" if node in cut else "")
    found = asked.checking.turn(2.0)
    assert any(node == 2 and finding.action == "exclude" for node, finding in found)


def test_time_that_the_leader_stood_still_is_nobody_s_silence(tmp_path):
    """A job that was suspended during a check found all of its nodes hanging."""
    orders, messages = [], []
    plan = Plan(Rules(nodes=1, check=True), tmp_path)
    leader = Leader(plan, Keeper(tmp_path), messages.append, lambda node, message: orders.append(message), 0.0)
    leader.came(0, "host", "localhost", 0.0)
    leader.hear(0, ["ready", 1], 0.0)
    leader.woke(500.0, 500.0)
    leader.turn(500.1)
    leader.hear(0, ["checked", 1, [], 2], 501.0)
    leader.turn(501.1)
    assert [order[0] for order in orders] == ["check", "start"] and "0 findings" in messages[0]


@pytest.mark.slow
def test_agents_leave_out_a_node_whose_devices_do_not_answer_and_try_the_link_of_the_others(tmp_path):
    """Real probes: those of the leader's own node cannot even begin, so that the spare takes its place."""
    devices = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": multiprocess_runs.flags(1)}
    nonsense = {0: {"JAX_PLATFORMS": "nonsense"}}
    with start(tmp_path, "--check=always", "--nodes=2", agents=3, variables=devices, own=nonsense) as run:
        assert run.wait(120) == [0, 0, 0]
    (check,) = run.events("check")  # no link failed
    assert "devices" in check.concluded and "nonsense" in check.seen
    assert run.events("checked")[-1].facts["places"] == [1, 2]
    assert [event.facts["places"] for event in run.events("started")] == [[1, 2]] and run.steps()[-1] == STEPS
