"""Copies in a durable place: whole or made so, never another's, and never given up for what is damaged here."""

import contextlib
import os
import re
import shutil
import socket
import threading
import time

import jax.numpy as jnp
import pytest

from zaya_jax.checkpoint import layout, remote, seal, store, writing
from zaya_jax.checkpoint.remote import Vault
from zaya_jax.config import Checkpoint, StorageError, UserError


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(remote, "PAUSES", (0.01, 0.01))


def train(workdir, steps=(2, 4, 6), plus=0, **settings):
    checkpoints = store.Store(workdir, Checkpoint(keep=9, **settings), print)
    checkpoints.newest()
    for step in steps:
        state = {"params": {"w": jnp.arange(100.0) + step + plus, "v": jnp.ones(7) * step}}
        checkpoints.save(step, state, {"step": step, "tokens": step})
        checkpoints.wait()
    checkpoints.close()
    return workdir / "checkpoints"


@pytest.fixture
def run(tmp_path):
    """A run's folder of checkpoints with three steps, and that of their copies."""
    return train(tmp_path / "run", durable=str(tmp_path / "copies")), tmp_path / "copies"


def start(root, copies, policy="stop"):
    """(the newest step, those without a copy at the end)."""
    checkpoints = store.Store(root.parent, Checkpoint(keep=9, durable=str(copies), on_corrupt=policy), print)
    return checkpoints.newest(), checkpoints.close()


