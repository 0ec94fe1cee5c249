"""Starts: a refused one leaves nothing behind, and the way out that its message names works; a fork
goes on from another run's checkpoint, as its config says."""

import dataclasses
import json
import shutil
import types
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_runs
from orbax.checkpoint import v1 as ocp
from refusals import check_error, check_refused, check_storage_error, raising, refusal
from saved_trees import save_tree

import zaya_jax as zj
from zaya_jax import cli, config
from zaya_jax import run as run_lib
from zaya_jax.checkpoint import partial, source
from zaya_jax.checkpoint.run import store
from zaya_jax.checkpoint.source import read_meta
from zaya_jax.config import Phase
from zaya_jax.pytorch import exchange
from zaya_jax.text import tokenizers
from zaya_jax.training import fork, notes, snapshot, start
from zaya_jax.training import state as states
from zaya_jax.training.snapshot import Snapshots
from zaya_jax.training.workdir import check_same, flat, open_workdir, read_config


class GoesOn(Exception):
    """The start has passed everything that could refuse it."""


KEYS = {
    "checkpoint__every_steps": 2,
    "checkpoint__keep": 9,
    "run__num_steps": 6,
    "schedule__decay_fraction": 0.5,
}


def train(workdir, devices=1, **keys):
    return tiny_runs.train(Path(workdir), devices, **KEYS | keys)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A workdir with checkpoints of steps 2, 4 and 6, which tests only read."""
    workdir = tmp_path_factory.mktemp("starts") / "run"
    assert train(workdir) == cli.DONE
    return workdir


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the workdir."""
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def begin(run, tmp_path, monkeypatch):
    """begin({key: value}, devices) on a copy of the workdir, or on a new one: UserError, or
    GoesOn."""

    monkeypatch.setattr(snapshot, "Snapshots", raising(GoesOn))

    def call(keys, devices=1, new=False):
        train(tmp_path / "new" if new else run, devices, **{"run.num_steps": 8} | keys)

    return call


def test_a_run_whose_tokenizer_was_replaced_is_not_read(run, tmp_path):
    """Its ids would be other text; the checkpoints have the hash of the right one."""
    shutil.rmtree(run / "tokenizer")
    tokenizers.train_bpe(["some text " * 50], 264).save(run / "tokenizer")
    for read in (zj.load, lambda place: exchange.to_hf(place, tmp_path / "hf")):
        check_refused(r"is not the tokenizer that .* was trained with", read, run)
    assert not (tmp_path / "hf").exists()
    shutil.rmtree(run / "tokenizer")
    assert zj.load(run).tokenizer is None


def test_a_complete_run_comes_from_its_durable_place_with_its_tokenizer(tmp_path):
    keys = {"run__num_steps": 2, "checkpoint__durable": str(tmp_path / "copies")}
    for name in ("run", "again"):
        assert train(tmp_path / name, **keys) == cli.DONE
    assert not (tmp_path / "again" / "metrics.jsonl").exists()
    assert zj.load(tmp_path / "again").tokenizer.kind == "bytes"


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
    ocp.save(tmp_path / "theirs", partial.read(trained, "*"))
    for name, place in (("a", trained), ("b", tmp_path / "theirs")):
        assert train(tmp_path / name, run__init_from=str(place)) == cli.DONE
    ours, theirs = (tiny_runs.by_step(tmp_path / name, "loss") for name in "ab")
    assert ours == theirs != tiny_runs.by_step(trained, "loss")


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
        check_refused(words, begin, keys, devices, new)
        check_error(GoesOn, "", begin, keys | way, devices, new)


@pytest.mark.parametrize(
    ("keys", "devices", "note"),
    [
        ({"data.micro_batch": 4}, 1, "data.micro_batch (0 before, 4 now): sums have another order"),
        ({"data.on_corrupt": "skip", "eval.every": 3, "checkpoint.max_failures": 9}, 1, ""),
        # no key has changed: by itself mesh.data takes the devices that there are
        ({}, 2, "the number of devices (1 before, 2 now): sums have another order"),
    ],
)
def test_what_cannot_change_the_numbers_may_change(run, monkeypatch, keys, devices, note):
    said = []

    def stop(recipe, here, workdir, reached, found):
        said.extend(found)
        raise GoesOn

    monkeypatch.setattr(notes, "describe_start", stop)
    check_error(GoesOn, "", train, run, devices, **{"run.num_steps": 8} | keys)
    text = " ".join(text for text in said if text.startswith("note: "))
    assert note in text and "and so does the learning rate" in text
    assert ("order" in text) == bool(note)
    recorded = flat(config.to_dict(read_config(run)))
    assert keys.items() <= recorded.items()


