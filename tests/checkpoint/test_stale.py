"""Checkpoints of a past that a run has given up are gone on from in no tier, however much of that was done already."""

import shutil

import jax.numpy as jnp
import pytest

from zaya_jax.checkpoint import look, remote, stale, store, writing
from zaya_jax.config import Checkpoint, StorageError

BACK = {"kind": "spike", "step": 3, "batches": 4}
AGAIN = {"kind": "corrupt", "step": 5, "batches": 0}


@pytest.fixture
def opened(tmp_path):
    """Opens the store of a run with all tiers."""

    def call(said=print):
        settings = Checkpoint(keep=9, local=str(tmp_path / "fast"), durable=str(tmp_path / "safe"))
        return store.Store(tmp_path / "run", settings, said)

    return call


def save(checkpoints, steps, *decisions):
    checkpoints.newest()
    known = {stale.KEY: list(decisions)} if decisions else {}
    for step in steps:
        state = {"params": {"w": jnp.arange(10.0) + step}}
        checkpoints.save(step, state, {"step": step, "tokens": step, **known})
        checkpoints.wait()
    checkpoints.close()


def parts(tmp_path):
    return sorted(int(p.name) for p in (tmp_path / "fast").glob("*/process-0/*") if p.name.isdigit())


def test_only_those_that_know_less_than_they_should_are():
    assert (
        stale.is_stale(4, 0, [BACK]) and not stale.is_stale(3, 0, [BACK]) and not stale.is_stale(4, 1, [BACK])
    )
    assert stale.is_stale(6, 1, [BACK, AGAIN]) and not stale.is_stale(5, 1, [BACK, AGAIN])


@pytest.mark.parametrize("done", ["nothing", "copies", "some of the folder", "the folder"])
def test_none_of_them_is_gone_on_from(tmp_path, opened, done):
    save(opened(), (2, 4, 6))
    root = tmp_path / "run" / "checkpoints"
    if done == "copies":
        stale.delete_copies(remote.Vault(str(tmp_path / "safe")), [BACK])
    elif done == "some of the folder":
        (root / "6").rename(root / f"{writing.STALE}1-6")
    elif done == "the folder":
        shutil.rmtree(root / "4")
        shutil.rmtree(root / "6")
    assert parts(tmp_path) == [6]
    said = []
    checkpoints = opened(said.append)
    checkpoints.drop_stale([BACK])
    assert checkpoints.newest() == 2
    checkpoints.close()
    assert writing.steps_in(root) == [2] == remote.Vault(str(tmp_path / "safe")).steps()
    assert parts(tmp_path) == []
    if done == "nothing":
        assert "step 4, 6, of a past that was given up" in said[0]
        assert "went back behind them: .stale-1-4, .stale-1-6" in look.steps_text(tmp_path / "run")
    # Its own later ones stay; what another decision gives up takes the place of what the first did.
    save(opened(), (4, 6), BACK)
    checkpoints = opened()
    checkpoints.drop_stale([BACK])
    assert checkpoints.newest() == 6
    checkpoints.drop_stale([BACK, AGAIN])
    assert checkpoints.newest() == 4
    checkpoints.close()
    assert sorted(p.name for p in root.glob(".stale-*")) == [".stale-2-6"]


def test_what_cannot_be_seen_is_not_deleted(tmp_path, opened, monkeypatch):
    save(opened(), (2, 4))
    vault = remote.Vault(str(tmp_path / "safe"))

    def away(*_):
        raise StorageError("the line is cut")

    monkeypatch.setattr(vault, "get", away)
    with pytest.raises(StorageError, match="cut"):
        stale.delete_copies(vault, [BACK])
    assert vault.steps() == [2, 4]