def content(folder):
    return {p: p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


CHUNK = "state/params.w/c.0"
CUT = {
    "a chunk is gone": lambda step: os.remove(step / CHUNK),
    "cut": lambda step: os.truncate(step / CHUNK, 10),
    "an array is gone": lambda step: shutil.rmtree(step / "state/params.w"),
    "meta is gone": lambda step: os.remove(step / layout.META),
    "more": lambda step: (step / "state" / "more").write_text(""),
    "a pipe": lambda step: (os.remove(step / CHUNK), os.mkfifo(step / CHUNK)),
    "a half-written file": lambda step: (step / "state" / ".c.part").write_text("half"),
}


@pytest.mark.parametrize("how", CUT)
def test_a_copy_whose_list_is_whole_is_completed(run, how):
    root, copies = run
    CUT[how](copies / "4")
    chunk = copies / "4" / "state/params.v/c.0"
    before = chunk.stat().st_ino
    assert Vault(str(copies)).verify(4) != []
    assert start(root, copies) == (6, [])
    assert Vault(str(copies)).verify(4) == []
    assert chunk.stat().st_ino == before, "what is there already is not sent again"


def test_what_an_earlier_upload_in_other_chunks_left_goes(run):
    root, copies = run
    writing.remove(root, 4)
    (copies / "4" / "state/params.w/c.7").write_bytes(b"of larger chunks")
    train(root.parent, (4,), plus=1, durable=str(copies))
    assert [Vault(str(copies)).verify(step) for step in (2, 4, 6)] == [[], [], []]


def exchange(root):
    (root / "2").rename(root / "away")
    (root / "4").rename(root / "2")
    (root / "away").rename(root / "4")


def test_wrong_steps_here_cost_no_copy(run, tmp_path, capsys):
    root, copies = run
    before, own = content(copies), tmp_path / "own"
    other = train(tmp_path / "other", plus=5)
    shutil.copytree(root, own)
    for wrong, words in (
        (lambda: exchange(root), r"checksums.json is of step 2, not of step 4"),
        (lambda: shutil.copytree(other / "4", root / "4"), r"checksums.json is of run \w+, not of run"),
        (lambda: shutil.copytree(own / "6", root / "4"), r"checksums.json is of step 6"),
    ):
        if "run" in words or "step 6" in words:
            shutil.rmtree(root / "4")
        wrong()
        assert start(root, copies) == (6, [])
        assert re.search(rf"WARNING: .*/4 is damaged: {words}.*move it away", capsys.readouterr().out)
        assert content(copies) == before
        for step in (2, 4):
            shutil.rmtree(root / str(step))
            shutil.copytree(own / str(step), root / str(step))


def test_a_whole_copy_is_not_given_up_for_a_damaged_step_of_another_content(run, tmp_path, capsys):
    """As after going back and training anew: the copy is of the step that was here before."""
    root, copies = run
    train_anew = tmp_path / "anew"
    (train_anew / "checkpoints").mkdir(parents=True)
    shutil.copyfile(root / seal.RUN, train_anew / "checkpoints" / seal.RUN)
    anew = train(train_anew, (4,), plus=9)
    shutil.rmtree(root / "4")
    shutil.copytree(anew / "4", root / "4")
    os.truncate(root / "4" / CHUNK, 10)
    before = content(copies)
    assert start(root, copies) == (6, [4])
    said = capsys.readouterr().out
    assert "has no whole copy of step 4, and cannot get one" in said and "or move it away" in said
    assert "the same command tries again" not in said and content(copies) == before
    shutil.rmtree(root / "4")
    shutil.copytree(anew / "4", root / "4")
    assert start(root, copies) == (6, []) and Vault(str(copies)).manifest(4) == writing.read_seal(root / "4")


@pytest.mark.parametrize("damage", [layout.MARKER, layout.META, None])
def test_another_run_s_place_is_known_however_damaged(run, tmp_path, damage):
    """And with or without the name in it, which older versions did not leave."""
    root, _ = run
    other = tmp_path / "other-copies"
    train(tmp_path / "other", plus=5, durable=str(other))
    assert (other / seal.RUN).read_text() == writing.run_of(tmp_path / "other" / "checkpoints")
    for _ in range(2):
        if damage:
            with (other / "6" / damage).open("a") as file:
                file.write(" ")
        elif (other / "6" / layout.MARKER).exists():
            (other / "6" / layout.MARKER).unlink()
        before = content(other), content(root)
        with pytest.raises(
            UserError, match=r"holds step 6 of another run than .*/run \(that is run \w+, this"
        ):
            start(root, other)
        assert (content(other), content(root)) == before
        (other / seal.RUN).unlink(missing_ok=True)


def test_one_foreign_step_among_its_own(run, tmp_path):
    root, copies = run
    shutil.rmtree(copies / "4")
    shutil.copytree(train(tmp_path / "other", plus=5) / "4", copies / "4")
    before = content(copies)
    with pytest.raises(UserError, match="holds step 4 of another run"):
        start(root, copies)
    with pytest.raises(UserError, match=r"of more than one run \(\.run, 2, 6 of run \w+; 4 of run \w+\)"):
        start(tmp_path / "new" / "checkpoints", copies)
    assert content(copies) == before


def test_of_which_nothing_tells_whose_it_is(run, tmp_path):
    root, _ = run
    (tmp_path / "place" / "8" / "state").mkdir(parents=True)
    (tmp_path / "place" / "8" / "state" / "c.0").write_text("x")
    with pytest.raises(UserError, match="holds step 8, of which nothing tells whose it is; move it away"):
        start(root, tmp_path / "place")
    # A folder with a number for a name that is no upload is not deleted as one that was cut short.
    (tmp_path / "place" / seal.RUN).write_text(writing.run_of(root))
    (tmp_path / "place" / "8" / "letter.txt").write_text("dear")
    before = content(tmp_path / "place")
    with pytest.raises(UserError, match=r"8 holds letter\.txt, which is no checkpoint's"):
        start(root, tmp_path / "place")
    assert content(tmp_path / "place") == before


def test_two_runs_that_begin_on_one_empty_place(run, tmp_path, capsys):
    place = tmp_path / "empty"
    first, second = (store.Store(tmp_path / name, Checkpoint(durable=str(place)), print) for name in "ab")
    assert first.newest() is None and second.newest() is None
    for checkpoints in (first, second):
        checkpoints.save(1, {"params": {"w": jnp.zeros(3)}}, {"step": 1, "tokens": 1})
        checkpoints.wait()
    assert first.close() == [] and second.close() == [1]
    assert "give each run a place of its own" in capsys.readouterr().out
    assert Vault(str(place)).verify(1) == []


def test_an_older_place_without_a_name_is_taken_on(run):
    root, copies = run
    (copies / seal.RUN).unlink()
    (copies / "6" / layout.MARKER).unlink()
    assert start(root, copies) == (6, []) and Vault(str(copies)).owner() == writing.run_of(root)
    assert Vault(str(copies)).verify(6) == []


def test_no_fresh_start_where_all_copies_are_damaged(run, tmp_path):
    _, copies = run
    for step in (2, 4, 6):
        os.truncate(copies / str(step) / CHUNK, 10)
    with pytest.raises(StorageError, match=r"no copy in .* is whole: restore one"):
        start(tmp_path / "new" / "checkpoints", copies, "previous")


@pytest.mark.parametrize("local", [False, True])
def test_a_dead_place_holds_no_save_up(tmp_path, monkeypatch, local):
    """It had: the next save waited for max_wait, counted as failed, and the third one ended the run."""
    alive, said, upload = threading.Event(), [], Vault.upload

    def waits(*args):
        assert alive.wait(60)
        upload(*args)

    monkeypatch.setattr(Vault, "upload", waits)
    copies, fast = tmp_path / "copies", tmp_path / "fast"
    settings = Checkpoint(
        durable=str(copies), local=str(fast) if local else "", keep=2, max_wait=0.1, max_failures=1
    )
    checkpoints = store.Store(tmp_path / "run", settings, said.append)
    checkpoints.newest()
    for step in range(1, 6):
        assert checkpoints.free(step)
        checkpoints.save(step, {"params": {"w": jnp.arange(9.0) + step}}, {"step": step, "tokens": step})
        until = time.monotonic() + 10
        while not checkpoints._collect(0) or step not in checkpoints.steps():
            assert time.monotonic() < until, "publishing waits for the copy"
            time.sleep(0.01)
    assert {1, 4, 5} <= set(checkpoints.steps()) <= {1, 3, 4, 5}  # the one that is on its way stays
    put_off = [line for line in said if "its copy is NOT: the one before is still on its way" in line]
    assert [int(line.split()[2]) for line in put_off] == [2, 3, 4, 5] and len(said) == 4
    alive.set()
    assert checkpoints.close() == []
    assert {4, 5} <= set(Vault(str(copies)).steps()) and not Vault(str(copies)).unfinished()


@pytest.fixture
def dead(monkeypatch):
    """The durable place does not answer, until it is called."""
    attempt = Vault._attempt

    def refuses(self, verb, name, *rest):
        raise StorageError(f"cannot {verb} {self.url}/{name}") from ConnectionRefusedError("refused")

    monkeypatch.setattr(Vault, "_attempt", refuses)
    return lambda: monkeypatch.setattr(Vault, "_attempt", attempt)


def test_a_run_goes_on_from_what_is_here_while_the_place_is_dead(run, tmp_path, dead):
    """A process that was killed meanwhile had ended the run with 4: its start looked for newer copies."""
    root, copies = run
    said = []
    checkpoints = store.Store(root.parent, Checkpoint(keep=9, durable=str(copies)), said.append)
    assert checkpoints.newest() == 6
    assert any("going on from step 6, which is here" in line for line in said)
    assert checkpoints.close() == [2, 4, 6]  # nobody knows
    with pytest.raises(
        StorageError, match="cannot look at"
    ):  # with nothing here there is nothing to go on from
        start(tmp_path / "new" / "checkpoints", copies)


def test_what_was_given_up_is_not_fetched_from_a_place_that_was_dead_meanwhile(run, dead, monkeypatch):
    root, copies = run
    decision = {"kind": "spike", "step": 2, "batches": 3, "at": 7, "seen": "x"}
    checkpoints = store.Store(root.parent, Checkpoint(keep=9, durable=str(copies)), print)
    checkpoints.drop_stale([decision])
    dead()  # it lives again
    assert checkpoints.newest() == 2
    checkpoints.close()
    assert Vault(str(copies)).steps() == [2, 4, 6]
    again = store.Store(root.parent, Checkpoint(keep=9, durable=str(copies)), print)
    again.drop_stale([decision])
    assert again.newest() == 2 and again.close() == []
    assert Vault(str(copies)).steps() == [2]


def test_who_is_asked_to_stop_waits_for_no_dead_place(tmp_path, monkeypatch):
    """All attempts of all copies that were on their way were made first: an hour, where the place took requests."""
    said, settings = [], Checkpoint(keep=9, max_wait=0.1, durable=str(tmp_path / "copies"))
    with monkeypatch.context() as patch:
        patch.setattr(remote, "PAUSES", (100.0,))
        patch.setattr(Vault, "_write", lambda *args: (_ for _ in ()).throw(OSError("dead")))
        checkpoints = store.Store(tmp_path / "run", settings, said.append)
        checkpoints.newest()
        for step in (1, 2):
            assert checkpoints.free(step)
            checkpoints.save(step, {"params": {"w": jnp.arange(9.0)}}, {"step": step, "tokens": step})
            checkpoints.wait(copies=False)
        assert checkpoints.steps() == [1, 2]
        assert checkpoints.close(again=False) == [1, 2]
    assert any("step 1 is saved, but its copy is NOT" in line and "may not wait" in line for line in said)
    assert "has no whole copy of step 1, 2; the same command tries again" in said[-1]
    checkpoints = store.Store(tmp_path / "run", settings, said.append)
    assert checkpoints.newest() == 2 and checkpoints.close() == []
    assert Vault(str(tmp_path / "copies")).steps() == [1, 2]


def test_each_attempt_is_one_request(monkeypatch):
    """botocore's and s3fs's own attempts came in between: what never answered was first spoken of after ten minutes."""
    monkeypatch.setattr(remote, "READ_TIMEOUT", 1)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    silent, asked = socket.create_server(("localhost", 0)), []

    def take():
        with contextlib.suppress(OSError):
            while True:
                asked.append(silent.accept()[0])

    threading.Thread(target=take, daemon=True).start()
    vault = Vault("s3://bucket/run", f"http://localhost:{silent.getsockname()[1]}")
    with pytest.raises(StorageError, match="after 3 attempts"):
        vault.steps()
    silent.close()
    assert len(asked) == 3
