"""What lies between JAX's client and its coordinator in process 0, so that the end of that one does not abort this one.

    address = through(host, port)     for jax.distributed.initialize; the relay lives as long as the process

The client keeps a call open on which the coordinator would report errors. When the connection closes, which the system
sees to as soon as process 0 is killed, the client ends its own process with SIGABRT and a stack trace. JAX passes it no
callback for that, and one passed by hand fails too (std::bad_cast, jaxlib 0.12.0). Behind the relay the client's
connection stays open, and silent: `lifelines` ends the process, and says why.
"""

import contextlib
import itertools
import os
import socket
import sys
import threading

_count = itertools.count()
_open: list[socket.socket] = []  # none must ever be closed, not even as garbage


def through(host: str, port: int) -> str:
    """An address that leads to host:port. On Linux a name without a file, which no http_proxy is asked for."""
    if sys.platform != "linux":
        return f"{host}:{port}"
    name = f"zaya_jax-{os.getpid()}-{next(_count)}"
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
            threading.Thread(target=_carry, args=(source, target), name="relay", daemon=True).start()


def _carry(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