def test_corpus_and_tokenizer_may_move_but_not_change(begin, run, tmp_path):
    moved = shutil.copytree(tiny_runs.CORPUS, tmp_path / "moved")
    tokenizers.load("bytes").save(tmp_path / "bytes")
    keys = {"data.path": str(moved), "data.tokenizer": str(tmp_path / "bytes")}
    check_error(GoesOn, "", begin, keys)
    before = (run / "config.json").read_bytes()
    changed = shutil.copytree(moved, tmp_path / "changed")  # a path is read once a program
    (changed / "0.txt").write_text("something else\n" * 30)
    message = refusal(begin, {"data.path": str(changed)})
    assert "the data is not what this run began with" in message and "restore them" in message
    assert (run / "config.json").read_bytes() == before


def test_sources_of_a_mixture_may_move_but_not_weigh_otherwise(tmp_path):
    for name in "ab":
        shutil.copytree(tiny_runs.CORPUS, tmp_path / name)
    (tmp_path / "b" / "0.txt").write_text("this one is not in the other\n" * 30)

    def train_on(steps, a, b, weight):
        mixture = (f"{tmp_path / a}=0.5", f"{tmp_path / b}={weight}")
        return train(tmp_path / "run", run__num_steps=steps, data__mixture=mixture)

    assert train_on(2, "a", "b", 0.5) == cli.DONE
    for name in "ab":
        (tmp_path / name).rename(tmp_path / f"new {name}")
    weights = r"data\.mixture=\[0\.5, 0\.5\], now it is \[0\.5, 0\.25\]; restore"
    check_refused(weights, train_on, 4, "new a", "new b", 0.25)
    check_refused("the data is not what this run began with", train_on, 4, "new b", "new a", 0.5)
    assert train_on(4, "new a", "new b", 0.5) == cli.DONE


def test_a_config_is_restored_and_a_shorter_run_is_lengthened(begin):
    assert "restore it" in refusal(begin, {"optim.lr": 0.5})
    assert "give at least as many steps" in refusal(begin, {"run.num_steps": 1})
    check_error(GoesOn, "", begin, {})


def lineage_in(workdir):
    return json.loads((workdir / "environment.json").read_text())["forked"]


def test_what_has_saved_nothing_may_be_anything(begin, run, tmp_path):
    """A first start that failed later than its checks has written a config; the advice to change it
    can be taken."""
    check_error(GoesOn, "", begin, {"run.fork": str(run)}, new=True)
    assert lineage_in(tmp_path / "new")
    keys = {"run.init_from": str(run), "data.seq_len": 64}
    check_error(GoesOn, "", begin, keys, new=True)
    assert read_config(tmp_path / "new").data.seq_len == 64
    assert lineage_in(tmp_path / "new") == []


