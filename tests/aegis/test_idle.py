"""Agents without processes: they are heard, and hear, for as long as they wait. Each waits three heartbeats here."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import multiprocess_runs
import pytest
from agents import STAND_IN, STEPS, start

from zaya_jax.aegis.decide import Decider, Rules
from zaya_jax.aegis.facts import Came, End, Lost, Ready
from zaya_jax.aegis.keeping import Keeper
from zaya_jax.aegis.leader import Leader, Plan
from zaya_jax.cluster import lines

SHORT = {"ZAYA_HEARTBEAT_SECONDS": "2"}


def test_nodes_that_wait_for_a_late_one_are_not_lost(tmp_path):
    """Whoever had no process was dropped after a heartbeat, and with it the whole job."""
    with start(tmp_path, "--nodes=3", agents=3, steps=5, variables=SHORT, late=6.5) as run:
        assert run.wait() == [0, 0, 0]
    assert not run.events("lost") and run.steps()[-1] == 5


def test_a_spare_waits_and_takes_the_place_of_a_lost_node(tmp_path):
    with start(tmp_path, "--nodes=2", agents=3, seconds=0.2, steps=60, variables=SHORT) as run:
        run.until_step(1)
        started = run.first("started")
        time.sleep(6.5)  # in which the third has nothing to say
        assert not run.events("lost")
        victim = started.facts["places"][1]
        run.agents[victim].kill()
        assert run.wait(of=[0, 3 - victim]) == [0, 0]
        assert run.gone()
    (lost,) = run.events("lost")
    assert "gone: killed" in lost.seen and run.steps()[-1] == 60


@pytest.mark.slow
def test_all_nodes_outlive_the_pauses_between_restarts(tmp_path):
    befalls = {1: "3 exit 9"}
    with start(tmp_path, "--restarts=3", agents=2, befalls=befalls, variables=SHORT) as run:
        for pause in ("at once", "in 5 s", "in 10 s"):
            run.until(f"restart {pause}")
            if pause != "in 10 s":
                (run.workdir / "do-1").write_text("3 exit 9")
        assert run.wait() == [0, 0]
    assert not run.events("lost") and run.steps()[-1] == STEPS


def test_a_loss_is_not_told_as_an_agent_that_did_not_come():
    decider = Decider(Rules(nodes=3, agents=3, join=30), 0.0)
    for fact in (Came(0, "a"), Ready(0), Came(1, "b"), Ready(1)):
        decider.take(fact, 1.0)
    (end,) = [action for action in decider.take(Lost(1, "cut"), 5.0) if isinstance(action, End)]
    assert end.text == "1 of 3 nodes are there; lost or left out: node 1"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_an_agent_that_looks_for_its_leader(tmp_path, number):
    environ = os.environ | {
        "PYTHONPATH": str(multiprocess_runs.ROOT), "PCI_DEVICES": "none", "NODES": "2", "NODE": "1",
        "JAX_COORDINATOR_ADDRESS": f"localhost:{multiprocess_runs.free_port()}",
    }  # fmt: skip
    command = [sys.executable, STAND_IN, "agent", "--", f"--workdir={tmp_path}", "5", "0.01"]
    agent = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)
    status = Path(f"/proc/{agent.pid}/status")
    while not int(status.read_text().split("SigCgt:")[1].split()[0], 16) >> (signal.SIGHUP - 1) & 1:
        time.sleep(0.05)  # its handlers are not set
    time.sleep(0.3)
    agent.send_signal(number)
    try:
        _, err = agent.communicate(timeout=20)
    finally:
        agent.kill()
    assert agent.returncode == 75 and "while it looked for its leader" in err, err


NONSENSE = (
    ["views"], ["exited"], ["finding"], ["stacks"], ["asked"], ["slept"], ["ready", "x"], ["views", 1, 5], ["?"],
    ["views", 1, [[1, "step", "x", "", 0, 0, "S", []]]], ["views", 1, [[1, [], 3, "", 0, 0, "S", []]]],
    ["views", 1, [[1, "step", 3, "", 0, 0, 5, []]]], ["views", 1, [[99, "step", 3, "", 0, 0, "S", [[1, 1, 1, 1]]]]],
    ["views", 1, [[1, "step", 3, "", 0, 0, "S", [["a", "b", "c", "d"]]]]], ["finding", {"name": 5}],
    ["stacks", 1, {"1": []}], ["exited", 1, "one", 0],
)  # fmt: skip


@pytest.fixture
def leader(tmp_path):
    """One of two nodes that run, each with one process."""
    plan, keeper = Plan(Rules(nodes=2, agents=2), tmp_path), Keeper(tmp_path)
    found = Leader(plan, keeper, lambda line: None, lambda node, message: None, 0.0)
    for node in (0, 1):
        found.came(node, f"host{node}", "localhost", 1.0)
        found.hear(node, ["ready", 5], 1.0)
    yield found
    found.end = found.end or (0, "")
    keeper.close(1)


@pytest.mark.parametrize("message", NONSENSE, ids=str)
def test_nonsense_of_a_known_agent_is_its_own_end_alone(leader, message):
    """Short lists ended the leader, and laps of a strange process dropped the next node that spoke."""
    with pytest.raises((ValueError, TypeError)):
        leader.hear(1, message, 2.0)
    leader.turn(3.0)
    leader.hear(0, ["views", 1, [[0, "step", 3, "", 0, 0, "S", [[2, 1.0, 0.5, 0.0]]]]], 4.0)
    leader.turn(5.0)
    assert leader.end is None


def test_a_caller_that_is_gone_before_it_is_welcomed_is_no_error_of_the_storage():
    server = lines.listen(0, "the test's", "")
    door = lines.Door(b"k", "d", 2, "")
    with socket.create_connection(server.getsockname()[:2]) as caller:
        while not (line := door.open(server)):
            time.sleep(0.01)
        nonce = json.loads(caller.makefile("rb").readline())[1]
        caller.sendall(
            json.dumps(["here", 1, "h", "d", "n", lines._proof(b"k", "caller", nonce, 1, "h", "d")]).encode()
            + b"\n"
        )
    time.sleep(0.05)
    assert door.hear(line, *line.read()) == "h" and line.host
    line.close()
    server.close()
