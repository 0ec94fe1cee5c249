"""A process's report is read whole by another, however often it changes, and costs nothing without
a watcher."""

import itertools
import math
import struct
import subprocess
import sys
import time

import pytest
from waiting import until

from zaya_jax.cluster import beats

NAN = math.nan
TALK = """
import sys, time
from zaya_jax.cluster import beats
beats.begin(3)
for n in range(1, int(sys.argv[1]) + 1):
    beats.at("step", n, beats.MARKS[1 + n % 4])
    beats.lap(n, n, n / 2, n / 4)
    time.sleep(1e-4)
print("said", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def talker(tmp_path, monkeypatch):
    (tmp_path / "beats").write_bytes(bytes(4 * beats.SIZE))
    monkeypatch.setenv(beats.VARIABLE, str(tmp_path / "beats"))

    def begin(count):
        return subprocess.Popen(
            [sys.executable, "-c", TALK, str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    return begin


def test_reads_what_another_process_said(talker, tmp_path):
    process = talker(70)
    process.stdout.readline()
    found = beats.read(tmp_path / "beats", 3)
    assert (found.pid, found.section, found.step) == (process.pid, "step", 70)
    assert found.mark == beats.MARKS[1 + 70 % 4]
    assert [lap.step for lap in found.laps] == list(range(7, 71))  # the newest, in their order
    assert found.laps[-1] == (70, 70.0, 35.0, 17.5)
    assert abs(found.since - time.monotonic()) < 60
    # it lives, though its main thread waits
    until(lambda: beats.read(tmp_path / "beats", 3).pulse != found.pulse, 20)
    assert beats.read(tmp_path / "beats", 3).since == found.since
    process.communicate()


def test_never_reads_half_of_it(talker, tmp_path):
    process = talker(20_000)
    places = set()
    while len(places) < 500:
        found = beats.read(tmp_path / "beats", 3)
        if found is None or found.section != "step":
            continue
        places.add(found.step)
        assert found.mark == beats.MARKS[1 + found.step % 4]
        for before, lap in itertools.pairwise(found.laps):
            assert lap.step == before.step + 1 and lap.own == lap.whole / 2
        if found.step == 20_000:
            break
    assert len(places) > 100
    process.kill()
    process.communicate()


def test_what_a_library_scribbles_over_a_beat_is_none(tmp_path):
    """The agent ended with a traceback, and the node's processes with it."""
    path, now = tmp_path / "beats", time.monotonic()
    sound = {"section": 2, "step": 9, "mark": 3, "since": now, "pulse": now, "laps": 1}
    lap = struct.pack("<qddd", 8, 1.0, 0.5, 0.1)

    def read(lap=lap, cut=None, **odd):
        head = struct.pack("<QqqqqddQ", 2, 77, *(sound | odd).values())
        path.write_bytes((head + lap.ljust(beats.SIZE - len(head), b"\0"))[:cut])
        return beats.read(path, 0)

    assert read().laps == ((8, 1.0, 0.5, 0.1),)
    for odd in (
        *({"section": n} for n in (99, -9, 2**62)),
        *({"mark": n} for n in (77, -1)),
        *({"step": n} for n in (-(2**63), -1, 2**62)),
        *({name: n} for name in ("since", "pulse") for n in (NAN, math.inf, -1e9, now + 1e6)),
        *({"cut": n} for n in (0, 10, beats.SIZE - 1)),
    ):
        assert read(**odd) is None, odd
    # A lap stays for 64 steps, in which the process would be silent.
    for numbers in ((-5, 1, 1, 1), (8, NAN, 1, 1), (8, 1, -1e300, 1)):
        assert read(lap=struct.pack("<qddd", *numbers)).laps == ()


def test_a_process_that_has_said_nothing_has_no_beat(tmp_path, monkeypatch):
    (tmp_path / "beats").write_bytes(bytes(2 * beats.SIZE))
    monkeypatch.setenv(beats.VARIABLE, str(tmp_path / "beats"))
    beats.Beats().begin(1)
    found = [beats.read(tmp_path / "beats", index) for index in range(2)]
    assert found[0] is None and found[1].section == "start"
