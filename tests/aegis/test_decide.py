"""The state machine that decides: each rule by itself, then random orders of facts, which never
leave it at a loss."""

import collections
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zaya_jax.aegis import cause, decide, log_rules
from zaya_jax.aegis.decide import Decider, Rules
from zaya_jax.aegis.facts import (
    AgentConnected,
    AgentLost,
    CheckNodes,
    CheckpointSeen,
    Command,
    Disconnect,
    EndAll,
    Exited,
    Hung,
    LogEvent,
    NodesChecked,
    Observed,
    Ready,
    StacksCollected,
    Start,
    Stepped,
    StopRequested,
    Tick,
)
from zaya_jax.cluster.events import ACTIONS, GROUPS, Finding
from zaya_jax.guard import guard


class World:
    """A decider with its clock, and nodes that obey."""

    def __init__(self, nodes, agents=None, min_nodes=None, each=1, **rules):
        self.now = 0.0
        self.decider = Decider(
            Rules(nodes, agents or nodes, min_nodes or nodes, processes=each, **rules), 0.0
        )
        self.seen: list = []
        for node in range(self.decider.rules.agents):
            self.take(AgentConnected(node, f"host{node}"))
            self.take(Ready(node))

    def take(self, *facts, after=0.0):
        """The actions that facts call for; a Kill is obeyed."""
        self.now += after
        out = []
        for fact in facts or (Tick(),):
            found = self.decider.take(fact, self.now)
            out += found
            self.seen += found
            if Command.KILL in found:
                out += self.take(*[Ready(node) for node in self.decider.nodes])
        return out

    def exit(self, *codes, after=0.1):
        """Processes end so, one a node, in this order: (node, code)."""
        out = []
        for node, code in codes:
            out += self.take(Exited(node, node, code), Ready(node), after=after)
        return out

    def starts(self):
        return [action.nodes for action in self.seen if isinstance(action, Start)]

    def end(self):
        return next((action.code for action in self.seen if isinstance(action, EndAll)), None)

    def events(self, kind):
        return [
            action.fields
            for action in self.seen
            if isinstance(action, LogEvent) and action.kind == kind
        ]


def finding(action, group="critical", name="x"):
    return Finding(name, group, action, "seen so")


@pytest.mark.parametrize(
    ("nodes", "restarts", "code", "saves", "starts", "end"),
    [
        (2, 5, 0, False, 1, 0),
        (2, 5, 2, False, 1, 2),  # a person is wanted
        (2, 5, 3, False, 1, 3),
        (1, 5, 4, False, 2, 4),  # storage is tried once more
        (1, 1, 75, False, 2, 1),  # no border of phases without a newer checkpoint
        (1, 0, 75, True, 10, None),  # one is a start at once, and costs nothing
        (1, 3, -9, False, 4, 137),  # as a shell says it
    ],
)
def test_how_often_it_starts_again_and_with_which_code_it_ends(
    nodes, restarts, code, saves, starts, end
):
    world = World(nodes=nodes, restarts=restarts)
    while world.end() is None and len(world.starts()) < 10:
        step = 5 * len(world.starts())
        world.take(Stepped(step), *([CheckpointSeen(step)] if saves else []))
        world.exit(*[(node, code) for node in range(nodes)])
        if code == 4 and world.end() is None:
            assert len(world.starts()) == 1  # after a pause
        world.take(after=0 if saves else 400)
    assert (len(world.starts()), world.end()) == (starts, end)


def test_a_loss_is_not_told_as_an_agent_that_did_not_come():
    decider = Decider(Rules(3, 3, 3, join=30), 0.0)
    for fact in (AgentConnected(0, "a"), Ready(0), AgentConnected(1, "b"), Ready(1)):
        decider.take(fact, 1.0)
    (end,) = [
        action for action in decider.take(AgentLost(1, "cut"), 5.0) if isinstance(action, EndAll)
    ]
    assert end.text == "1 of 3 nodes are there; lost or left out: node 1"


def ended(*codes):
    """Processes end so, one a node, in this order: (node, code)."""
    return [fact for node, code in codes for fact in (Exited(node, node, code), Ready(node))]


def says(process, line):
    """The finding in a line of a process of node 0."""
    (found,) = log_rules.Matcher().feed(process, line)
    return Observed(0, found)


def gone(process, other):
    line = f"error: process {other} on host0 is gone: killed, or crashed; see logs/process-0.log"
    return says(process, line)


