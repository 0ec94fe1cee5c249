"""A caller's observers see state and figures of their steps, add figures, and may end the run."""

import os
import shutil
import signal
import types

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_runs

import zaya_jax as zj
from zaya_jax import cli


class Norm:
    """The embedding's norm, every second step; ends the run at `last`."""

    every = 2

    def __init__(self, last=None):
        self.last, self.seen = last, []

    def after_step(self, number, state, figures):
        self.seen.append((number, figures["loss"]))
        if number == self.last:
            raise zj.EndRun("the embedding is large enough")
        rows = jnp.linalg.norm(state["params"]["embed"]["embedding"], axis=1)
        # The step has names of its own, which keep their values.
        return {"embedding": jnp.linalg.norm(rows), "rows": rows, "step": 99, "loss": np.nan}


def end_without_a_reason(*_):
    raise zj.EndRun


def once(number, done):
    """An observer that is called after this step alone."""
    return types.SimpleNamespace(every=number, after_step=done)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return tiny_runs.write_corpus(tmp_path_factory.mktemp("corpus") / "corpus")


def train(corpus, workdir, *observers, num_steps=8):
    return tiny_runs.train(
        workdir, observers=observers, data__path=corpus, run__num_steps=num_steps
    )


def test_observers_see_their_steps_and_change_no_bit(corpus, tmp_path, caplog):
    norm = Norm()
    assert train(corpus, tmp_path / "seen", norm) == cli.DONE
    lines = {line["step"]: line for line in tiny_runs.lines(tmp_path / "seen")}
    assert [number for number, _ in norm.seen] == [2, 4, 6, 8]
    assert all(lines[number]["loss"] == loss for number, loss in norm.seen)
    assert {step for step, line in lines.items() if "embedding" in line} == {2, 4, 6, 8}
    assert lines[2]["embedding"] != lines[4]["embedding"] and len(lines[2]["rows"]) > 8

    # One that ends the run saves there, and what follows is the run that was never ended. It is
    # over even if a signal comes before, after which the same command would go on.
    assert (
        train(
            corpus,
            tmp_path / "ended",
            once(5, lambda *_: os.kill(os.getpid(), signal.SIGHUP)),
            Norm(last=6),
        )
        == cli.DONE
    )
    assert "the embedding is large enough: ends after step 6; saved" in caplog.text
    assert (tmp_path / "ended" / "checkpoints" / "6").is_dir()
    assert (tmp_path / "ended" / "report.html").exists()
    shutil.copytree(tmp_path / "ended", tmp_path / "on")
    assert train(corpus, tmp_path / "on", once(7, end_without_a_reason)) == cli.DONE
    assert "no reason given: ends after step 7; saved" in caplog.text
    # After the last step the run has its usual end.
    assert train(corpus, tmp_path / "on", Norm(last=8)) == cli.DONE
    assert "ends after step 8" not in caplog.text
    tiny_runs.same_state(tmp_path / "seen", tmp_path / "on")


def test_an_observer_that_fails_ends_the_run_with_its_error(corpus, tmp_path):
    class Broken(Norm):
        def after_step(self, number, state, figures):
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        train(corpus, tmp_path / "broken", Broken())
    assert [line["step"] for line in tiny_runs.lines(tmp_path / "broken")][-1] == 2
