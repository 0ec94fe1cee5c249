"""Copies of checkpoints in another place, a folder or a real S3 server on this machine: sent,
fetched, made up."""

import contextlib
import os
import re
import shutil
import socket
import threading
import time

import boto3
import fsspec
import jax.numpy as jnp
import pytest
from checkpoint_helpers import content, same, save, small, train
from refusals import check_refused, check_storage_error
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
    """An empty place for checkpoints, and how to look at and change it behind the vault's back."""
    if request.param == "folder":
        return Place(str(tmp_path / "vault"))
    request.getfixturevalue("s3_server")
    return bucket(f"b{abs(hash(str(tmp_path)))}")


def bucket(name):
    boto3.client("s3").create_bucket(Bucket=name)
    return Place(f"s3://{name}/run")


class Place:
    def __init__(self, url):
        self.url = url
        self.files, self.root = fsspec.core.url_to_fs(url, use_listings_cache=False)

    def names(self):
        return sorted(path[len(self.root) + 1 :] for path in self.files.find(self.root))

    def get(self, name):
        return self.files.cat_file(f"{self.root}/{name}")

    def put(self, name, content):
        self.files.pipe_file(f"{self.root}/{name}", content)

    def delete(self, name):
        self.files.rm_file(f"{self.root}/{name}")


def start(root, copies, **settings):
    """(the newest step, those without a copy at the end)."""
    checkpoints = store.Store(
        root.parent, Checkpoint(keep=9, durable=str(copies), **settings), print
    )
    return checkpoints.find_newest(), checkpoints.close()


def cut_off(*_):
    raise OSError("dead")


# ################################################################################################
# The vault
# ##################################################################################################


def test_there_and_back(place, tmp_path):
    folder = train(tmp_path / "run", 5) / "5"
    here, vault = Vault(folder.parent), Vault(place.url)
    listed = here.read_seal(5)
    names = [name for name in listed.files if name != layout.COMMITTED]
    for some in (names[::2], names[3::2]):  # as two processes do
        here.copy(5, some, vault)
    place.put(f"5/{names[0]}", b"half")
    says = f"lacks 2 of {len(listed.files)} files, such as {names[0]}"
    check_storage_error(says, vault.complete, 5, listed)
    if vault.storage.folder:  # as a kill before a folder's first file leaves it
        (vault.storage.folder / "5" / "state" / "empty").mkdir()
    assert vault.steps() == [] and vault.unfinished() == [5]
    vault.remove(5)
    assert place.names() == [] and vault.numbered() == []
    here.copy(5, names, vault)
    vault.complete(5, listed)
    assert (vault.steps(), vault.unfinished(), vault.read_seal(5)) == ([5], [], listed)
    assert place.names() == sorted(f"5/{name}" for name in [*listed.files, layout.SEAL_FILE])
    victim = folder / names[-1]
    victim.write_bytes(victim.read_bytes()[:-1] + b"?")
    # not copied as if it were whole
    check_storage_error(f"{names[-1]} .*is changed", here.copy, 5, names, vault)


def test_deleting_takes_the_marker_first(place, tmp_path, monkeypatch):
    train(tmp_path / "run", 5, durable=place.url)
    vault, gone = Vault(place.url), []
    delete = vault.storage._unlink

    def dies(name):
        if gone:
            raise PermissionError("no more")
        gone.append(name)
        delete(name)

    monkeypatch.setattr(vault.storage, "_unlink", dies)
    check_storage_error("cannot delete", vault.remove, 5)
    assert gone == [f"5/{layout.SEAL_FILE}"]
    other = Vault(place.url)
    assert other.steps() == [] and other.unfinished() == [5]
    other.remove(5)
    assert place.names() == [seal.RUN]


