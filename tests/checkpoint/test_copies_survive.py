"""A whole copy outlives an error of its storage, and takes the place of a damaged checkpoint; no
run goes on from a checkpoint of a past that it has given up."""

import errno
import os
import re
import shutil
from unittest.mock import Mock

import pytest
from checkpoint_helpers import content, save, train
from fsspec.implementations.local import LocalFileSystem
from refusals import check_storage_error, refusal
from test_durable import CHUNK, cut_off, dead, hasty, opened, run, start

from zaya_jax.checkpoint import folders, layout, storage
from zaya_jax.checkpoint.run import look, retention
from zaya_jax.checkpoint.vault import Vault
from zaya_jax.guard import decisions

__all__ = ["dead", "hasty", "run"]


def test_a_list_that_cannot_be_looked_at_costs_no_copy(run, monkeypatch):
    """fsspec's `exists` said no to any error: the copy was deleted as an upload cut short."""
    root, copies = run
    shutil.rmtree(root / "4")  # only its copy is left
    before, info, failed = content(copies), LocalFileSystem.info, []

    def sometimes(self, path, **options):
        if str(path).endswith(f"copies/4/{layout.SEAL_FILE}") and len(failed) < 2:
            failed.append(path)
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return info(self, path, **options)

    monkeypatch.setattr(LocalFileSystem, "info", sometimes)
    assert start(root, copies) == (6, []) and len(failed) == 2
    assert content(copies) == before


def test_an_upload_under_way_is_left_to_the_run_that_sends_it(run, tmp_path):
    root, copies = run
    os.remove(copies / "6" / layout.SEAL_FILE)
    other = opened(tmp_path / "other", copies)
    assert other.find_newest() == 4 and (copies / "6" / CHUNK).exists()
    other.close()
    assert start(root, copies) == (6, []) and Vault(copies).steps() == [2, 4, 6]


@pytest.mark.parametrize("how", ["list is gone", "cut"])
@pytest.mark.parametrize("on_corrupt", ["stop", "previous"])
def test_a_whole_copy_takes_the_place_of_the_damaged_newest(run, capsys, how, on_corrupt):
    root, copies = run
    whole = content(root / "6")
    if how == "cut":
        os.truncate(root / "6" / CHUNK, 10)
    else:
        os.remove(root / "6" / layout.SEAL_FILE)
    damaged = content(root / "6")
    assert start(root, copies, on_corrupt=on_corrupt) == (6, [])
    assert content(root / "6") == whole
    assert [*content(root / ".damaged-6").values()] == [*damaged.values()]
    assert re.search(r"damaged step 6 is kept as .*\.damaged-6", capsys.readouterr().out)


def test_an_older_step_is_fetched_where_the_newest_is_damaged_and_has_no_whole_copy(run, capsys):
    """With none before it here, a run ended; with an older one here it went back further."""
    root, copies = run
    for step in (root / "6", copies / "6"):
        os.truncate(step / CHUNK, 10)
    whole = content(root / "4")
    check_storage_error(r"/6 is damaged.*on_corrupt=previous", start, root, copies)
    shutil.rmtree(root / "2")
    shutil.rmtree(root / "4")
    assert start(root, copies, on_corrupt="previous") == (4, [])
    assert content(root / "4") == whole
    assert re.search("/6 is damaged: .*; its copy: .*/6 is damaged", capsys.readouterr().out)


def test_a_copy_that_cannot_be_fetched_now_is_not_passed_over(run, tmp_path, monkeypatch):
    """With on_corrupt=previous a run went on from an older step where the network had failed once."""
    root, copies = run
    shutil.rmtree(root / "6")
    with monkeypatch.context() as patch:
        patch.setattr(storage.Storage, "_write", cut_off)
        check_storage_error(
            "step 6 is not here; its copy in .* cannot be fetched now: cannot write",
            start,
            root,
            copies,
            on_corrupt="previous",
        )
    assert start(root, copies) == (6, [])


def test_a_copy_in_a_place_that_does_not_answer_is_not_passed_over(run, dead):
    root, copies = run
    os.truncate(root / "6" / CHUNK, 10)
    for on_corrupt in ("stop", "previous"):
        check_storage_error(
            "/6 is damaged: .* truncated.*; its copy in .* cannot be fetched now: cannot list",
            start,
            root,
            copies,
            on_corrupt=on_corrupt,
        )
    assert start(root, "", on_corrupt="previous") == (4, [])  # the advice
    dead()  # it lives again
    assert start(root, copies) == (6, [])


