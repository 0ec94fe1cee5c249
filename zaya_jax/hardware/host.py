"""Settings of the host: freed memory is kept, programs are compiled fast and cached, 64-bit
numbers are refused.

keep_memory()      before JAX starts
keep_compiled()    before JAX starts
cache_folder()     for what outlives a process
compiler_options() when a large program is compiled
require_x32()      before anything is made for a training step
"""

import ctypes
import gc
import mmap
import os
import platform
from importlib.metadata import entry_points
from pathlib import Path

import jax

from pallas_kernels.chip import Chip
from zaya_jax.config import UserError


def keep_memory() -> None:
    """Makes Python look for garbage less often; on a CPU with glibc, makes this keep freed memory,
    in huge pages, and runs one step at a time.

    XLA's CPU backend allocates its temporaries anew each step; handed back and taken again they
    cost a page fault every 4 KiB, 148,000 a step of a 15M-parameter model and a fifth of its time.
    In pages of 2 MiB the processor also finds them faster. With a step begun before the last one
    ended, two steps' temporaries lie side by side, the next fit in neither's place, and the process
    grows by a step's memory at a time.
    """
    # Tracing makes many objects and few cycles: with Python's own threshold the step of `tiny` takes
    # 1.5 s to trace and lower, with this one 1.1 s.
    gc.set_threshold(20_000)
    # Asking JAX for its backend would start the threads whose arenas must not be made: look for a
    # GPU's plugin.
    accelerated = any(entry_points(group="jax_plugins"))
    if accelerated or platform.libc_ver()[0] != "glibc":
        return
    trim_threshold, mmap_max, arena_max = -1, -4, -8  # mallopt's numbers, from malloc.h
    libc = ctypes.CDLL(None)
    libc.mallopt(mmap_max, 0)
    libc.mallopt(trim_threshold, -1)  # never
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    # One device's temporaries are now the main thread's, whose arena is the heap. Virtual devices
    # have threads of their own, whose arenas are too small.
    if "host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        libc.mallopt(arena_max, 1)
    _ask_for_huge_pages(libc, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)


def _ask_for_huge_pages(libc: ctypes.CDLL, size: int) -> None:
    """For the next `size` bytes of the heap: addresses, which take no memory until something is
    written there.

    Where the system counts addresses as memory, or limits them, pages stay small.
    """
    never_overcommit = "2"
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == never_overcommit:
        return
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.free.argtypes = [ctypes.c_void_p]
    region = libc.malloc(size)
    if region:
        start = -(-region // mmap.PAGESIZE) * mmap.PAGESIZE
        libc.madvise(start, region + size - start, mmap.MADV_HUGEPAGE)
        libc.free(region)


def keep_compiled() -> None:
    """Compiled programs outlive the process, below the user's cache folder unless JAX is set to
    keep them elsewhere."""
    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder()))


def cache_folder() -> Path:
    """The folder for what a later start on this machine need not find out again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zaya_jax"


def compiler_options(target: Chip) -> dict[str, int]:
    """Compiler options for a training step, and for a program that runs once.

    On a CPU LLVM's first level takes two thirds of the third level's time, and a step is as fast
    (benchmarks/step.md); compiled with level 0 it takes three times as long. Fresh weights have the
    same bits: 35M of them took 6.0 s to compile instead of 34.6 s, and 1.9 s to make instead of
    1.0 s. A GPU's compiler keeps its own level.
    """
    level = "xla_backend_optimization_level"
    return {} if level in os.environ.get("XLA_FLAGS", "") or not target.is_host else {level: 1}


def require_x32() -> None:
    """UserError where JAX is set to make 64-bit numbers: weights, sums and indices are float32 and
    int32."""
    if jax.config.jax_enable_x64:
        raise UserError(
            "JAX makes float64 and int64 here, but a training step is of float32 and int32; unset"
            " JAX_ENABLE_X64, or take jax_enable_x64 out of the config file"
        )
