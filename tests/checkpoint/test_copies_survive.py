"""A whole copy outlives an error of its storage, and takes the place of a damaged checkpoint."""

import errno
import os
import re
import shutil

import pytest
from checkpoint_helpers import content, save, train
from fsspec.implementations.local import LocalFileSystem

from zaya_jax.checkpoint import layout, storage
from zaya_jax.checkpoint.run import store
from zaya_jax.checkpoint.vault import Vault
from zaya_jax.config import Checkpoint, StorageError

CHUNK = "state/params.w/c.0"


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(storage, "DELAYS", (0.01, 0.01))


@pytest.fixture
def run(tmp_path):
    """A run's folder of checkpoints with three steps, and that of their copies."""
    return train(tmp_path / "run", 2, 4, 6, durable=str(tmp_path / "copies")), tmp_path / "copies"


def start(root, copies, **keys):
    """(the newest step, those without a copy at the end)."""
    checkpoints = store.Store(root.parent, Checkpoint(keep=9, durable=str(copies), **keys), print)
    return checkpoints.find_newest(), checkpoints.close()


def test_a_list_that_cannot_be_looked_at_costs_no_copy(run, monkeypatch):
    """fsspec's `exists` said no to any error: the copy was deleted as an upload cut short."""
    root, copies = run
    shutil.rmtree(root / "4")  # only its copy is left
    before, info, failed = content(copies), LocalFileSystem.info, []

    def sometimes(self, path, **options):
        if str(path).endswith(f"copies/4/{layout.MARKER}") and len(failed) < 2:
            failed.append(path)
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return info(self, path, **options)

    monkeypatch.setattr(LocalFileSystem, "info", sometimes)
    assert start(root, copies) == (6, []) and len(failed) == 2
    assert content(copies) == before


def test_an_upload_under_way_is_left_to_the_run_that_sends_it(run, tmp_path):
    root, copies = run
    os.remove(copies / "6" / layout.MARKER)
    other = store.Store(tmp_path / "other", Checkpoint(keep=9, durable=str(copies)), print)
    assert other.find_newest() == 4 and (copies / "6" / CHUNK).exists()
    other.close()
    assert start(root, copies) == (6, []) and Vault(str(copies)).steps() == [2, 4, 6]


@pytest.mark.parametrize("how", ["list is gone", "cut"])
@pytest.mark.parametrize("on_corrupt", ["stop", "previous"])
def test_a_whole_copy_takes_the_place_of_the_damaged_newest(run, capsys, how, on_corrupt):
    root, copies = run
    whole = content(root / "6")
    if how == "cut":
        os.truncate(root / "6" / CHUNK, 10)
    else:
        os.remove(root / "6" / layout.MARKER)
    damaged = content(root / "6")
    assert start(root, copies, on_corrupt=on_corrupt) == (6, [])
    assert content(root / "6") == whole
    assert [*content(root / ".damaged-6").values()] == [*damaged.values()]
    assert re.search(r"damaged step 6 is kept as .*\.damaged-6", capsys.readouterr().out)


def test_without_a_whole_copy_the_damaged_newest_is_as_without_copies(run, capsys):
    root, copies = run
    os.truncate(root / "6" / CHUNK, 10)
    os.truncate(copies / "6" / CHUNK, 10)
    with pytest.raises(StorageError, match=r"/6 is damaged.*on_corrupt=previous"):
        start(root, copies)
    assert (root / "6").exists()
    assert start(root, copies, on_corrupt="previous")[0] == 4
    assert "no copy takes the place of the damaged step 6" in capsys.readouterr().out


def test_an_old_copy_that_stays_is_no_failure_of_the_new_one(run, monkeypatch, capsys):
    root, copies = run

    def dies(self, step):
        raise storage.Unreachable("cannot delete")

    monkeypatch.setattr(Vault, "remove", dies)
    settings = Checkpoint(keep=1, durable=str(copies))
    checkpoints = store.Store(root.parent, settings, print)
    checkpoints.find_newest()
    save(checkpoints, 8)
    assert checkpoints.close() == [] and 8 in Vault(str(copies)).steps()
    assert "NOT" not in (out := capsys.readouterr().out) and "is not deleted: cannot delete" in out
