"""Starts: a refused one leaves nothing behind, and the way out that its message names works."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_runs
from orbax.checkpoint import v1 as ocp
from refusals import refusal
from saved_trees import save_tree

import zaya_jax as zj
from zaya_jax import cli, config
from zaya_jax.checkpoint import partial, source
from zaya_jax.checkpoint.run import store
from zaya_jax.config import UserError
from zaya_jax.pytorch import exchange
from zaya_jax.text import tokenizers
from zaya_jax.training import notes, snapshot
from zaya_jax.training import state as states
from zaya_jax.training.workdir import check_same, open_workdir, read_config


class GoesOn(Exception):
    """The start has passed everything that could refuse it."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A workdir with a checkpoint of step 2, and the corpus of it."""
    folder = tmp_path_factory.mktemp("starts")
    keys = {"data__path": tiny_runs.write_corpus(folder / "corpus"), "run__num_steps": 2}
    assert tiny_runs.train(folder / "run", **keys) == cli.DONE
    return folder


@pytest.fixture
def begin(trained, tmp_path, monkeypatch):
    """begin({key: value}, devices) on a copy of the workdir, or on a new one: UserError, or
    GoesOn."""

    def stop(*args):
        raise GoesOn

    shutil.copytree(trained / "run", tmp_path / "run")
    monkeypatch.setattr(snapshot, "Snapshots", stop)

    def call(keys, devices=1, new=False):
        keys = {"data.path": str(trained / "corpus"), "run.num_steps": 4} | keys
        tiny_runs.train(tmp_path / ("new" if new else "run"), devices, **keys)

    return call


def test_a_run_whose_tokenizer_was_replaced_is_not_read(trained, tmp_path):
    """Its ids would be other text; the checkpoints have the hash of the right one."""
    shutil.copytree(trained / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "tokenizer")
    tokenizers.train_bpe(["some text " * 50], 264).save(tmp_path / "run" / "tokenizer")
    for read in (zj.load, lambda place: exchange.to_hf(place, tmp_path / "hf")):
        with pytest.raises(
            config.UserError, match=r"is not the tokenizer that .* was trained with"
        ):
            read(tmp_path / "run")
    assert not (tmp_path / "hf").exists()
    shutil.rmtree(tmp_path / "run" / "tokenizer")
    assert zj.load(tmp_path / "run").tokenizer is None


BASE = config.Model(num_hidden_layers=2)
WINDOWS = dict(layer_types=("hybrid", "hybrid_sliding"), sliding_window=8)
OTHER_ROPE = config.RopeKinds(config.Rope(rope_theta=1e6), config.Rope(rope_theta=1.0))


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"rms_norm_eps": 0.1}, ["rms_norm_eps 1e-05 there, 0.1 here"]),
        ({"rope_parameters": OTHER_ROPE}, ["rope_parameters.hybrid.rope_theta 10000.0 there"]),
        (WINDOWS, ["layer_types", "rope_parameters.hybrid_sliding", "sliding_window"]),
        ({"layer_types": ("hybrid", "hybrid"), "sliding_window": 8}, []),
        ({"max_position_embeddings": 9, "initializer_range": 1.0, "eos_token_id": 5}, []),
    ],
)
def test_only_keys_that_change_a_result_are_said_to_differ(changes, keys):
    found = source.model_differences(BASE, dataclasses.replace(BASE, **changes))
    assert all(any(key in line for line in found) for key in keys) and bool(found) == bool(keys)
    assert source.model_differences(None, BASE) == []


def test_weights_that_orbax_alone_saved_train_on_alike(trained, tmp_path):
    ocp.save(tmp_path / "theirs", partial.read(trained / "run", "*"))
    for name, place in (("a", trained / "run"), ("b", tmp_path / "theirs")):
        keys = {
            "data__path": str(trained / "corpus"),
            "run__num_steps": 2,
            "run__init_from": str(place),
        }
        assert tiny_runs.train(tmp_path / name, **keys) == cli.DONE
    # without step 0
    ours, theirs = ([x["loss"] for x in tiny_runs.lines(tmp_path / name)[1:]] for name in "ab")
    assert ours == theirs != [x["loss"] for x in tiny_runs.lines(trained / "run")]


