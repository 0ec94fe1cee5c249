"""No run goes on from a checkpoint of a past that it has given up, however much of that was done
already."""

import shutil

import checkpoint_helpers
import pytest

from zaya_jax.checkpoint import folders
from zaya_jax.checkpoint.run import look, retention, store
from zaya_jax.checkpoint.vault import Vault
from zaya_jax.config import Checkpoint, UserError
from zaya_jax.guard import decisions

BACK = {"kind": "spike", "step": 3, "batches": 4, "at": 7, "seen": "a loss"}
AGAIN = {"kind": "corrupt", "step": 5, "batches": 0, "at": 6, "seen": "a device"}


@pytest.fixture
def opened(tmp_path):
    """Opens the store of a run that has copies."""

    def call(messages=print):
        return store.Store(
            tmp_path / "run", Checkpoint(keep=9, durable=str(tmp_path / "safe")), messages
        )

    return call


def save(checkpoints, steps, *decisions):
    checkpoints.find_newest()
    checkpoint_helpers.save(
        checkpoints, *steps, **({retention.DECISIONS: list(decisions)} if decisions else {})
    )
    checkpoints.close()


def places(tmp_path):
    """The steps of workdir/checkpoints and of the durable place."""
    return folders.steps_in(tmp_path / "run" / "checkpoints"), Vault(str(tmp_path / "safe")).steps()


@pytest.mark.parametrize("done", ["nothing", "copies", "some of the folder", "the folder"])
def test_none_of_them_is_gone_on_from(tmp_path, opened, done):
    save(opened(), (2, 4, 6))
    root, messages = tmp_path / "run" / "checkpoints", []
    if done == "copies":
        for step in (4, 6):
            Vault(str(tmp_path / "safe")).remove(step)
    elif done == "some of the folder":
        (root / "6").rename(root / f"{folders.STALE}1-6")
    elif done == "the folder":
        shutil.rmtree(root / "4")
        shutil.rmtree(root / "6")
    checkpoints = opened(messages.append)
    assert checkpoints.find_newest([BACK]) == 2
    checkpoints.close()
    assert places(tmp_path) == ([2], [2])
    if done == "nothing":
        assert "step 4, 6, of a past that was given up" in messages[0]
        assert (
            "went back behind them: .stale-1-4, .stale-1-6"
            in look.remarks(tmp_path / "run", [], [])[0]
        )
    # Its own later ones stay, whatever the file says; another decision's take the place of the
    # first's.
    save(opened(), (4, 6), BACK)
    checkpoints = opened()
    for decided, newest in (([], 6), ([BACK], 6), ([BACK, AGAIN], 4)):
        assert checkpoints.find_newest(decided) == newest
    checkpoints.close()
    assert sorted(p.name for p in root.glob(".stale-*")) == [".stale-2-6"]


OTHERS = {
    # decisions that the checkpoints know, those in the file, and why these are another run's Steps
    # 6 and 8 come after the step at which another run decided to go back: it is not this run's
    # past.
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
def test_another_run_s_decisions_are_refused_before_anything_goes(tmp_path, opened, place, case):
    made, file, why = OTHERS[case]
    save(opened(), (2, 4, 6, 8), *made)
    root = tmp_path / "run" / "checkpoints"
    # where the checkpoints are lost, the copies speak for them
    for step in (2, 4, 6, 8) if place == "durable" else ():
        folders.remove(root, step)
    before = places(tmp_path)
    decisions.write(tmp_path / "run", file)
    checkpoints = opened()
    with pytest.raises(
        UserError, match=rf"{why}.*Nothing was deleted.*move this one away"
    ) as refused:
        checkpoints.find_newest(file)
    checkpoints.close()
    assert str(refused.value).split()[0] == str(tmp_path / "run" / "aegis" / decisions.FILE)
    assert places(tmp_path) == before and not list(root.glob(".stale-*"))
