"""The state machine that decides: each rule by itself, then random orders of facts, which never
leave it at a loss."""

import collections
import random
from unittest.mock import ANY

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
    """A decider with its clock, and nodes that obey, but for those that are deaf."""

    def __init__(self, nodes, agents=None, min_nodes=None, each=1, deaf=(), **rules):
        self.now, self.deaf = 0.0, deaf
        self.decider = Decider(
            Rules(nodes, agents or nodes, min_nodes or nodes, processes=each, **rules), 0.0
        )
        self.seen: list = []
        for node in range(self.decider.rules.agents):
            self.take(AgentConnected(node, f"host{node}"), Ready(node))

    def take(self, *facts):
        """The actions that facts call for; a number is the seconds that pass before the next."""
        out = []
        for fact in facts:
            if isinstance(fact, int | float):
                self.now, fact = self.now + fact, Tick()
            found = self.decider.take(fact, self.now)
            out += found
            self.seen += found
            if Command.KILL in found:
                out += self.take(*[Ready(n) for n in self.decider.nodes if n not in self.deaf])
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
        world.take(*ended(*[(node, code) for node in range(nodes)]))
        if code == 4 and world.end() is None:
            assert len(world.starts()) == 1  # after a pause
        world.take(0 if saves else 400)
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
        world.take(0.01, fact)
    (died,) = world.events("died")
    assert said.items() <= died.items()


@pytest.mark.parametrize(("code", "waits", "then"), [(1, 1, 3), (0, 100, 30)])
def test_who_does_not_end_with_the_others_is_killed(code, waits, then):
    world = World(nodes=2)
    assert Command.KILL not in world.take(*ended((0, code)), waits)
    assert Command.KILL in world.take(then)
    assert code or "still running 130 s after process 0 exited" in world.events("hangs")[0]["seen"]


def test_pauses_grow_and_progress_resets_them():
    world = World(nodes=1, restarts=4)
    pauses = []
    for _ in range(4):
        begun, count = world.now, len(world.starts())
        world.take(*ended((0, -9)))
        while len(world.starts()) == count:
            assert world.now < 1000
            world.take(0.5)
        pauses.append(world.now - begun)
    assert pauses == [0, 5, 10, 20]
    world.take(CheckpointSeen(10), *ended((0, -9)))
    assert world.events("died")[-1]["done"] == "restart at once"


Device = collections.namedtuple("Device", "name process_index")
Device.__str__ = lambda self: self.name


def wrong(processes, hosts=("host0", "host1", "host2")):
    """The finding in the line of a run that ends because a device of these processes is wrong."""
    devices = [Device(f"cpu:{2048 * p}", p) for p in processes]
    found = says(0, f"error: {guard.in_words(devices, hosts)} computes wrongly: it gave other bits")
    assert found.finding.name == cause.WRONG
    return found


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


