"""What a message names as the way out is one: taken literally, the next start goes on."""

import json
import re
import shutil
import signal

import jax
import pytest

from experiments import pretrain
from experiments.configs import tiny
from zaya_jax import cli, config
from zaya_jax.data import tokenizers
from zaya_jax.train import snapshot
from zaya_jax.train.workdir import read_config

ALL_DEVICES = jax.devices()
SMALL = {
    "model.hidden_size": 32, "model.num_hidden_layers": 1, "model.head_dim": 8, "model.moe_intermediate_size": 32,
    "model.num_experts": 4, "model.router_hidden_size": 8, "data.seq_len": 32, "data.global_batch": 8,
    "eval.windows": 4, "log.sample_tokens": 4, "optim.name": "adamw", "run.num_steps": 2,
}  # fmt: skip
MORE = {"run.num_steps": 4}
SET = re.compile(r"(config\.[\w.\[\]]+)=([\w.+-]+)")


class GoesOn(Exception):
    """The start has passed everything that could refuse it."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A workdir with a checkpoint of step 2, the corpus of it, and how it was started."""
    folder = tmp_path_factory.mktemp("advice")
    corpus = folder / "corpus"
    corpus.mkdir()
    for i in range(40):
        (corpus / f"{i}.txt").write_text("".join(f"line {j} of file {i}, {i * j % 97}\n" for j in range(30)))
    assert train(folder / "run", SMALL | {"data.path": str(corpus)}, 1) == cli.DONE
    return folder


def train(workdir, keys, devices):
    """One start with these keys on so many devices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *args: ALL_DEVICES[:devices])
        settings = tiny.get_config()
        settings.update_from_flattened_dict(keys)
        code = pretrain.train(config.check(settings), workdir)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return code


@pytest.fixture
def begin(trained, tmp_path, monkeypatch):
    """begin({key: value}, devices) on a copy of the workdir, or on a new one: UserError, or GoesOn."""

    def stop(*args):
        raise GoesOn

    shutil.copytree(trained / "run", tmp_path / "run")
    base = SMALL | {"data.path": str(trained / "corpus")} | MORE
    monkeypatch.setattr(snapshot, "of_run", stop)

    def call(keys, devices=1, new=False):
        train(tmp_path / ("new" if new else "run"), base | keys, devices)

    return call


def ways(message):
    """The keys and values that each alternative of a message's advice asks for."""
    parts = re.split(r",? or (?=set |before )", message.partition("; ")[2])
    return [
        {key.removeprefix("config."): json.loads(x.lower()) for key, x in SET.findall(part)} for part in parts
    ]


def refused(begin, keys, devices, new=False):
    with pytest.raises(config.UserError) as error:
        begin(keys, devices, new)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("keys", "devices", "words"),
    [
        ({"data.micro_batch": 2}, 4, "micro-batch of 2"),
        ({"mesh.data": 3}, 8, "but there are 8 devices"),
        ({"mesh.expert": 8}, 8, "num_experts=4"),
        ({"mesh.tensor": 8}, 8, "num_attention_heads=4"),
        ({"mesh.tensor": 8, "mesh.tsp": True}, 8, "num_experts=4"),
        ({"mesh.data": 1, "mesh.context": 2, "mesh.expert": 4}, 8, ""),
        ({"mesh.expert": 3, "mesh.data": 1}, 3, "num_experts=4"),
        ({"mesh.context": 3}, 6, "seq_len=32"),
        ({"mesh.context": 6}, 6, "seq_len=32"),
        ({}, 6, "micro-batch of 8"),
        ({"mesh.data": 0}, 4, "mesh.data=0"),
    ],
)
@pytest.mark.parametrize("new", [False, True])
def test_a_mesh_that_is_advised_is_taken(begin, keys, devices, words, new):
    if not words:
        with pytest.raises(GoesOn):
            begin(keys, devices, new)
        return
    message = refused(begin, keys, devices, new)
    assert words in message
    found = [way for way in ways(message) if way]
    if "number of devices that divides 8" in message or "no mesh" in message or "at least 1" in message:
        assert not found  # nothing to set, so other devices
        with pytest.raises(GoesOn):
            begin({key: 1 if value == 0 else value for key, value in keys.items() if value == 0}, 1, new)
        return
    assert found, message
    for way in found:
        if not new and "data.seq_len" in way:
            continue  # only before the first step, as it says
        with pytest.raises(GoesOn):
            begin(keys | way, devices, new)


