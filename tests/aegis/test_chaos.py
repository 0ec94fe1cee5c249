"""A run that is hurt on purpose: each fault is found and rightly named, and the bits are those of a run left alone."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from zaya_jax.aegis import chaos, hurt
from zaya_jax.config import UserError


def test_a_process_is_killed_and_a_gpu_counts_an_error(tmp_path, capsys):
    found = chaos.Chaos(tmp_path / "chaos", 0, print, processes=2)
    faults = [
        fault for fault in chaos.FAULTS if fault.name in ("a process is killed", "a GPU's memory error")
    ]
    assert found.run(0, faults, learned=2) == 75, capsys.readouterr().out
    same, step = found.same_bits()
    assert same and step >= 10, capsys.readouterr().out
    assert found.well() and {outcome.fault for outcome in found.outcomes} == {fault.name for fault in faults}
    killed, counted = found.table()[2:] if "killed" in found.table()[2] else found.table()[:1:-1]
    assert killed.startswith("| a process is killed | 1 | 1 |") and "never" not in killed + counted


@pytest.mark.slow
def test_everything_at_once(tmp_path, capsys):
    found = chaos.Chaos(tmp_path / "chaos", 1, print)
    assert found.run(10) == 75, capsys.readouterr().out
    assert found.same_bits()[0] and found.well(), found.table()


def test_a_folder_that_is_in_use_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is not empty; give a new folder"):
        chaos.Chaos(tmp_path, 0, print)


TALK = """
import socket, sys
with socket.create_connection(("localhost", int(sys.argv[1]))) as line:
    line.sendall(b"here")
    print(line.recv(1), flush=True)
"""


def test_a_connection_between_two_processes_is_cut():
    with socket.create_server(("localhost", 0)) as server:
        command = [sys.executable, "-c", TALK, str(server.getsockname()[1])]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            line, _ = server.accept()
            with line:
                assert line.recv(4) == b"here"
                mine, other = (hurt.Victim(i, pid, "") for i, pid in enumerate((os.getpid(), child.pid)))
                assert hurt.cut(other, mine) == 1
                assert line.recv(1) == b""  # nobody closed it
            assert child.stdout.read() == "b''\n"


def test_what_a_full_disk_does_to_a_process(tmp_path):
    write = f"import sys; sys.stdin.read(1); open({str(tmp_path / 'f')!r}, 'wb').write(bytes(10_000))"
    command = [sys.executable, "-c", write]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        hurt.fill_disk(hurt.Victim(0, child.pid, ""))
        _, said = child.communicate("x")
    assert "File too large" in said and (tmp_path / "f").stat().st_size <= hurt.SMALL


def test_a_stopped_process_is_seen_as_one():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        victim = hurt.Victim(0, child.pid, "")
        hurt.stop(victim)
        _, status = os.waitpid(child.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status) and os.WSTOPSIG(status) == signal.SIGSTOP
        hurt.kill(victim)
