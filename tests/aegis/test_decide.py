"""The state machine that decides: each rule by itself, then random orders of facts, which never
leave it at a loss."""

import random
from unittest.mock import ANY

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from world import World, ended, finding, wrong

from zaya_jax.aegis import decide
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

HUNG = Hung(1, "stands", "first", 5.0)
DIES = ended((0, -9))
BROKEN = Observed(1, finding("exclude"))
WRONG = Finding("gpu computes wrongly", "critical", "exclude", "1 of 4 is wrong", -1, "device 3")
MISSING = Finding("gpu missing", "critical", "exclude", "7 devices are there, 8 are expected")
SLOW = Finding("link is slow", "distributed", "warn", "1 GB/s", -1, "node 0-node 1")
AT_ONCE = {"done": "restart at once"}
IN_5_S = {"done": "restart in 5 s, with the node: no spare could take its place"}
LATER = "the next start leaves it out if others suffice"
# The world, what comes (a number: seconds that pass), the orders, and the events of some kinds.
SCENES = {
    "all are done": (
        {"nodes": 2},
        [*ended((0, 0), (1, 0))],
        [Start(1, (0, 1)), EndAll(0, ANY)],
        {},
    ),
    "bad input wants a person": (
        {"nodes": 2},
        [*ended((0, 2), (1, 2))],
        [Start(1, (0, 1)), EndAll(2, ANY)],
        {},
    ),
    "an unhealthy run wants a person": (
        {"nodes": 2},
        [*ended((0, 3), (1, 3))],
        [Start(1, (0, 1)), EndAll(3, ANY)],
        {},
    ),
    "storage is tried once more, after a pause": (
        {"nodes": 1},
        [*ended((0, 4)), 29, *DIES, 1, *ended((0, 4))],
        [Start(1, (0,)), Start(2, (0,)), EndAll(4, ANY)],
        {"died": [{"done": "restart in 30 s"}, {"done": decide.NEEDS_PERSON}]},
    ),
    "after progress it is tried again": (
        {"nodes": 1},
        [*ended((0, 4)), 30, CheckpointSeen(5), *ended((0, 4)), 30],
        [Start(1, (0,)), Start(2, (0,)), Start(3, (0,))],
        {"died": [{"done": "restart in 30 s"}] * 2},
    ),
    "a border of phases is a start at once, and costs nothing": (
        {"nodes": 1, "restarts": 0},
        [CheckpointSeen(5), *ended((0, 75)), CheckpointSeen(10), *ended((0, 75))],
        [Start(1, (0,)), Start(2, (0,)), Start(3, (0,))],
        {"border": [AT_ONCE] * 2},
    ),
    "without a newer checkpoint it is none": (
        {"nodes": 1, "restarts": 1},
        [CheckpointSeen(5), *ended((0, 75)), *ended((0, 75)), *ended((0, 75))],
        [Start(1, (0,)), Start(2, (0,)), Start(3, (0,)), EndAll(1, ANY)],
        {"died": [AT_ONCE, {"done": "ending the run"}]},
    ),
    "pauses grow, and it ends with the code that a shell says": (
        {"nodes": 1, "restarts": 3},
        [*DIES, *DIES, 5, *DIES, 10, *DIES],
        [*(Start(number, (0,)) for number in range(1, 5)), EndAll(137, ANY)],
        {},
    ),
    "pauses are waited for": (
        {"nodes": 1},
        [*DIES, *DIES, 4.9],
        [Start(1, (0,)), Start(2, (0,))],
        {"died": [AT_ONCE, IN_5_S]},
    ),
    "progress resets them": (
        {"nodes": 1, "restarts": 2},
        [*DIES, *DIES, 5, CheckpointSeen(10), *DIES],
        [Start(number, (0,)) for number in range(1, 5)],
        {"died": [AT_ONCE, IN_5_S, AT_ONCE]},
    ),
    "who does not end with the others has a moment": (
        {"nodes": 2},
        [*ended((0, 1)), 2.9],
        [Start(1, (0, 1))],
        {},
    ),
    "then it is killed": (
        {"nodes": 2},
        [*ended((0, 1)), 3],
        [Start(1, (0, 1)), Command.KILL, Start(2, (0, 1))],
        {},
    ),
    "who still saves has two minutes": (
        {"nodes": 2},
        [*ended((0, 0)), 119],
        [Start(1, (0, 1))],
        {},
    ),
    "then it hangs": (
        {"nodes": 2},
        [*ended((0, 0)), 100, 30],
        [Start(1, (0, 1)), Command.KILL, Start(2, (0, 1))],
        {"hangs": [{"seen": "still running 130 s after process 0 exited with code 0"}]},
    ),
    "a loss is not told as an agent that did not come": (
        {"nodes": 3, "absent": [2]},
        [AgentLost(1, "cut")],
        [EndAll(1, "1 of 3 nodes are there; lost or left out: node 1")],
        {},
    ),
    # A finding that excludes is remembered in whatever state it comes.
    "it comes while the run trains": (
        {"nodes": 2, "agents": 3},
        [BROKEN],
        [Start(1, (0, 1)), Command.KILL, Start(2, (0, 2))],
        {"log": [{"done": "restart"}], "excluded": [{"node": "host1"}]},
    ),
    "it comes while others end": (
        {"nodes": 2, "agents": 3},
        [Exited(1, 1, 1), BROKEN, Ready(0), Ready(1)],
        [Start(1, (0, 1)), Start(2, (0, 2))],
        {"log": [{"done": LATER}], "excluded": [{"node": "host1"}]},
    ),
    "it comes while stacks are saved": (
        {"nodes": 2, "agents": 3},
        [HUNG, BROKEN, StacksCollected("")],
        [Start(1, (0, 1)), Command.DUMP_STACKS, Command.KILL, Start(2, (0, 2))],
        {"log": [{"done": LATER}], "excluded": [{"node": "host1"}]},
    ),
    "it comes while all are killed": (
        {"nodes": 2, "agents": 3, "deaf": [0, 1]},
        [HUNG, StacksCollected(""), BROKEN, Ready(0), Ready(1)],
        [Start(1, (0, 1)), Command.DUMP_STACKS, Command.KILL, Start(2, (0, 2))],
        {"log": [{"done": LATER}], "excluded": [{"node": "host1"}]},
    ),
    "it comes before the next start": (
        {"nodes": 2, "agents": 3},
        [*ended((0, 4), (1, 4)), BROKEN, 30],
        [Start(1, (0, 1)), Start(2, (0, 2))],
        {"log": [{"done": LATER}], "excluded": [{"node": "host1"}]},
    ),
    "it comes before all are there": (
        {"nodes": 2, "agents": 3, "absent": [0, 2]},
        [BROKEN, AgentConnected(0, "host0"), AgentConnected(2, "host2"), Ready(0), Ready(2)],
        [Start(1, (0, 2))],
        {"log": [{"done": LATER}], "excluded": [{"node": "host1"}]},
    ),
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
    "a node that comes back during the check is tested before it starts": (
        {"nodes": 2, "agents": 3, "check": True},
        [AgentLost(0, "gone"), AgentConnected(0, "host0"), Ready(0), NodesChecked((), 4.0)],
        [CheckNodes((0, 1)), CheckNodes((1, 2)), CheckNodes((0, 1))],
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
    "return": 20,
    "death": 30,
    "save": 50,
    "step": 30,
    "stop": 1,
    "nothing": 149,
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
    asked, passed, killed, saved, over = (), (), False, 0, None  # nodes of the last check

    def give(*facts):
        nonlocal asked, passed, killed, over
        for action in [action for fact in facts for action in decider.take(fact, now)]:
            assert over is None, "it acts after its end"
            match action:
                case CheckNodes(chosen):
                    assert rules.check and set(chosen) <= there and not running
                    asked = chosen
                case Start(_, chosen):
                    assert passed == chosen or not rules.check
                    assert not running and rules.min_nodes <= len(chosen) <= nodes
                    assert set(chosen) <= there - lost - decider.excluded.keys(), "one is out"
                    running.update(chosen)
                    passed, killed = (), False
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
            passed = asked
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
                give(Hung(rng.randrange(len(decider.nodes)), "s", "c", 5.0))
            case "stacks":
                give(StacksCollected("x"))
            case "loss" if node in there - lost:
                lost.add(node)
                running.discard(node)
                give(AgentLost(node, "gone"))
            case "return" if node in lost - dead:
                lost.discard(node)
                give(AgentConnected(node, f"h{node}"), Ready(node))
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
            give(Hung(0, "silent", "c", 5.0))  # as the agents would notice
    raise AssertionError(f"no end: {decider.state}")