def test_phases_that_have_not_begun_may_change(tmp_path):
    first, other = Phase("first", 2 * 128), Phase(tokens=512, seq_len=8, rope_theta=77.0)

    def change(before, after, reached):
        old, new = (
            tiny_runs.settings(schedule__phases=phases, eval__windows=0)
            for phases in (before, after)
        )
        return check_same(old, new, tmp_path, reached)

    begun = (first, Phase(tokens=256, seq_len=32))
    longer = (Phase("first", 384), other)
    check_refused(r"phases\[0\]\.tokens=256, now it is 384; restore it", change, begun, longer, 2)
    note = change(begun, (first, other, Phase(tokens=128)), 2)
    assert "steps that have not begun follow the new plan, and so does the learning rate" in note
    otherwise = (first, Phase(tokens=512, seq_len=8))
    check_refused(r"phases\[1\]\.rope_theta", change, (first, other), otherwise, 4)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tree(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


REFUSED = {
    "parameters needs": {"model__num_hidden_layers": 10_000, "model__hidden_size": 2**14},
    "data.path": {"data__path": "nowhere"},
    "tokenizer": {"data__tokenizer": "nowhere.json"},
    "config.model.eos_token_id=3": {"model__eos_token_id": 3},
    "config.run.init_from=nowhere: nowhere is not a folder": {"run__init_from": "nowhere"},
    "nothing://host/x is no folder and no URL": {"checkpoint__durable": "nothing://host/x"},
    "a mixture's source: 'nowhere' holds no text": {"data__mixture": ("nowhere=1",)},
}


@pytest.mark.parametrize("says", REFUSED)
def test_a_refused_run_leaves_nothing(here, says):
    assert says in refusal(train, "runs/tiny", **REFUSED[says])
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
    says = rf"init_from(={place}: (nowhere is not|other has no)|: step 1 of {place} does not fit)"
    check_refused(says, train, "runs/tiny", run__init_from=place)
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
        check_refused(says, train, place)
    assert tree(here) == before


# ################################################################################################
# Forks
# ##################################################################################################


def times_in(folder):
    """Every file with its content's time: a run that only reads leaves them alike."""
    return {
        str(p.relative_to(folder)): p.stat().st_mtime_ns
        for p in folder.rglob("*")
        if not p.is_dir()
    }


def test_it_goes_on_from_the_parent_s_state_in_an_order_of_its_own(
    trained, tmp_path, capsys, monkeypatch
):
    before, name = times_in(trained), f"{trained}@2"
    copied = []
    for place in ("on_host", "on_devices"):
        make = getattr(Snapshots, place)
        monkeypatch.setattr(
            Snapshots, place, lambda *args, n=place, make=make: copied.append(n) or make(*args)
        )
    assert train(tmp_path / "fork", run__fork=name) == cli.DONE
    # Before its first step nobody knows what the devices have room for.
    assert copied == ["on_host", "on_devices", "on_devices"]
    out = capsys.readouterr().out
    rates = "learning rate 0.003 at step 2 there, 0.003 at step 3"
    assert f"note: fork of {name} (2 steps, 256 tokens): {rates}" in out
    assert "note: this fork reads its data from the beginning, in an order of its own" in out
    assert times_in(trained) == before
    theirs, ours = tiny_runs.lines(trained)[2:], tiny_runs.lines(tmp_path / "fork")
    for key in ("step", "tokens", "lr"):
        assert [x[key] for x in ours] == [x[key] for x in theirs]
    assert all(x["loss"] != y["loss"] for x, y in zip(ours, theirs, strict=True))
    recorded = read_config(tmp_path / "fork").run
    assert (recorded.fork, recorded.fork_step, recorded.fork_tokens) == (name, 2, 256)
    parent = {
        "folder": str(trained),
        "run": (trained / "checkpoints" / ".run").read_text(),
        "step": 2,
        "tokens": 256,
        "changed": {},
    }
    for step in (2, 6):  # the first is the state that it began with
        assert read_meta(tmp_path / "fork", step)["lineage"] == [parent]
    tiny_runs.same_state(f"{tmp_path / 'fork'}/checkpoints/2", f"{trained}/checkpoints/2")
    report = (tmp_path / "fork" / "report.html").read_text()
    for words in ("<h2>Lineage</h2>", str(trained), "256 of them before"):
        assert words in report


def test_a_fork_notes_other_tiles_than_its_parent_s(tmp_path, capsys, monkeypatch):
    tiles = run_lib.kernels.Tiles({"a": 1}, "tiles: 1")
    monkeypatch.setattr(run_lib.kernels, "choose_tiles", lambda *args, **_: tiles)
    assert train(tmp_path / "run", run__num_steps=2) == cli.DONE
    keys = {"run__num_steps": 4, "run__fork": str(tmp_path / "run")}
    for name, found, noted in (("same", {"a": 1}, False), ("others", {"a": 2}, True)):
        tiles = tiles._replace(kernels=found)
        assert train(tmp_path / name, **keys) == cli.DONE
        assert ("step 2: our kernels or their tiles: sums" in capsys.readouterr().out) == noted


NO_FORK = {
    "config.model.num_experts 4 there, 8 here": {"model__num_experts": 8},
    "config.optim.name 'adamw' there, 'muon' here": {"optim__name": "muon"},
    "config.run.fork=RUN and config.run.init_from=x are both given": {"run__init_from": "x"},
    "config.run.num_steps=6, but run.fork=RUN@6 has reached step 6": {"run__num_steps": 6},
    "run.num_steps=6, but run.fork=RUN@6 has reached step 6": {  # whatever the phases' lengths
        "run__num_steps": 6,
        "schedule__phases": (Phase("long", 3_000),),
    },
    "config.run.fork=RUN@3: RUN has no checkpoint of step 3; it has 2, 4, 6": {
        "run__fork": "RUN@3"
    },
    "config.schedule.decay_steps=4, but 3 steps come after": {
        "run__num_steps": 9,
        "schedule__decay_steps": 4,
        "data__global_batch": 16,
    },
    "end after 384 tokens, but run.fork=RUN@6 has seen 768": {
        "schedule__phases": (Phase("short", 300),)
    },
}


@pytest.mark.parametrize("says", NO_FORK)
def test_what_does_not_fit_is_one_line_and_leaves_nothing(trained, tmp_path, says):
    keys = {"run__fork": "RUN", "run__num_steps": 9} | NO_FORK[says]
    keys["run__fork"] = keys["run__fork"].replace("RUN", str(trained))
    assert says.replace("RUN", str(trained)) in refusal(train, tmp_path / "fork", **keys)
    assert not (tmp_path / "fork").exists()


def test_another_tokenizer_is_refused(trained):
    other = tokenizers.load("bytes")
    other.sha256 = "another's"
    says = r"config\.data\.tokenizer='bytes' is not the one of run\.fork="
    check_refused(says, fork.Parent, tiny_runs.settings(run__fork=str(trained)), other)


def test_a_damaged_one_is_refused_and_an_unfinished_one_passed_over(run, tmp_path):
    checkpoints = run / "checkpoints"
    (checkpoints / "6").rename(checkpoints / ".saving-6")
    assert fork.resolve(tiny_runs.settings(run__fork=str(run)), tmp_path)[1] == 4
    chunks = [path for path in (checkpoints / "4" / "state").rglob("c*") if path.is_file()]
    largest = max(chunks, key=lambda path: path.stat().st_size)
    largest.write_bytes(bytes(largest.stat().st_size))
    (checkpoints / "2" / "checksums.json").write_text("{}")
    for step, damage in ((4, r"/4 is damaged: state/.* is changed"), (2, "2 is damaged: ")):
        keys = {"run__fork": f"{run}@{step}", "run__num_steps": 9}
        check_storage_error(damage, train, tmp_path / "fork", **keys)


def test_the_step_that_was_newest_at_first_stays_the_one(trained, tmp_path):
    """A start that saved nothing has recorded it; the same command means the same, whatever the
    parent did since."""
    recorded = {"fork": f"{trained}@4", "fork_step": 4, "fork_tokens": 512}
    (tmp_path / "config.json").write_text(json.dumps({"run": recorded}))
    for given, found in (("", [4, 512]), ("@4", [4, 512]), ("@2", [2, 256])):
        settings = tiny_runs.settings(run__fork=f"{trained}{given}")
        assert fork.resolve(settings, tmp_path)[1:] == found


@pytest.mark.slow
def test_it_resumes_as_itself_when_the_parent_has_gone_and_can_be_forked(run, tmp_path, capsys):
    keys = {"run__fork": f"{run}@2", "checkpoint__every_steps": 100, "optim__lr": 1e-3}
    broken = types.SimpleNamespace(every=4, after_step=lambda *_: 1 / 0)
    check_error(ZeroDivisionError, "", train, tmp_path / "killed", **keys, observers=[broken])
    assert train(tmp_path / "whole", **keys) == cli.DONE
    shutil.rmtree(run)
    check_refused("has no checkpoint", train, tmp_path / "another", **keys)
    assert not (tmp_path / "another").exists()
    for given in (keys, keys | {"run__fork": str(run)}):
        assert train(tmp_path / "killed", **given) == cli.DONE
    tiny_runs.same_run(tmp_path / "killed", tmp_path / "whole")
    none = r"was started with config\.run\.fork='.*run@2', now it is ''; restore it"
    check_refused(none, train, tmp_path / "killed", **keys | {"run__fork": ""})
    # A fork of it, on two devices, with other batches, that the durable place alone has when it
    # goes on.
    capsys.readouterr()
    more = {
        "run__fork": str(tmp_path / "killed"),
        "data__global_batch": 16,
        "mesh__data": 2,
        "run__num_steps": 8,
    }
    assert train(tmp_path / "second", 2, **more) == cli.DONE
    assert "config.data.global_batch 8 there, 16 here" in capsys.readouterr().out
    tokens = tiny_runs.by_step(tmp_path / "second", "tokens")
    assert tokens == {7: 6 * 128 + 256, 8: 6 * 128 + 512}
    forked = lineage_in(tmp_path / "second")
    places = [(Path(parent["folder"]).name, parent["step"]) for parent in forked]
    assert places == [("killed", 6), ("run", 2)]
    assert forked[0]["changed"]["mesh.data"] == [-1, 2]
    assert forked[1]["changed"]["optim.lr"] == [3e-3, 1e-3]


def test_weights_of_another_tokenizer_are_told(capsys):
    weights = exchange.InMemory({})
    meta = {"tokenizer": tokenizers.load("bytes").sha256}
    weights.meta = lambda: meta
    planned = types.SimpleNamespace(
        placed=types.SimpleNamespace(config=config.Config()), tokenizer=tokenizers.load("bytes")
    )
    start._say_what_differs(weights, planned)
    assert capsys.readouterr().out == ""
    planned.tokenizer = tokenizers.train_bpe(["other words"], 270)
    start._say_what_differs(weights, planned)
    assert "note: a model in memory was trained with another tokenizer" in capsys.readouterr().out
