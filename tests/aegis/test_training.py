"""Training itself under an agent: killed and stopped, it ends with the bits of an unbroken run."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import multiprocess_runs
import pytest

from zaya_jax.aegis import events
from zaya_jax.checkpoint.writing import steps_in

KEYS = {
    "model.hidden_size": 16, "model.num_hidden_layers": 2, "model.head_dim": 8, "model.moe_intermediate_size": 16,
    "model.num_experts": 4, "model.router_hidden_size": 8, "data.seq_len": 16, "data.global_batch": 8,
    "eval.every": 30, "eval.windows": 2, "log.sample_tokens": 2, "checkpoint.every_steps": 10, "run.num_steps": 60,
    "precision.compute": "float32", "precision.newton_schulz": "float32", "optim.name": "adamw",
}  # fmt: skip


def supervised(folder, name, keys, befall=None):
    """A run of two processes under an agent; `befall(pids by index)` is called when step 20 is saved."""
    corpus = folder / "corpus"
    if not corpus.exists():
        corpus.mkdir()
        for i in range(60):
            text = "".join(f"line {j} of file {i}, {i * j % 97}\n" for j in range(20))
            (corpus / f"{i}.txt").write_text(text)
    workdir = folder / name
    options = [f"--config.{key}={value}" for key, value in {**keys, "data.path": corpus}.items()]
    environ = os.environ | {
        "XLA_FLAGS": multiprocess_runs.flags(1), "PCI_DEVICES": "none", "PYTHONPATH": str(multiprocess_runs.ROOT),
    }  # fmt: skip
    command = [sys.executable, "-m", "experiments.supervise", "--processes=2", "--", f"--workdir={workdir}"]
    with (folder / f"{name}.out").open("w") as out:
        agent = subprocess.Popen(
            [*command, *options], cwd=multiprocess_runs.ROOT, env=environ, stdout=out, stderr=out
        )
        try:
            until = time.monotonic() + 240
            while befall and 20 not in steps_in(workdir / "checkpoints"):
                assert agent.poll() is None and time.monotonic() < until, (folder / f"{name}.out").read_text()
                time.sleep(0.01)
            if befall:
                befall(pids(workdir))
            assert agent.wait(240) == 0, (folder / f"{name}.out").read_text()
        finally:
            agent.kill()
            agent.wait()
    return workdir


def pids(workdir):
    """The processes of the newest start."""
    found = {}
    for log in sorted((workdir / "logs").glob("process-*.log")):
        said = re.findall(r"process (\d+) of \d+, pid (\d+) on", log.read_text())
        found[int(said[-1][0])] = int(said[-1][1])
    return found


def bits(workdir):
    """The sums of all bytes of the last checkpoint's arrays."""
    folder = workdir / "checkpoints" / str(steps_in(workdir / "checkpoints")[-1])
    sums = json.loads((folder / "checksums.json").read_text())
    # The run's name differs, and with it the sum of all.
    found = {name: v for name, v in _leaves(sums) if "meta" not in name and name not in ("/run", "/crc32c")}
    assert len(found) > 10
    return found


def _leaves(tree, name=""):
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, f"{name}/{key}")
    else:
        yield name, str(tree)


def losses(workdir):
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return supervised(tmp_path_factory.mktemp("unbroken"), "run", KEYS)


@pytest.mark.slow  # test_chaos kills one of two processes in the default run
@pytest.mark.parametrize(("number", "kind"), [(signal.SIGKILL, "died"), (signal.SIGSTOP, "hangs")])
def test_a_run_that_is_broken_ends_with_the_bits_of_one_that_is_not(tmp_path, unbroken, number, kind):
    workdir = supervised(tmp_path, "run", KEYS, lambda pids: os.kill(pids[1], number))
    (found,) = [event for event in events.read(workdir) if event.kind == kind]
    assert found.process == 1
    assert losses(workdir) == losses(unbroken) and len(losses(workdir)) == KEYS["run.num_steps"]
    assert bits(workdir) == bits(unbroken)
    (restarted,) = [event for event in events.read(workdir) if event.kind == "restarted"]
    assert restarted.seconds > 0 and restarted.step > 20
    assert [event.kind for event in events.read(workdir)][-1] == "ended"
