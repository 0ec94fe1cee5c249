"""tools.network: a link has about its rate, and the kernel takes all of it away."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import until

from tools import network

# Node 1 sends 1.5 MB to node 0 and prints how long connecting took; node 0 how long receiving did.
# Both write into one pipe, so a line and its end are one string: Python may write each by itself.
SEND = """
import os, socket, time
begun = time.monotonic()
if os.environ["JAX_PROCESS_ID"] == "0":
    with socket.create_server((socket.gethostname(), 1)) as server:
        connection, _ = server.accept()
    connection.recv(1)
    begun = time.monotonic()
    while connection.recv(1 << 16):
        pass
    print(f"received {time.monotonic() - begun}\\n", end="")
else:
    connection = None
    while not connection:
        begun = time.monotonic()
        try:
            connection = socket.create_connection(("10.0.0.1", 1))
        except ConnectionRefusedError:
            time.sleep(0.05)
    print(f"connected {time.monotonic() - begun}\\n", end="")
    connection.sendall(bytes(1_500_000))
"""
WAIT = """
import os, time
print(os.readlink("/proc/self/ns/net") + "\\n", end="", flush=True)
time.sleep(100)
"""


def start(*options: str, python: str) -> subprocess.Popen:
    """A network on whose nodes Python runs this text."""
    command = [sys.executable, "-m", "tools.network", *options, "--", sys.executable, "-c", python]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def skip_if_forbidden(process: subprocess.Popen) -> None:
    """Skips where a network that has ended says that the machine does not allow it."""
    if process.wait(60) == network.FORBIDDEN:
        pytest.skip(process.stderr.read().strip())


def namespaces() -> set[str]:
    """The network namespaces of all processes of the machine."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/ns/net"):
        with contextlib.suppress(OSError):  # the process has ended
            found.add(os.readlink(link))
    return found


@pytest.mark.parametrize("delay", [0, 50])
def test_a_link_has_its_rate_and_delay(delay):
    """1.5 MB take a second over 12 Mbit/s, and a thousandth of one without a limit."""
    with start("--nodes=2", "--rate=12", f"--delay={delay}", python=SEND) as sending:
        skip_if_forbidden(sending)
        assert sending.returncode == 0, sending.stderr.read()
        lines = [line.split() for line in sending.stdout.read().splitlines()]
    seconds = {what: float(took) for what, took in lines}
    assert 0.7 < seconds["received"] < 20
    assert 2 * delay / 1000 <= seconds["connected"] < 20  # there and back


def test_nothing_is_left_of_a_network_that_is_killed():
    with start("--nodes=2", "--delay=1", python=WAIT) as waiting:
        made = {waiting.stdout.readline().strip() for _ in range(2)}
        if "" in made:
            skip_if_forbidden(waiting)
        assert len(made) == 2 and made <= namespaces()
        waiting.kill()
    until(lambda: not made & namespaces(), 20)


def test_a_machine_that_forbids_it_is_told_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(network, "ENTER", "ls --no-such-namespace")  # fails as unshare does
    monkeypatch.setattr(network, "PROGRAMS", ())
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest's own stays
    monkeypatch.setattr(sys, "argv", ["network", "--", "true"])
    assert network.main() == network.FORBIDDEN
    said = capsys.readouterr().err
    assert "skipped" in said and "no-such-namespace" in said and said.count("\n") == 1
