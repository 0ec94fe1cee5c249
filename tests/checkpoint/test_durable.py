"""Copies of checkpoints in another place, a folder or a real S3 server on this machine: sent,
fetched, made up."""

import contextlib
import os
import re
import shutil
import socket
import threading
import time
from unittest.mock import DEFAULT, Mock, call

import boto3
import fsspec
import pytest
from checkpoint_helpers import content, put_in_place, same, save, small, train
from fsspec.implementations.dirfs import DirFileSystem
from refusals import check_error, check_refused, check_storage_error
from rows import slow
from saved_trees import restore_tree, save_tree
from waiting import until

from zaya_jax.checkpoint import folders, layout, seal, storage
from zaya_jax.checkpoint.run import store
from zaya_jax.checkpoint.source import SealedSource
from zaya_jax.checkpoint.vault import Vault
from zaya_jax.config import Checkpoint, StorageError, UserError


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(storage, "DELAYS", (0.01, 0.01))


@pytest.fixture(params=["s3", "folder"])
def place(request, tmp_path):
    """The address of an empty place for checkpoints."""
    if request.param == "folder":
        return str(tmp_path / "vault")
    request.getfixturevalue("s3_server")
    return bucket(f"b{abs(hash(str(tmp_path)))}")


def bucket(name):
    boto3.client("s3").create_bucket(Bucket=name)
    return f"s3://{name}/run"


def files_of(place):
    """The files of a place, to look at and change behind the vault's back."""
    files, root = fsspec.core.url_to_fs(place, use_listings_cache=False)
    return DirFileSystem(root, files)


def spoil(files, name):
    files.pipe_file(name, files.cat_file(name)[:-1] + b"?")


def opened(workdir, copies, say=print, check_meta=None, **settings):
    """The store of a run that has its copies in this place."""
    keys = Checkpoint(**{"keep": 9, "durable": str(copies), **settings})
    return store.Store(workdir, keys, say, check_meta)


def start(root, copies, **settings):
    """(the newest step, those without a copy at the end)."""
    checkpoints = opened(root.parent, copies, **settings)
    return checkpoints.find_newest(), checkpoints.close()


cut_off = Mock(side_effect=OSError("dead"))


# ################################################################################################
# The vault
# ##################################################################################################


def test_there_and_back(place, tmp_path):
    local = Vault(train(tmp_path / "run", 5))
    vault, files = Vault(place), files_of(place)
    listed = local.read_seal(5)
    names = [name for name in listed.files if name != layout.COMMITTED]
    for some in (names[::2], names[3::2]):  # as two processes do
        local.copy(5, some, vault)
    files.pipe_file(f"5/{names[0]}", b"half")
    says = f"lacks 2 of {len(listed.files)} files, such as {names[0]}"
    check_storage_error(says, vault.complete, 5, listed)
    if vault.storage.folder:  # as a kill before a folder's first file leaves it
        (vault.storage.folder / "5" / "state" / "empty").mkdir()
    assert (vault.steps(), vault.unfinished()) == ([], [5])
    vault.remove(5)
    assert (files.find(""), vault.numbered()) == ([], [])
    local.copy(5, names, vault)
    vault.complete(5, listed)
    assert (vault.steps(), vault.unfinished(), vault.read_seal(5)) == ([5], [], listed)
    assert {*files.find("")} == {f"5/{name}" for name in [*listed.files, layout.SEAL_FILE]}


def test_deleting_takes_the_marker_first(place, tmp_path):
    train(tmp_path / "run", 5, durable=place)
    vault, other = Vault(place), Vault(place)
    dies = [DEFAULT, PermissionError("no more")]
    vault.storage._unlink = Mock(wraps=vault.storage._unlink, side_effect=dies)
    check_storage_error("cannot delete", vault.remove, 5)
    assert vault.storage._unlink.call_args_list[0] == call(f"5/{layout.SEAL_FILE}")
    assert (other.steps(), other.unfinished()) == ([], [5])
    other.remove(5)
    assert files_of(place).find("") == [seal.RUN]


def test_a_passing_failure_is_tried_again_and_a_lasting_one_said(s3_server, monkeypatch):
    vault, messages = Vault(bucket("flaky")), []
    vault.storage.on_first_failure = messages.append
    reset, files = ConnectionResetError("reset by peer"), vault.storage._files
    pipe = Mock(wraps=files.pipe_file, side_effect=[reset, reset, DEFAULT])
    monkeypatch.setattr(files, "pipe_file", pipe)
    vault.storage.put("5/x", b"content")
    assert vault.read(5, "x") == b"content"
    why = "cannot write s3://flaky/run/5/x"
    assert messages == [f"warning: {why} yet: reset by peer; trying again"]
    pipe.side_effect = reset
    lasting = f"{why} after 3 attempts: reset by peer"
    check_storage_error(lasting, vault.storage.put, "5/x", b"content")


