"""Finds the rank of a process in its run, or of an agent among agents, from flags, variables or
Slurm.

    rank = find_rank(os.environ)              None for a process alone
    rank = find_agent_rank(os.environ)        None for an agent alone

JAX's own detection of Slurm takes one GPU per task for granted.
"""

import argparse
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from zaya_jax.config import UserError

# How each of the three is called as a flag and as a variable, by processes and by agents.
NAMES = {
    "coordinator": ("coordinator", "JAX_COORDINATOR_ADDRESS"),
    "num_processes": ("num_processes", "JAX_NUM_PROCESSES"),
    "process_id": ("process_id", "JAX_PROCESS_ID"),
}
OF_AGENTS = NAMES | {"num_processes": ("agents", "NODES"), "process_id": ("agent", "NODE")}
SLURM_STEP = (
    "SLURM_JOB_ID",
    "SLURM_STEP_NODELIST",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "SLURM_LOCALID",
)
ONE_A_NODE = r"1(\(x\d+\))?"  # SLURM_STEP_TASKS_PER_NODE of one task on each node
# Kubernetes gives it to every pod of an indexed Job, a JobSet's included
POD_INDEX = "JOB_COMPLETION_INDEX"
VISIBLE_DEVICES = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


class LostProcess(RuntimeError):
    """A process of the run that did not come, or is gone: one line, exit code 1; a restart may
    help."""


@dataclasses.dataclass(frozen=True)
class Rank:
    """One process among `count`: the `index`-th; `devices` are the local ones it takes, () for all
    it sees."""

    coordinator: str
    count: int
    index: int
    devices: tuple[int, ...] = ()


def join_address(host: str, port: int) -> str:
    """host:port, with brackets around an address of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """The host, without brackets, and the port."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def add_options(parser: argparse.ArgumentParser) -> None:
    """--coordinator, --num_processes and --process_id, for a program of one or several
    processes."""
    add = parser.add_argument
    add("--coordinator", metavar="HOST:PORT", help="process 0, where there are several processes")
    add("--num_processes", type=int, metavar="N", help="how many processes take part")
    add("--process_id", type=int, metavar="I", help="which of them this is, from 0")


def find_rank(
    environ: Mapping[str, str],
    given: Mapping[str, Any] | None = None,
    names: Mapping[str, tuple[str, str]] = NAMES,
) -> Rank | None:
    """The rank that flags (`given`), variables or Slurm name, in this order; None if there is one
    process.

    The index may also be that of a pod. UserError if it is incomplete or contradicts itself.
    """
    found = {name: value for name, value in (given or {}).items() if value not in (None, "")}
    found |= {n: environ[v] for n, (_, v) in names.items() if n not in found and environ.get(v)}
    by_hand = dict(found)  # without what Slurm and Kubernetes say
    if all(name in environ for name in SLURM_STEP):
        tasks, task = environ["SLURM_NTASKS"], environ["SLURM_PROCID"]
        found = {
            "coordinator": _slurm_address(environ),
            "num_processes": tasks,
            "process_id": task,
        } | found
    elif (
        not found
        and _number("SLURM_NTASKS", environ.get("SLURM_NTASKS", "1")) > 1
        and "SLURM_PROCID" in environ
    ):
        unset = next(name for name in SLURM_STEP if name not in environ)
        raise UserError(
            f"this is a job of {environ['SLURM_NTASKS']} Slurm tasks, but srun did not start this"
            f" one ({unset} is not set); start the program with srun, as launch/slurm.sbatch does,"
            " or ask for one task"
        )
    if POD_INDEX in environ:
        found.setdefault("process_id", environ[POD_INDEX])
    how_many, which = names["num_processes"][0], names["process_id"][0]
    alone = _number(how_many, found.get("num_processes", 0)) == 1
    if not found or (alone and str(by_hand.get("process_id", 0)) == "0"):
        return None
    called = {name: f"--{flag} ({variable})" for name, (flag, variable) in names.items()}
    missing = [name for name in names if name not in found]
    if missing:
        raise UserError(
            f"{called[next(iter(found))]} is given, but not"
            f" {' and '.join(called[name] for name in missing)}; set all three for several"
            f" processes, or {called['num_processes']} to 1 for one ({POD_INDEX} and Slurm's"
            " variables set them too)"
        )
    count, index = _number(how_many, found["num_processes"]), _number(which, found["process_id"])
    if count < 1 or not 0 <= index < count:
        raise UserError(
            f"{which}={index} is out of range for {how_many}={count} (0 to {count - 1})"
        )
    coordinator = str(found["coordinator"])
    port = re.fullmatch(r".+:([0-9]{1,5})", coordinator)
    if not port or not 0 < int(port[1]) < 2**16:
        raise UserError(
            f"{called['coordinator']} is {coordinator!r}; give host:port of number 0, with a port"
            " from 1 to 65535"
        )
    return Rank(
        coordinator, count, index, () if "process_id" in by_hand else _slurm_devices(environ)
    )


def find_agent_rank(
    environ: Mapping[str, str],
    coordinator: str | None = None,
    agents: int | None = None,
    agent: int | None = None,
) -> Rank | None:
    """One agent per node: from flags, NODES and NODE, Slurm or a pod's index, as processes find
    their rank."""
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    by_slurm = agents is None and "NODES" not in environ and "SLURM_PROCID" in environ
    if by_slurm and not re.fullmatch(ONE_A_NODE, tasks):
        raise UserError(
            f"Slurm starts {tasks} tasks on a node, but an agent starts the node's processes"
            " itself; start one task a node (srun --ntasks-per-node=1), as launch/slurm.sbatch"
            " does"
        )
    given = {"coordinator": coordinator, "num_processes": agents, "process_id": agent}
    return find_rank(environ, given, OF_AGENTS)


def _number(name: str, text: Any) -> int:
    try:
        return int(text)
    except ValueError:
        raise UserError(
            f"{name}={text!r} is not a whole number; see docs/clusters.md for what to set"
        ) from None


def _slurm_address(environ: Mapping[str, str]) -> str:
    """The first host of the step's list (a1,a2 or a[01-16,20]-ib), and a port that differs between
    jobs."""
    first = re.split(r",(?![^\[]*\])", environ["SLURM_STEP_NODELIST"])[0]
    port = (
        environ.get("JAX_COORDINATOR_PORT")
        or 61440 + _number("SLURM_JOB_ID", environ["SLURM_JOB_ID"]) % 4096
    )
    host = re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)  # of each list of numbers the first
    return f"{host}:{port}"


def _slurm_devices(environ: Mapping[str, str]) -> tuple[int, ...]:
    """The device of this task, unless it is alone on its node or already sees only its own
    device."""
    visible = [environ[name] for name in VISIBLE_DEVICES if environ.get(name)]
    bound = any("," not in devices for devices in visible)
    alone = re.fullmatch(ONE_A_NODE, environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if bound or alone or "SLURM_LOCALID" not in environ:
        return ()
    return (_number("SLURM_LOCALID", environ["SLURM_LOCALID"]),)


def name_processes(indices: list[int]) -> str:
    """process 3; processes 1, 4 and 5; beyond sixteen only their number."""
    names = [str(i) for i in indices[:16]]
    if len(indices) > 16:
        names.append(f"{len(indices) - 16} more")
    if len(names) == 1:
        return f"process {names[0]}"
    return f"processes {', '.join(names[:-1])} and {names[-1]}"