LATE = 2.5  # seconds
CAUSES = {  # nodes, processes of each, what comes, and what the event of the end says
    "reported last": (
        (3, 1, *ended((2, 1), (0, 1), (1, -9))),
        {"process": 1, "seen": "SIGKILL", "node": "host1"},
    ),
    "others abort when one is gone": (
        (3, 1, *ended((2, -6), (1, -11), (0, 1))),
        {"process": 1, "seen": "SIGSEGV", "node": "host1"},
    ),
    "too late to be the cause": (
        (2, 1, *ended((1, 1)), LATE, *ended((0, -11))),
        {"process": 1, "seen": "exit code 1", "node": "host1"},
    ),
    # While a durable place was slow, a cut connection, and whatever else, was called "copy failed".
    "copies that are put off explain nothing": (
        (
            *(1, 2),
            says(0, "warning: step 2 is saved, but its copy is NOT: the one before is on its way"),
            says(0, "warning: cannot write s3://a/b yet: Could not connect to the endpoint URL"),
            *(Exited(0, 1, 1), Ready(0)),
        ),
        {"process": 1, "concluded": "", "group": "distributed"},
    ),
    "what follows from it explains nothing": (
        (3, 1, gone(0, 1), *ended((0, 1), (1, -9), (2, 1))),
        {"process": 1, "concluded": ""},
    ),
    "of findings at several nodes the first counts": (
        (
            *(3, 1),
            Observed(2, finding("warn", "distributed", "first")),
            Observed(0, finding("warn", "distributed", "second")),
            *ended((0, 1), (1, 1), (2, 1)),
        ),
        {"concluded": "first", "node": "host2"},
    ),
    "a full disk is of the process that the line names": (
        (
            *(1, 4),
            says(0, "error: 3 saves failed in a row, the last with: No space (process 2); E"),
            *(Exited(0, process, 4) for process in range(4)),
            Ready(0),
        ),
        {"process": 2, "group": "storage", "concluded": "the storage fails"},
    ),
    "two that accuse each other have lost their connection": (
        (1, 3, gone(0, 2), gone(2, 0), *(Exited(0, p, 1) for p in (1, 0, 2)), Ready(0)),
        {"process": 0, "concluded": "the connection between processes 0 and 2 broke"},
    ),
    "two that accuse a third have not": (
        (
            *(1, 3, gone(0, 2), gone(1, 2), Exited(0, 1, 1), Exited(0, 0, 1)),
            *(Exited(0, 2, -9), Ready(0)),
        ),
        {"process": 2, "concluded": ""},
    ),
}


@pytest.mark.parametrize("name", CAUSES)
def test_the_cause_is_named_and_not_who_followed(name):
    (nodes, each, *facts), said = CAUSES[name]
    world = World(nodes=nodes, each=each)
    for fact in facts:
        if isinstance(fact, float):
            world.now += fact
        else:
            world.take(fact, after=0.01)
    (died,) = world.events("died")
    assert said.items() <= died.items()


@pytest.mark.parametrize(("code", "waits", "then"), [(1, 1, 3), (0, 100, 30)])
def test_who_does_not_end_with_the_others_is_killed(code, waits, then):
    world = World(nodes=2)
    world.exit((0, code))
    assert Command.KILL not in world.take(after=waits)
    assert Command.KILL in world.take(after=then)
    assert code or "still running 130 s after process 0 exited" in world.events("hangs")[0]["seen"]


@pytest.mark.parametrize(("code", "kind"), [(3, 3), (0, "lost")])
def test_a_node_lost_while_others_end_hides_no_failure(code, kind):
    """A run that was unhealthy started again, and again, where an agent ended with it."""
    world = World(nodes=3, agents=4)
    world.exit((0, code))
    world.take(AgentLost(1, "gone"), after=1)
    world.take(Ready(2))
    assert world.end() == kind if code else world.events(kind)


def test_pauses_grow_and_progress_resets_them():
    world = World(nodes=1, restarts=4)
    pauses = []
    for _ in range(4):
        begun, world.now = world.now, world.now + 0.1
        count = len(world.starts())
        world.exit((0, -9))
        while len(world.starts()) == count:
            assert world.now < 1000
            world.take(after=0.5)
        pauses.append(world.now - begun)
    assert pauses[1] < pauses[2] < pauses[3]
    world.take(CheckpointSeen(10))
    world.exit((0, -9))
    assert world.events("died")[-1]["done"] == "restart at once"


Device = collections.namedtuple("Device", "name process_index")
Device.__str__ = lambda self: self.name


