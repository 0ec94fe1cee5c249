"""Finds the node's accelerators, and builds the commands that start programs near them.

gpus(os.environ)           the NUMA node of each accelerator
on_numa_node(numa)         words before a command, to run it on that NUMA node
ends_with_this()           words before a command, to have it end with this process
time_outs(patience)        variables for collectives that outlast a link's absence
"""

import contextlib
import math
import os
import shutil
import sys
from collections.abc import Mapping
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


def time_outs(patience: float) -> dict[str, str]:
    """Has RCCL and NCCL wait for a network that is away for so long, and hardly longer.

    A packet is sent again after 4.096 us * 2^TIMEOUT, RETRY_CNT times; then the collective fails.
    """
    if not patience:
        return {}
    exponent = math.ceil(math.log2(patience / RETRIES / 4.096e-6))
    return {"NCCL_IB_TIMEOUT": str(min(max(exponent, 14), 31)), "NCCL_IB_RETRY_CNT": str(RETRIES)}


def on_numa_node(numa: int) -> list[str]:
    """Starts a program on this NUMA node; else batches and checkpoints pass the link between the
    sockets."""
    if numa < 0 or not shutil.which("numactl"):
        return []
    return ["numactl", f"--cpunodebind={numa}", f"--preferred={numa}"]