def test_a_passing_failure_is_tried_again_and_a_lasting_one_said(s3_server, monkeypatch):
    vault, fails, messages = Vault(bucket("flaky").url), [2], []
    vault.storage.on_first_failure = messages.append
    pipe = vault.storage._files.pipe_file

    def sometimes(*args):
        if fails[0]:
            fails[0] -= 1
            raise ConnectionResetError("reset by peer")
        return pipe(*args)

    monkeypatch.setattr(vault.storage._files, "pipe_file", sometimes)
    vault.storage.put("5/x", b"content")
    assert vault.read(5, "x") == b"content"
    why = "cannot write s3://flaky/run/5/x"
    assert messages == [f"warning: {why} yet: reset by peer; trying again"]
    fails[0] = 1000
    check_storage_error(
        f"{why} after 3 attempts: reset by peer", vault.storage.put, "5/x", b"content"
    )
    for url, error, words in (
        ("s3://no-such-bucket/run", StorageError, "no-such-bucket"),
        ("nosuch://x", UserError, "no URL that fsspec can open here"),
        ("simplecache::file:///x", UserError, "is a chain of file systems"),
    ):
        with pytest.raises(error, match=words):
            Vault(url).steps()


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

    if kind == "silent":
        threading.Thread(target=take, daemon=True).start()
    port = {"absent": 9, "silent": silent.getsockname()[1]}[kind]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://localhost:{port}")
    monkeypatch.setattr(storage, "READ_TIMEOUT", 0.5)
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # of another endpoint
    vault, begun = Vault("s3://bucket/run"), time.monotonic()
    check_storage_error(
        r"cannot read s3://bucket/run/5/x after 3 attempts.*AWS_ENDPOINT_URL", vault.read, 5, "x"
    )
    assert len(asked) == (3 if kind == "silent" else 0)
    monkeypatch.setattr(storage, "GIVE_UP_AFTER", 1.0)
    monkeypatch.setattr(storage, "DELAYS", (0.1,) * 100)
    check_storage_error(r"after \d\d? attempts:", vault.read, 5, "x")
    assert time.monotonic() - begun < 20
    silent.close()


def test_an_answer_that_trickles_has_an_end(monkeypatch):
    """Only silence was limited: a store that sent a byte every 8 s held a reading up for ever."""
    monkeypatch.setattr(storage, "RESPONSE_TIMEOUT", 0.2)
    monkeypatch.setattr(storage, "DELAYS", (0.1,))
    vault, over = Vault("memory://trickles"), threading.Event()
    monkeypatch.setattr(vault.storage._files, "cat_file", lambda path: over.wait(60))
    check_storage_error(r"after 2 attempts: no complete answer within 0.2 s", vault.read, 5, "x")
    over.set()


# ################################################################################################
# A run's copies
# ##################################################################################################


def test_a_run_keeps_a_copy_and_comes_back_from_it(place, tmp_path):
    train(tmp_path / "run", 5, 6, durable=place.url)
    assert Vault(place.url).steps() == [5, 6]
    # Its address is read as a workdir is.
    assert SealedSource(place.url, 5).read("params.w").shape == (1000,)
    # Another machine, and an empty folder.
    messages = []
    other = store.Store(tmp_path / "other", Checkpoint(durable=place.url), messages.append)
    assert other.find_newest() == 6 and "fetched from" in messages[0] and other.close() == []
    same(restore_tree(other, 6, small(0)), small(6))
    # A damaged copy is not taken.
    name = "6/state/params.w/c.0"
    place.put(name, place.get(name)[:-1] + b"?")
    third = tmp_path / "third"
    check_storage_error(
        r"step 6 is not here; its copy: .*/6 is damaged: .* is changed.*=previous",
        lambda: store.Store(third, Checkpoint(durable=place.url), messages.append).find_newest(),
    )
    careful = Checkpoint(durable=place.url, on_corrupt="previous")
    again = store.Store(third, careful, messages.append)
    assert again.find_newest() == 5 and again.close() == []  # before its copy is damaged
    assert re.match(r"WARNING: .*/6 is damaged.* going on from the one before", messages[1])
    name = "5/state/params.w/c.0"
    place.put(name, place.get(name)[:-1] + b"?")
    # nor a fresh start made
    check_storage_error(
        r"/5 is damaged: .*there is none before it: restore it",
        lambda: store.Store(tmp_path / "fourth", careful, messages.append).find_newest(),
    )
    # Steps that the rules delete go there too.
    one = store.Store(tmp_path / "run", Checkpoint(durable=place.url, keep=1), print)
    one.find_newest()
    one.wait()  # the step whose copy is looked at would stay until the next save
    save(one, 7)
    assert one.close() == [] and Vault(place.url).steps() == [7]


