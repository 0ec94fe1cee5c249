"""Where an agent stands among agents, which devices its processes take, and whose stacks can be had."""

import os
import signal
import subprocess
import sys
import time

import pytest

from zaya_jax.aegis import stacks, standing
from zaya_jax.cluster.place import Place
from zaya_jax.config import UserError

SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "gpu[03-06]", "SLURM_NTASKS": "4", "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
}  # fmt: skip


def test_from_flags_variables_slurm_and_pods():
    assert standing.find({}) is None
    assert (
        standing.find({"JAX_NUM_PROCESSES": "8", "JAX_PROCESS_ID": "3"}) is None
    )  # a process's, not an agent's
    ours = {"NODES": "16", "NODE": "3", "JAX_COORDINATOR_ADDRESS": "host:1"}
    assert standing.find(ours) == Place("host:1", 16, 3)
    assert standing.find(ours, agents=2, agent=1) == Place("host:1", 2, 1)
    assert standing.find({**ours, "NODES": "1", "NODE": "0"}) is None
    found = standing.find(SLURM)
    assert (found.count, found.index) == (4, 2) and found.coordinator.startswith("gpu03:")
    pod = {"JOB_COMPLETION_INDEX": "1", "NODES": "2", "JAX_COORDINATOR_ADDRESS": "host:1"}
    assert standing.find(pod) == Place("host:1", 2, 1)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"NODES": "2"}, r"--agents \(NODES\) is given, but not --coordinator \(JAX_COORDINATOR_ADDRESS\) and --agent"),
        ({"NODES": "2", "NODE": "2", "JAX_COORDINATOR_ADDRESS": "h:1"}, "agent=2 of agents=2 is no process"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "8(x4)"}, "one task a node"),
        ({"NODES": "two", "NODE": "0", "JAX_COORDINATOR_ADDRESS": "h:1"}, "agents='two' is no whole number"),
    ],
)  # fmt: skip
def test_refuses_by_the_agents_own_names(environ, words):
    with pytest.raises(UserError, match=words):
        standing.find(environ)


def test_finds_accelerators_in_the_order_of_their_addresses(tmp_path):
    for i, (kind, numa) in enumerate(
        (("0x120000", "1"), ("0x020000", "0"), ("0x030200", "0"), ("0x120000", "?"))
    ):
        device = tmp_path / f"0000:0{i}:00.0"
        device.mkdir()
        (device / "class").write_text(f"{kind}\n")
        (device / "numa_node").write_text(f"{numa}\n")
    (tmp_path / "0000:09:00.0").mkdir()
    assert standing.gpus({"PCI_DEVICES": str(tmp_path)}) == [1, 0, -1]


def test_binds_to_a_numa_node_where_numactl_is(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert standing.beside(1) == []
    (tmp_path / "numactl").write_text("#!/bin/sh\n")
    (tmp_path / "numactl").chmod(0o755)
    assert standing.beside(1) == ["numactl", "--cpunodebind=1", "--preferred=1"] and standing.beside(-1) == []


SPY = """#!/bin/sh
echo "Process $4: python"
echo 'Thread 1 (idle): "MainThread"'
echo "    wait (threading.py:355)"
echo "    train (zaya_jax/x/y.py:17)"
echo 'Thread 2 (active): "pulse"'
echo "    _live (beats.py:106)"
"""


def test_a_process_that_does_not_listen_is_left_alive_and_looked_at_from_outside(tmp_path, monkeypatch):
    """SIGUSR1 would kill it: its handler is not there yet."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"], stdout=-1
    )
    process.stdout.readline()
    target = {3: stacks.Target(process.pid, tmp_path / "none.log")}
    monkeypatch.setenv("PATH", str(tmp_path))
    found = stacks.collect(target)[3]
    assert (
        found.how == "/proc"
        and f"thread {process.pid}" in found.text
        and found.line.startswith(("state S", "state R"))
    )
    process.send_signal(signal.SIGSTOP)
    while stacks.state(process.pid) != "T":
        time.sleep(0.01)
    (tmp_path / "py-spy").write_text(SPY)
    (tmp_path / "py-spy").chmod(0o755)
    found = stacks.collect(target)[3]
    assert found.how == "py-spy"
    assert found.line == "threading.py:355 in wait" and "state T" in found.text
    assert process.poll() is None
    process.kill()
    process.communicate()
    assert stacks.state(process.pid) == "?"


def test_a_child_does_not_start_for_a_parent_that_is_gone(tmp_path):
    from zaya_jax.aegis import child

    become = [sys.executable, "-I", "-S", child.__file__]
    done = subprocess.run([*become, str(os.getpid()), "echo", "ran"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "ran\n")
    done = subprocess.run([*become, "1", "echo", "ran"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    done = subprocess.run([*become, str(os.getpid()), "no such program"], capture_output=True, text=True)
    assert done.returncode == 2 and "does not start" in done.stderr


@pytest.mark.parametrize(("patience", "least"), [(0.5, 0.5), (30.0, 30.0), (120.0, 120.0), (3600.0, 3600.0)])
def test_collectives_wait_as_long_as_the_patience_and_less_than_twice_that(patience, least):
    found = standing.time_outs(patience)
    waited = 4.096e-6 * 2 ** int(found["NCCL_IB_TIMEOUT"]) * int(found["NCCL_IB_RETRY_CNT"])
    assert least <= waited <= 2 * patience and int(found["NCCL_IB_TIMEOUT"]) <= 31
    assert standing.time_outs(0.0) == {}
