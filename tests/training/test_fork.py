"""Runs that go on from another's checkpoint: exactly where nothing differs, otherwise as their
config says."""

import json
import shutil
from pathlib import Path

import pytest
import tiny_runs
from refusals import refusal

from zaya_jax import cli
from zaya_jax import run as run_lib
from zaya_jax.checkpoint.source import read_meta
from zaya_jax.config import Phase, StorageError, UserError
from zaya_jax.text import tokenizers
from zaya_jax.training import fork
from zaya_jax.training.snapshot import Snapshots

LONG = {
    "checkpoint__every_steps": 2,
    "checkpoint__keep": 9,
    "run__num_steps": 6,
    "schedule__decay_fraction": 0.5,
}


def settings(folder, keys):
    return tiny_runs.settings(**LONG | {"data__path": str(folder / "corpus")} | keys)


def train(folder, workdir, devices=1, **keys):
    """One start in this process."""
    return tiny_runs.train(workdir, devices, **LONG | {"data__path": str(folder / "corpus")} | keys)


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    """A folder with a corpus and a run of six steps, `run`, with checkpoints of steps 2, 4 and
    6."""
    folder = tmp_path_factory.mktemp("forks")
    tiny_runs.write_corpus(folder / "corpus")
    assert train(folder, folder / "run") == cli.DONE
    return folder


def tree(folder):
    """Every file with its content's time: a run that only reads leaves them alike."""
    return {
        str(p.relative_to(folder)): p.stat().st_mtime_ns
        for p in folder.rglob("*")
        if not p.is_dir()
    }


def test_it_goes_on_from_the_parent_s_state_in_an_order_of_its_own(
    parent, tmp_path, capsys, monkeypatch
):
    before, name = tree(parent / "run"), f"{parent / 'run'}@2"
    copied = []
    for place in ("on_host", "on_devices"):
        make = getattr(Snapshots, place)
        monkeypatch.setattr(
            Snapshots, place, lambda *args, n=place, make=make: copied.append(n) or make(*args)
        )
    assert train(parent, tmp_path / "fork", run__fork=name) == cli.DONE
    # Before its first step nobody knows what the devices have room for.
    assert copied == ["on_host", "on_devices", "on_devices"]
    out = capsys.readouterr().out
    assert (
        f"note: fork of {name} (2 steps, 256 tokens): learning rate 0.003 at step 2 there, 0.003 at"
        " step 3" in out
    )
    assert "note: this fork reads its data from the beginning, in an order of its own" in out
    assert tree(parent / "run") == before
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


@pytest.fixture
def named(parent, tmp_path):
    """A copy of the parent's run that may be damaged."""
    shutil.copytree(parent / "run", tmp_path / "run")
    return tmp_path / "run"


