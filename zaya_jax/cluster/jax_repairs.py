"""Two repairs of JAX's distributed runtime, for which it has no public hooks.

compile_together(barrier)         programs of several processes are compiled by all before one runs them
address = through(host, port)     for jax.distributed.initialize; keeps a client alive when the coordinator dies
"""

import contextlib
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
from jax._src import compilation_cache, compiler

_open: list[socket.socket] = []  # must never be closed, not even as garbage


def compile_together(barrier: Callable[[str], None]) -> None:
    """All processes compile a shared program before one runs it, and all keep CPU programs in the
    cache.

    The first process to enter a collective waits at most 30 s for the others (gloo, jaxlib 0.12.0),
    and with a warm cache it is there minutes before them. All processes compile these programs in
    the same order, since they run the same ones.

    JAX lets only process 0 write to the cache. For a CPU the key depends on the process, by the
    fingerprint of its devices, so the others would never find anything.
    """
    compile_first, write = compiler.compile_or_get_cached, compiler._cache_write

    def compile_and_wait(
        backend: Any, computation: Any, devices: Any, *args: Any, **kwargs: Any
    ) -> Any:
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
            compilation_cache.put_executable_and_time(
                cache_key, module_name, executable, backend, seconds
            )
        else:
            write(cache_key, compile_time_secs, module_name, backend, executable)

    compiler.compile_or_get_cached, compiler._cache_write = compile_and_wait, write_each


def through(host: str, port: int) -> str:
    """An address that leads to host:port through a relay that lives as long as the process.

    The client keeps a call open on which the coordinator would report errors. When the connection
    closes, which the system sees to as soon as process 0 is killed, the client ends its own process
    with SIGABRT and a stack trace. JAX passes it no callback for that, one passed by hand fails
    (std::bad_cast, jaxlib 0.12.0), and jax_enable_recoverability changes nothing of it. Behind the
    relay the client's connection stays open, and silent: `lifelines` ends the process, and says why.

    Called once in a process. On Linux the address is a name without a file, which no http_proxy is
    asked for.
    """
    if sys.platform != "linux":
        return f"{host}:{port}"
    # Containers that share a host's network share these names too, and number alike.
    name = f"zaya_jax-{os.getpid()}-{secrets.token_hex(4)}"
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"\0{name}")
    server.listen()
    threading.Thread(target=_serve, args=(server, host, port), name="relay", daemon=True).start()
    return f"unix-abstract:{name}"


def _serve(server: socket.socket, host: str, port: int) -> None:
    while True:
        near, _ = server.accept()
        try:
            far = socket.create_connection((host, port), timeout=10)
        except OSError:  # not up yet: the client tries again
            near.close()
            continue
        far.settimeout(None)
        far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _open.extend((near, far))
        for source, target in ((near, far), (far, near)):
            threading.Thread(
                target=_carry, args=(source, target), name="relay", daemon=True
            ).start()


def _carry(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
