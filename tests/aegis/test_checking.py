"""The check before each start: nodes that are unfit are left out, links are tried in pairs, and the run then begins."""

import socket

import multiprocess_runs
from agents import STEPS, start

from zaya_jax.aegis import preflight
from zaya_jax.aegis.decide import HARDWARE, PREEMPTED, Decider, Rules
from zaya_jax.aegis.events import Finding
from zaya_jax.aegis.facts import Asked, Came, Check, Checked, End, Exited, Lost, Ready, Say, Start, Stepped
from zaya_jax.aegis.keeping import Keeper
from zaya_jax.aegis.leader import Leader, Plan
from zaya_jax.aegis.preflight import ANSWER, Checking

WRONG = Finding(
    "gpu computes wrongly", "critical", "exclude", "device 3: 1 of 4 numbers is wrong", -1, "device 3"
)
MISSING = Finding("gpu missing", "critical", "exclude", "7 devices are there, 8 are expected")
SLOW = Finding("link is slow", "distributed", "warn", "1 GB/s", -1, "node 0-node 1")


class Decided:
    """A decider whose nodes are all there, and what it does."""

    def __init__(self, **rules):
        self.now, self.decider = 0.0, Decider(Rules(**rules, check=True), 0.0)
        self.did: list = []
        for node in range(self.decider.rules.agents):
            self.take(Came(node, f"host{node}"), Ready(node))

    def take(self, *facts):
        for fact in facts:
            self.now += 1
            self.did += self.decider.take(fact, self.now)

    def of(self, kind):
        return [action for action in self.did if isinstance(action, kind)]

    def said(self, kind):
        return [action.given for action in self.of(Say) if action.kind == kind]


def test_each_start_is_checked_and_what_it_took_is_in_the_event():
    run = Decided(nodes=2)
    assert run.of(Check) == [Check((0, 1))] and not run.of(Start)
    run.take(Checked((), 4.0))
    assert run.of(Start) == [Start(1, (0, 1))]
    run.take(Stepped(1), Exited(1, 1, -9), Ready(0), Ready(1))
    assert len(run.of(Check)) == 2 and len(run.of(Start)) == 1
    run.take(Checked((), 5.5))
    assert run.of(Start)[1:] == [Start(2, (0, 1))]
    run.take(Stepped(2))
    assert run.said("restarted")[0]["facts"]["check"] == 5.5


def test_an_unfit_node_is_left_out_before_the_start_and_its_spare_is_checked_too():
    run = Decided(nodes=2, agents=3)
    run.take(Checked(((1, WRONG),), 4.0))
    assert run.of(Check)[1:] == [Check((0, 2))] and not run.of(Start)
    assert run.said("excluded")[0]["node"] == "host1" and run.said("check")[0]["concluded"] == WRONG.name
    run.take(Checked(((-1, SLOW),), 4.0))
    assert run.of(Start) == [Start(1, (0, 2))]


def test_without_a_spare_a_wrong_device_ends_it_and_another_fault_is_said():
    run = Decided(nodes=2)
    run.take(Checked(((1, MISSING),), 4.0))
    assert run.of(Start) == [Start(1, (0, 1))]
    assert "no spare node" in run.said("check")[0]["done"]
    run = Decided(nodes=2)
    run.take(Checked(((1, WRONG), (1, MISSING)), 4.0))
    assert not run.of(Start) and run.of(End)[0].code == HARDWARE
    assert "device 3" in run.of(End)[0].text
    run = Decided(nodes=2)
    run.take(Checked(((-1, Finding("no link works", "distributed", "stop", "x", -1, "all nodes")),), 4.0))
    assert run.of(End)[0].code == 1 and len(run.said("check")) == 1


