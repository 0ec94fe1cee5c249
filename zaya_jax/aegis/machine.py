"""Finds the node's accelerators, and builds the commands that start programs near them.

gpus(os.environ)           the NUMA node of each accelerator
on_numa_node(numa)         words before a command, to run it on that NUMA node
ends_with_this()           words before a command, to have it end with this process
time_outs(patience)        variables for collectives that outlast a link's absence
missing_cards(os.environ)  words about network cards that NCCL_IB_HCA names and nothing can use
"""

import contextlib
import ctypes
import math
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

PCI = "/sys/bus/pci/devices"
RETRIES = 7  # the most that a queue pair can do
ACCELERATORS = ("0x1200", "0x0302")  # processing accelerator (MI300X), 3D controller (H100, H200)
# The system kills the program when the agent ends, however that ends: nothing trains on alone. It
# is no function called between fork and exec, since the agent has threads, and one may hold a lock
# at that moment.
BECOME = """
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


def ends_with_this() -> list[str]:
    """Starts the program whose words follow, which does not outlive this process."""
    return [sys.executable, "-I", "-S", "-c", BECOME, str(os.getpid())]


def gpus(environ: Mapping[str, str]) -> list[int]:
    """The NUMA nodes of the accelerators (-1: none), in the order of their PCI addresses, which is
    the drivers'."""
    found = []
    for device in sorted(Path(environ.get("PCI_DEVICES", PCI)).glob("*")):
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
    return variables, on_numa_node(nearest.pop()) if len(nearest) == 1 else []


def time_outs(patience: float) -> dict[str, str]:
    """Has RCCL and NCCL wait for a network that is away for so long, and hardly longer.

    A packet is sent again after 4.096 us * 2^TIMEOUT, RETRY_CNT times; then the collective fails.
    """
    if not patience:
        return {}
    exponent = math.ceil(math.log2(patience / RETRIES / 4.096e-6))
    return {"NCCL_IB_TIMEOUT": str(min(max(exponent, 14), 31)), "NCCL_IB_RETRY_CNT": str(RETRIES)}


def missing_cards(environ: Mapping[str, str], root: str | Path = "/") -> str:
    """What NCCL_IB_HCA names without effect; "" for nothing. RCCL and NCCL say nothing: without a card
    they take sockets."""
    given = environ.get("NCCL_IB_HCA", "")
    # "mlx5" is any card whose name begins so, "=mlx5_1" is that one, "^mlx5" are all others.
    fits = str.__eq__ if given.startswith("=") else str.startswith
    names = [n.partition(":")[0] for n in given.lstrip("=").split(",") if n and given[0] != "^"]
    there = {path.name for path in Path(root, "sys/class/infiniband").glob("*")}
    usable = there & usable_cards() if str(root) == "/" else there
    absent = [name for name in names if not any(fits(card, name) for card in usable)]
    if not absent:
        return ""
    why = "/sys/class/infiniband does not have them: `ibv_devices` lists the names"
    if all(any(fits(card, name) for card in there) for name in absent):
        why = "libibverbs has no driver for them here: install the card's (launch/Dockerfile)"
    return f"NCCL_IB_HCA names {', '.join(absent)}, but {why}; collectives will use sockets"


def usable_cards() -> set[str]:
    """The cards that libibverbs, by which RCCL and NCCL look for them, has a driver for."""
    try:
        verbs, count = ctypes.CDLL("libibverbs.so.1"), ctypes.c_int()
    except OSError:
        return set()
    verbs.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
    verbs.ibv_get_device_name.restype = ctypes.c_char_p
    found = verbs.ibv_get_device_list(ctypes.byref(count))
    names = [verbs.ibv_get_device_name(ctypes.c_void_p(found[i])) for i in range(count.value)]
    return {name.decode() for name in names}


def on_numa_node(numa: int) -> list[str]:
    """Starts a program on this NUMA node; else batches and checkpoints pass the link between the
    sockets."""
    if numa < 0 or not shutil.which("numactl"):
        return []
    return ["numactl", f"--cpunodebind={numa}", f"--preferred={numa}"]
