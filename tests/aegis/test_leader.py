"""A leader whose agents are messages: nonsense ends the agent that sent it alone, and nobody pays for its own sleep."""

import json
import socket
import time

import pytest

from zaya_jax.aegis.decide import Rules
from zaya_jax.aegis.keeping import Keeper
from zaya_jax.aegis.leader import Leader
from zaya_jax.aegis.node import Plan
from zaya_jax.cluster import lines

NONSENSE = (
    ["views"], ["exited"], ["finding"], ["stacks"], ["asked"], ["slept"], ["ready", "x"], ["views", 1, 5], ["?"],
    ["views", 1, [[1, "step", "x", "", 0, 0, "S", []]]], ["views", 1, [[1, [], 3, "", 0, 0, "S", []]]],
    ["views", 1, [[1, "step", 3, "", 0, 0, 5, []]]], ["views", 1, [[99, "step", 3, "", 0, 0, "S", [[1, 1, 1, 1]]]]],
    ["views", 1, [[1, "step", 3, "", 0, 0, "S", [["a", "b", "c", "d"]]]]], ["finding", {"name": 5}],
    ["stacks", 1, {"1": []}], ["exited", 1, "one", 0],
)  # fmt: skip


def test_nonsense_of_a_known_agent_is_its_own_end_alone(tmp_path):
    """Short lists ended the leader, and laps of a strange process dropped the next node that spoke."""
    keeper = Keeper(tmp_path)
    leader = Leader(Plan(Rules(nodes=2), tmp_path), keeper, lambda line: None, lambda node, message: None, 0.0)
    for node in (0, 1):
        leader.came(node, f"host{node}", "localhost", 1.0)
        leader.hear(node, ["ready", 5], 1.0)
    for now, message in enumerate(NONSENSE, start=2):
        with pytest.raises((ValueError, TypeError)):
            leader.hear(1, message, now)
        leader.turn(now)
        leader.hear(0, ["views", 1, [[0, "step", 3, "", 0, 0, "S", [[now, 1.0, 0.5, 0.0]]]]], now)
        leader.turn(now)
        assert leader.end is None, message
    leader.end = 0, ""
    keeper.close(1)


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


def test_a_caller_that_is_gone_before_it_is_welcomed_is_no_error_of_the_storage():
    server = lines.listen(0, "the test's", "")
    door = lines.Door(b"k", "d", 2, "")
    with socket.create_connection(server.getsockname()[:2]) as caller:
        while not (line := door.open(server)):
            time.sleep(0.01)
        nonce = json.loads(caller.makefile("rb").readline())[1]
        proof = lines._proof(b"k", "caller", nonce, 1, "h", "d")
        caller.sendall(json.dumps(["here", 1, "h", "d", "n", proof]).encode() + b"\n")
    time.sleep(0.05)
    assert door.hear(line, *line.read()) == "h" and line.host
    line.close()
    server.close()
