"""Who may write where: one writer of a workdir at a time, no place of a run in another, and none in a
folder of another run."""

import contextlib
import shutil
import subprocess
import sys

import checkpoint_helpers
import pytest
from checkpoint_helpers import content, put_in_place, train
from refusals import check_refused

from zaya_jax import config
from zaya_jax.checkpoint.run import claims, store
from zaya_jax.config import Checkpoint, UserError
from zaya_jax.pytorch import any_model
from zaya_jax.training.workdir import TakenFolder, open_workdir

HOLD = """
import os, sys, time
from pathlib import Path
from zaya_jax.checkpoint.run import claims
for folder in sys.argv[1:]:
    claims.take(Path(folder))
if not os.fork():  # a worker that outlives it
    time.sleep(20)
print("taken", flush=True)
time.sleep(600)
"""


# ################################################################################################
# The lock
# ##################################################################################################


@pytest.fixture
def holder(tmp_path, monkeypatch):
    """A process that has the lock of a workdir, and makes a new folder."""
    monkeypatch.setattr(claims, "PATIENCE", 1.0)
    command = [sys.executable, "-c", HOLD, tmp_path / "run", tmp_path / ".new.part"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "taken\n"
    yield process
    process.kill()
    process.stdout.close()
    process.wait()


def test_the_second_is_told_who_has_it_until_that_has_ended(tmp_path, holder):
    workdir, settings = tmp_path / "run", config.check(config.default())
    since = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\S*"
    message = rf"in use by process {holder.pid} on \S+ since {since}; wait until"
    (tmp_path / "link").symlink_to(workdir)
    for refused in (
        lambda: open_workdir(workdir, settings),
        lambda: open_workdir(workdir, settings),  # a refusal gives back no other's lock
        lambda: open_workdir(tmp_path / "link", settings),
        lambda: claims.require_free(workdir),
        # as two imports into one folder
        lambda: claims.whole_or_nothing(tmp_path / "new").__enter__(),
    ):
        check_refused(message, refused)
    assert [*workdir.iterdir()] == [workdir / claims.LOCK], "nothing was written"
    holder.kill()
    claims.require_free(workdir)
    open_workdir(workdir, settings)
    open_workdir(workdir, settings)  # a run that goes on in the same process
    claims.release(workdir)
    claims.release(workdir)


def test_who_waits_writes_nothing_while_a_refused_run_deletes_its_folder(
    tmp_path, holder, monkeypatch
):
    """It may delete the lock's file first; what the other wrote then would be deleted, too."""
    path = tmp_path / "run" / claims.LOCK

    def meanwhile(_):
        if path.exists():
            path.unlink()
        else:  # all is deleted
            holder.kill()
            holder.wait()

    monkeypatch.setattr(claims.time, "sleep", meanwhile)
    claims.take(tmp_path / "run")
    assert holder.returncode, "it has ended"
    claims.release(tmp_path / "run")


def test_a_lock_whose_file_went_with_its_folder_locks_nothing(tmp_path, monkeypatch):
    """A run that is refused takes its new folder away, while another waits for it."""
    opened = claims._open

    def then_deleted(path):
        monkeypatch.setattr(claims, "_open", opened)
        file = opened(path)
        path.unlink()
        return file

    monkeypatch.setattr(claims, "_open", then_deleted)
    claims.take(tmp_path)
    path = tmp_path.resolve() / claims.LOCK
    assert claims._is_still_at(claims._taken[path], path)
    claims.release(tmp_path)


@pytest.mark.parametrize("target", ["notes.txt", "nowhere"])
def test_a_lock_that_is_a_link_is_refused_and_its_target_left_as_it_is(tmp_path, target):
    (tmp_path / "notes.txt").write_text("of somebody else\n" * 50)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / claims.LOCK).symlink_to(tmp_path / target)
    for call in (claims.take, claims.require_free):
        with pytest.raises(OSError, match="symbolic links"):
            call(tmp_path / "run")
    assert (tmp_path / "notes.txt").read_text() == "of somebody else\n" * 50
    assert not (tmp_path / "nowhere").exists()


# ################################################################################################
# Folders
# ##################################################################################################


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    """A run's folder with steps 2 and 4, and links to it; the current folder is the one above."""
    monkeypatch.chdir(tmp_path)
    train(tmp_path / "run", 2, 4)
    (tmp_path / "link").symlink_to(tmp_path / "run" / "checkpoints")
    (tmp_path / "above").symlink_to(tmp_path)
    return tmp_path / "run"


WAYS = [
    "{run}/checkpoints",
    "file://{run}/checkpoints",
    "local://{run}/checkpoints",
    "{run}/x/../checkpoints",
    "run//checkpoints/.",
    "{top}/link",
    "{top}/above/run/checkpoints",
    "{run}/checkpoints/2",
    "{run}/checkpoints/new",
    "{run}",
    "{run}/tokenizer",
    "{top}",
    ".",
    "/",
]


def test_no_copies_in_the_run_s_own_folder_nor_around_it(workdir, tmp_path):
    before = content(tmp_path)
    for way in WAYS:
        keys = Checkpoint(durable=way.format(run=workdir, top=tmp_path))
        check_refused(r"overlap.*choose a separate place", store.Store, workdir, keys, print)
    keys = Checkpoint(durable=f"{tmp_path}/x/../new/checkpoints")
    check_refused("overlap", store.Store, tmp_path / "new", keys, print)  # it is not there yet
    assert content(tmp_path) == before
    store.Store(workdir, Checkpoint(durable=str(tmp_path / "runs")), print).close()
    assert not claims.overlap(tmp_path / "new", tmp_path / "newer")


