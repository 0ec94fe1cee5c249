"""Which devices a node's processes take, how they are started, and whose stacks can be had."""

import os
import signal
import subprocess
import sys

import pytest
from waiting import until

from zaya_jax.aegis import machine, stacks


def test_finds_accelerators_in_the_order_of_their_addresses(tmp_path):
    for i, (kind, numa) in enumerate(
        (("0x120000", "1"), ("0x020000", "0"), ("0x030200", "0"), ("0x120000", ""))
    ):
        device = tmp_path / f"sys/bus/pci/devices/0000:0{i}:00.0"
        device.mkdir(parents=True)
        (device / "class").write_text(f"{kind}\n")
        if numa:
            (device / "numa_node").write_text(f"{numa}\n")
    (tmp_path / "sys/bus/pci/devices/0000:09:00.0").mkdir()
    assert machine.gpu_numa_nodes(tmp_path) == [1, 0, -1]


def test_binds_to_a_numa_node_where_numactl_is(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.numactl_prefix(1) == []
    (tmp_path / "numactl").write_text("#!/bin/sh\n")
    (tmp_path / "numactl").chmod(0o755)
    assert machine.numactl_prefix(1) == ["numactl", "--cpunodebind=1", "--preferred=1"]
    assert machine.numactl_prefix(-1) == []


@pytest.mark.parametrize(
    ("processes", "parts"),
    [
        (4, [("0", 0), ("1", 0), ("2", 1), ("3", 1)]),
        (2, [("0,1", 0), ("2,3", 1)]),
        (1, [(None, None)]),  # it drives the GPUs of both NUMA nodes
        (8, [(None, None)]),
    ],
)
def test_processes_share_all_gpus_of_a_node(monkeypatch, processes, parts):
    """Two processes took one each of eight GPUs, and said nothing."""
    monkeypatch.setattr(machine, "numactl_prefix", lambda numa: numa)
    for i, (ids, numa) in enumerate(parts):
        variables, near = machine.part_of_gpus([0, 0, 1, 1], i, processes)
        assert (variables.get("JAX_LOCAL_DEVICE_IDS"), near) == (ids, [] if numa is None else numa)


def test_a_process_that_does_not_listen_is_left_alive_and_looked_at_from_outside(tmp_path):
    """SIGUSR1 would kill it: its handler is not there yet."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"], stdout=-1
    )
    process.stdout.readline()
    target = {3: stacks.StackTarget(process.pid, tmp_path / "none.log")}
    found = stacks.collect(target)[3]
    assert (
        found.how == "/proc"
        and f"thread {process.pid}" in found.text
        and found.line.startswith(("state S", "state R"))
    )
    process.send_signal(signal.SIGSTOP)
    until(lambda: stacks.state(process.pid) == "T")
    assert "state T" in stacks.collect(target)[3].text
    assert process.poll() is None
    process.kill()
    process.communicate()
    assert stacks.state(process.pid) == "?"


def test_a_child_does_not_start_for_a_parent_that_is_gone():
    def started(parent, *words):
        *become, _ = machine.die_with_parent_prefix()
        done = subprocess.run([*become, str(parent), *words], capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    assert started(os.getpid(), "echo", "ran") == (0, "ran\n", "")
    assert started(1, "echo", "ran") == (1, "", "")
    error = "error: no such program does not start: No such file or directory\n"
    assert started(os.getpid(), "no such program") == (2, "", error)


@pytest.mark.parametrize("patience", [0.5, 30.0, 120.0, 3600.0])
def test_collectives_wait_as_long_as_the_patience_and_less_than_twice_that(patience):
    found = machine.nccl_timeouts(patience)
    waited = 4.096e-6 * 2 ** int(found["NCCL_IB_TIMEOUT"]) * int(found["NCCL_IB_RETRY_CNT"])
    assert patience <= waited <= 2 * patience and int(found["NCCL_IB_TIMEOUT"]) <= 31
    assert machine.nccl_timeouts(0.0) == {}


@pytest.mark.parametrize(
    ("named", "absent"),
    [
        (None, ""),
        ("", ""),
        ("ionic_0,ionic_1", ""),
        ("ionic", ""),  # all whose names begin so
        ("=ionic_0:1,ionic_1", ""),
        ("^mlx5_7", ""),  # all but these
        ("ionic_0,ionic_7:1,mlx5", "ionic_7, mlx5"),
        ("=ionic", "ionic"),
    ],
)
def test_network_cards_that_are_named_and_not_there_are_said(tmp_path, named, absent):
    """RCCL takes sockets then, and says nothing."""
    for card in ("ionic_0", "ionic_1"):
        (tmp_path / "sys/class/infiniband" / card).mkdir(parents=True)
    words = machine.missing_cards({"NCCL_IB_HCA": named} if named is not None else {}, tmp_path)
    assert (f"NCCL_IB_HCA names {absent}, but /sys/class" in words) == bool(absent)
    assert bool(words) == bool(absent)