@pytest.mark.parametrize(
    ("keys", "note"),
    [
        ({"data.on_corrupt": "skip"}, ""),
        ({"data.micro_batch": 4}, "data.micro_batch (0 before, 4 now): sums have another order"),
        pytest.param(
            {"remat": "layer"},
            "remat ('none' before, 'layer' now): sums have another order",
            marks=pytest.mark.slow,
        ),
        ({"eval.windows": 2, "eval.every": 3, "data.workers": 1, "checkpoint.max_failures": 9}, ""),
    ],
)
def test_what_cannot_change_the_numbers_may_change(trained, tmp_path, capsys, keys, note):
    shutil.copytree(trained / "run", tmp_path / "run")
    base = SMALL | MORE | {"data.path": str(trained / "corpus")}
    assert train(tmp_path / "run", base | keys, 1) == cli.DONE
    out = capsys.readouterr().out
    assert note in out and ("note: changed" in out) == bool(note)
    recorded = config.to_dict(read_config(tmp_path / "run"))
    for key, value in keys.items():
        group = recorded
        for part in key.split("."):
            group = group[part]
        assert group == value


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
    message = refused(begin, {"data.path": str(changed)}, 1)
    assert "the data is not what this run began with" in message and "restore them" in message
    assert (tmp_path / "run" / "config.json").read_bytes() == before != b""


def test_sources_of_a_mixture_may_move_but_not_weigh_otherwise(trained, tmp_path):
    for name in "ab":
        shutil.copytree(trained / "corpus", tmp_path / name)
    (tmp_path / "b" / "0.txt").write_text("this one is not in the other\n" * 30)
    mixture = lambda a, b, weight: {"data.mixture": (f"{tmp_path / a}=0.5", f"{tmp_path / b}={weight}")}  # noqa: E731
    assert train(tmp_path / "run", SMALL | mixture("a", "b", 0.5), 1) == cli.DONE
    for name in "ab":
        (tmp_path / name).rename(tmp_path / f"new {name}")
    with pytest.raises(
        config.UserError, match=r"data\.mixture=\[0\.5, 0\.5\], now it is \[0\.5, 0\.25\]; restore"
    ):
        train(tmp_path / "run", SMALL | MORE | mixture("new a", "new b", 0.25), 1)
    with pytest.raises(config.UserError, match="the data is not what this run began with"):
        train(tmp_path / "run", SMALL | MORE | mixture("new b", "new a", 0.5), 1)
    assert train(tmp_path / "run", SMALL | MORE | mixture("new a", "new b", 0.5), 1) == cli.DONE


def test_a_config_is_restored_and_a_shorter_run_is_lengthened(begin):
    assert "restore it" in refused(begin, {"optim.lr": 0.5}, 1)
    assert "give at least as many steps" in refused(begin, {"run.num_steps": 1}, 1)
    with pytest.raises(GoesOn):
        begin({})


def test_what_has_saved_nothing_may_be_anything(begin, tmp_path):
    """A first start that failed later than its checks has written a config; the advice to change it can be taken."""
    with pytest.raises(GoesOn):
        begin({}, new=True)
    assert (tmp_path / "new" / "config.json").exists()
    with pytest.raises(GoesOn):
        begin({"run.init_from": str(tmp_path / "run"), "run.init_grow": True, "data.seq_len": 64}, new=True)
    assert json.loads((tmp_path / "new" / "config.json").read_text())["data"]["seq_len"] == 64


@pytest.mark.parametrize(
    ("keys", "mended"),
    [
        ({"data.seq_len": 2048}, {"model.max_position_embeddings": 2048}),
        ({"data.micro_batch": 3}, {"data.micro_batch": 0}),
        ({"data.micro_batch": 3}, {"data.micro_batch": 4}),
        ({"model.vocab_size": 200}, {"model.vocab_size": 264}),
    ],
)
def test_sizes_of_a_new_run_can_be_mended_as_told(begin, keys, mended):
    refused(begin, keys, 1, new=True)
    with pytest.raises(GoesOn):
        begin(keys | mended, 1, new=True)


def phases(*given):
    return {"schedule.phases": tuple(config.Phase(**phase) for phase in given)}


def test_phases_that_have_not_begun_may_change(trained, tmp_path, capsys):
    first = {"name": "first", "tokens": 2 * 256}
    base = SMALL | {"data.path": str(trained / "corpus"), "eval.windows": 0}
    assert train(tmp_path / "run", base | phases(first, {"tokens": 512, "seq_len": 64}), 1) == cli.DONE
    capsys.readouterr()
    other = {"tokens": 1024, "seq_len": 16, "rope_theta": 77.0, "packing": "best_fit"}
    with pytest.raises(config.UserError, match=r"phases\[0\]\.tokens=512, now it is 768; restore it"):
        train(tmp_path / "run", base | MORE | phases(first | {"tokens": 768}, other), 1)
    assert train(tmp_path / "run", base | MORE | phases(first, other, {"tokens": 256}), 1) == cli.DONE
    out = capsys.readouterr().out
    assert "phases that have not begun (1,024 tokens in all before, 1,792 tokens in all now)" in out
    last = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][-1]
    assert last["step"] == 4 and last["tokens"] == 512 + 2 * 16 * 8
    with pytest.raises(config.UserError, match=r"phases\[1\]\.rope_theta"):
        train(tmp_path / "run", base | MORE | phases(first, other | {"rope_theta": 0.0}), 1)