WRONG = Finding(
    "gpu computes wrongly",
    "critical",
    "exclude",
    "device 3: 1 of 4 numbers is wrong",
    -1,
    "device 3",
)
MISSING = Finding("gpu missing", "critical", "exclude", "7 devices are there, 8 are expected")
SLOW = Finding("link is slow", "distributed", "warn", "1 GB/s", -1, "node 0-node 1")
# The world, what comes (a number: seconds that pass), the orders, and the events of some kinds.
SCENES = {
    "a node lost while an unhealthy run ends hides nothing": (
        {"nodes": 3, "agents": 4},
        [*ended((0, 3)), 1, AgentLost(1, "gone")],
        [Start(1, (0, 1, 2)), Command.KILL, EndAll(3, ANY)],
        {},
    ),
    "a node lost while the others end well is the cause": (
        {"nodes": 3, "agents": 4},
        [*ended((0, 0)), 1, AgentLost(1, "gone")],
        [Start(1, (0, 1, 2)), Command.KILL, Start(2, (0, 2, 3))],
        {"lost": [{"node": "host1", "seen": "gone"}]},
    ),
    "without a spare a node with a wrong device is tried once more": (
        {"nodes": 2},
        [wrong([1]), *ended((0, 5), (1, 5)), wrong([1]), *ended((0, 5), (1, 5))],
        [Start(1, (0, 1)), Start(2, (0, 1)), EndAll(5, ANY)],
        {},
    ),
    "so it is if its own end is heard first": (
        {"nodes": 2},
        [wrong([1]), *ended((1, 5), (0, 5)), wrong([1]), *ended((1, 5), (0, 5))],
        [Start(1, (0, 1)), Start(2, (0, 1)), EndAll(5, ANY)],
        {},
    ),
    "without a spare a node with a critical finding goes on": (
        {"nodes": 2},
        [Observed(1, finding("exclude"))],
        [Start(1, (0, 1))],
        {"log": [{"done": decide.NO_SPARE}]},
    ),
    "some findings only explain an end": (
        {"nodes": 1},
        [Observed(0, finding("warn", "storage")), Observed(0, finding("note", "critical"))],
        [Start(1, (0,))],
        {},
    ),
    "others restart the run": (
        {"nodes": 1},
        [Observed(0, finding("restart"))],
        [Start(1, (0,)), Command.KILL, Start(2, (0,))],
        {"found": [{"concluded": "x"}]},
    ),
    "stacks are saved before a hanging run is killed": (
        {"nodes": 2},
        [HUNG, 1, StacksCollected("process 1 is at x.py:1")],
        [Start(1, (0, 1)), Command.DUMP_STACKS, Command.KILL, Start(2, (0, 1))],
        {"hangs": [{"process": 1, "seen": "stands; process 1 is at x.py:1"}]},
    ),
    "stacks are not waited for": (
        {"nodes": 2},
        [HUNG, decide.COLLECT + 1],
        [Start(1, (0, 1)), Command.DUMP_STACKS, Command.KILL, Start(2, (0, 1))],
        {},
    ),
    "a node that fails twice gives place to a spare": (
        {"nodes": 2, "agents": 3},
        [*ended((1, -9), (0, 1)), 10, *ended((1, -9), (0, 1)), 10],
        [Start(1, (0, 1)), Start(2, (0, 1)), Start(3, (0, 2))],
        {},
    ),
    "a node that does not stop is dropped": (
        {"nodes": 2, "agents": 3, "deaf": [1]},
        [HUNG, StacksCollected(""), decide.STOP],
        [Start(1, (0, 1)), Command.DUMP_STACKS, Command.KILL, Disconnect(1), Start(2, (0, 2))],
        {},
    ),
    "recovery is counted to the first new step": (
        {"nodes": 1},
        [Stepped(17), 1, *ended((0, -9)), 4, Stepped(11)],
        [Start(1, (0,)), Start(2, (0,))],
        {"restarted": [{"step": 11, "facts": {"was_at": 17}, "seconds": 4.0}]},
    ),
    "each start is checked": (
        {"nodes": 2, "check": True},
        [NodesChecked((), 4.0), Stepped(1), *ended((1, -9), (0, 1)), NodesChecked((), 5.5)],
        [CheckNodes((0, 1)), Start(1, (0, 1)), CheckNodes((0, 1)), Start(2, (0, 1))],
        {"checked": [{"seconds": 4.0}, {"seconds": 5.5}]},
    ),
    "an unfit node is left out before the start, and its spare is checked too": (
        {"nodes": 2, "agents": 3, "check": True},
        [
            NodesChecked(((1, WRONG),), 4.0),
            NodesChecked(((-1, SLOW),), 4.0),
            AgentLost(1, "gone"),
            AgentConnected(1, "host1"),
            Ready(1),
        ],
        [CheckNodes((0, 1)), CheckNodes((0, 2)), Start(1, (0, 2))],
        {
            "check": [{"concluded": WRONG.name}, {"concluded": SLOW.name}],
            "excluded": [{"node": "host1"}],
            "came": [{"done": "it waits for the next start"}, {"done": "it stays left out"}],
        },
    ),
    "without a spare a fault is said, and an answer that was not asked for does nothing": (
        {"nodes": 2, "check": True},
        [NodesChecked(((1, MISSING),), 4.0), NodesChecked(((0, WRONG),), 4.0)],
        [CheckNodes((0, 1)), Start(1, (0, 1))],
        {"check": [{"done": decide.NO_SPARE}]},
    ),
    "without a spare a wrong device ends it": (
        {"nodes": 2, "check": True},
        [NodesChecked(((1, WRONG), (1, MISSING)), 4.0)],
        [CheckNodes((0, 1)), EndAll(5, ANY)],
        {"check": [{"concluded": WRONG.name}, {"concluded": MISSING.name}]},
    ),
    "what wants a person ends it": (
        {"nodes": 2, "check": True},
        [NodesChecked(((-1, finding("stop", "distributed")),), 4.0)],
        [CheckNodes((0, 1)), EndAll(1, ANY)],
        {"check": [{"done": decide.NEEDS_PERSON}]},
    ),
    "a node is lost during the check": (
        {"nodes": 2, "agents": 3, "check": True},
        [AgentLost(1, "gone"), NodesChecked((), 4.0)],
        [CheckNodes((0, 1)), CheckNodes((0, 2)), Start(1, (0, 2))],
        {},
    ),
    "a signal before the training heeds it is an end as asked": (
        {"nodes": 1},
        [StopRequested("SIGTERM"), *ended((0, -15))],
        [Start(1, (0,)), Command.SAVE, EndAll(75, ANY)],
        {},
    ),
    "a wish to stop during the check": (
        {"nodes": 1, "check": True},
        [StopRequested("SIGTERM")],
        [CheckNodes((0,)), EndAll(75, ANY)],
        {},
    ),
}


