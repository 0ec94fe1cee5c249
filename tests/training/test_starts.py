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
from refusals import check_error, check_refused, check_storage_error, refusal
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
        check_refused(r"is not the tokenizer that .* was trained with", read, tmp_path / "run")
    assert not (tmp_path / "hf").exists()
    shutil.rmtree(tmp_path / "run" / "tokenizer")
    assert zj.load(tmp_path / "run").tokenizer is None


def test_a_complete_run_comes_from_its_durable_place_with_its_tokenizer(trained, tmp_path):
    keys = {
        "data__path": str(trained / "corpus"),
        "run__num_steps": 2,
        "checkpoint__durable": str(tmp_path / "copies"),
    }
    for name in ("run", "again"):
        assert tiny_runs.train(tmp_path / name, **keys) == cli.DONE
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
def test_what_cannot_change_the_numbers_may_change(
    trained, tmp_path, monkeypatch, keys, devices, note
):
    said = []

    def stop(recipe, here, workdir, reached, found):
        said.extend(found)
        raise GoesOn

    monkeypatch.setattr(notes, "describe_start", stop)
    shutil.copytree(trained / "run", tmp_path / "run")
    given = {"data.path": str(trained / "corpus"), "run.num_steps": 4} | keys
    with pytest.raises(GoesOn):
        tiny_runs.train(tmp_path / "run", devices, **given)
    text = " ".join(text for text in said if text.startswith("note: "))
    assert (
        note in text and "and so does the learning rate" in text and ("order" in text) == bool(note)
    )
    recorded = config.editable(read_config(tmp_path / "run"))
    assert {key: recorded[key.split(".")[0]][key.split(".")[1]] for key in keys} == keys