@pytest.mark.parametrize("place", ["folder", slow("s3")], indirect=True)
def test_copies_that_are_missing_are_made_up(place, tmp_path, monkeypatch, capsys):
    """At the next start and at each end, whatever kept them away: a store that failed, a kill,
    another hand."""
    root = train(tmp_path / "run", 5, 6)  # saved before there was a durable place
    vault = Vault(place.url)
    assert start(root, place.url) == (6, [])
    assert vault.steps() == [5, 6] and vault.verify(5) == [] and vault.verify(6) == []

    # Cut short, and with a damaged list.
    place.delete(f"5/{layout.SEAL_FILE}")
    place.put(f"6/{layout.SEAL_FILE}", b"{}")
    with monkeypatch.context() as patch:
        patch.setattr(storage, "DELAYS", ())
        patch.setattr(storage.Storage, "_write", cut_off)
        assert start(root, place.url) == (6, [5, 6])
        out = capsys.readouterr().out
        assert "warning: step 6 is saved, but its copy is NOT: cannot write" in out
        assert re.search(
            f"error: {place.url} has no complete copy of step 5, 6 \\(.*\\); running the same command again retries",
            out,
        )
    assert start(root, place.url) == (6, [])
    assert vault.steps() == [5, 6] and vault.verify(5) == [] and vault.verify(6) == []


def test_another_run_s_place_is_refused_before_anything_is_copied(place, tmp_path, capsys):
    train(tmp_path / "run", 5, durable=place.url)
    train(tmp_path / "stranger", 9)
    before = {name: place.get(name) for name in place.names()}
    check_refused(
        r"place of another run than .*/stranger \(that is run \w+, this is run \w+",
        lambda: store.Store(
            tmp_path / "stranger", Checkpoint(durable=place.url), print
        ).find_newest(),
    )

    def other(meta):
        raise UserError("it has another learning rate")

    for _ in range(2):
        new = store.Store(tmp_path / "new", Checkpoint(durable=place.url), print, other)
        check_refused(r"run than .*/new \(it has another learning rate\)", new.find_newest)
        assert folders.numbered(tmp_path / "new" / "checkpoints") == []
    asked = []
    one = store.Store(tmp_path / "same", Checkpoint(durable=place.url), print, asked.append)
    assert one.find_newest() == 5 and one.close() == []
    assert asked[0]["step"] == 5
    assert {name: place.get(name) for name in place.names()} == before
    # Where the name is lost, no run takes the place.
    place.delete(seal.RUN)
    for workdir in ("run", "stranger", "another"):
        one = store.Store(tmp_path / workdir, Checkpoint(durable=place.url), print)
        check_refused(r"holds step 5, and no \.run tells whose it is", one.find_newest)


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
    assert Vault(str(copies)).verify(4) != []
    assert start(root, copies) == (6, []) and Vault(str(copies)).verify(4) == []


def test_wrong_steps_cost_no_copy_and_are_never_fetched(run, tmp_path, capsys):
    root, copies = run
    before, own = content(copies), tmp_path / "own"
    other = train(tmp_path / "other", 4, 8, plus=5)
    shutil.copytree(root, own)
    for wrong, words in (
        (other / "4", r"checksums.json is of run \w+, not of run"),
        (own / "6", r"checksums.json is of step 6"),
    ):
        shutil.rmtree(root / "4")
        shutil.copytree(wrong, root / "4")
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
    shutil.rmtree(root / "4")
    shutil.copytree(anew / "4", root / "4")
    os.truncate(root / "4" / CHUNK, 10)
    before = content(copies)
    assert start(root, copies) == (6, [4]) and content(copies) == before
    out = capsys.readouterr().out
    assert re.search(r"has no complete copy of step 4 \(.*/4 is damaged: .*c\.0 .* truncated", out)
    shutil.rmtree(root / "4")
    shutil.copytree(anew / "4", root / "4")
    assert start(root, copies) == (6, []) and Vault(str(copies)).read_seal(4) == Vault(
        root
    ).read_seal(4)


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
    first, second = (
        store.Store(tmp_path / name, Checkpoint(durable=str(place)), print) for name in "ab"
    )
    assert first.find_newest() is None and second.find_newest() is None
    save(first, 1)
    save(second, 1)
    assert first.close() == [] and second.close() == [1]
    assert "give each run a place of its own" in capsys.readouterr().out
    assert Vault(str(place)).verify(1) == []


