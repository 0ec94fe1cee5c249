"""Several real processes: they meet, name who is missing, stop after one step, and end with one
exit code."""

import re
import signal
import socket
import time
from pathlib import Path

import pytest
from multiprocess_runs import start

from zaya_jax import cli

SEVERAL = Path(__file__).with_name("several.py")


def play(scene, folder, count=2, **variables):
    with start([SEVERAL, *scene.split("=")], count, folder, variables=variables) as run:
        return run.wait(90)


def lose(scene, victim, number, folder, count, seconds=5):
    """Kills or stops one process: every other ends with 1, and one line that names it and its
    host."""
    heartbeat = {"ZAYA_HEARTBEAT_SECONDS": str(seconds)}
    with start([SEVERAL, scene, victim], count, folder, variables=heartbeat) as run:
        for index in range(count):
            run.wait_for("here", index)
        time.sleep(1)  # into the middle of the scene
        run.processes[victim].send_signal(number)
        others = [i for i in range(count) if i != victim]
        results = run.wait(90, others)
    how = {
        signal.SIGKILL: "gone: killed",
        signal.SIGSTOP: f"silent for {0.9 * seconds:.0f} s: stopped",
    }[number]
    line = f"error: process {victim} on {socket.gethostname()} is {how}"
    for result in results:
        assert result.code == 1 and result.err.startswith(line) and result.err.count("\n") == 1, (
            results
        )


def test_processes_meet_and_name_who_is_missing(tmp_path):
    results = play("meet", tmp_path, count=3, ZAYA_WAIT_SECONDS="10")
    for result in results:
        assert "first: {'who': 0}\nagain: [0, 'twice']\n" in result.out
        assert "all: {'worst': 2.0, 'mean': 1.0, 'sum': 3.0}\ncrossed" in result.out
        assert result.code == 1
    line = "process 1 of 3 did not reach 'supper' within 10 s; see their logs"
    assert line in results[0].err and results[0].err.count("\n") == 1
    assert "Traceback" not in "".join(result.err for result in results)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scene", "code", "who", "line"),
    [
        ("bad input", cli.BAD_INPUT, 1, "the cheese is missing; bring some"),
        ("storage", cli.STORAGE, 0, "the shelf fell down"),
        ("bug", 1, 1, "ZeroDivisionError: by none"),
    ],
)
def test_an_error_in_one_ends_all_with_its_code(tmp_path, scene, code, who, line):
    results = play(scene, tmp_path)
    assert [result.code for result in results] == [code, code], results
    assert results[who].err.endswith(f"error: {line}\n")
    assert re.search(rf"error: (process {who} on \S+: )?{line}\n$", results[0].err)


def test_a_killed_process_0_is_named_and_aborts_nobody(tmp_path):
    lose("in collectives", 0, signal.SIGKILL, tmp_path, count=2)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("count", "victim"), [(2, 0), (2, 1), (3, 1), (4, 0), (4, 3)])
@pytest.mark.parametrize("scene", ["in collectives", "computing", "at a barrier", "at the end"])
def test_whoever_is_lost_is_named_whatever_all_are_doing(tmp_path, scene, count, victim, number):
    lose(scene, victim, number, tmp_path, count)


@pytest.mark.slow
def test_who_is_only_slow_is_not_lost(tmp_path):
    """Computing, waiting, and stopped for less than the limit."""
    variables = {"ZAYA_HEARTBEAT_SECONDS": "6"}
    with start([SEVERAL, "slow"], 3, tmp_path, variables=variables) as run:
        for index in range(3):
            run.wait_for("here", index)
        for process in run.processes:
            process.send_signal(signal.SIGSTOP)
            time.sleep(2)
            process.send_signal(signal.SIGCONT)
        results = run.wait(90)
    assert [(result.code, result.err) for result in results] == [(0, "")] * 3, results


def test_nobody_enters_a_collective_before_all_have_compiled_it(tmp_path):
    """gloo waits 30 s there; here the barrier before it is made less patient still."""
    results = play(
        "slow compiler=20", tmp_path, ZAYA_WAIT_SECONDS="2", JAX_ENABLE_COMPILATION_CACHE="0"
    )
    assert [result.code for result in results] == [1, 1], results
    line = r"error: process 1 of 2 did not reach 'compiled \w+' within 2 s"
    assert re.search(line, results[0].err) and "all:" not in results[0].out


@pytest.mark.slow
def test_every_process_finds_its_programs_in_the_cache(tmp_path):
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    for hits in (False, True):
        results = play("cache", tmp_path, **cache)
        assert [result.code for result in results] == [0, 0], results
        assert [bool(re.search("hits: [1-9]", result.out)) for result in results] == [hits] * 2, (
            results
        )