def test_an_old_copy_that_stays_is_no_failure_of_the_new_one(run, monkeypatch, capsys):
    root, copies = run
    dies = Mock(side_effect=storage.Unreachable("cannot delete"))
    monkeypatch.setattr(Vault, "remove", dies)
    checkpoints = opened(root.parent, copies, keep=1)
    checkpoints.find_newest()
    save(checkpoints, 8)
    assert checkpoints.close() == [] and 8 in Vault(copies).steps()
    out = capsys.readouterr().out
    assert "NOT" not in out and "is not deleted: cannot delete" in out


BACK = {"kind": "spike", "step": 3, "batches": 4, "at": 7, "seen": "a loss"}
AGAIN = {"kind": "corrupt", "step": 5, "batches": 0, "at": 6, "seen": "a device"}


def places(run):
    """The steps of a run's folder and of its copies."""
    root, copies = run
    return folders.steps_in(root), Vault(copies).steps()


@pytest.mark.parametrize("done", ["nothing", "copies", "some of the folder", "the folder"])
def test_no_abandoned_step_is_gone_on_from(run, capsys, done):
    root, copies = run
    if done == "copies":
        for step in (4, 6):
            Vault(copies).remove(step)
    elif done == "some of the folder":
        (root / "6").rename(root / f"{folders.STALE}1-6")
    elif done == "the folder":
        shutil.rmtree(root / "4")
        shutil.rmtree(root / "6")
    checkpoints = opened(root.parent, copies)
    assert checkpoints.find_newest([BACK]) == 2
    checkpoints.close()
    assert places(run) == ([2], [2])
    if done == "nothing":
        assert "step 4, 6, of a past that was given up" in capsys.readouterr().out
        (remark,) = look.remarks(root.parent, [], [])
        assert "went back behind them: .stale-1-4, .stale-1-6" in remark
    # Its own later ones stay, whatever the file says; another decision's take the place of the
    # first's.
    train(root.parent, 4, 6, meta={retention.DECISIONS: [BACK]}, durable=str(copies))
    checkpoints = opened(root.parent, copies)
    for decided, newest in (([], 6), ([BACK], 6), ([BACK, AGAIN], 4)):
        assert checkpoints.find_newest(decided) == newest
    checkpoints.close()
    assert [path.name for path in root.glob(".stale-*")] == [".stale-2-6"]


OTHERS = {
    # decisions that the checkpoints know, those in the file, and why these are another run's
    # Steps 6 and 8 come after the step at which another run decided to go back: it is not this
    # run's past.
    "later": ([], [BACK | {"step": 1, "at": 5}], "does not know the decision at step 5"),
    "later than the second": (
        [BACK],
        [BACK, AGAIN | {"step": 1, "at": 7}],
        "the decision at step 7",
    ),
    # As many decisions as the checkpoints have, and more, but others.
    "more": ([BACK], [BACK | {"step": 1}, AGAIN | {"at": 9}], "has other decisions"),
}


@pytest.mark.parametrize("place", ["workdir", "durable"])
@pytest.mark.parametrize("case", OTHERS)
def test_another_run_s_decisions_are_refused_before_anything_goes(tmp_path, place, case):
    made, file, why = OTHERS[case]
    workdir, copies, steps = tmp_path / "run", tmp_path / "copies", (2, 4, 6, 8)
    root = train(workdir, *steps, meta={retention.DECISIONS: made}, durable=str(copies))
    # where the checkpoints are lost, the copies speak for them
    for step in steps if place == "durable" else ():
        folders.remove(root, step)
    before = places((root, copies))
    decisions.write(workdir, file)
    checkpoints = opened(workdir, copies)
    said = refusal(checkpoints.find_newest, file)
    checkpoints.close()
    assert said.startswith(f"{workdir / 'aegis' / decisions.FILE} ")
    assert re.search(rf"{why}.*Nothing was deleted.*move this one away", said)
    assert places((root, copies)) == before and not list(root.glob(".stale-*"))
