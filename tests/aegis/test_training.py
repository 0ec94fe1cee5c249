"""Training itself under an agent: killed in mid-run, or hurt in many ways, it goes on and does each
step once."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import multiprocess_runs
import pytest
from small_runs import SMALL
from tiny_runs import lines
from waiting import until

from tools import chaos
from zaya_jax.checkpoint.folders import steps_in
from zaya_jax.cluster import events


@pytest.mark.slow
def test_a_killed_run_goes_on_and_does_each_step_once(tmp_path):
    workdir, output = tmp_path / "run", tmp_path / "said"
    corpus = multiprocess_runs.write_corpus(tmp_path / "corpus")
    options = [
        f"--config.{key}={value}"
        for key, value in {**SMALL, "run.num_steps": 60, "data.path": corpus}.items()
    ]
    environ = os.environ | {"XLA_FLAGS": multiprocess_runs.flags(1), "PCI_DEVICES": "none"}
    command = [
        sys.executable,
        "-m",
        "experiments.supervise",
        "--",
        f"--workdir={workdir}",
        *options,
    ]
    with (
        output.open("w") as out,
        subprocess.Popen(
            command, cwd=multiprocess_runs.ROOT, env=environ, stdout=out, stderr=out
        ) as agent,
    ):
        try:
            until(lambda: steps_in(workdir / "checkpoints"), 240, output.read_text)
            (child,) = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
            os.kill(int(child), signal.SIGKILL)
            assert agent.wait(240) == 0, output.read_text()
        finally:
            agent.kill()
    found = {event.kind: event for event in events.read(workdir)}
    assert found["died"].process == 0 and found["died"].seen == "SIGKILL"
    assert (
        found["restarted"].step > 10
        and found["restarted"].seconds > 0
        and found["ended"].facts["code"] == 0
    )
    assert [line["step"] for line in lines(workdir)] == list(range(1, 61))


@pytest.mark.slow
def test_a_run_hurt_in_every_way_names_each_fault_and_has_the_bits_of_one_left_alone(
    tmp_path, capsys
):
    found = chaos.Chaos(tmp_path / "chaos", 1, print)
    assert found.run(10) == 75, capsys.readouterr().out
    assert found.same_bits()[0] and found.well(), found.table()
