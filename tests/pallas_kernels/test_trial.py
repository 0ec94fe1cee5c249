"""The trial of kernels, interpreted, with planted faults: each costs a verdict and no more, and the
verdict is kept."""

import contextlib
import functools
import json
import os
import stat
from types import SimpleNamespace

import pytest
from rows import slow

from pallas_kernels import chip, trial

MODEL = {
    "vocab_size": 257,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "moe_intermediate_size": 64,
    "num_experts": 1,
    "router_hidden_size": 32,
    "cca_time0": 2,
    "cca_time1": 2,
}
HERE = chip.Chip("cpu", "gfx942")


def asked(*operators, **more):
    return {
        "model": MODEL,
        "batch": 1,
        "length": 128,
        "dtype": "bfloat16",
        "operators": list(operators),
        **more,
    }


def tried(folder, request, *faults, pretend=HERE, **more):
    program = ("tests.pallas_kernels.planted", *faults)
    more = {"seconds": 120, "each": 60} | more
    return trial.find(lambda here: request, folder=folder, program=program, pretend=pretend, **more)


def faults(record):
    return {
        (row["operator"], row["implementation"]): row["fault"]
        for row in record["rows"]
        if "fault" in row
    }


def test_each_planted_fault_costs_its_kernels_verdict_alone(tmp_path):
    every = [name for name in chip.OPERATORS if name != "linear_attention"]
    planted = {
        "attention": "NaN",
        "newton_schulz": "wrong",
        "residual_norm": "raises",
        "cross_entropy": "kills",
        "cca_mix": "slow",
    }
    record = tried(tmp_path, asked(*every), *(f"{name}={fault}" for name, fault in planted.items()))
    found = faults(record)
    assert record["kernels"] == ["grouped_mlp"] and record["tried"]
    assert set(found) == {(name, "ours") for name in planted if name != "cca_mix"}
    assert found["attention", "ours"] == "wrong: not finite"
    assert found["newton_schulz", "ours"].startswith("wrong: by 0.0")
    assert found["residual_norm", "ours"] == "failed: NotImplementedError: no such instruction"
    assert found["cross_entropy", "ours"] == "ended the process (SIGKILL)"
    said = trial.words(record)
    assert said.startswith(
        "kernels on gfx942: attention: XLA's (ours wrong: not finite), cca_mix: XLA's (ours 0."
    )
    assert "grouped_mlp " in said and "x, " in said and "note" not in said
    # The next start takes the same without a trial; another code, driver or size tries again.
    again = tried(tmp_path, asked(*every), "attention=kills")
    assert again == {**record, "tried": False}


@pytest.mark.slow  # ten seconds of waiting
def test_one_that_never_ends_is_ended_and_the_fastest_tile_is_named(tmp_path):
    record = tried(tmp_path, asked("newton_schulz", "cca_mix"), "cca_mix=hangs", "tiles=2", each=10)
    # and its other tile is not tried
    assert faults(record) == {("cca_mix", "ours"): "did not end within 10 s"}
    assert [word.partition(":")[0] for word in record["kernels"]] == ["newton_schulz"]
    (tile,) = chip.Chip("cpu", "gfx942").taking(tuple(record["kernels"])).kernels
    seconds = trial.totals(record["rows"], "newton_schulz")
    assert min(("ours", "ours, tile 2"), key=seconds.__getitem__) == {"newton_schulz": "ours"}.get(
        tile, "ours, tile 2"
    )


@pytest.mark.parametrize(
    "kind", ["Tesla V100-SXM2-32GB", slow("gfx908"), "gfx950", slow("NVIDIA B200")]
)
def test_old_unknown_and_future_cards_end_in_a_verdict(kind, monkeypatch):
    monkeypatch.setattr(trial, "OURS", {"ours": "1"})
    here = chip.Chip("cpu", kind)
    rows = [
        line["row"] for line in trial.tried(asked("newton_schulz"), here, [], 60) if "row" in line
    ]
    assert {row["implementation"] for row in rows} >= {"XLA", "ours"} and not any(
        "fault" in row for row in rows
    )
    record = {"rows": rows, "kernels": trial.decided(rows), "kind": kind, "tuned": here.is_tuned}
    assert trial.words(record) == f"kernels on {kind}: " + trial.words(record).partition(": ")[2]
    taken = {**record, "kernels": ["newton_schulz:2"]}
    assert ("untuned" in trial.words(taken)) == (kind != "gfx950") and "(tile 2)" in trial.words(
        taken
    )


@pytest.mark.slow
def test_a_gradient_that_is_zero_is_not_measured_by_its_rounding(monkeypatch):
    """Queries that see one key have none; no shape is a multiple of a tile."""
    monkeypatch.setattr(trial, "OURS", {"ours": "1"})
    request = asked("attention", windows=[1], whole=50) | {"length": 21}
    rows = [line["row"] for line in trial.tried(request, HERE, [], 60) if "row" in line]
    assert len(rows) == 4 and not any("fault" in row for row in rows)
    assert all(row["norm"] < 0.01 for row in rows)


