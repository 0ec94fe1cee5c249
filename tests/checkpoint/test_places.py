"""Places of a run that lie in each other are refused however they are spelt, before anything is written."""

import os

import jax.numpy as jnp
import pytest

from zaya_jax import config
from zaya_jax.checkpoint import places, rewrite, store
from zaya_jax.config import Checkpoint, UserError
from zaya_jax.train.workdir import open_workdir


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    """A run's folder with steps 2 and 4, and links to it; the current folder is the one above."""
    monkeypatch.chdir(tmp_path)
    checkpoints = store.Store(tmp_path / "run", Checkpoint(), print)
    checkpoints.newest()
    for step in (2, 4):
        checkpoints.save(step, {"params": {"w": jnp.arange(9.0) + step}}, {"step": step, "tokens": step})
        checkpoints.wait()
    checkpoints.close()
    (tmp_path / "link").symlink_to(tmp_path / "run" / "checkpoints")
    (tmp_path / "above").symlink_to(tmp_path)
    return tmp_path / "run"


def tree(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


WAYS = [
    "{run}/checkpoints", "{run}/checkpoints/", "file://{run}/checkpoints", "local://{run}/checkpoints",
    "{run}/x/../checkpoints", "run/checkpoints", "run//checkpoints/.", "{top}/link", "{top}/above/run/checkpoints",
    "{run}/checkpoints/2", "{run}/checkpoints/new", "{run}", "{run}/tokenizer", "{top}", ".", "/",
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_no_copies_in_the_run_s_own_folder_nor_around_it(workdir, tmp_path, way):
    durable, before = way.format(run=workdir, top=tmp_path), tree(tmp_path)
    with pytest.raises(UserError, match=r"lie in each other.*give a place apart"):
        store.Store(workdir, Checkpoint(durable=durable), print)
    assert tree(tmp_path) == before


def test_the_fast_folder_lies_apart_too(workdir, tmp_path):
    for local, durable in (
        (str(workdir), ""),
        ("link/2", ""),
        (str(tmp_path / "fast"), str(tmp_path / "fast")),
    ):
        with pytest.raises(UserError, match="lie in each other"):
            store.Store(workdir, Checkpoint(local=local, durable=durable), print)
    store.Store(workdir, Checkpoint(local=str(tmp_path), durable=str(tmp_path / "runs")), print).close()
    with pytest.raises(UserError, match="is a chain of file systems"):
        store.Store(workdir, Checkpoint(durable=f"simplecache::file://{workdir}/checkpoints"), print)


def test_before_the_folders_exist(tmp_path):
    new = tmp_path / "new"
    with pytest.raises(UserError, match="lie in each other"):
        store.Store(new, Checkpoint(durable=str(tmp_path / "x" / ".." / "new" / "checkpoints")), print)
    assert not os.listdir(tmp_path)
    assert not places.overlap(tmp_path / "new", tmp_path / "newer")


def test_nothing_is_written_into_a_checkpoint(workdir, tmp_path):
    inside, before = f"{workdir}/checkpoints/4/more", tree(tmp_path)
    apart = tmp_path / "apart"
    for write in (
        lambda: rewrite.reshard(workdir, inside),
        lambda: rewrite.reshard(workdir, f"file://{inside}"),
        lambda: rewrite.export_params(workdir, inside),
        lambda: places.new_folder(tmp_path / "link" / "4" / "state" / "deep", "--out"),
        lambda: open_workdir(inside, config.Config()),
        lambda: store.Store(apart, Checkpoint(durable=inside), print),
        lambda: store.Store(apart, Checkpoint(local=inside), print),
    ):
        with pytest.raises(UserError, match=r"lies in the checkpoint .*/checkpoints/4, where all"):
            write()
    assert tree(tmp_path) == before


def test_a_link_is_no_new_folder(workdir, tmp_path):
    """Whatever it leads to: the new folder takes its name at the end, which a link's cannot be."""
    (tmp_path / "empty").mkdir()
    for name, leads_to in (("to_empty", "empty"), ("to_nothing", "missing"), ("loop", "loop")):
        (tmp_path / name).symlink_to(tmp_path / leads_to)
        with pytest.raises(UserError, match=f"{name} is a symbolic link; give a new folder"):
            rewrite.export_params(workdir, tmp_path / name)
    rewrite.export_params(workdir, tmp_path / "empty")


def test_nothing_is_written_among_a_run_s_checkpoints(workdir, tmp_path):
    before = tree(tmp_path)
    for inside in (workdir / "checkpoints" / "99", workdir / "checkpoints" / "a" / "b"):
        with pytest.raises(UserError, match=r"lies in .*/checkpoints, among the checkpoints of a run"):
            rewrite.export_params(workdir, inside)
    assert tree(tmp_path) == before
