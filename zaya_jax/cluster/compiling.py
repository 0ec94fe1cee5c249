"""What several processes need of JAX's compiler and do not get, by wrapping two functions of its own.

compiling.wait_for_all(barrier)     from now on, in this process
"""

from collections.abc import Callable
from typing import Any

import jax
from jax._src import compilation_cache, compiler  # JAX has no public place for either


def wait_for_all(barrier: Callable[[str], None]) -> None:
    """Has every program of several processes compiled by all before one runs it, and CPU programs kept by all.

    The first process to enter a collective waits no longer than 30 s for the others (gloo, jaxlib 0.12.0), and with a
    warm cache it is there minutes before them. All processes compile the same such programs in the same order, since
    they run the same ones.

    JAX lets process 0 alone write to the cache. For a CPU the place in it depends on the process, by the fingerprint of
    its devices, so that the others would find nothing, ever.
    """
    compile_first, write = compiler.compile_or_get_cached, compiler._cache_write

    def compile_and_wait(backend: Any, computation: Any, devices: Any, *args: Any, **kwargs: Any) -> Any:
        executable = compile_first(backend, computation, devices, *args, **kwargs)
        if len({device.process_index for device in devices.flat}) > 1:
            name = str(computation.operation.attributes["sym_name"]).strip('"')
            barrier(f"compiled {name}")
        return executable

    def write_each(
        cache_key: str, compile_time_secs: float, module_name: str, backend: Any, executable: Any
    ) -> None:
        shortest = jax.config.jax_persistent_cache_min_compile_time_secs
        if backend.platform == "cpu" and backend.process_index() and compile_time_secs >= shortest:
            seconds = int(compile_time_secs)
            compilation_cache.put_executable_and_time(cache_key, module_name, executable, backend, seconds)
        else:
            write(cache_key, compile_time_secs, module_name, backend, executable)

    compiler.compile_or_get_cached, compiler._cache_write = compile_and_wait, write_each