def test_a_dead_place_holds_no_save_up(tmp_path, monkeypatch):
    """It had: the next save waited for max_wait, counted as failed, and the third one ended the
    run."""
    alive, messages, copy = threading.Event(), [], Vault.copy

    def waits(*args):
        assert alive.wait(60)
        copy(*args)

    monkeypatch.setattr(Vault, "copy", waits)
    copies = tmp_path / "copies"
    settings = Checkpoint(durable=str(copies), keep=2, max_wait=0.1, max_failures=1)
    checkpoints = store.Store(tmp_path / "run", settings, messages.append)
    checkpoints.find_newest()
    for step in range(1, 6):
        assert checkpoints.wait_for_room(step)
        save_tree(
            checkpoints,
            step,
            {"params": {"w": jnp.arange(9.0) + step}},
            {"step": step, "tokens": step},
        )
        # publishing does not wait for the copy
        until(lambda: checkpoints._finish_save(0) and step in checkpoints.steps(), 10)  # noqa: B023
    assert messages == []
    alive.set()
    assert checkpoints.close() == []
    assert {4, 5} <= set(checkpoints.steps()) <= {1, 3, 4, 5}  # the one that is on its way stays
    assert {4, 5} <= set(Vault(str(copies)).steps()) and not Vault(str(copies)).unfinished()


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


def test_a_run_goes_on_from_what_is_here_while_the_place_is_dead(run, tmp_path, dead):
    """A process that was killed meanwhile had ended the run with 4: its start looked for newer
    copies."""
    root, copies = run
    messages = []
    checkpoints = store.Store(root.parent, Checkpoint(keep=9, durable=str(copies)), messages.append)
    assert checkpoints.find_newest() == 6
    assert any("continuing from the local step 6" in line for line in messages)
    assert checkpoints.close() == [2, 4, 6]  # the place does not answer
    # nothing is here to go on from
    check_storage_error("cannot list", start, tmp_path / "new" / "checkpoints", copies)


def test_what_was_given_up_is_not_fetched_from_a_place_that_was_dead_meanwhile(run, dead):
    root, copies = run
    decision = {"kind": "spike", "step": 2, "batches": 3, "at": 7, "seen": "x"}
    checkpoints = store.Store(root.parent, Checkpoint(keep=9, durable=str(copies)), print)
    assert checkpoints.find_newest([decision]) == 2
    dead()  # it lives again
    checkpoints.close()
    assert Vault(str(copies)).steps() == [2, 4, 6]
    again = store.Store(root.parent, Checkpoint(keep=9, durable=str(copies)), print)
    assert again.find_newest([decision]) == 2 and again.close() == []
    assert Vault(str(copies)).steps() == [2]


def test_a_stop_waits_for_no_dead_place(tmp_path, monkeypatch):
    """All attempts of all copies that were on their way were made first: an hour, where the place
    took requests."""
    messages, settings = [], Checkpoint(keep=9, max_wait=0.1, durable=str(tmp_path / "copies"))
    with monkeypatch.context() as patch:
        patch.setattr(storage, "DELAYS", (100.0,))
        patch.setattr(storage.Storage, "_write", cut_off)
        checkpoints = store.Store(tmp_path / "run", settings, messages.append)
        checkpoints.find_newest()
        for step in (1, 2):
            assert checkpoints.wait_for_room(step)
            save_tree(
                checkpoints,
                step,
                {"params": {"w": jnp.arange(9.0)}},
                {"step": step, "tokens": step},
            )
            checkpoints.wait_for_save()
        assert checkpoints.steps() == [1, 2]
        assert checkpoints.close(retry_copies=False) == [1, 2]
    assert any(
        "step 1 is saved, but its copy is NOT" in line and "no time left to wait" in line
        for line in messages
    )
    assert (
        "has no complete copy of step 1, 2" in messages[-1]
        and "running the same command again retries" in messages[-1]
    )
    assert start(tmp_path / "run" / "checkpoints", tmp_path / "copies") == (2, [])
    assert Vault(str(tmp_path / "copies")).steps() == [1, 2]
