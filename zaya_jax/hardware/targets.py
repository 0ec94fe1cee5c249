"""Compiles for absent chips: their descriptions, and the compilers that know them.

    make setup-targets                              # once: XLA's GPU plugins, into .venv-targets
    devices = targets.devices("mi300x", 1024)       # to build a mesh of; nothing can be put on them

XLA takes a GPU's numbers from a text, so no GPU is needed. It then picks kernels by rule instead of
measuring them (autotuning). Without ROCm, stand-ins take the place of its libraries: the process
can compile but never run.
"""

import ctypes
import dataclasses
import functools
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax

from zaya_jax.config import Config, UserError
from zaya_jax.hardware import chips, clusters, sizing

FOLDER = Path(__file__).parents[2] / ".venv-targets"
GIB = 1 << 30
# XLA repeats instructions to stay below a limit: in a run what JAX takes of the memory, of an absent
# chip this share.
OF_ABSENT = 0.8
# AMD's devices by the names that a machine with them gives, which programs ask for the chip that
# they are made for.
ARCHITECTURES = {"AMD Instinct MI300X": "gfx942", "AMD Instinct MI355X": "gfx950"}


class Target(NamedTuple):
    """A chip as its compiler sees it."""

    platform: str  # JAX's: "rocm", "cuda", "cpu"
    memory: int  # bytes of HBM
    text: str  # XLA's GpuTargetConfigProto


def _gpu(platform: str, memory: int, name: str, about: str, versions: str) -> Target:
    told = int(memory * sizing.memory_share() / OF_ABSENT)
    text = (
        "gpu_device_info { threads_per_block_limit: 1024 block_dim_limit_x: 2147483647"
        " threads_per_core_limit: 2048 fpus_per_core: 128"
        f" device_memory_size: {told} {about} }} {versions} "
        f'platform_name: "{platform.upper()}" device_description_str: "{name}"'
    )
    return Target(platform, memory, text)


def _amd(
    memory: int, name: str, cores: int, gigahertz: float, bandwidth: float, shared: int
) -> Target:
    about = (
        "threads_per_warp: 64 block_dim_limit_y: 65536 block_dim_limit_z: 65536 l2_cache_size:"
        " 4194304 "
        "registers_per_core_limit: 131072 registers_per_block_limit: 131072 "
        f'rocm_compute_capability {{ gcn_arch_name: "{ARCHITECTURES[name]}:sramecc+:xnack-" }} '
        f"core_count: {cores} clock_rate_ghz: {gigahertz} memory_bandwidth: {bandwidth:.0f} "
    ) + " ".join(f"shared_memory_per_{part}: {shared}" for part in ("block", "block_optin", "core"))
    return _gpu("rocm", memory, name, about, "dnn_version_info { major: 3 minor: 5 }")


def _hopper(memory: int, name: str, bandwidth: float) -> Target:
    about = (
        "threads_per_warp: 32 block_dim_limit_y: 65535 block_dim_limit_z: 65535 core_count: 132"
        " clock_rate_ghz: 1.98 shared_memory_per_block: 49152 shared_memory_per_block_optin:"
        " 232448 shared_memory_per_core: 233472 registers_per_core_limit: 65536"
        " registers_per_block_limit: 65536 l2_cache_size: 52428800 memory_bandwidth:"
        f" {bandwidth:.0f} cuda_compute_capability {{ major: 9 minor: 0 feature_extension:"
        " ACCELERATED_FEATURES }"
    )
    return _gpu(
        "cuda",
        memory,
        name,
        about,
        "runtime_version { major: 13 } dnn_version_info { major: 9 minor: 28 }",
    )


# Cores, clock and bandwidth: the vendors' data sheets. Memory: as a process finds it, a little less
# than is sold.
TARGETS = {
    "mi300x": _amd(
        192 * GIB, "AMD Instinct MI300X", 304, 2.1, chips.CHIPS["mi300x"].bandwidth, 65536
    ),
    "mi355x": _amd(
        288 * 10**9, "AMD Instinct MI355X", 256, 2.4, chips.CHIPS["mi355x"].bandwidth, 163840
    ),
    "h200": _hopper(151_397_597_184, "NVIDIA H200", chips.CHIPS["h200"].bandwidth),
    "h100": _hopper(84_942_979_072, "NVIDIA H100 80GB HBM3", chips.CHIPS["h100"].bandwidth),
}


def memory_for_jax(name: str) -> int:
    """Bytes of a GPU's memory that JAX takes (`sizing.memory_share`)."""
    return int(TARGETS[name].memory * sizing.memory_share())


def devices(name: str, count: int, config: Config | None = None) -> list[Any]:
    """So many devices of a kind, in nodes of at most eight; UserError where their compiler is not
    installed.

    To be called before JAX has compiled anything for a GPU in this process: the flags of
    `hardware.sizing` are set here.
    """
    if name == "cpu":
        return jax.devices("cpu")[:count]
    from jax.experimental import topologies

    target = TARGETS[name]
    os.environ["XLA_FLAGS"] = sizing.merged(
        os.environ.get("XLA_FLAGS", ""), sizing.compiler_flags(target.platform, config)
    )
    jax.devices("cpu")  # the plugins that JAX finds by itself are registered then
    _register(target.platform)
    node = clusters.of_chip(name).of_devices(count).node
    topology = topologies.get_topology_desc(
        platform=target.platform, target_config=target.text, topology=f"1x{count // node}x{node}"
    )
    return list(topology.devices)


def _register(platform: str) -> None:
    """Gives JAX the platform's compiler, unless it has it."""
    from jax._src import xla_bridge  # there is no public way by hand
    from jax._src.lib import xla_client

    if xla_client._xla.pjrt_plugin_loaded(platform):
        return
    plugins = [*FOLDER.glob(f"jax_plugins/xla_{platform}*/xla_{platform}_plugin.so")]
    stamp = FOLDER / ".stamp"  # comes last
    if not plugins or not stamp.exists():
        raise UserError(f"the compiler for {platform} is not installed; run: make setup-targets")
    version = stamp.read_text().partition(",")[0]
    if version != f"jax {jax.__version__}":
        raise UserError(
            f"{FOLDER.name} holds compilers for {version}, this is jax {jax.__version__}; run: make"
            " setup-targets"
        )
    if platform == "rocm":
        _stand_in()
        tell_pallas()
    options = {**xla_client.generate_pjrt_gpu_plugin_options(), "platform_name": platform.upper()}
    xla_bridge.register_plugin(platform, library_path=str(plugins[0]), options=options)


def tell_pallas() -> None:
    """Tells Pallas the architectures of AMD's absent devices; it knows only those of present
    ones."""
    # as for new chips of others; there is no public way
    from jax._src.pallas.triton import gpu_info

    for name, architecture in ARCHITECTURES.items():
        info = gpu_info.GpuInfo(gpu_version=None, arch_name=architecture, compute_capability=0)
        gpu_info.registry[name] = functools.partial(dataclasses.replace, info)


def _stand_in() -> None:
    """Loads the stand-ins of those libraries of ROCm that this machine does not have."""
    missing = []
    for library in sorted((FOLDER / "standins").glob("lib*")):
        try:
            ctypes.CDLL(library.name)
        except OSError:
            missing.append(library)
    if missing:
        ctypes.CDLL(str(FOLDER / "standins" / "names.so"), mode=ctypes.RTLD_GLOBAL)
    for library in missing:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
