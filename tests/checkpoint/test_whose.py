"""Whose a folder is: seen under the lock, told by the checkpoints, and never changed by a step of another run."""

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys

import jax.numpy as jnp
import pytest

from experiments import checkpoint
from zaya_jax import cli, config
from zaya_jax.checkpoint import audit, lock, rewrite, seal, store, writing
from zaya_jax.config import Checkpoint, StorageError, UserError
from zaya_jax.pytorch import exchange
from zaya_jax.train import workdir as workdir_lib
from zaya_jax.train.workdir import AsItWas, open_workdir


def settings(**keys):
    given = config.default()
    given.update_from_flattened_dict({name.replace("__", "."): value for name, value in keys.items()})
    return config.check(given)


def train(folder, steps=(2, 4), plus=0, **keys):
    """A run's folder with a config and some steps."""
    workdir = open_workdir(folder, settings(**keys))
    checkpoints = store.Store(workdir, Checkpoint(keep=9), print)
    checkpoints.newest()
    for step in steps:
        meta = {"step": step, "tokens": step, "config": config.to_dict(settings(**keys))}
        checkpoints.save(step, {"params": {"w": jnp.arange(9.0) + step + plus}}, meta)
        checkpoints.wait()
    checkpoints.close()
    lock.release(workdir)
    return workdir