def test_corpus_and_tokenizer_may_move_but_not_change(begin, trained, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(trained / "corpus", moved)
    tokenizers.load("bytes").save(tmp_path / "bytes")
    check_error(
        GoesOn, "", begin, {"data.path": str(moved), "data.tokenizer": str(tmp_path / "bytes")}
    )
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
    check_refused(
        r"data\.mixture=\[0\.5, 0\.5\], now it is \[0\.5, 0\.25\]; restore",
        train,
        4,
        "new a",
        "new b",
        0.25,
    )
    check_refused("the data is not what this run began with", train, 4, "new b", "new a", 0.5)
    assert train(4, "new a", "new b", 0.5) == cli.DONE


def test_a_config_is_restored_and_a_shorter_run_is_lengthened(begin):
    assert "restore it" in refusal(begin, {"optim.lr": 0.5}, 1)
    assert "give at least as many steps" in refusal(begin, {"run.num_steps": 1}, 1)
    check_error(GoesOn, "", begin, {})


def lineage_in(workdir):
    return json.loads((workdir / "environment.json").read_text())["forked"]


def test_what_has_saved_nothing_may_be_anything(begin, tmp_path):
    """A first start that failed later than its checks has written a config; the advice to change it
    can be taken."""
    check_error(GoesOn, "", begin, {"run.fork": str(tmp_path / "run")}, new=True)
    assert lineage_in(tmp_path / "new")
    check_error(
        GoesOn, "", begin, {"run.init_from": str(tmp_path / "run"), "data.seq_len": 64}, new=True
    )
    assert json.loads((tmp_path / "new" / "config.json").read_text())["data"]["seq_len"] == 64
    assert lineage_in(tmp_path / "new") == []


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
    check_refused(
        r"phases\[0\]\.tokens=256, now it is 384; restore it",
        change,
        begun,
        [first | {"tokens": 384}, other],
        2,
    )
    note = change(begun, [first, other, {"tokens": 128}], 2)
    assert "steps that have not begun follow the new plan, and so does the learning rate" in note
    check_refused(
        r"phases\[1\]\.rope_theta", change, [first, other], [first, other | {"rope_theta": 0.0}], 4
    )


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
    "config.run.init_from=nowhere: nowhere is not a folder": {"run__init_from": "nowhere"},
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
    check_refused(
        rf"init_from(={place}: (nowhere is not|other has no)|: step 1 of {place} does not fit)",
        train,
        run__init_from=place,
    )
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


LONG = {
    "checkpoint__every_steps": 2,
    "checkpoint__keep": 9,
    "run__num_steps": 6,
    "schedule__decay_fraction": 0.5,
}


def fork_settings(folder, keys):
    return tiny_runs.settings(**LONG | {"data__path": str(folder / "corpus")} | keys)


def fork_train(folder, workdir, devices=1, **keys):
    """One start in this process."""
    return tiny_runs.train(workdir, devices, **LONG | {"data__path": str(folder / "corpus")} | keys)


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    """A folder with a corpus and a run of six steps, `run`, with checkpoints of steps 2, 4 and
    6."""
    folder = tmp_path_factory.mktemp("forks")
    tiny_runs.write_corpus(folder / "corpus")
    assert fork_train(folder, folder / "run") == cli.DONE
    return folder


def times_in(folder):
    """Every file with its content's time: a run that only reads leaves them alike."""
    return {
        str(p.relative_to(folder)): p.stat().st_mtime_ns
        for p in folder.rglob("*")
        if not p.is_dir()
    }


def test_it_goes_on_from_the_parent_s_state_in_an_order_of_its_own(
    parent, tmp_path, capsys, monkeypatch
):
    before, name = times_in(parent / "run"), f"{parent / 'run'}@2"
    copied = []
    for place in ("on_host", "on_devices"):
        make = getattr(Snapshots, place)
        monkeypatch.setattr(
            Snapshots, place, lambda *args, n=place, make=make: copied.append(n) or make(*args)
        )
    assert fork_train(parent, tmp_path / "fork", run__fork=name) == cli.DONE
    # Before its first step nobody knows what the devices have room for.
    assert copied == ["on_host", "on_devices", "on_devices"]
    out = capsys.readouterr().out
    assert (
        f"note: fork of {name} (2 steps, 256 tokens): learning rate 0.003 at step 2 there, 0.003 at"
        " step 3" in out
    )
    assert "note: this fork reads its data from the beginning, in an order of its own" in out
    assert times_in(parent / "run") == before
    theirs, ours = tiny_runs.lines(parent / "run")[2:], tiny_runs.lines(tmp_path / "fork")
    for key in ("step", "tokens", "lr"):
        assert [x[key] for x in ours] == [x[key] for x in theirs]
    assert all(x["loss"] != y["loss"] for x, y in zip(ours, theirs, strict=True))
    recorded = json.loads((tmp_path / "fork" / "config.json").read_text())["run"]
    assert (recorded["fork"], recorded["fork_step"], recorded["fork_tokens"]) == (name, 2, 256)
    for step in (2, 6):  # the first is the state that it began with
        (one,) = read_meta(tmp_path / "fork", step)["lineage"]
        assert (one["folder"], one["step"], one["tokens"]) == (str(parent / "run"), 2, 256)
        assert (
            one["run"] == (parent / "run" / "checkpoints" / ".run").read_text()
            and one["changed"] == {}
        )
    tiny_runs.same_state(f"{tmp_path / 'fork'}/checkpoints/2", f"{parent / 'run'}/checkpoints/2")
    report = (tmp_path / "fork" / "report.html").read_text()
    assert (
        "<h2>Lineage</h2>" in report
        and str(parent / "run") in report
        and "256 of them before" in report
    )


def test_a_fork_notes_other_tiles_than_its_parent_s(parent, tmp_path, capsys, monkeypatch):
    tiles = run_lib.kernels.Tiles({"a": 1}, "tiles: 1")
    monkeypatch.setattr(run_lib.kernels, "choose_tiles", lambda *args, **_: tiles)
    assert fork_train(parent, tmp_path / "run", run__num_steps=2) == cli.DONE
    keys = {"run__num_steps": 4, "run__fork": str(tmp_path / "run")}
    for name, found, noted in (("same", {"a": 1}, False), ("others", {"a": 2}, True)):
        tiles = tiles._replace(kernels=found)
        assert fork_train(parent, tmp_path / name, **keys) == cli.DONE
        assert ("step 2: our kernels or their tiles: sums" in capsys.readouterr().out) == noted


@pytest.fixture
def damageable(parent, tmp_path):
    """A copy of the parent's run that may be damaged."""
    shutil.copytree(parent / "run", tmp_path / "run")
    return tmp_path / "run"


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
def test_what_does_not_fit_is_one_line_and_leaves_nothing(parent, tmp_path, says):
    put = lambda text: text.replace("RUN", str(parent / "run")) if isinstance(text, str) else text  # noqa: E731
    keys = {"run__fork": "RUN", "run__num_steps": 9} | NO_FORK[says]
    keys = {key: put(value) for key, value in keys.items()}
    assert put(says) in refusal(fork_train, parent, tmp_path / "fork", **keys)
    assert not (tmp_path / "fork").exists()


def test_another_tokenizer_is_refused(parent):
    other = tokenizers.load("bytes")
    other.sha256 = "another's"
    given = fork_settings(parent, {"run__fork": str(parent / "run"), "run__num_steps": 9})
    check_refused(
        r"config\.data\.tokenizer='bytes' is not the one of run\.fork=", fork.Parent, given, other
    )


def test_a_damaged_one_is_refused_and_an_unfinished_one_passed_over(damageable, parent, tmp_path):
    (damageable / "checkpoints" / "6").rename(damageable / "checkpoints" / ".saving-6")
    given = fork_settings(parent, {"run__fork": str(damageable), "run__num_steps": 9})
    assert fork.resolve(given, tmp_path)[1] == 4
    chunk = max(
        (damageable / "checkpoints" / "4" / "state").rglob("c*"),
        key=lambda p: p.is_file() and p.stat().st_size,
    )
    chunk.write_bytes(bytes(chunk.stat().st_size))
    (damageable / "checkpoints" / "2" / "checksums.json").write_text("{}")
    for step, damage in (
        (4, r"checkpoints/4 is damaged: state/.* is changed"),
        (2, "2 is damaged: "),
    ):
        check_storage_error(
            damage,
            fork_train,
            parent,
            tmp_path / "fork",
            run__fork=f"{damageable}@{step}",
            run__num_steps=9,
        )


def test_the_step_that_was_newest_at_first_stays_the_one(parent, tmp_path):
    """A start that saved nothing has recorded it; the same command means the same, whatever the
    parent did since."""
    (tmp_path / "config.json").write_text(
        json.dumps({"run": {"fork": f"{parent / 'run'}@4", "fork_step": 4, "fork_tokens": 512}})
    )

    def find(given):
        return fork.resolve(
            fork_settings(parent, {"run__fork": f"{parent / 'run'}{given}"}), tmp_path
        )

    assert find("")[1:] == find("@4")[1:] == [4, 512]
    assert find("@2")[1:] == [2, 256]


@pytest.mark.slow
def test_it_resumes_as_itself_when_the_parent_has_gone_and_can_be_forked(
    parent, damageable, tmp_path, capsys
):
    keys = {"run__fork": f"{damageable}@2", "checkpoint__every_steps": 100, "optim__lr": 1e-3}
    step = run_lib.Loop.train_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            run_lib.Loop,
            "train_step",
            lambda self, now: step(self, now) if now.number < 5 else 1 / 0,
        )
        with pytest.raises(ZeroDivisionError):
            fork_train(parent, tmp_path / "killed", **keys)
    assert fork_train(parent, tmp_path / "whole", **keys) == cli.DONE
    shutil.rmtree(damageable)
    check_refused("has no checkpoint", fork_train, parent, tmp_path / "another", **keys)
    assert not (tmp_path / "another").exists()
    for given in (keys, keys | {"run__fork": str(damageable)}):
        assert fork_train(parent, tmp_path / "killed", **given) == cli.DONE
    tiny_runs.same_run(tmp_path / "killed", tmp_path / "whole")
    check_refused(
        r"was started with config\.run\.fork='.*run@2', now it is ''; restore it",
        fork_train,
        parent,
        tmp_path / "killed",
        **keys | {"run__fork": ""},
    )
    # A fork of it, on two devices, with other batches, that the durable place alone has when it
    # goes on.
    capsys.readouterr()
    more = {
        "run__fork": str(tmp_path / "killed"),
        "data__global_batch": 16,
        "mesh__data": 2,
        "run__num_steps": 8,
    }
    assert fork_train(parent, tmp_path / "second", 2, **more) == cli.DONE
    assert "config.data.global_batch 8 there, 16 here" in capsys.readouterr().out
    assert [line["tokens"] for line in tiny_runs.lines(tmp_path / "second")] == [
        6 * 128 + 256,
        6 * 128 + 512,
    ]
    forked = lineage_in(tmp_path / "second")
    assert [(Path(one["folder"]).name, one["step"]) for one in forked] == [
        ("killed", 6),
        ("run", 2),
    ]
    assert forked[1]["changed"]["optim.lr"] == [3e-3, 1e-3] and forked[0]["changed"][
        "mesh.data"
    ] == [-1, 2]


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
