"""Checkpoints of a past that a run has given up are gone on from in no tier, however much of that was done already."""

import shutil

import jax.numpy as jnp
import pytest

from zaya_jax.aegis import decisions
from zaya_jax.checkpoint import look, remote, stale, store, writing
from zaya_jax.config import Checkpoint, StorageError, UserError

BACK = {"kind": "spike", "step": 3, "batches": 4, "at": 7, "seen": "a loss"}
AGAIN = {"kind": "corrupt", "step": 5, "batches": 0, "at": 6, "seen": "a device"}


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


OTHERS = {  # what the checkpoints know, what the file says, and why that is not theirs
    # Steps 6 and 8 come after the step at which another run decided to go back: it is not this run's past.
    "later": ([], [BACK | {"step": 1, "at": 5}], "does not know what was decided at step 5"),
    # Not even where another of its decisions is later than all steps of this run.
    "later than one": ([], [BACK | {"step": 1, "at": 5}, AGAIN | {"at": 900}], "decided at step 5"),
    "later than the second": ([BACK], [BACK, AGAIN | {"step": 1, "at": 7}], "decided at step 7"),
    # As many decisions as the checkpoints have, or more, but others.
    "as many": ([BACK], [AGAIN | {"step": 1}], "has other decisions"),
    "more": ([BACK], [BACK | {"step": 1}, AGAIN | {"at": 9}], "has other decisions"),
}


@pytest.mark.parametrize(
    ("tier", "case"),
    # A part in the local folder has the number of its decisions, not what they are.
    [(tier, case) for tier in ("workdir", "durable") for case in OTHERS]
    + [("local", case) for case in OTHERS if "later" in case],
)
def test_another_run_s_decisions_are_refused_before_anything_goes(tmp_path, opened, tier, case):
    made, file, why = OTHERS[case]
    save(opened(), (2, 4, 6, 8), *made)
    root, vault = tmp_path / "run" / "checkpoints", remote.Vault(str(tmp_path / "safe"))
    for step in (2, 4, 6, 8):  # where one tier is lost, another speaks for it
        if tier != "workdir":
            writing.remove(root, step)
        if tier == "local":
            vault.remove(step)
    before = (writing.steps_in(root), vault.steps(), parts(tmp_path))
    assert any(before)
    decisions.write(tmp_path / "run", file)
    assert decisions.read(tmp_path / "run") == file
    checkpoints = opened()
    with pytest.raises(UserError, match=rf"{why}.*Nothing was deleted.*move this one away") as refused:
        checkpoints.drop_stale(file)
    checkpoints.close()
    named = str(refused.value).split()[0]
    assert named == str(tmp_path / "run" / "aegis" / decisions.FILE)
    assert (writing.steps_in(root), vault.steps(), parts(tmp_path)) == before
    assert not list(root.glob(".stale-*"))


def test_a_file_that_knows_less_than_the_checkpoints_gives_up_nothing(tmp_path, opened):
    save(opened(), (2, 4, 6), BACK, AGAIN)
    checkpoints = opened()
    checkpoints.drop_stale([BACK])
    assert checkpoints.newest() == 6
    checkpoints.close()
