"""What a process says of itself is read whole by another, however often it changes, and costs nothing unasked."""

import itertools
import os
import struct
import subprocess
import sys
import time

import pytest

from zaya_jax.cluster import beats

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
    monkeypatch.setenv(beats.FOLDER, str(tmp_path))

    def begin(count):
        return subprocess.Popen(
            [sys.executable, "-c", TALK, str(count)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    return begin


def test_reads_what_another_process_said(talker, tmp_path):
    process = talker(70)
    process.stdout.readline()
    found = beats.read(tmp_path / "beat-00003")
    assert (found.pid, found.process, found.section, found.step) == (process.pid, 3, "step", 70)
    assert found.mark == beats.MARKS[1 + 70 % 4]
    assert [lap.step for lap in found.laps] == list(range(7, 71))  # the newest, in their order
    assert found.laps[-1] == (70, 70.0, 35.0, 17.5)
    assert abs(found.since - time.monotonic()) < 60
    pulse, until = found.pulse, time.monotonic() + 20
    while beats.read(tmp_path / "beat-00003").pulse == pulse:  # it lives, though its main thread waits
        assert time.monotonic() < until
        time.sleep(0.05)
    assert beats.read(tmp_path / "beat-00003").since == found.since
    process.communicate()


def test_never_reads_half_of_it(talker, tmp_path):
    process = talker(20_000)
    places = set()
    while len(places) < 500:
        found = beats.read(tmp_path / "beat-00003")
        if found is None or found.section != "step":
            continue
        places.add(found.step)
        assert found.mark == beats.MARKS[1 + found.step % 4]
        for before, lap in itertools.pairwise(found.laps):
            assert lap.step == before.step + 1 and lap.own == lap.whole / 2
        if found.step == 20_000:
            break
    assert len(places) > 100
    process.communicate()


def test_nobody_who_listens_is_no_error(tmp_path, monkeypatch):
    monkeypatch.delenv(beats.FOLDER, raising=False)
    beats.begin(0)
    beats.at("step", 1)
    beats.lap(1, 1.0, 1.0, 1.0)
    assert beats.read(tmp_path / "beat-00000") is None
    for content in (b"x", bytes(beats.SIZE)):
        (tmp_path / "beat-00000").write_bytes(content)
        assert beats.read(tmp_path / "beat-00000") is None


@pytest.mark.parametrize(
    "word", [(0, 3, 99), (0, 5, -1), (1, 6, 1e300), (1, 7, float("nan")), (2, 0, None), (3, 0, None)]
)
def test_a_process_that_scribbles_over_its_file_has_said_nothing(tmp_path, word):
    """A section of 99 was an IndexError of the agent, a sparse file a MemoryError, a pipe no end."""
    kind, place, value = word
    path = tmp_path / "beat-00000"
    beats.Beats(tmp_path, 0).lap(1, 1.0, 1.0, 1.0)
    assert beats.read(path).section == "start"
    if kind < 2:
        raw = bytearray(path.read_bytes())
        struct.pack_into("<d" if kind else "<q", raw, 8 * place, value)
        path.write_bytes(raw)
    else:
        path.unlink()
        os.mkfifo(path) if kind == 2 else os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 36)
    assert beats.read(path) is None