def test_nothing_is_written_into_a_checkpoint_nor_beside_its_siblings(workdir, tmp_path):
    inside, before = f"{workdir}/checkpoints/4/more", content(tmp_path)
    for write in (
        lambda: claims.require_new_folder(inside),
        lambda: claims.require_new_folder(tmp_path / "link" / "4" / "state" / "deep"),
        lambda: claims.require_new_folder(workdir / "checkpoints" / "99"),
        lambda: claims.require_new_folder(workdir / "checkpoints" / "a" / "b"),
        lambda: open_workdir(inside, config.Config()),
        lambda: store.Store(tmp_path / "apart", Checkpoint(durable=inside), print),
    ):
        check_refused(r"lies in .*/checkpoints, among the checkpoints of a run", write)
    assert content(tmp_path) == before


def test_a_new_folder_is_whole_or_absent_and_a_link_to_it_stays(workdir, tmp_path):
    (tmp_path / "to_empty").symlink_to(tmp_path / "empty")
    (tmp_path / "empty").mkdir()
    before = content(tmp_path)
    with contextlib.suppress(KeyError), claims.whole_or_nothing(tmp_path / "a" / "b") as part:
        (part / "file").write_text("half")
        raise KeyError
    assert content(tmp_path) == before
    with claims.whole_or_nothing(claims.require_new_folder(tmp_path / "to_empty")) as part:
        (part / "file").write_text("whole")
    assert (tmp_path / "to_empty").is_symlink() and (tmp_path / "empty" / "file").exists()


def settings(**keys):
    defaults = config.default()
    defaults.update_from_flattened_dict(
        {name.replace("__", "."): value for name, value in keys.items()}
    )
    return config.check(defaults)


def train_run(folder, steps=(2, 4), plus=0, **keys):
    """A run's folder with a config and some steps."""
    workdir = open_workdir(folder, settings(**keys))
    checkpoint_helpers.train(
        workdir, *steps, plus=plus, meta={"config": config.to_dict(settings(**keys))}
    )
    claims.release(workdir)
    return workdir


@pytest.fixture
def then_waits(monkeypatch):
    """Who takes the lock next waits while another run trains in a folder."""
    take = claims.take

    def call(folder, **keys):
        def waits(workdir, say=print):
            monkeypatch.setattr(claims, "take", take)
            train_run(folder, **keys)
            take(workdir, say)

        monkeypatch.setattr(claims, "take", waits)

    return call


@pytest.mark.parametrize("may_go_on", [False, True])
def test_a_refused_start_that_waited_takes_nothing_of_the_run_that_came_first(
    tmp_path, then_waits, may_go_on
):
    """The folder was new when it looked; another run began, saved and ended while it waited for the
    lock. One that may go on there is refused later, for another reason."""
    place = tmp_path / "run"
    taken_folder = TakenFolder(place)
    then_waits(place, run__seed=1)
    keys = settings(run__seed=1 if may_go_on else 2)
    if may_go_on:
        open_workdir(place, keys, taken_folder.note_if_new)
    else:
        says = r"was started with config\.run\.seed=1, now it is 2"
        check_refused(says, open_workdir, place, keys, taken_folder.note_if_new)
    assert claims.taken(place) == may_go_on
    before = content(place)
    taken_folder(UserError)
    assert content(place) == before and (place / "config.json").exists()


def test_what_a_refused_start_has_fetched_goes_with_it(tmp_path):
    shutil.copytree(train_run(tmp_path / "run") / "checkpoints", tmp_path / "copies")
    taken_folder = TakenFolder(tmp_path / "new")
    workdir = open_workdir(tmp_path / "new", settings(), taken_folder.note_if_new)
    copies = Checkpoint(durable=str(tmp_path / "copies"))
    assert store.Store(workdir, copies, print).find_newest() == 4
    taken_folder(UserError)
    claims.release(workdir)
    assert not (tmp_path / "new").exists()


def test_the_checkpoint_is_believed_not_config_json(tmp_path):
    workdir = train_run(tmp_path / "run")
    path = workdir / "config.json"
    recorded = path.read_text()
    path.write_text(recorded.replace('"seed": 0', '"seed": 7'))
    # The command that the run was started with goes on; what config.json says now does not.
    open_workdir(workdir, settings())
    claims.release(workdir)
    check_refused(
        r"was started with config\.run\.seed=0, now it is 7",
        lambda: open_workdir(workdir, settings(run__seed=7)),
    )
    assert any_model.config_at(workdir, 4) == settings()
    # Of another run, name and all: no start on it counts as complete.
    path.write_text(recorded)
    other = train_run(tmp_path / "other", plus=1, run__seed=5)
    put_in_place(workdir / "checkpoints", other / "checkpoints")
    check_refused(
        r"was started with config\.run\.seed=5, now it is 0",
        lambda: open_workdir(workdir, settings()),
    )


def test_a_failed_export_leaves_what_others_made(tmp_path, then_waits):
    target = tmp_path / "target"
    then_waits(target, plus=1)

    def export():
        with claims.whole_or_nothing(claims.require_new_folder(target)):
            pass

    check_refused("exists and is not empty", export)
    assert store.Store(target, Checkpoint(), print).find_newest() == 4
