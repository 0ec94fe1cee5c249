"""The leader hears sound messages, and no odd one of an agent that it knows ends it."""

import json
import math

import pytest

from zaya_jax.aegis import facts
from zaya_jax.aegis.decide import Rules
from zaya_jax.aegis.keeping import Keeper
from zaya_jax.aegis.leader import FIELDS, Leader
from zaya_jax.aegis.node import Plan

VIEW = [1, "step", 4, "wait", 0.1, 0.2, "S", [[4, 1.0, 0.5, 0.0]]]
FINDING = {
    "name": "nic down",
    "group": "distributed",
    "action": "warn",
    "seen": "x",
    "process": -1,
    "device": "mlx5_0",
}
SOUND = {
    "ready": [4000],
    "views": [1, [VIEW]],
    "exited": [1, 1, -9],
    "finding": [FINDING],
    "checked": [1, [FINDING], 4000],
    "linked": [1, 1e9, ""],
    "stacks": [1, {"1": ["faulthandler", "x.py:1"]}],
    "asked": ["SIGTERM"],
    "slept": [4.0],
}
ODD = [None, True, -5, 10**400, math.nan, math.inf, 1.5, "x", [], [[]], {}, {"x": 1}, ["x"], [1, 2]]


@pytest.fixture
def leader(tmp_path):
    """That of a run of two nodes, which has begun."""
    said = Leader(Plan(Rules(2, 2, 2), tmp_path), Keeper(tmp_path), print, lambda *_: None, 0.0)
    for node in (0, 1):
        said.came(node, f"host{node}", "localhost", 0.0)
        said.hear(node, ["ready", 4000 + node], 0.0)
    assert said.decider.state == "running"
    yield said
    said.end = said.end or (0, "")


def mutants(value):
    """A message with one part in it exchanged by an odd one, left out, or added."""
    yield from (odd for odd in ODD if type(odd) is not type(value) or odd in (10**400, [], {}))
    parts = dict(enumerate(value)) if isinstance(value, list) else value
    for name, part in parts.items() if isinstance(parts, dict) else ():
        for odd in mutants(part):
            new = value.copy()
            new[name] = odd
            yield new
    if isinstance(value, list):
        yield from (value[:-1], [*value, 0])


def test_each_message_is_heard(leader):
    assert SOUND.keys() == FIELDS.keys()
    for kind, fields in SOUND.items():
        if kind != "asked":
            leader.hear(1, json.loads(json.dumps([kind, *fields])), 1.0)
    assert leader.decider.state == "ending"  # for what has exited
    leader.hear(0, ["asked", "SIGTERM"], 1.0)


@pytest.mark.parametrize("kind", SOUND)
def test_odd_ones_are_heard_or_refused(leader, kind):
    """Their sender is dropped at a ValueError (`lines.Door`)."""
    refused = 0
    for number, fields in enumerate(mutants(SOUND[kind])):
        try:
            leader.hear(1, [kind, *fields] if isinstance(fields, list) else [kind, fields], 1.0)
        except ValueError:
            refused += 1
        leader.turn(1.0 + number / 100)
        leader.take(facts.Tick(), 1.0 + number / 100)
    assert refused > 10 and leader.end is None
    with pytest.raises(ValueError, match="of node 1"):
        leader.hear(1, ["an unknown one"], 2.0)


def test_a_node_speaks_for_its_own_processes_alone(leader):
    leader.hear(1, ["exited", 1, 0, -9], 1.0)
    leader.hear(1, ["views", 1, [[0, *VIEW[1:]], [99, *VIEW[1:]]]], 1.0)
    leader.turn(1.0)
    assert leader.decider.state == "running"
