"""Finds the node's accelerators, and builds the commands that start programs near them.

root()                      the folder in which all files of the machine are looked for
gpu_numa_nodes(root())      the NUMA node of each accelerator
numactl_prefix(numa)        words before a command, to run it on that NUMA node
die_with_parent_prefix()    words before a command, to have it end with this process
nccl_timeouts(patience)     variables for collectives that outlast a link's absence
missing_cards(os.environ)   words about network cards that NCCL_IB_HCA names and nothing can use
"""

import contextlib
import math
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = "ZAYA_WATCH_ROOT"  # the variable: another root than /, for tests
RETRIES = 7  # the most that a queue pair can do
ACCELERATORS = ("0x1200", "0x0302")  # processing accelerator (MI300X), 3D controller (H100, H200)
# The system kills the program when the agent ends, however that ends: nothing trains on alone. This
# is not a preexec_fn, because the agent has threads, one of which may hold a lock at the fork.
EXEC_WRAPPER = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):  # it ended before
    sys.exit(1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(print(f"error: {sys.argv[2]} does not start: {error.strerror}", file=sys.stderr) or 2)
"""


def die_with_parent_prefix() -> list[str]:
    """Starts the program whose words follow, which does not outlive this process."""
    return [sys.executable, "-I", "-S", "-c", EXEC_WRAPPER, str(os.getpid())]


def root() -> Path:
    """The folder in which the machine's files are looked for."""
    return Path(os.environ.get(ROOT, "/"))


def gpu_numa_nodes(root: Path) -> list[int]:
    """The NUMA nodes of the accelerators (-1: none), in the order of their PCI addresses, which is
    the drivers'."""
    found = []
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        with contextlib.suppress(OSError):
            if (device / "class").read_text().startswith(ACCELERATORS):
                numa = device / "numa_node"  # where the kernel knows of any
                found.append(int(numa.read_text()) if numa.exists() else -1)
    return found


def part_of_gpus(
    numa_nodes: Sequence[int], index: int, processes: int
) -> tuple[dict[str, str], list[str]]:
    """Variables and words before the command for one of a node's processes: an equal part of the
    GPUs, on their NUMA node if they have one in common."""
    share = len(numa_nodes) // processes
    if not share:
        return {}, []
    first = index * share
    variables = {}
    if processes > 1:
        gpus = range(first, first + share)
        variables["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, gpus))
    nearest = set(numa_nodes[first : first + share])
    return variables, numactl_prefix(nearest.pop()) if len(nearest) == 1 else []


def nccl_timeouts(patience: float) -> dict[str, str]:
    """Has RCCL and NCCL wait for a network that is away for so long, and hardly longer.

    A packet is sent again after 4.096 us * 2^TIMEOUT, RETRY_CNT times; then the collective fails.
    """
    if not patience:
        return {}
    exponent = math.ceil(math.log2(patience / RETRIES / 4.096e-6))
    return {"NCCL_IB_TIMEOUT": str(min(max(exponent, 14), 31)), "NCCL_IB_RETRY_CNT": str(RETRIES)}


def missing_cards(environ: Mapping[str, str], root: Path) -> str:
    """What NCCL_IB_HCA names and the system does not have; "" for nothing. RCCL and NCCL do not
    say: without a card they take sockets."""
    setting = environ.get("NCCL_IB_HCA", "")
    if setting.startswith("^"):  # all cards but these
        return ""
    # "mlx5" is any card whose name begins so, "=mlx5_1" is that one.
    exact = setting.startswith("=")
    names = [name.partition(":")[0] for name in setting.lstrip("=").split(",") if name]
    cards = [path.name for path in (root / "sys/class/infiniband").glob("*")]
    absent = [n for n in names if not any(c == n or (c.startswith(n) and not exact) for c in cards)]
    if not absent:
        return ""
    return (
        f"NCCL_IB_HCA names {', '.join(absent)}, but /sys/class/infiniband does not have them:"
        " `ibv_devices` lists the names; collectives will use sockets"
    )


def numactl_prefix(numa: int) -> list[str]:
    """Starts a program on this NUMA node; else batches and checkpoints pass the link between the
    sockets."""
    if numa < 0 or not shutil.which("numactl"):
        return []
    return ["numactl", f"--cpunodebind={numa}", f"--preferred={numa}"]
