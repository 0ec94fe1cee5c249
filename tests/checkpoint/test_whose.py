"""The owner of a folder: seen under the lock, named by the checkpoints, never changed by a step of
another run."""

import json
import shutil

import checkpoint_helpers
import pytest
from checkpoint_helpers import content

from zaya_jax import config
from zaya_jax.checkpoint.run import claims, rewrite, store
from zaya_jax.config import Checkpoint, UserError
from zaya_jax.pytorch import any_model, exchange
from zaya_jax.training.workdir import CleanupIfRefused, open_workdir


def settings(**keys):
    given = config.default()
    given.update_from_flattened_dict(
        {name.replace("__", "."): value for name, value in keys.items()}
    )
    return config.check(given)


def train(folder, steps=(2, 4), plus=0, **keys):
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
            train(folder, **keys)
            take(workdir, say)

        monkeypatch.setattr(claims, "take", waits)

    return call


def test_a_refused_start_that_waited_takes_nothing_of_the_run_that_came_first(tmp_path, then_waits):
    """The folder was new when it looked; another run began, saved and ended while it waited for the
    lock."""
    place = tmp_path / "run"
    cleanup = CleanupIfRefused(place)
    then_waits(place, run__seed=1)
    with pytest.raises(UserError, match=r"was started with config\.run\.seed=1, now it is 2"):
        open_workdir(place, settings(run__seed=2), cleanup.locked)
    assert not claims.taken(place)
    before = content(place)
    cleanup(UserError)
    assert content(place) == before and (place / "config.json").exists()

    # One that may go on there is refused later, for another reason: it did not begin this either.
    shutil.rmtree(place)
    cleanup = CleanupIfRefused(place)
    then_waits(place, run__seed=1)
    open_workdir(place, settings(run__seed=1), cleanup.locked)
    before = content(place)
    cleanup(UserError)
    assert content(place) == before
    claims.release(place)


def test_what_a_refused_start_has_fetched_goes_with_it(tmp_path):
    shutil.copytree(train(tmp_path / "run") / "checkpoints", tmp_path / "copies")
    cleanup = CleanupIfRefused(tmp_path / "new")
    workdir = open_workdir(tmp_path / "new", settings(), cleanup.locked)
    assert (
        store.Store(workdir, Checkpoint(durable=str(tmp_path / "copies")), print).find_newest() == 4
    )
    cleanup(UserError)
    claims.release(workdir)
    assert not (tmp_path / "new").exists()


def test_the_checkpoint_is_believed_not_config_json(tmp_path):
    workdir = train(tmp_path / "run")
    path = workdir / "config.json"
    recorded = path.read_text()
    path.write_text(recorded.replace('"seed": 0', '"seed": 7'))
    # The command that the run was started with goes on; what config.json says now does not.
    open_workdir(workdir, settings())
    claims.release(workdir)
    with pytest.raises(UserError, match=r"was started with config\.run\.seed=0, now it is 7"):
        open_workdir(workdir, settings(run__seed=7))
    for read in (
        lambda: any_model.config_at(workdir, 4),
        lambda: exchange.to_hf(workdir, tmp_path / "out"),
    ):
        with pytest.raises(
            UserError, match=r"contradicts the checkpoint of step 4: .*run\.seed=0.*restore"
        ):
            read()
    path.write_text(json.dumps(json.loads(recorded) | {"name": "renamed"}))
    assert any_model.config_at(workdir, 4) == settings()
    # Of another run, name and all: no start on it counts as complete.
    path.write_text(recorded)
    other = train(tmp_path / "other", plus=1, run__seed=5)
    shutil.rmtree(workdir / "checkpoints")
    shutil.copytree(other / "checkpoints", workdir / "checkpoints")
    with pytest.raises(UserError, match=r"was started with config\.run\.seed=5, now it is 0"):
        open_workdir(workdir, settings())


def test_a_failed_reshard_leaves_what_others_made(tmp_path, then_waits):
    source, target = train(tmp_path / "run"), tmp_path / "target"
    then_waits(target, plus=1)
    with pytest.raises(UserError, match="exists and is not empty"):
        rewrite.reshard(source, target)
    assert store.Store(target, Checkpoint(), print).find_newest() == 4