@pytest.mark.parametrize(
    ("url", "error", "words"),
    [
        ("s3://no-such-bucket/run", StorageError, "no-such-bucket"),
        ("simplecache::file:///x", UserError, "is a chain of file systems"),
    ],
)
def test_an_address_of_no_place_is_said(s3_server, url, error, words):
    check_error(error, words, lambda: Vault(url).steps())


@pytest.mark.parametrize("kind", ["absent", "silent"])
def test_a_place_without_answers_has_an_end(monkeypatch, kind):
    """Each attempt is one request: botocore's and s3fs's own came in between, so that what never
    answered was first spoken of after ten minutes."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    silent, asked = socket.create_server(("localhost", 0)), []

    def take():
        with contextlib.suppress(OSError):
            while True:
                asked.append(silent.accept()[0])

    threading.Thread(target=take, daemon=True).start()
    port = {"absent": 9, "silent": silent.getsockname()[1]}[kind]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://localhost:{port}")
    monkeypatch.setattr(storage, "READ_TIMEOUT", 0.5)
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # of another endpoint
    says = r"cannot read s3://bucket/run/5/x after 3 attempts.*AWS_ENDPOINT_URL"
    begun = time.monotonic()
    check_storage_error(says, Vault("s3://bucket/run").read, 5, "x")
    silent.close()
    assert time.monotonic() - begun < 20
    assert len(asked) == {"absent": 0, "silent": 3}[kind]


def test_an_answer_that_trickles_has_an_end(monkeypatch):
    """Only silence was limited: a store that sent a byte every 8 s held a reading up for ever."""
    monkeypatch.setattr(storage, "RESPONSE_TIMEOUT", 0.2)
    monkeypatch.setattr(storage, "DELAYS", (0.1,) * 100)
    monkeypatch.setattr(storage, "GIVE_UP_AFTER", 1.0)
    vault, over = Vault("memory://trickles"), threading.Event()
    monkeypatch.setattr(vault.storage._files, "cat_file", lambda path: over.wait(60))
    check_storage_error(
        r"after [2-9] attempts: no complete answer within 0.2 s", vault.read, 5, "x"
    )
    over.set()


# ################################################################################################
# A run's copies
# ##################################################################################################


def test_a_run_keeps_a_copy_and_comes_back_from_it(place, tmp_path):
    train(tmp_path / "run", 5, 6, durable=place)
    vault, files, messages = Vault(place), files_of(place), []
    assert vault.steps() == [5, 6]
    # Its address is read as a workdir is.
    assert SealedSource(place, 5).read("params.w").shape == (1000,)
    # Another machine, and an empty folder.
    other = opened(tmp_path / "other", place, messages.append)
    assert other.find_newest() == 6 and "fetched from" in messages[0] and other.close() == []
    same(restore_tree(other, 6, small(0)), small(6))
    # A damaged copy is not taken.
    spoil(files, "6/state/params.w/c.0")
    third = tmp_path / "third"
    check_storage_error(
        r"step 6 is not here; its copy: .*/6 is damaged: .* is changed.*=previous",
        opened(third, place).find_newest,
    )
    again = opened(third, place, messages.append, on_corrupt="previous")
    assert again.find_newest() == 5 and again.close() == []  # before its copy is damaged
    assert re.match(r"WARNING: .*/6 is damaged.* going on from the one before", messages[1])
    # nor a fresh start made
    spoil(files, "5/state/params.w/c.0")
    check_storage_error(
        r"/5 is damaged: .*there is none before it: restore it",
        opened(tmp_path / "fourth", place, on_corrupt="previous").find_newest,
    )
    # Steps that the rules delete go there too.
    checkpoints = opened(tmp_path / "run", place, keep=1)
    checkpoints.find_newest()
    checkpoints.wait()  # the step whose copy is looked at would stay until the next save
    save(checkpoints, 7)
    assert checkpoints.close() == [] and vault.steps() == [7]


@pytest.mark.parametrize("place", ["folder", slow("s3")], indirect=True)
def test_copies_that_are_missing_are_made_up(place, tmp_path, monkeypatch, capsys):
    """At the next start and at each end, whatever kept them away: a store that failed, a kill,
    another hand."""
    root = train(tmp_path / "run", 5, 6)  # saved before there was a durable place
    vault, files = Vault(place), files_of(place)
    assert start(root, place) == (6, [])
    files.rm_file(f"5/{layout.SEAL_FILE}")  # cut short
    files.pipe_file(f"6/{layout.SEAL_FILE}", b"{}")  # and with a damaged list
    with monkeypatch.context() as patch:
        patch.setattr(storage, "DELAYS", ())
        patch.setattr(storage.Storage, "_write", cut_off)
        assert start(root, place) == (6, [5, 6])
    out = capsys.readouterr().out
    assert "warning: step 6 is saved, but its copy is NOT: cannot write" in out
    assert re.search(
        f"error: {place} has no complete copy of step 5, 6 \\(.*\\); running the same command again retries",
        out,
    )
    assert start(root, place) == (6, [])
    assert (vault.steps(), vault.verify(5), vault.verify(6)) == ([5, 6], [], [])


def test_another_run_s_place_is_refused_before_anything_is_copied(place, tmp_path):
    train(tmp_path / "run", 5, durable=place)
    train(tmp_path / "stranger", 9)
    files = files_of(place)
    before = files.cat(files.find(""))
    check_refused(
        r"place of another run than .*/stranger \(that is run \w+, this is run \w+",
        opened(tmp_path / "stranger", place).find_newest,
    )
    refuses = Mock(side_effect=UserError("it has another learning rate"))
    for _ in range(2):
        new = opened(tmp_path / "new", place, check_meta=refuses)
        check_refused(r"run than .*/new \(it has another learning rate\)", new.find_newest)
        assert folders.numbered(tmp_path / "new" / "checkpoints") == []
    accepts = Mock()
    checkpoints = opened(tmp_path / "same", place, check_meta=accepts)
    assert checkpoints.find_newest() == 5 and checkpoints.close() == []
    assert accepts.call_args.args[0]["step"] == 5
    assert files.cat(files.find("")) == before
    # Where the name is lost, no run takes the place.
    files.rm_file(seal.RUN)
    for workdir in ("run", "stranger", "another"):
        checkpoints = opened(tmp_path / workdir, place)
        check_refused(r"holds step 5, and no \.run tells whose it is", checkpoints.find_newest)


@pytest.fixture
def run(tmp_path):
    """A run's folder of checkpoints with three steps, and that of their copies."""
    return train(tmp_path / "run", 2, 4, 6, durable=str(tmp_path / "copies")), tmp_path / "copies"