def wrong(processes, hosts=("host0", "host1", "host2")):
    """The finding in the line of a run that ends because a device of these processes is wrong."""
    devices = [Device(f"cpu:{2048 * p}", p) for p in processes]
    found = says(0, f"error: {guard.in_words(devices, hosts)} computes wrongly: it gave other bits")
    assert found.finding.name == cause.WRONG
    return found


@pytest.mark.parametrize("first", [(0, 1), (1, 0)])
def test_without_a_spare_a_node_with_a_wrong_device_is_tried_once_more(first):
    world = World(nodes=2)
    world.take(wrong([1]))
    world.exit(*[(node, 5) for node in first])
    assert world.starts() == [(0, 1)] * 2
    world.take(wrong([1]))
    world.exit(*[(node, 5) for node in first])
    assert world.end() == 5


@pytest.mark.parametrize(
    ("suspects", "out"),
    [
        ([0, 0], 0),  # two devices of one process
        ([2, 3], 1),  # a group on one node
        ([1, 2], None),  # on two
        (range(4), None),
        (range(17), None),  # more than the line names
        (None, None),  # the line was lost
        ([9], None),  # a process that is not there
    ],
)
@pytest.mark.parametrize("first", [(0, 1), (1, 0)])
def test_a_node_is_left_out_only_if_all_suspects_are_on_it(suspects, out, first):
    """The node whose end was heard first was left out for good where nobody knew the culprit."""
    world = World(nodes=2, agents=3, each=2)
    if suspects is not None:
        world.take(wrong(suspects, ["a-host-of-a-long-name.example.net"] * 20))
    for node in first:
        world.take(Exited(node, 2 * node, 5), Exited(node, 2 * node + 1, 5), Ready(node))
    assert list(world.decider.excluded) == ([] if out is None else [out])
    (died,) = world.events("died")
    assert died["node"] == ("" if out is None else f"host{out}")
    assert died["concluded"] == "a device computes wrongly" and len(world.starts()) == 2


BEGUN = Ready(1), Ready(2), Ready(3)
HUNG = Hung(1, 1, "stands", "first", 5.0)
BEFORE = {  # a state, by the facts that lead to it
    "gathering": (),
    "running": BEGUN,
    "ending": (*BEGUN, Exited(1, 1, 1)),
    "dumping": (*BEGUN, HUNG),
    "killing": (*BEGUN, HUNG, StacksCollected("")),
    "pausing": (*BEGUN, Exited(1, 1, 4), Ready(1), Exited(0, 0, 4), Ready(0)),
}


@pytest.mark.parametrize("state", BEFORE)
def test_a_finding_that_excludes_is_remembered_in_whatever_state_it_comes(state):
    decider, seen = Decider(Rules(2, 4, 2), 0.0), []
    come = [AgentConnected(node, f"host{node}") for node in range(4)]
    for fact in (*come, Ready(0), *BEFORE[state]):
        decider.take(fact, 1.0)
    assert decider.state == state
    broken = Finding("gpu uncorrectable memory error", "critical", "exclude", "1 -> 2")
    rest = BEGUN[1:] if state == "gathering" else ()
    for number, fact in enumerate([Observed(1, broken), Ready(0), Ready(1), *rest, *[Tick()] * 20]):
        seen += decider.take(fact, 2.0 + 5 * number)
    (start,) = [action for action in seen if isinstance(action, Start)]
    assert 1 not in start.nodes and 1 in decider.excluded
    (told,) = [a.fields for a in seen if isinstance(a, LogEvent) and a.kind in ("log", "hardware")]
    assert told["done"]


def test_without_a_spare_a_node_with_a_critical_finding_goes_on():
    world = World(nodes=2)
    assert Command.KILL not in world.take(Observed(1, finding("exclude")))
    assert "no spare" in world.events("log")[0]["done"]


def test_a_finding_restarts_the_run_or_only_explains_its_end():
    world = World(nodes=1)
    world.take(Observed(0, finding("warn", "storage")), Observed(0, finding("note", "critical")))
    assert world.end() is None and len(world.starts()) == 1
    world.take(Observed(0, finding("restart")))
    assert len(world.starts()) == 2 and world.events("found")[0]["concluded"] == "x"


def test_a_hang_collects_before_it_kills():
    world = World(nodes=2)
    out = world.take(Hung(1, 1, "stands", "first", 5.0))
    assert Command.DUMP_STACKS in out and Command.KILL not in out
    assert Command.KILL in world.take(StacksCollected("process 1 is at x.py:1"), after=1)
    (hangs,) = world.events("hangs")
    assert hangs["process"] == 1 and "x.py:1" in hangs["seen"] and len(world.starts()) == 2
    world = World(nodes=2)
    world.take(Hung(1, 1, "stands", "first", 5.0))
    assert Command.KILL in world.take(after=decide.COLLECT + 1)  # none came