REFUSED = {
    "config.model.num_experts 4 there, 8 here": {"model__num_experts": 8},
    "config.optim.name 'adamw' there, 'muon' here": {"optim__name": "muon"},
    "config.run.fork=RUN and config.run.init_from=x are both given": {"run__init_from": "x"},
    "config.run.num_steps=6, but run.fork=RUN@6 has reached step 6": {"run__num_steps": 6},
    "config.run.fork=RUN@3: RUN has no checkpoint of step 3; it has 2, 4, 6": {
        "run__fork": "RUN@3"
    },
    "fork_step=4 and fork_tokens=3, but RUN@4 has 512 tokens at step 4": {
        "run__fork": "RUN@4",
        "run__fork_step": 4,
        "run__fork_tokens": 3,
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


@pytest.mark.parametrize("says", REFUSED)
def test_what_does_not_fit_is_one_line_and_leaves_nothing(parent, tmp_path, says):
    put = lambda text: text.replace("RUN", str(parent / "run")) if isinstance(text, str) else text  # noqa: E731
    keys = {"run__fork": "RUN", "run__num_steps": 9} | REFUSED[says]
    keys = {key: put(value) for key, value in keys.items()}
    assert put(says) in refusal(train, parent, tmp_path / "fork", **keys)
    assert not (tmp_path / "fork").exists()


def test_another_tokenizer_is_refused(parent):
    other = tokenizers.load("bytes")
    other.sha256 = "another's"
    given = settings(parent, {"run__fork": str(parent / "run"), "run__num_steps": 9})
    with pytest.raises(
        UserError, match=r"config\.data\.tokenizer='bytes' is not the one of run\.fork="
    ):
        fork.Parent(given, other)


def test_a_damaged_one_is_refused_and_an_unfinished_one_passed_over(named, parent, tmp_path):
    (named / "checkpoints" / "6").rename(named / "checkpoints" / ".saving-6")
    given = settings(parent, {"run__fork": str(named), "run__num_steps": 9})
    assert fork.resolve(given, tmp_path)[1] == 4
    chunk = max(
        (named / "checkpoints" / "4" / "state").rglob("c*"),
        key=lambda p: p.is_file() and p.stat().st_size,
    )
    chunk.write_bytes(bytes(chunk.stat().st_size))
    (named / "checkpoints" / "2" / "checksums.json").write_text("{}")
    for step, damage in (
        (4, r"step 4 of .*run is damaged: state/.* is changed"),
        (2, "2 is damaged: "),
    ):
        with pytest.raises(StorageError, match=damage):
            train(parent, tmp_path / "fork", run__fork=f"{named}@{step}", run__num_steps=9)


def test_the_step_that_was_newest_at_first_stays_the_one(parent, tmp_path):
    """A start that saved nothing has recorded it; the same command means the same, whatever the
    parent did since."""
    (tmp_path / "config.json").write_text(
        json.dumps({"run": {"fork": f"{parent / 'run'}@4", "fork_step": 4, "fork_tokens": 512}})
    )

    def find(given):
        return fork.resolve(settings(parent, {"run__fork": f"{parent / 'run'}{given}"}), tmp_path)

    assert find("")[1:] == find("@4")[1:] == [4, 512]
    assert find("@2")[1:] == [2, 256]


@pytest.mark.slow
def test_it_resumes_as_itself_when_the_parent_has_gone_and_can_be_forked(
    parent, named, tmp_path, capsys
):
    keys = {"run__fork": f"{named}@2", "checkpoint__every_steps": 100, "optim__lr": 1e-3}
    step = run_lib.Loop.train_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            run_lib.Loop,
            "train_step",
            lambda self, now: step(self, now) if now.number < 5 else 1 / 0,
        )
        with pytest.raises(ZeroDivisionError):
            train(parent, tmp_path / "killed", **keys)
    assert train(parent, tmp_path / "whole", **keys) == cli.DONE
    shutil.rmtree(named)
    with pytest.raises(UserError, match="has no checkpoint"):
        train(parent, tmp_path / "another", **keys)
    assert not (tmp_path / "another").exists()
    for given in (keys, keys | {"run__fork": str(named)}):
        assert train(parent, tmp_path / "killed", **given) == cli.DONE
    tiny_runs.same_state(tmp_path / "killed", tmp_path / "whole")
    assert [line["loss"] for line in tiny_runs.lines(tmp_path / "killed")] == [
        x["loss"] for x in tiny_runs.lines(tmp_path / "whole")
    ]
    with pytest.raises(
        UserError, match=r"was started with config\.run\.fork='.*run@2', now it is ''; restore it"
    ):
        train(parent, tmp_path / "killed", **keys | {"run__fork": ""})
    # A fork of it, on two devices, with other batches, that the durable place alone has when it
    # goes on.
    capsys.readouterr()
    more = {
        "run__fork": str(tmp_path / "killed"),
        "data__global_batch": 16,
        "mesh__data": 2,
        "run__num_steps": 8,
    }
    assert train(parent, tmp_path / "second", 2, **more) == cli.DONE
    assert "config.data.global_batch 8 there, 16 here" in capsys.readouterr().out
    assert [line["tokens"] for line in tiny_runs.lines(tmp_path / "second")] == [
        6 * 128 + 256,
        6 * 128 + 512,
    ]
    forked = json.loads((tmp_path / "second" / "lineage.json").read_text())["forked"]
    assert [(Path(one["folder"]).name, one["step"]) for one in forked] == [
        ("killed", 6),
        ("run", 2),
    ]
    assert forked[1]["changed"]["optim.lr"] == [3e-3, 1e-3] and forked[0]["changed"][
        "mesh.data"
    ] == [-1, 2]