def row(name, seconds, operator="attention", case="documents", **more):
    return {
        "operator": operator,
        "case": case,
        "implementation": name,
        "forward": seconds,
        "backward": seconds,
        **more,
    }


def test_ours_must_be_faster_by_three_percent_and_right_everywhere():
    def of(*rows):
        return trial.decided([row("XLA", 1.0), *rows])

    assert of(row("ours", 0.98)) == [] and of(row("ours", 0.96)) == ["attention"]
    assert of(row("ours", 0.9), row("ours, tile 3", 0.8), row("cuDNN", 0.1)) == ["attention:3"]
    assert of(row("ours", 0.5, fault="wrong: not finite")) == []
    elsewhere = [
        row("XLA", 1.0, case="window"),
        row("ours", 0.1),
        row("ours", 0.1, case="window", fault="failed: x"),
    ]
    assert of(*elsewhere) == []
    assert trial.decided([row("XLA", 1.0, fault="failed: x"), row("ours", 9.0)]) == ["attention"]
    assert trial.decided([]) == []


@pytest.fixture
def told(monkeypatch):
    """Instead of a process: what is here, and rows; gives the number of trials, by which our kernel
    is faster."""
    here = {
        "platform": "gpu",
        "kind": "gfx942",
        "driver": "6",
        "jax": "0.12",
        "devices": 1,
        "name": "MI300X",
    }
    trials = []

    def rows_of(first, program, asked, pretend, rows, *times):
        trials.append(asked)
        rows += [row("XLA", 9.0), row("ours", 1.0), row("ours, tile 2", 0.5)]
        return []

    monkeypatch.setattr(
        trial, "child", lambda program: contextlib.nullcontext(SimpleNamespace(next=lambda s: here))
    )
    monkeypatch.setattr(trial, "_try", rows_of)
    return here, trials


def test_what_the_record_is_kept_by_and_what_is_stale(tmp_path, monkeypatch, told):
    here, trials = told
    find = functools.partial(trial.find, lambda _: asked("attention"), folder=tmp_path)
    first = find()
    (path,) = tmp_path.glob("*.json")
    trial.write(tmp_path / "of a run", first | {"kernels": []})
    own = trial.read(tmp_path / "of a run")
    assert (
        find(known=[own])["kernels"] == []
        and find()["kernels"] == ["attention:2"]
        and len(trials) == 1
    )
    find(known=[{**own, "jax": "0.11"}])  # a run's own of another JAX: the cache's
    assert len(trials) == 1 and find(again=True)["tried"] and len(trials) == 2
    path.write_text(path.read_text()[:100])  # damaged: it is made anew
    assert trial.read(path) is None and find()["tried"] and not find()["tried"] and len(trials) == 3
    for name, value in {"driver": "7", "kind": "gfx950", "jax": "0.13"}.items():
        with monkeypatch.context() as patch:
            patch.setitem(here, name, value)
            assert find()["tried"] and not find()["tried"]
    monkeypatch.setattr(trial, "code", lambda: "another")
    assert (
        find()["tried"]
        and trial.find(lambda _: asked("attention", batch=2), folder=tmp_path)["tried"]
    )
    assert len(trials) == 8


def test_a_cache_that_cannot_be_written_is_said_and_costs_no_more(tmp_path, told):
    folder = tmp_path / "a file"
    folder.write_text("")
    record = trial.find(lambda here: asked("attention"), folder=folder)
    assert record["kernels"] == ["attention:2"] and f"{folder} cannot be written" in trial.words(
        record
    )


def test_a_trial_that_cannot_start_leaves_all_to_xla(tmp_path):
    record = trial.find(
        lambda here: asked("newton_schulz"), folder=tmp_path, program=("no.such.module",)
    )
    assert record["kernels"] == [] and "ended the process (exit code 1)" in trial.words(record)
    assert not [*tmp_path.iterdir()]


def test_on_a_cpu_nothing_is_asked(tmp_path):
    assert trial.find(lambda here: pytest.fail("asked"), folder=tmp_path) is None
    assert not trial.may_be_here()


def test_a_record_is_whole_or_not_there(tmp_path):
    for text in (
        "",
        "[]",
        '"x"',
        "{}",
        json.dumps({"rows": [], "kernels": ["atention"], "kind": "x"}),
        '{"rows": 1}',
    ):
        (tmp_path / "r.json").write_text(text)
        assert trial.read(tmp_path / "r.json") is None
    trial.write(tmp_path / "deep" / "r.json", {"rows": [], "kernels": ["attention:2"], "kind": "x"})
    assert trial.read(tmp_path / "deep" / "r.json")["kernels"] == ["attention:2"]
    assert (
        stat.S_ISREG(os.stat(tmp_path / "deep" / "r.json").st_mode)
        and len([*(tmp_path / "deep").iterdir()]) == 1
    )
