"""A run says where it is in the order in which it comes there, and tells its own time from the time that it waits."""

import itertools
import time
from functools import partial
from types import SimpleNamespace

import jax
import pytest

from experiments import pretrain
from experiments.configs import tiny
from zaya_jax import cli, config
from zaya_jax.cluster import beats
from zaya_jax.train.where import Where

SMALL = {
    "model.hidden_size": 16, "model.num_hidden_layers": 2, "model.head_dim": 8, "model.moe_intermediate_size": 16,
    "model.num_experts": 4, "model.router_hidden_size": 8, "data.seq_len": 16, "data.global_batch": 8, "mesh.data": 1,
    "eval.every": 2, "eval.windows": 2, "log.sample_tokens": 2, "checkpoint.every_steps": 3, "run.num_steps": 6,
    "precision.compute": "float32", "optim.name": "adamw",
}  # fmt: skip


@pytest.fixture
def said(monkeypatch):
    """Everything that is said: places, and laps."""
    places, laps = [], []
    monkeypatch.setattr(beats, "at", lambda *place: places.append(place))
    monkeypatch.setattr(beats, "lap", lambda *lap: laps.append(beats.Lap(*lap)))
    return places, laps


def test_a_run_says_each_place_that_it_comes_to(said, tmp_path, monkeypatch):
    (tmp_path / "text").mkdir()
    for i in range(60):
        (tmp_path / "text" / f"{i}.txt").write_text(f"line of file {i}\n" * 40)
    devices = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *args: devices)
    settings = tiny.get_config()
    settings.update_from_flattened_dict(SMALL | {"data.path": str(tmp_path / "text")})
    assert pretrain.train(config.check(settings), tmp_path / "run") == cli.DONE
    places, laps = said
    sections = {n: [s for s, _ in itertools.groupby(p[0] for p in places if p[1] == n)] for n in range(1, 7)}
    assert sections == {
        1: ["compile", "step"],
        2: ["step", "compile", "evaluate"],
        3: ["step", "save"],
        4: ["step", "evaluate"],
        5: ["step"],
        6: ["step", "evaluate", "save", "end"],
    }
    marks = [mark for mark, _ in itertools.groupby(m for section, n, m in places if n == 5)]
    assert marks == ["fetch", "wait", "figures"]  # a CPU computes in the call
    assert [lap.step for lap in laps] == [3, 4, 5, 6]
    assert all(lap.whole >= lap.own + lap.data and min(lap[1:]) > 0 for lap in laps), laps


def test_own_time_is_what_is_left_of_a_step_without_waiting(said, monkeypatch):
    clock = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: clock)
    where = Where(SimpleNamespace(platform="gpu"))
    for step in (1, 2):
        for seconds, done in (
            (1, partial(where.fetch, step, "program")),  # from the end of the step before
            (2, where.dispatch),
            (4, where.came),
            (8, partial(where.mark, "figures")),
            (16, partial(where.evaluate, step, "evaluation")),
            (32, where.evaluating),
            (64, where.lap),
        ):
            clock += seconds
            done()
    places, laps = said
    assert ("step", 2, "dispatch") in places  # an accelerator's call is short
    # Fetching took 2, the call 4, figures 16; waiting is not its own, evaluation not the step's.
    assert laps == [beats.Lap(2, 2 + 4 + 8 + 16, 4 + 16, 2)]