@pytest.mark.parametrize(
    ("keys", "devices", "words", "way"),
    [
        ({"data.micro_batch": 2}, 4, "set config.data.micro_batch=4", {"data.micro_batch": 4}),
        (
            {"mesh.data": 3},
            8,
            "but there are 8 devices; set config.mesh.data=8 or -1",
            {"mesh.data": 8},
        ),
        (
            {"mesh.expert": 8},
            8,
            "num_experts=4 does not divide .* give it a divisor of 4",
            {"mesh.expert": 4},
        ),
    ],
)
def test_a_mesh_that_is_advised_is_taken(begin, keys, devices, words, way):
    for new in (False, True):
        assert re.search(words, refusal(begin, keys, devices, new))
        with pytest.raises(GoesOn):
            begin(keys | way, devices, new)


@pytest.mark.parametrize(
    ("keys", "note"),
    [
        ({"data.micro_batch": 4}, "data.micro_batch (0 before, 4 now): sums have another order"),
        ({"data.on_corrupt": "skip", "eval.every": 3, "checkpoint.max_failures": 9}, ""),
    ],
)
def test_what_cannot_change_the_numbers_may_change(trained, tmp_path, monkeypatch, keys, note):
    said = []

    def stop(recipe, here, workdir, reached, found):
        said.extend(found)
        raise GoesOn

    monkeypatch.setattr(notes, "describe_start", stop)
    shutil.copytree(trained / "run", tmp_path / "run")
    with pytest.raises(GoesOn):
        tiny_runs.train(
            tmp_path / "run", **{"data.path": str(trained / "corpus"), "run.num_steps": 4} | keys
        )
    (text,) = (text for text in said if text.startswith("note: changed"))
    assert (
        note in text and "and so does the learning rate" in text and ("order" in text) == bool(note)
    )
    recorded = config.editable(read_config(tmp_path / "run"))
    assert {key: recorded[key.split(".")[0]][key.split(".")[1]] for key in keys} == keys


