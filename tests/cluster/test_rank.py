"""The rank of a process or an agent, from flags, variables, Slurm, a pod; refusals."""

import pytest
from refusals import refusal

from zaya_jax.cluster.rank import Rank, find_agent_rank, find_rank, join_address, split_address

SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "gpu[017-020,031]",
    "SLURM_NTASKS": "40",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "8(x5)",
}
JAX = {"JAX_COORDINATOR_ADDRESS": "node0:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "2"}
POD = {
    "JAX_COORDINATOR_ADDRESS": "zaya-0-0.zaya:1234",
    "JAX_NUM_PROCESSES": "4",
    "JOB_COMPLETION_INDEX": "3",
}

NODES = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "gpu[03-06]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
}


@pytest.mark.parametrize(
    ("environ", "given", "rank"),
    [
        ({}, {}, None),
        ({"JAX_NUM_PROCESSES": "1", "JOB_COMPLETION_INDEX": "0"}, {}, None),
        (SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, {}, None),
        # a shell of salloc: not one of the tasks
        ({"SLURM_NTASKS": "40", "SLURM_JOB_ID": "1"}, {}, None),
        (JAX, {}, Rank("node0:1234", 4, 2)),
        (POD, {}, Rank("zaya-0-0.zaya:1234", 4, 3)),
        (JAX, {"process_id": 0}, Rank("node0:1234", 4, 0)),
        ({}, {"coordinator": "h:1", "num_processes": 2, "process_id": 1}, Rank("h:1", 2, 1)),
        (SLURM, {}, Rank("gpu017:61441", 40, 9, (1,))),
        (SLURM | {"ROCR_VISIBLE_DEVICES": "1"}, {}, Rank("gpu017:61441", 40, 9)),
        (SLURM | {"ROCR_VISIBLE_DEVICES": "0,1,2,3"}, {}, Rank("gpu017:61441", 40, 9, (1,))),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1(x40)"}, {}, Rank("gpu017:61441", 40, 9)),
        (SLURM | {"JAX_COORDINATOR_PORT": "7000"}, {}, Rank("gpu017:7000", 40, 9, (1,))),
        (SLURM | {"SLURM_STEP_NODELIST": "a,b"}, {}, Rank("a:61441", 40, 9, (1,))),
        (SLURM | {"SLURM_STEP_NODELIST": "a[1-3,7]-ib"}, {}, Rank("a1-ib:61441", 40, 9, (1,))),
        (SLURM | {"SLURM_STEP_NODELIST": "r[1-2]n[3,4],b"}, {}, Rank("r1n3:61441", 40, 9, (1,))),
        (SLURM | JAX, {}, Rank("node0:1234", 4, 2)),  # a launcher of one's own inside a Slurm task
    ],
)
def test_ranks(environ, given, rank):
    assert find_rank(environ, given) == rank


@pytest.mark.parametrize(
    ("environ", "given", "words"),
    [
        ({"JAX_NUM_PROCESSES": "4"}, {}, ("--num_processes", "--coordinator", "--process_id")),
        (
            {},
            {"coordinator": "h:1"},
            ("--coordinator", "--num_processes (JAX_NUM_PROCESSES)", "--process_id"),
        ),
        (
            {},
            {"num_processes": 2, "process_id": 0},
            ("not --coordinator (JAX_COORDINATOR_ADDRESS)",),
        ),
        (JAX | {"JAX_PROCESS_ID": "4"}, {}, ("process_id=4", "num_processes=4")),
        (JAX | {"JAX_PROCESS_ID": "two"}, {}, ("process_id='two'", "whole number")),
        (JAX | {"JAX_COORDINATOR_ADDRESS": "node0"}, {}, ("'node0'", "host:port")),
        (
            {"SLURM_NTASKS": "40", "SLURM_PROCID": "0", "SLURM_JOB_ID": "1"},
            {},
            ("40 Slurm tasks", "srun"),
        ),
        ({"JOB_COMPLETION_INDEX": "0"}, {}, ("JOB_COMPLETION_INDEX", "JAX_NUM_PROCESSES")),
        # By the agents' own names.
        (
            {"NODES": "2"},
            None,
            ("--agents (NODES)", "not --coordinator (JAX_COORDINATOR_ADDRESS) and --agent"),
        ),
        (
            {"NODES": "2", "NODE": "2", "JAX_COORDINATOR_ADDRESS": "h:1"},
            None,
            ("agent=2 is out of range for agents=2",),
        ),
        ({**NODES, "SLURM_STEP_TASKS_PER_NODE": "8(x4)"}, None, ("one task a node",)),
        (
            {"NODES": "two", "NODE": "0", "JAX_COORDINATOR_ADDRESS": "h:1"},
            None,
            ("agents='two'", "a whole number"),
        ),
    ],
)
def test_what_is_incomplete_or_contradicts_itself_is_one_line(environ, given, words):
    find = (find_agent_rank, environ) if given is None else (find_rank, environ, given)
    said = refusal(*find)
    assert all(word in said for word in words), said


@pytest.mark.parametrize(
    ("host", "address"), [("fd00::1", "[fd00::1]:4000"), ("node1", "node1:4000")]
)
def test_an_address_of_ipv6_has_brackets(host, address):
    assert join_address(host, 4000) == address and split_address(address) == (host, 4000)


AGENT = {"NODES": "16", "NODE": "3", "JAX_COORDINATOR_ADDRESS": "host:1"}


@pytest.mark.parametrize(
    ("environ", "given", "rank"),
    [
        ({}, {}, None),
        # a process's, not an agent's
        ({"JAX_NUM_PROCESSES": "8", "JAX_PROCESS_ID": "3"}, {}, None),
        (AGENT, {}, Rank("host:1", 16, 3)),
        (AGENT, {"agents": 2, "agent": 1}, Rank("host:1", 2, 1)),
        (AGENT | {"NODES": "1", "NODE": "0"}, {}, None),
        (NODES, {}, Rank("gpu03:61447", 4, 2)),
        (POD | {"NODES": "4"}, {}, Rank("zaya-0-0.zaya:1234", 4, 3)),
    ],
)
def test_ranks_of_agents(environ, given, rank):
    assert find_agent_rank(environ, **given) == rank
