"""The first cause of an end is named, and a node is left out only if the fault is its own."""

import pytest
from world import World, ended, finding, says, wrong

from zaya_jax.aegis.facts import Exited, Observed, Ready, Stepped
from zaya_jax.cluster.events import Finding


def gone(process, other):
    line = f"error: process {other} on host0 is gone: killed, or crashed; see logs/process-0.log"
    return says(process, line)


LATE = 2.5  # seconds
SEEN = Observed(0, Finding("x", "distributed", "warn", "seen so", 0))
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
    "a line after which the run went on explains nothing": (
        (1, 1, SEEN, LATE, Stepped(5), *ended((0, 1))),
        {"process": 0, "concluded": ""},
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
    assert died["concluded"] == "a device computes wrongly"
    assert world.decider.state == "running"  # again