def test_a_node_that_is_lost_or_a_wish_to_stop_during_the_check():
    run = Decided(nodes=2, agents=3)
    run.take(Lost(1, "gone"))
    assert run.of(Check)[1:] == [Check((0, 2))]
    run.take(Checked((), 4.0))
    assert run.of(Start) == [Start(1, (0, 2))]
    run = Decided(nodes=1)
    run.take(Asked("SIGTERM"))
    assert run.of(End)[0].code == PREEMPTED
    run = Decided(nodes=1)
    run.take(Checked((), 4.0), Checked(((0, WRONG),), 4.0))  # the second is nobody's answer
    assert run.of(Start) and not run.of(End)


class Asking:
    """A check whose nodes answer as they are told."""

    def __init__(self, count):
        self.orders: list = []
        addresses = {i: f"10.0.0.{i}" for i in range(count)}
        self.checking = Checking(7, range(count), addresses, lambda n, m: self.orders.append((n, m)), 0.0)

    def well(self, *nodes, findings=()):
        for node in nodes:
            given = [finding.__dict__ for finding in findings]
            self.checking.hear(node, ["checked", 7, given, 1000 + node])

    def linked(self, bandwidth=1e9, wrong=lambda node: ""):
        """All that were ordered to try links answer."""
        orders, self.orders = self.orders, []
        for node, message in orders:
            if message[0] == "link":
                self.checking.hear(node, ["linked", 7, bandwidth, wrong(node)])


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


def test_who_does_not_answer_is_found_and_tries_no_link():
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


def test_agents_leave_out_a_node_whose_devices_do_not_answer(tmp_path):
    """Real probes: node 1 cannot even begin, node 0 is left alone, and a restart is checked again."""
    devices = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": multiprocess_runs.flags(1)}
    with start(
        tmp_path, "--check=always", "--nodes=2", "--min_nodes=1", agents=2, befalls={0: "12 kill"},
        variables=devices, own={1: {"JAX_PLATFORMS": "nonsense"}},
    ) as run:  # fmt: skip
        assert run.wait(120, of=[0]) == [0]
    (check,) = [event for event in run.events("check") if "devices" in event.concluded]
    assert check.node == socket.gethostname() and "nonsense" in check.seen
    assert [event.facts["places"] for event in run.events("started")] == [[0], [0]]
    assert run.events("restarted")[0].facts["check"] > 0 and run.steps()[-1] == STEPS


def test_agents_try_the_link_between_them(tmp_path):
    devices = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": multiprocess_runs.flags(1)}
    with start(tmp_path, "--check=always", agents=2, variables=devices) as run:
        assert run.wait(120) == [0, 0]
    assert not [event for event in run.events("check") if event.concluded.startswith("link")]
    assert len(run.events("started")) == 1


def test_time_that_the_leader_stood_still_is_nobody_s_silence(tmp_path):
    """A job that was suspended during a check found all of its nodes hanging."""
    orders, said = [], []
    plan = Plan(Rules(nodes=1, check=True), tmp_path)
    leader = Leader(plan, Keeper(tmp_path), said.append, lambda node, message: orders.append(message), 0.0)
    leader.came(0, "host", "localhost", 0.0)
    leader.hear(0, ["ready", 1], 0.0)
    leader.woke(500.0, 500.0)
    leader.turn(500.1)
    leader.hear(0, ["checked", 1, [], 2], 501.0)
    leader.turn(501.1)
    assert [order[0] for order in orders] == ["check", "start"] and "0 findings" in said[0]


def test_a_node_that_was_left_out_and_comes_again_is_no_spare_and_both_checks_are_counted():
    run = Decided(nodes=2, agents=3)
    run.take(Checked((), 4.0), Stepped(1), Exited(1, 1, -9), Ready(0), Ready(1))
    run.take(
        Checked(((1, WRONG),), 5.0), Checked((), 6.0), Lost(1, "gone"), Came(1, "host1"), Ready(1), Stepped(2)
    )
    assert run.of(Start)[-1] == Start(2, (0, 2))
    assert run.said("restarted")[0]["facts"]["check"] == 11.0
    assert run.said("came")[-1]["done"] == "it stays left out"