@pytest.mark.parametrize("name", SCENES)
def test_what_comes_of_it(name):
    options, facts, orders, told = SCENES[name]
    world = World(**options)
    world.take(*facts)
    assert [action for action in world.seen if not isinstance(action, LogEvent)] == orders
    for kind, wanted in told.items():
        events = zip(world.events(kind), wanted, strict=True)
        assert [{name: event[name] for name in fields} for event, fields in events] == wanted


@pytest.mark.parametrize(
    "fact", [Tick(), StacksCollected("x")]
)  # its stacks are waited for, or its end
@pytest.mark.parametrize(
    ("agents", "least", "gives_up"), [(3, 2, True), (2, 1, True), (2, 2, False)]
)
def test_a_silent_node_that_is_not_needed_is_given_up_while_its_answer_is_waited_for(
    agents, least, gives_up, fact
):
    world = World(nodes=2, agents=agents, min_nodes=least, deaf=[1])
    late = decide.SILENT + 0.1
    assert not world.decider.gives_up(1, 59.0)  # the run goes on: the usual limit counts
    world.take(HUNG, fact)
    assert world.decider.gives_up(1, late) == gives_up and not world.decider.gives_up(1, 2.0)
    if gives_up:
        orders = world.take(AgentLost(1, "silent for 5 s"))
        assert Start(2, (0, 2) if agents > 2 else (0,)) in orders
        assert not world.decider.gives_up(0, late)


CODES = (0, 1, 2, 3, 4, 5, 75, 130, 134, -6, -9, -11, -15)
CHANCES = {  # of what comes next, in thousandths
    "exit": 400,
    "finding": 100,
    "hang": 100,
    "stacks": 100,
    "loss": 20,
    "death": 30,
    "save": 50,
    "step": 30,
    "stop": 1,
    "nothing": 169,
}


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
    rules = Rules(
        nodes, nodes + spares, max(nodes - fewer, 1), restarts, join=60.0, check=rng.random() < 0.5
    )
    decider, agents = Decider(rules, 0.0), range(rules.agents)
    there, running, lost, dead = set(), set(), set(), set()  # of dead ones no answer comes any more
    checked, killed, saved, over = not rules.check, False, 0, None

    def give(*facts):
        nonlocal killed, over, checked
        for action in [action for fact in facts for action in decider.take(fact, now)]:
            assert over is None, "it acts after its end"
            match action:
                case CheckNodes(chosen):
                    assert rules.check and set(chosen) <= there and not running
                    checked = False
                case Start(_, chosen):
                    assert checked and not running and rules.min_nodes <= len(chosen) <= nodes
                    assert set(chosen) <= there - lost - decider.excluded.keys(), "one is out"
                    running.update(chosen)
                    checked, killed = not rules.check, False
                case Command.KILL:
                    killed = True
                case Disconnect(node):
                    lost.add(node)
                    running.discard(node)
                case EndAll():
                    over = action

    def finding():
        return Finding("x", rng.choice(GROUPS), rng.choice(ACTIONS), "seen")

    def end_one(code):
        node = rng.choice(sorted(running - dead))
        running.discard(node)
        give(Exited(node, node, code), Ready(node))

    for node in agents:
        if rng.random() < 0.9:
            there.add(node)
            give(AgentConnected(node, f"h{node}"), Ready(node))
    for _ in range(3000):
        if over:
            return
        now += rng.choice((0.0, 0.1, 1.0, 5.0, 30.0, 130.0))
        node, often = rng.choice(agents), rng.random() < 0.7
        if decider.state == "checking" and often:
            checked = True
            found = [(rng.randrange(-1, len(agents)), finding()) for _ in range(rng.randrange(3))]
            give(NodesChecked(tuple(found), 1.0))
        (event,) = rng.choices([*CHANCES], CHANCES.values())
        match "kill" if killed and often else event:
            case "kill" if running - dead:
                end_one(-9)
            case "exit" if running - dead:
                end_one(rng.choice(CODES))
            case "finding":
                give(Observed(node, finding()))
            case "hang" if running:
                give(Hung(rng.choice(sorted(running)), 0, "s", "c", 5.0))
            case "stacks":
                give(StacksCollected("x"))
            case "loss" if node in there - lost:
                lost.add(node)
                running.discard(node)
                give(AgentLost(node, "gone"))
            case "death" if running:
                dead.add(node)
            case "save" if saved < 50:
                saved += 1
                give(CheckpointSeen(saved))
            case "step":
                give(Stepped(rng.randrange(100)))
            case "stop":
                give(StopRequested("SIGTERM"))
        give(Tick())
        if decider.state == "running" and running and running <= dead:
            give(Hung(min(running), 0, "silent", "c", 5.0))  # as the agents would notice
    raise AssertionError(f"no end: {decider.state}")
