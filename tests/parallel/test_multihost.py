"""Several real processes: they meet, name who is missing, stop after one step, and end with one exit code."""

import re
import signal
from pathlib import Path

import pytest
from multiprocess_runs import start

from zaya_jax import cli

SEVERAL = Path(__file__).with_name("several.py")


def play(scene, folder, count=2):
    with start([SEVERAL, scene], count, folder) as run:
        return run.wait(90)


def test_processes_meet_and_name_who_is_missing(tmp_path):
    results = play("meet", tmp_path, count=3)
    for result in results:
        assert "first: {'who': 0}\nagain: [0, 'twice']\n" in result.out
        assert "all: {'worst': 2.0, 'mean': 1.0, 'sum': 3.0}\ncrossed" in result.out
        assert result.code == 1
    line = "process 1 of 3 did not come to 'supper' within 2 s; see logs/ there"
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


@pytest.mark.slow
def test_a_process_that_was_killed_is_named(tmp_path):
    results = play("killed", tmp_path)
    assert [result.code for result in results] == [1, -signal.SIGKILL], results
    lost = "error: process 1 of 2 did not come to 'supper' within 2 s; see logs/ there\n"
    assert results[0].err == lost + "error: process 1 of 2 gave no answer\n"


@pytest.mark.slow
def test_a_signal_to_one_stops_all_after_the_same_step(tmp_path):
    with start([SEVERAL, "stop"], 3, tmp_path) as run:
        run.wait_for("step 20\n", index=2)
        run.processes[2].send_signal(signal.SIGTERM)
        results = run.wait(90)
    assert [result.code for result in results] == [cli.PREEMPTED] * 3, results
    said = {re.search(r"stopped after \d+ by .*", result.out)[0] for result in results}
    assert len(said) == 1 and said.pop().endswith("by SIGTERM to process 2")