def test_corpus_and_tokenizer_may_move_but_not_change(begin, trained, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(trained / "corpus", moved)
    tokenizers.load("bytes").save(tmp_path / "bytes")
    with pytest.raises(GoesOn):
        begin({"data.path": str(moved), "data.tokenizer": str(tmp_path / "bytes")})
    before = (tmp_path / "run" / "config.json").read_bytes()
    changed = tmp_path / "changed"  # a text corpus is read once a program, by its path
    shutil.copytree(moved, changed)
    (changed / "0.txt").write_text("something else\n" * 30)
    message = refusal(begin, {"data.path": str(changed)}, 1)
    assert "the data is not what this run began with" in message and "restore them" in message
    assert (tmp_path / "run" / "config.json").read_bytes() == before != b""


def test_sources_of_a_mixture_may_move_but_not_weigh_otherwise(trained, tmp_path):
    for name in "ab":
        shutil.copytree(trained / "corpus", tmp_path / name)
    (tmp_path / "b" / "0.txt").write_text("this one is not in the other\n" * 30)

    def mixture(a, b, weight):
        return {"data.mixture": (f"{tmp_path / a}=0.5", f"{tmp_path / b}={weight}")}

    def train(steps, *given):
        return tiny_runs.train(tmp_path / "run", **{"run.num_steps": steps}, **mixture(*given))

    assert train(2, "a", "b", 0.5) == cli.DONE
    for name in "ab":
        (tmp_path / name).rename(tmp_path / f"new {name}")
    with pytest.raises(
        config.UserError, match=r"data\.mixture=\[0\.5, 0\.5\], now it is \[0\.5, 0\.25\]; restore"
    ):
        train(4, "new a", "new b", 0.25)
    with pytest.raises(config.UserError, match="the data is not what this run began with"):
        train(4, "new b", "new a", 0.5)
    assert train(4, "new a", "new b", 0.5) == cli.DONE


def test_a_config_is_restored_and_a_shorter_run_is_lengthened(begin):
    assert "restore it" in refusal(begin, {"optim.lr": 0.5}, 1)
    assert "give at least as many steps" in refusal(begin, {"run.num_steps": 1}, 1)
    with pytest.raises(GoesOn):
        begin({})


def test_what_has_saved_nothing_may_be_anything(begin, tmp_path):
    """A first start that failed later than its checks has written a config; the advice to change it
    can be taken."""
    with pytest.raises(GoesOn):
        begin({"run.fork": str(tmp_path / "run")}, new=True)
    assert (tmp_path / "new" / "config.json").exists() and (
        tmp_path / "new" / "lineage.json"
    ).exists()
    with pytest.raises(GoesOn):
        begin({"run.init_from": str(tmp_path / "run"), "data.seq_len": 64}, new=True)
    assert json.loads((tmp_path / "new" / "config.json").read_text())["data"]["seq_len"] == 64
    assert not (tmp_path / "new" / "lineage.json").exists()


def test_phases_that_have_not_begun_may_change(tmp_path):
    first, other = (
        {"name": "first", "tokens": 2 * 128},
        {"tokens": 512, "seq_len": 8, "rope_theta": 77.0},
    )

    def change(before, after, reached):
        old, new = (
            tiny_runs.settings(
                schedule__phases=tuple(config.Phase(**phase) for phase in phases), eval__windows=0
            )
            for phases in (before, after)
        )
        return check_same(old, new, tmp_path, reached)

    begun = [first, {"tokens": 256, "seq_len": 32}]
    with pytest.raises(UserError, match=r"phases\[0\]\.tokens=256, now it is 384; restore it"):
        change(begun, [first | {"tokens": 384}, other], 2)
    note = change(begun, [first, other, {"tokens": 128}], 2)
    assert "steps that have not begun follow the new plan, and so does the learning rate" in note
    with pytest.raises(UserError, match=r"phases\[1\]\.rope_theta"):
        change([first, other], [first, other | {"rope_theta": 0.0}], 4)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current folder."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def train(place="runs/tiny", **keys):
    return tiny_runs.train(
        Path(place),
        **{"data__path": f"{cli.__file__[: -len('cli.py')]}optim", "run__num_steps": 2} | keys,
    )


def tree(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


REFUSED = {
    "parameters needs": {"model__num_hidden_layers": 10_000, "model__hidden_size": 2**14},
    "data.path": {"data__path": "nowhere"},
    "tokenizer": {"data__tokenizer": "nowhere.json"},
    "config.model.eos_token_id=3": {"model__eos_token_id": 3},
    "config.run.init_from=nowhere: nowhere has no checkpoint": {"run__init_from": "nowhere"},
    "nothing://host/x is no folder and no URL": {"checkpoint__durable": "nothing://host/x"},
    "a mixture's source: 'nowhere' holds no text": {"data__mixture": ("nowhere=1",)},
}


@pytest.mark.parametrize("says", REFUSED)
def test_a_refused_run_leaves_nothing(here, says):
    assert says in refusal(train, **REFUSED[says])
    assert tree(here) == []


@pytest.mark.parametrize("place", ["nowhere", "other@9", "other"])
def test_weights_to_begin_with_are_refused_before_anything_is_compiled(here, monkeypatch, place):
    uncompiled = states.init
    if place.startswith("other"):
        params = {"embed": {"embedding": np.zeros((3, 2), np.float32)}}
        other = store.Store(open_workdir(here / "other", config.Config()))
        save_tree(other, 1, {"params": params}, {"step": 1})
        other.close()
    before = tree(here)

    def compiled(config, setup):
        assert isinstance(jax.numpy.zeros(()), jax.core.Tracer), "the fresh state is being made"
        return uncompiled(config, setup)

    monkeypatch.setattr(states, "init", compiled)
    with pytest.raises(
        UserError,
        match=rf"init_from(={place}: (nowhere|other) has no|: step 1 of {place} does not fit)",
    ):
        train(run__init_from=place)
    assert tree(here) == before


def test_what_was_there_before_a_refused_run_stays(here):
    (here / "runs" / "tiny").mkdir(parents=True)
    (here / "runs" / "tiny" / "mine.txt").write_text("x")
    (here / "file").write_text("mine")
    before = tree(here)
    for place, says in (
        ("runs/tiny", r"holds mine\.txt"),
        ("file/a/b", "^file/a/b cannot be written"),
    ):
        with pytest.raises(UserError, match=says):
            train(place)
    assert tree(here) == before