def test_a_node_that_fails_twice_gives_place_to_a_spare():
    world = World(nodes=2, agents=3)
    for _ in range(2):
        world.exit((1, -9), (0, 1))
        world.take(after=10)
    assert world.starts() == [(0, 1), (0, 1), (0, 2)]


def test_a_node_that_does_not_stop_is_dropped():
    world = World(nodes=2, agents=3)
    world.decider.take(Hung(1, 1, "stands", "first", 5.0), 1.0)
    world.decider.take(StacksCollected(""), 2.0)
    world.decider.take(Ready(0), 2.0)
    out = world.decider.take(Tick(), 2.0 + decide.STOP)
    assert Disconnect(1) in out and Start(2, (0, 2)) in out


@pytest.mark.parametrize(
    "fact", [Tick(), StacksCollected("x")]
)  # its stacks are waited for, or its end
@pytest.mark.parametrize(
    ("agents", "least", "gives_up"), [(3, 2, True), (2, 1, True), (2, 2, False)]
)
def test_a_silent_node_that_is_not_needed_is_given_up_while_its_answer_is_waited_for(
    agents, least, gives_up, fact
):
    world = World(nodes=2, agents=agents, min_nodes=least)
    late = decide.SILENT + 0.1
    assert not world.decider.gives_up(1, 59.0)  # the run goes on: the usual limit counts
    world.decider.take(Hung(1, 1, "stands", "first", 4.5), 1.0)
    world.decider.take(fact, 1.0)
    assert world.decider.gives_up(1, late) == gives_up and not world.decider.gives_up(1, 2.0)
    if gives_up:
        out = world.decider.take(Ready(0), 2.0) + world.decider.take(
            AgentLost(1, "silent for 5 s"), 2.1
        )
        out += world.decider.take(Ready(0), 2.2)
        assert Start(2, (0, 2) if agents > 2 else (0,)) in out and not world.decider.gives_up(
            0, late
        )


def test_recovery_is_counted_to_the_first_new_step():
    world = World(nodes=1)
    world.take(Stepped(17), after=1)
    world.exit((0, -9), after=1)
    world.take(Stepped(11), after=4)
    (again,) = world.events("restarted")
    assert again["step"] == 11 and again["facts"]["was_at"] == 17 and again["seconds"] == 4.0


WRONG = Finding(
    "gpu computes wrongly",
    "critical",
    "exclude",
    "device 3: 1 of 4 numbers is wrong",
    -1,
    "device 3",
)
MISSING = Finding("gpu missing", "critical", "exclude", "7 devices are there, 8 are expected")


def test_each_start_is_checked():
    world = World(nodes=2, check=True)
    assert CheckNodes((0, 1)) in world.seen and not world.starts()
    world.take(NodesChecked((), 4.0))
    assert world.starts() == [(0, 1)]
    world.take(Stepped(1))
    world.exit((1, -9), (0, 1))
    assert world.seen.count(CheckNodes((0, 1))) == 2 and len(world.starts()) == 1
    world.take(NodesChecked((), 5.5), Stepped(2))
    assert world.starts() == [(0, 1)] * 2 and world.events("checked")[-1]["seconds"] == 5.5


def test_an_unfit_node_is_left_out_before_the_start_and_its_spare_is_checked_too():
    world = World(nodes=2, agents=3, check=True)
    world.take(NodesChecked(((1, WRONG),), 4.0))
    assert CheckNodes((0, 2)) in world.seen and not world.starts()
    assert world.events("excluded")[0]["node"] == "host1"
    assert world.events("check")[0]["concluded"] == WRONG.name
    slow = Finding("link is slow", "distributed", "warn", "1 GB/s", -1, "node 0-node 1")
    world.take(NodesChecked(((-1, slow),), 4.0))
    assert world.starts() == [(0, 2)]
    world.take(AgentLost(1, "gone"), AgentConnected(1, "host1"), Ready(1))
    assert world.events("came")[-1]["done"] == "it stays left out"


def test_without_a_spare_a_wrong_device_ends_it_and_another_fault_is_said():
    world = World(nodes=2, check=True)
    world.take(NodesChecked(((1, MISSING),), 4.0))
    assert world.starts() == [(0, 1)] and "no spare node" in world.events("check")[0]["done"]
    world.take(NodesChecked(((0, WRONG),), 4.0))  # an answer that was not asked for
    assert world.end() is None
    for found, code in (
        (((1, WRONG), (1, MISSING)), 5),
        (((-1, finding("stop", "distributed")),), 1),
    ):
        world = World(nodes=2, check=True)
        world.take(NodesChecked(found, 4.0))
        assert (
            not world.starts() and world.end() == code and len(world.events("check")) == len(found)
        )


