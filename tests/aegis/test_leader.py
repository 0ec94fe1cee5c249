"""A leader whose agents are messages: nobody pays for the time that the leader slept."""

import json
import socket
import time

from zaya_jax.aegis.decide import Rules
from zaya_jax.aegis.keeping import Keeper
from zaya_jax.aegis.leader import Leader
from zaya_jax.aegis.node import Plan
from zaya_jax.cluster import lines


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