CHUNK = "state/params.w/c.0"
CUT = {
    "a chunk is gone": lambda step: os.remove(step / CHUNK),
    "cut": lambda step: os.truncate(step / CHUNK, 10),
    "meta is gone": lambda step: os.remove(step / layout.META),
    "more": lambda step: (step / "state" / "more").write_text(""),
}


@pytest.mark.parametrize("how", CUT)
def test_a_copy_whose_list_is_whole_is_completed(run, how):
    root, copies = run
    CUT[how](copies / "4")
    assert Vault(copies).verify(4) != []
    assert start(root, copies) == (6, []) and Vault(copies).verify(4) == []


def test_wrong_steps_cost_no_copy_and_are_never_fetched(run, tmp_path, capsys):
    root, copies = run
    before, copy = content(copies), tmp_path / "copy"
    other = train(tmp_path / "other", 4, 8, plus=5)
    shutil.copytree(root, copy)
    for wrong, words in (
        (other / "4", r"checksums.json is of run \w+, not of run"),
        (copy / "6", r"checksums.json is of step 6"),
    ):
        put_in_place(root / "4", wrong)
        assert start(root, copies) == (6, [])
        assert re.search(
            rf"WARNING: .*/4 is damaged: {words}.*move it away", capsys.readouterr().out
        )
        assert content(copies) == before
    shutil.copytree(other / "8", copies / "8")
    check_storage_error(r"/8 is damaged: checksums\.json is of run", start, root, copies)
    assert start(root, copies, on_corrupt="previous")[0] == 6


def test_a_whole_copy_is_not_given_up_for_a_damaged_step_of_another_content(run, tmp_path, capsys):
    """As after going back and training anew: the copy is of the step that was here before."""
    root, copies = run
    (tmp_path / "anew" / "checkpoints").mkdir(parents=True)
    shutil.copyfile(root / seal.RUN, tmp_path / "anew" / "checkpoints" / seal.RUN)
    anew = train(tmp_path / "anew", 4, plus=9)
    put_in_place(root / "4", anew / "4")
    os.truncate(root / "4" / CHUNK, 10)
    before = content(copies)
    assert start(root, copies) == (6, [4]) and content(copies) == before
    out = capsys.readouterr().out
    assert re.search(r"has no complete copy of step 4 \(.*/4 is damaged: .*c\.0 .* truncated", out)
    put_in_place(root / "4", anew / "4")
    assert start(root, copies) == (6, [])
    assert Vault(copies).read_seal(4) == Vault(root).read_seal(4)