def test_a_node_that_is_lost_or_a_wish_to_stop_during_the_check():
    world = World(nodes=2, agents=3, check=True)
    world.take(AgentLost(1, "gone"))
    assert CheckNodes((0, 2)) in world.seen
    world.take(NodesChecked((), 4.0))
    assert world.starts() == [(0, 2)]
    world = World(nodes=1, check=True)
    world.take(StopRequested("SIGTERM"))
    assert world.end() == 75


CODES = (0, 1, 2, 3, 4, 5, 75, 130, 134, -6, -9, -11, -15)


@settings(max_examples=400, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(0, 2),
    st.integers(0, 3),
    st.integers(0, 10**9),
)
def test_random_orders_of_facts_always_come_to_a_decision(nodes, spares, fewer, restarts, seed):
    """Nodes that die, hang, answer late or never; found things; signals. It never starts on a node
    that is excluded or lost, never has two starts at once, and always ends, since there is no
    progress for ever."""
    rng, now = random.Random(seed), 0.0
    wanted = Rules(
        nodes, nodes + spares, max(nodes - fewer, 1), restarts, join=60.0, check=rng.random() < 0.5
    )
    decider, everything = Decider(wanted, 0.0), range(nodes + spares)
    there, running, lost, dead = set(), set(), set(), set()  # of dead ones no answer comes any more
    checked, killed, saved, over = not wanted.check, False, 0, None

    def give(*given):
        nonlocal killed, over, checked
        for action in [action for fact in given for action in decider.take(fact, now)]:
            assert over is None, "it acts after its end"
            match action:
                case CheckNodes(chosen):
                    assert wanted.check and set(chosen) <= there and not running
                    checked = False
                case Start(_, chosen):
                    assert checked and not running and wanted.min_nodes <= len(chosen) <= nodes
                    assert not set(chosen) & (decider.excluded.keys() | lost), (
                        "on a node that is out"
                    )
                    assert set(chosen) <= there
                    running.update(chosen)
                    checked, killed = not wanted.check, False
                case Command.KILL:
                    killed = True
                case Disconnect(node):
                    lost.add(node)
                    running.discard(node)
                case EndAll():
                    over = action

    def finding():
        return Finding("x", rng.choice(GROUPS), rng.choice(ACTIONS), "seen")

    def one_of_running(code=None):
        node = rng.choice(sorted(running))
        if node not in dead or killed:
            running.discard(node)
        if node not in dead:
            give(Exited(node, node, rng.choice(CODES) if code is None else code), Ready(node))

    for node in everything:
        if rng.random() < 0.9:
            there.add(node)
            give(AgentConnected(node, f"h{node}"), Ready(node))
    for _ in range(3000):
        if over:
            break
        now += rng.choice((0.0, 0.1, 1.0, 5.0, 30.0, 130.0))
        roll, node = rng.random(), rng.choice(everything)
        if decider.state == "checking" and rng.random() < 0.7:
            checked = True
            give(
                NodesChecked(
                    tuple(
                        (rng.randrange(-1, nodes + spares), finding())
                        for _ in range(rng.randrange(3))
                    ),
                    1.0,
                )
            )
        if killed and running and rng.random() < 0.7:
            one_of_running(-9)
        elif roll < 0.4 and running:
            one_of_running()
        elif roll < 0.5:
            give(Observed(node, finding()))
        elif roll < 0.6 and running:
            give(Hung(rng.choice(sorted(running)), 0, "s", "c", 5.0))
        elif roll < 0.7:
            give(StacksCollected("x"))
        elif roll < 0.72 and node in there - lost:
            lost.add(node)
            running.discard(node)
            give(AgentLost(node, "gone"))
        elif roll < 0.75 and running:
            dead.add(node)
        elif roll < 0.8 and saved < 50:
            saved += 1
            give(CheckpointSeen(saved))
        elif roll < 0.83:
            give(Stepped(rng.randrange(100)))
        elif roll < 0.831:
            give(StopRequested("SIGTERM"))
        give(Tick())
        if decider.state == "running" and running and running <= dead:
            give(Hung(min(running), 0, "silent", "c", 5.0))  # as the agents would notice
    assert over, f"no end: {decider.state}"