def content(folder):
    return {p: p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


@pytest.fixture
def verify(monkeypatch, capsys):
    """The exit code and the output of `verify`."""

    def call(place):
        monkeypatch.setattr("sys.argv", ["checkpoint", "verify", f"--workdir={place}"])
        return cli.exit_code(checkpoint.main), capsys.readouterr().out

    return call


def test_a_refused_start_that_waited_takes_nothing_of_who_came_first(tmp_path, monkeypatch):
    """The folder was new when it looked; another run began, saved and ended while it waited for the lock."""
    place, take = tmp_path / "run", lock.take

    def waits(workdir, say=print):
        monkeypatch.setattr(lock, "take", take)
        train(place, run__seed=1)
        take(workdir, say)

    as_it_was = AsItWas(place)
    monkeypatch.setattr(lock, "take", waits)
    with pytest.raises(UserError, match=r"was started with config\.run\.seed=1, now it is 2"):
        open_workdir(place, settings(run__seed=2), as_it_was.locked)
    assert not lock.held(place)
    before = content(place)
    as_it_was(UserError)
    assert content(place) == before and (place / "config.json").exists()

    # One that may go on there is refused later, for another reason: it began none of this either.
    shutil.rmtree(place)
    as_it_was = AsItWas(place)
    monkeypatch.setattr(lock, "take", waits)
    open_workdir(place, settings(run__seed=1), as_it_was.locked)
    before = content(place)
    as_it_was(UserError)
    assert content(place) == before
    lock.release(place)


def test_what_a_refused_start_has_fetched_goes_with_it(tmp_path):
    shutil.copytree(train(tmp_path / "run") / "checkpoints", tmp_path / "copies")
    as_it_was = AsItWas(tmp_path / "new")
    workdir = open_workdir(tmp_path / "new", settings(), as_it_was.locked)
    assert store.Store(workdir, Checkpoint(durable=str(tmp_path / "copies")), print).newest() == 4
    as_it_was(UserError)
    lock.release(workdir)
    assert not (tmp_path / "new").exists()


def test_the_checkpoint_is_believed_not_config_json(tmp_path, monkeypatch):
    workdir = train(tmp_path / "run")
    path = workdir / "config.json"
    recorded = path.read_text()
    path.write_text(recorded.replace('"seed": 0', '"seed": 7'))
    # The command that the run was started with goes on; what config.json says now does not.
    open_workdir(workdir, settings())
    lock.release(workdir)
    with pytest.raises(UserError, match=r"was started with config\.run\.seed=0, now it is 7"):
        open_workdir(workdir, settings(run__seed=7))
    with pytest.raises(
        UserError, match=r"config\.json contradicts the checkpoint of step 4: .*run\.seed=0.*restore"
    ):
        exchange.config_at(workdir, 4)
    with pytest.raises(UserError, match="contradicts the checkpoint of step 4"):
        exchange.to_hf(workdir, tmp_path / "out")
    path.write_text(json.dumps(json.loads(recorded) | {"name": "renamed"}))
    assert exchange.config_at(workdir, 4) == settings()
    # Of another run, name and all: no start on it counts as complete.
    path.write_text(recorded)
    other = train(tmp_path / "other", plus=1, run__seed=5)
    shutil.rmtree(workdir / "checkpoints")
    shutil.copytree(other / "checkpoints", workdir / "checkpoints")
    with pytest.raises(UserError, match=r"was started with config\.run\.seed=5, now it is 0"):
        open_workdir(workdir, settings())


@pytest.mark.parametrize("to", ["{}", "file://{}/checkpoints"])
def test_a_step_is_not_resharded_into_another_run(tmp_path, to):
    source, other = train(tmp_path / "run"), train(tmp_path / "other", (2,), plus=1)
    before = content(other)
    for _ in range(2):
        with pytest.raises(UserError, match=r"give (a new folder|each run a place of its own)"):
            rewrite.reshard(source, to.format(other))
        assert content(other) == before
        (other / "checkpoints" / seal.RUN).unlink(missing_ok=True)  # then the steps tell it
        before = content(other)
    # Where it began and has saved nothing, its name tells it.
    begun = open_workdir(tmp_path / "begun", settings())
    store.Store(begun, Checkpoint(), print).newest()
    lock.release(begun)
    with pytest.raises(UserError, match=r"is of run|is run"):
        rewrite.reshard(source, to.format(begun))
    rewrite.reshard(source, tmp_path / "new", step=2)
    rewrite.reshard(source, tmp_path / "new", step=4)
    assert writing.run_of(tmp_path / "new" / "checkpoints") == writing.run_of(source / "checkpoints")


def test_a_failed_reshard_leaves_what_others_made(tmp_path, monkeypatch):
    source, target, take = train(tmp_path / "run"), tmp_path / "target", lock.take

    def waits(workdir, say=print):
        monkeypatch.setattr(lock, "take", take)
        train(target, plus=1)
        take(workdir, say)

    monkeypatch.setattr(lock, "take", waits)
    with pytest.raises(UserError, match="step 4 already"):
        rewrite.reshard(source, target)
    assert store.Store(target, Checkpoint(), print).newest() == 4
    monkeypatch.setattr(writing, "commit", lambda *args: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        rewrite.reshard(source, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_verify_sees_steps_of_two_runs_side_by_side(tmp_path, verify):
    workdir, other = train(tmp_path / "run"), train(tmp_path / "other", plus=1)
    shutil.copytree(workdir / "checkpoints", tmp_path / "copies")
    for root, place in ((workdir / "checkpoints", workdir), (tmp_path / "copies", tmp_path / "copies")):
        assert verify(place)[0] == 0
        shutil.rmtree(root / "2")
        shutil.copytree(other / "checkpoints" / "2", root / "2")
        code, out = verify(place)
        assert code == 4 and "step 2: checksums.json is of run" in out
        (root / seal.RUN).unlink()
        code, out = verify(place)
        assert code == 4 and "checkpoints of several runs lie here: 2 of run" in out


def test_a_lock_that_was_deleted_locks_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "PATIENCE", 0.3)
    lock.take(tmp_path)
    (tmp_path / lock.NAME).unlink()
    lock.keep(tmp_path)
    with another_process(tmp_path) as said:
        assert "is in use by process" in said, "it was taken anew"
    waiter = os.open(tmp_path / lock.NAME, os.O_RDWR)
    (tmp_path / lock.NAME).unlink()  # as one does that takes its new folder away
    lock.release(tmp_path)
    fcntl.lockf(waiter, fcntl.LOCK_EX | fcntl.LOCK_NB)
    lock.take(tmp_path)  # not refused by the old one: the next makes a file of its own
    os.close(waiter)
    with another_process(tmp_path) as said:
        assert "is in use by process" in said
    (tmp_path / lock.NAME).unlink()
    with another_process(tmp_path) as said:
        assert said == "taken\n"
    for _ in range(2):  # the other has ended, but what lies there now is its own
        with pytest.raises(UserError, match=r"was deleted while this run had it, and process \d+ .* took"):
            lock.keep(tmp_path)
    lock.release(tmp_path)


OTHER = """
import sys
from pathlib import Path
from zaya_jax.checkpoint import lock
lock.PATIENCE = 0.2
try:
    lock.take(Path(sys.argv[1]))
    print("taken", flush=True)
except ValueError as error:
    print(error, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def another_process(folder):
    """What another process says that tries to take the lock; it keeps it inside."""
    command = [sys.executable, "-c", OTHER, folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process.stdout.readline()
        process.communicate("")


def test_who_waited_for_a_deleted_lock_does_not_own_the_folder(tmp_path, monkeypatch):
    holder, opened = os.open(tmp_path / lock.NAME, os.O_RDWR | os.O_CREAT), lock._opened
    os.close(holder)

    def then_deleted(path):
        file = opened(path)
        if (tmp_path / lock.NAME).exists() and then_deleted.times:
            then_deleted.times -= 1
            (tmp_path / lock.NAME).unlink()
        return file

    then_deleted.times = 2
    monkeypatch.setattr(lock, "_opened", then_deleted)
    lock.take(tmp_path)
    assert lock._is(lock._held[tmp_path.resolve() / lock.NAME], tmp_path / lock.NAME)
    lock.release(tmp_path)


def test_a_run_whose_folder_was_taken_over_saves_nothing_more(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lock, "PATIENCE", 0.1)
    lock.take(tmp_path)
    checkpoints = store.Store(tmp_path, Checkpoint(), print)
    checkpoints.newest()
    (tmp_path / lock.NAME).unlink()
    with another_process(tmp_path) as said:
        assert said == "taken\n"
        for step in (1, 2):
            checkpoints.save(step, {"params": {"w": jnp.zeros(3)}}, {"step": step, "tokens": step})
            checkpoints.wait()
        assert checkpoints.steps() == []
        assert capsys.readouterr().out.count("was deleted while this run had it") == 2
    checkpoints.save(3, {"params": {"w": jnp.zeros(3)}}, {"step": 3, "tokens": 3})
    checkpoints.close()
    assert checkpoints.steps() == [], "the other has ended, but what lies there now is its own"
    lock.release(tmp_path)


DEEP = '{"a":' * 100_000


@pytest.mark.parametrize(
    "text", [DEEP, "[]", "null", '{"name": ' + "9" * 5000 + "}", '{"name": ' + "[" * 3000 + "]" * 3000 + "}"]
)
def test_a_config_json_that_is_none_is_a_line_with_its_name(tmp_path, text):
    workdir = train(tmp_path / "run", (2,))
    (workdir / "config.json").write_text(text)
    for read in (
        workdir_lib.read_config,
        lambda w: open_workdir(w, settings()),
        lambda w: exchange.config_at(w, 2),
    ):
        with pytest.raises(UserError, match=r"run/config\.json") as caught:
            read(workdir)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_pipes_and_folders_in_the_place_of_files(tmp_path):
    """To open a pipe would wait for ever."""
    workdir = train(tmp_path / "run")
    for name in (
        "checkpoints/4/checksums.json",
        "checkpoints/4/meta/data.json",
        "checkpoints/4/state/params.w/c.0",
    ):
        kept = (workdir / name).read_bytes()
        for odd in (os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)):
            (workdir / name).unlink()
            odd(workdir / name)
            damages = [str(d) for d in audit.verify(workdir / "checkpoints" / "4")]
            assert any("no regular file" in d or "Is a directory" in d for d in damages), damages
            with pytest.raises(StorageError):
                store.Store(workdir, Checkpoint(), print).newest()
            with pytest.raises((StorageError, UserError)):
                rewrite.reshard(workdir, tmp_path / "new", step=4)
            with pytest.raises((StorageError, UserError)):
                audit.require(workdir / "checkpoints" / "4")
            os.rmdir(workdir / name) if (workdir / name).is_dir() else os.remove(workdir / name)
            (workdir / name).write_bytes(kept)
    for name in ("checkpoints/.run", "config.json"):
        (workdir / name).unlink()
        os.mkfifo(workdir / name)
    assert writing.run_of(workdir / "checkpoints") == ""
    with pytest.raises(UserError, match=r"config\.json cannot be read \(no regular file"):
        workdir_lib.read_config(workdir)


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/.run"])
def test_what_stands_in_the_place_of_checkpoints(tmp_path, name):
    workdir = train(tmp_path / "run", ())
    if name == "checkpoints":
        shutil.rmtree(workdir / name)
        (workdir / name).write_text("")
    else:
        (workdir / name).unlink()
        (workdir / name).mkdir()
    with pytest.raises(StorageError, match=r"checkpoints cannot be used for checkpoints \(.*; move away"):
        store.Store(workdir, Checkpoint(), print).newest()
