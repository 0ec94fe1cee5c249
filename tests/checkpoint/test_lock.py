"""One writer of a workdir at a time, told who it is; and nobody when it has ended, however that was."""

import fcntl
import os
import re
import subprocess
import sys

import jax.numpy as jnp
import pytest

from zaya_jax import config
from zaya_jax.checkpoint import lock, rewrite, store
from zaya_jax.config import Checkpoint, UserError
from zaya_jax.train.workdir import open_workdir

HOLD = """
import os, sys, time
from pathlib import Path
from zaya_jax.checkpoint import lock
lock.take(Path(sys.argv[1]))
if not os.fork():  # a worker that outlives it
    time.sleep(20)
print("taken", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path, monkeypatch):
    """Another process that has the workdir `run`."""
    monkeypatch.setattr(lock, "PATIENCE", 0.3)
    (tmp_path / "run").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path / "run"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "taken\n"
    yield process
    process.kill()
    process.stdout.close()
    process.wait()


def test_the_second_is_told_who_has_it_until_that_has_ended(tmp_path, holder):
    workdir = tmp_path / "run"
    said = (
        rf"run is in use by process {holder.pid} on \S+ since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d\S*; wait until"
    )
    settings = config.check(config.default())
    for _ in range(2):  # to be refused gives nobody else's lock back
        with pytest.raises(UserError, match=said):
            open_workdir(workdir, settings)
    assert sorted(p.name for p in workdir.iterdir()) == [lock.NAME], "nothing was written"
    link = tmp_path / "link"
    link.symlink_to(workdir)
    with pytest.raises(UserError, match=re.escape(f"--workdir={link} is in use")):
        open_workdir(link, settings)
    holder.kill()
    open_workdir(workdir, settings)
    open_workdir(workdir, settings)  # a run that goes on in the same process
    lock.release(workdir)
    lock.release(workdir)


def test_what_writes_beside_a_run_is_refused_too(tmp_path, holder):
    source = tmp_path / "source"
    checkpoints = store.Store(source, Checkpoint(), print)
    checkpoints.save(3, {"params": {"w": jnp.zeros(3)}}, {"step": 3, "tokens": 3})
    checkpoints.close()
    with pytest.raises(UserError, match=f"in use by process {holder.pid}"):
        rewrite.reshard(source, tmp_path / "run")
    holder.kill()
    rewrite.reshard(source, tmp_path / "run")
    assert store.Store(tmp_path / "run").steps() == [3]


def test_where_files_cannot_be_locked_that_is_said(tmp_path, monkeypatch, capsys):
    def cannot(*args):
        raise OSError(37, os.strerror(37))

    monkeypatch.setattr(fcntl, "lockf", cannot)
    lock.take(tmp_path)
    assert "cannot be locked" in capsys.readouterr().out
    lock.release(tmp_path)