def test_a_place_that_a_lost_run_has_only_marked_is_refused(run, tmp_path):
    """A new workdir was trained without any copy, and refused at its second start."""
    root, copies = run
    assert start(root, copies) == (6, [])
    for step in "246":  # as a kill in the first copy leaves it
        os.remove(copies / step / layout.SEAL_FILE)
    new = tmp_path / "new" / "checkpoints"
    check_refused("place of run .* has no complete copy there; delete that", start, new, copies)
    assert start(root, copies) == (6, [])
    assert start(new, copies) == (6, [])


def test_two_runs_that_begin_on_one_empty_place(tmp_path, capsys):
    place = tmp_path / "empty"
    first, second = opened(tmp_path / "a", place), opened(tmp_path / "b", place)
    assert first.find_newest() is None and second.find_newest() is None
    save(first, 1)
    save(second, 1)
    assert first.close() == [] and second.close() == [1]
    assert "give each run a place of its own" in capsys.readouterr().out
    assert Vault(place).verify(1) == []


def test_a_dead_place_holds_no_save_up(tmp_path, monkeypatch):
    """It had: the next save waited for max_wait, counted as failed, and the third one ended the
    run."""
    alive, messages, copy = threading.Event(), [], Vault.copy

    def waits(*args):
        assert alive.wait(60)
        copy(*args)

    monkeypatch.setattr(Vault, "copy", waits)
    few = {"keep": 2, "max_wait": 0.1, "max_failures": 1}
    checkpoints = opened(tmp_path / "run", tmp_path / "copies", messages.append, **few)
    checkpoints.find_newest()
    for step in range(1, 6):
        assert checkpoints.wait_for_room(step)
        save_tree(checkpoints, step, small(step), {"step": step, "tokens": step})
        # publishing does not wait for the copy
        until(lambda: checkpoints._finish_save(0) and step in checkpoints.steps(), 10)  # noqa: B023
    assert messages == []
    alive.set()
    assert checkpoints.close() == []
    assert {4, 5} <= set(checkpoints.steps()) <= {1, 3, 4, 5}  # the one that is on its way stays
    vault = Vault(tmp_path / "copies")
    assert {4, 5} <= set(vault.steps()) and not vault.unfinished()


@pytest.fixture
def dead(monkeypatch):
    """The durable place does not answer, until it is called."""
    attempt = storage.Storage.attempt

    def refuses(self, verb, name, *rest):
        if not self.url.endswith("copies"):
            return attempt(self, verb, name, *rest)
        raise storage.Unreachable(f"cannot {verb} {self.url}/{name}")

    monkeypatch.setattr(storage.Storage, "attempt", refuses)
    return lambda: monkeypatch.setattr(storage.Storage, "attempt", attempt)


def test_a_run_goes_on_from_what_is_here_while_the_place_is_dead(run, tmp_path, dead, capsys):
    """A process that was killed meanwhile had ended the run with 4: its start looked for newer
    copies."""
    root, copies = run
    assert start(root, copies) == (6, [2, 4, 6])  # the place does not answer
    assert "continuing from the local step 6" in capsys.readouterr().out
    # nothing is here to go on from
    check_storage_error("cannot list", start, tmp_path / "new" / "checkpoints", copies)


def test_what_was_given_up_is_not_fetched_from_a_place_that_was_dead_meanwhile(run, dead):
    root, copies = run
    decision = {"kind": "spike", "step": 2, "batches": 3, "at": 7, "seen": "x"}
    checkpoints = opened(root.parent, copies)
    assert checkpoints.find_newest([decision]) == 2
    dead()  # it lives again
    checkpoints.close()
    assert Vault(copies).steps() == [2, 4, 6]
    again = opened(root.parent, copies)
    assert again.find_newest([decision]) == 2 and again.close() == []
    assert Vault(copies).steps() == [2]


def test_a_stop_waits_for_no_dead_place(tmp_path, monkeypatch, capsys):
    """All attempts of all copies that were on their way were made first: an hour, where the place
    took requests."""
    root, copies = train(tmp_path / "run", 1, 2), tmp_path / "copies"
    with monkeypatch.context() as patch:
        patch.setattr(storage, "DELAYS", (100.0,))
        patch.setattr(storage.Storage, "_write", cut_off)
        checkpoints = opened(tmp_path / "run", copies, max_wait=0.1)
        assert checkpoints.find_newest() == 2
        assert checkpoints.close(retry_copies=False) == [1, 2]
    out = capsys.readouterr().out
    assert re.search("is saved, but its copy is NOT.*no time left to wait", out)
    assert "has no complete copy of step 1, 2" in out
    assert start(root, copies) == (2, [])
    assert Vault(copies).steps() == [1, 2]
