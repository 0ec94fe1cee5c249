"""Where an agent stands among the agents of its run, and which devices its processes take.

place = find(os.environ, coordinator, agents, agent)    None for an agent alone
gpus()                                                  the NUMA node of each accelerator
"""

import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from zaya_jax.cluster import place as places
from zaya_jax.cluster.place import Place
from zaya_jax.config import UserError

# What the agents have in place of what processes have: flag and variable.
OURS = {
    "--num_processes (JAX_NUM_PROCESSES)": "--agents (NODES)",
    "--process_id (JAX_PROCESS_ID)": "--agent (NODE)",
    "num_processes": "agents",
    "process_id": "agent",
}
PCI = "/sys/bus/pci/devices"
RETRIES = 7  # the most that a queue pair can do
ACCELERATORS = ("0x1200", "0x0302")  # processing accelerator (MI300X), 3D controller (H100, H200)


def find(
    environ: Mapping[str, str], coordinator: str | None = None, agents: int | None = None, agent: int | None = None
) -> Place | None:  # fmt: skip
    """One agent per node: from flags, NODES and NODE, Slurm or a pod's index, as processes find their place."""
    given = {
        "coordinator": coordinator,
        "num_processes": agents if agents is not None else environ.get("NODES"),
        "process_id": agent if agent is not None else environ.get("NODE"),
    }
    if str(given["num_processes"]) == "1":
        if str(given["process_id"] or "0") != "0":
            raise UserError(
                f"--agent (NODE) is {given['process_id']}, but --agents (NODES) is 1: an agent alone is number 0"
            )
        return None
    # What says where a *process* stands says nothing about agents.
    left = {name: v for name, v in environ.items() if name not in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")}
    a_node = environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    if (
        given["num_processes"] is None
        and "SLURM_PROCID" in environ
        and not re.fullmatch(r"1(\(x\d+\))?", a_node)
    ):
        raise UserError(
            f"Slurm starts {a_node} tasks on a node, but an agent starts the node's processes itself; "
            "start one task a node (srun --ntasks-per-node=1), as launch/slurm.sbatch does"
        )
    try:
        return places.find_place(left, given)
    except UserError as error:
        text = str(error)
        for theirs, ours in OURS.items():
            text = text.replace(theirs, ours)
        raise UserError(text) from None


def gpus(environ: Mapping[str, str]) -> list[int]:
    """The NUMA nodes of the accelerators (-1: none), in the order of their PCI addresses, which is the drivers'."""
    found = []
    for device in sorted(Path(environ.get("PCI_DEVICES", PCI)).glob("*")):
        try:
            kind = (device / "class").read_text()
        except OSError:
            continue
        if kind.startswith(ACCELERATORS):
            try:
                found.append(int((device / "numa_node").read_text()))
            except (OSError, ValueError):
                found.append(-1)
    return found


def time_outs(patience: float) -> dict[str, str]:
    """What has RCCL and NCCL wait for a network that is away for so long, and hardly longer.

    A packet is sent again after 4.096 us * 2^TIMEOUT, RETRY_CNT times; then the collective fails.
    """
    if not patience:
        return {}
    exponent = math.ceil(math.log2(patience / RETRIES / 4.096e-6))
    return {"NCCL_IB_TIMEOUT": str(min(max(exponent, 14), 31)), "NCCL_IB_RETRY_CNT": str(RETRIES)}


def beside(numa: int) -> list[str]:
    """What starts a program on this NUMA node; else batches and checkpoints pass the link between the sockets."""
    if numa < 0 or not shutil.which("numactl"):
        return []
    return ["numactl", f"--cpunodebind={numa}", f"--preferred={numa}"]
