"""Sets the compiler flags of a GPU run, each with its reason: the only place that does.

They go into XLA_FLAGS before JAX starts its backend; flags already there stay as they are. A CPU
run gets none. Every program sets them, since all start by `cli.exit_code`; a script of one's own
must call `set_for_platform` itself. An unknown flag kills the process, so a test starts JAX with
all of them. The sizes are first choices and await measurement on the machines
(`experiments.characterize`); `pretrain` logs the flags in force in each process.
"""

import os
from collections.abc import Mapping, MutableMapping
from importlib.metadata import entry_points

MIB = 1 << 20
Flags = Mapping[str, str | int]

BOTH: Flags = {
    # Starts a collective as early and awaits it as late as its data allow: fsdp's gathers, the
    # ring's and TSP's exchanges run under the matmuls around them.
    "xla_gpu_enable_latency_hiding_scheduler": "true",
    # With XLA's 1, of two exchanges that could travel together one stands before the compute: the
    # ring's backward pass sends keys and values and their gradients, a halo goes both ways
    # (benchmarks/context.md).
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
    # With fsdp the weights of layer l + 1 are gathered inside the scan while layer l computes, and
    # backwards layer l's gradient is scattered while layer l - 1 computes.
    "xla_gpu_enable_pipelined_all_gather": "true",
    "xla_gpu_enable_pipelined_reduce_scatter": "true",
    # The first collective waits for the slowest node's compilation; XLA's own 40 s end a cold start
    # of many nodes.
    "xla_gpu_first_collective_call_terminate_timeout_seconds": 1800,
}

# The same flags where collectives wait for their turn: slower, and without the schedules in which
# XLA has had errors.
CAUTIOUS: Flags = {
    "xla_gpu_enable_latency_hiding_scheduler": "false",
    "xla_gpu_experimental_parallel_collective_overlap_limit": 1,
    "xla_gpu_enable_pipelined_all_gather": "false",
    "xla_gpu_enable_pipelined_reduce_scatter": "false",
}


def _combining(size: int) -> Flags:
    """Collectives of one kind up to so many bytes become one call.

    The gradient itself is in buckets of one array already (zaya_jax/optim/zero: 2 GB and more at
    ZAYA1's size) and passes every threshold; the arrays left to combine are the weights of one
    layer under fsdp, or AdamW's and Muon's buckets of a small model. Arrays gathered together also
    lie in memory together (a layer of ZAYA1 is 0.4 GB in bfloat16). The halos of one layer
    (convolution, delayed value) are kilobytes each and go together; the ring's blocks of keys and
    values must not wait for each other.
    """
    kinds = ("all_reduce", "reduce_scatter", "all_gather")
    found = {f"xla_gpu_{kind}_combine_threshold_bytes": size for kind in kinds}
    return {**found, "xla_gpu_collective_permute_combine_threshold_bytes": 4 * MIB}


PLATFORMS: dict[str, Flags] = {
    # Over Pollara's Ethernet a call must be large before it comes near 400 Gb/s a GPU, and RCCL's
    # start-up grows with the number of nodes: XLA's 30 MiB leave both on the table. Graphs of
    # collectives end in a segmentation fault.
    "rocm": {**BOTH, **_combining(256 * MIB), "xla_gpu_enable_command_buffer": ""},
    # InfiniBand and NVLink are near their rate earlier than Ethernet; smaller groups can start
    # earlier.
    "cuda": {**BOTH, **_combining(128 * MIB)},
}

# JAX takes three quarters of a GPU's memory by default; RCCL, NCCL and the kernels' own need the
# rest. A GPU alone has neither, and may give JAX more, by the variable.
MEMORY_SHARE, OF_MEMORY = 0.90, "XLA_PYTHON_CLIENT_MEM_FRACTION"


def platform(environ: Mapping[str, str] = os.environ) -> str | None:
    """rocm or cuda, by JAX_PLATFORMS or else by the installed plugin; None for a CPU. Starts no
    backend."""
    asked = environ.get("JAX_PLATFORMS", "").split(",")[0].lower()
    if asked in PLATFORMS:
        return asked
    if asked not in ("", "gpu"):
        return None
    installed = " ".join(plugin.name for plugin in entry_points(group="jax_plugins"))
    return next((name for name in PLATFORMS if name in installed), None)


def merged(present: str, wanted: Flags) -> str:
    """XLA_FLAGS with those of `wanted` that it does not set yet."""
    named = {word.lstrip("-").split("=", 1)[0] for word in present.split()}
    added = [f"--{name}={value}" for name, value in wanted.items() if name not in named]
    return " ".join([*present.split(), *added])


def set_for_platform(environ: MutableMapping[str, str] = os.environ) -> None:
    """Adds this platform's flags to XLA_FLAGS; to be called before anything asks JAX for a
    device."""
    if name := platform(environ):
        environ["XLA_FLAGS"] = merged(environ.get("XLA_FLAGS", ""), PLATFORMS[name])
        environ.setdefault(OF_MEMORY, str(MEMORY_SHARE))


def memory_share(environ: Mapping[str, str] = os.environ) -> float:
    """The share of a GPU's memory that JAX takes: the environment's, otherwise MEMORY_SHARE."""
    return float(environ.get(OF_MEMORY, MEMORY_SHARE))
