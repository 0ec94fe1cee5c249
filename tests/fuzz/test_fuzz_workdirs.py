"""generate and checkpoint under generated options, and on workdirs and model directories with damaged files."""

import functools
import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from damage import copied, damage, damages
from harness import Accepted, call, folder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from values import make_places, places

from experiments import generate, pretrain
from zaya_jax import config
from zaya_jax.checkpoint import lock, store
from zaya_jax.config import Model
from zaya_jax.data import tokenizers
from zaya_jax.model import zaya
from zaya_jax.train.workdir import open_workdir

few = settings(
    max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True
)
many = settings(few, max_examples=2000, derandomize=False, print_blob=True)
MODEL = Model(
    vocab_size=264, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=4,
    moe_intermediate_size=4, num_experts=2, router_hidden_size=4, max_position_embeddings=64, initializer_range=0.5,
)  # fmt: skip
NUMBERS = ("-1", "0", "1", "2", "5", "nan", "inf", "-inf", "1e999", "1e-320", "", "x", "9" * 30, "9" * 5000, "0x10",
           "1.5", "-0", " 1", "1_0", "\u0661", "4294967295", "4294967296", "1e6", "1000001")  # fmt: skip
CONFIG = """
import json
from ml_collections import ConfigDict
from zaya_jax import config
def get_config():
    return config.editable(config.check({"model": MODEL, "name": "small", "run": {"num_steps": 2},
        "data": {"seq_len": 16, "global_batch": 2, "path": "texts"}}))
""".replace("MODEL", repr(config.to_dict(MODEL)))
TEXTS = (
    "",
    " ",
    "def ",
    "\u00fc\u4e16\U0001f600",
    "\udce9",
    "\ud800",
    "a\0b",
    "x" * 100,
    "--",
    "-",
    "\n",
    "<|bos|>",
)


def make_run(folder: Path) -> Path:
    """A run's folder that is complete at step 2, with all that one has but a training."""
    given_config = config.default().to_dict() | {"model": config.to_dict(MODEL), "name": "small"}
    given_config["data"] |= {"seq_len": 16, "global_batch": 2, "path": "texts"}
    given_config["run"]["num_steps"] = 2
    checked = config.check(given_config)
    workdir = open_workdir(folder, checked)
    tokenizers.load("bytes").save(workdir / "tokenizer")
    params = zaya.init(MODEL, jax.random.key(0))
    state = {
        "params": params,
        "balance": {"bias": zaya.init_balance(MODEL)},
        "optimizer": {"count": np.zeros(3, np.float32)},
    }
    saved = store.Store(workdir)
    figures = {"loss": 2.0, "eval/loss": 2.0}
    for step in (2,):
        saved.save(step, state, {
            "step": step, "tokens": 32 * step, "config": config.to_dict(checked), "metrics": figures, "data": {},
            "tokenizer": tokenizers.load("bytes").sha256, "version": "0",
        })  # fmt: skip
    saved.close()
    lines = [
        {"step": i + 1, "loss": 5.0 - i, "lr": 0.1, "grad_norm": 1.0, "step_seconds": 0.1, "tokens_per_second": 9.0,
         "load": [[0.5, 0.4, 0.1]], "load_entropy": [0.9], "eval/loss": 5.0, "tokens": 32 * i}
        for i in range(2)
    ]  # fmt: skip
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (workdir / "environment.json").write_text('{"device": "cpu", "jax": "0"}')
    (workdir / "sample.txt").write_text("def f():")
    (workdir / "samples.jsonl").write_text('{"step": 1, "prompt": "def ", "text": "def f():"}\n')
    lock.release(workdir)
    return workdir


def accepted(*args, **keys):
    raise Accepted


@pytest.fixture(scope="module")
def source():
    """What is copied and damaged: a run's folder, and a model directory."""
    with folder() as here:
        make_run(here / "run")
        yield here


@pytest.fixture(scope="module")
def sandbox():
    """A folder with places of every kind, and a whole run."""
    with folder() as here:
        make_places(here)
        make_run(here / "run")
        yield here


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(generate.decode, "stream", accepted)
    monkeypatch.setattr(pretrain, "describe_run", accepted)
    monkeypatch.setattr("signal.signal", lambda *args: None)


@pytest.fixture
def one_device(monkeypatch):
    devices = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *args: devices)


@functools.cache
def options_of(command, sandbox):
    """A command line of a program with some of its options, each with any value."""
    there = st.one_of(st.sampled_from(["run", "run", str(sandbox / "run")]), st.sampled_from(places(sandbox)))
    new = st.one_of(st.sampled_from(["new/a/b", "new", "empty"]), st.sampled_from(places(sandbox)))
    pages = st.sampled_from(["a.html", "run/checkpoints.html", "nowhere/a.html", "empty", "/dev/null/a.html"])
    number, words = st.one_of(st.sampled_from(NUMBERS), st.integers().map(str)), st.sampled_from(TEXTS)
    known = {
        "generate": {
            "workdir": there, "prompt": words, "prompt_file": there, "num_tokens": number, "temperature": number,
            "seed": number, "step": number,
        },
        "inspect": {"workdir": there, "step": number, "html": st.one_of(pages, new)},
        "verify": {"workdir": there, "step": number},
        "reshard": {"from": there, "to": new, "step": number, "chunk_mb": number},
        "export_params": {"workdir": there, "step": number, "out": new, "dtype": words},
        "from_hf": {"model": there, "workdir": new},
        "to_hf": {"workdir": there, "step": number, "out": new, "dtype": words, "shard_gb": number},
    }[command]  # fmt: skip
    needed = {"workdir", "from", "to", "out", "model"} & known.keys()
    return st.lists(st.sampled_from(sorted(known)), max_size=3, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: known[name] for name in sorted({*needed, *names})})
    )


COMMANDS = ("generate", "inspect", "verify", "reshard", "export_params", "from_hf", "to_hf")


def check_options(sandbox, command, given_options):
    options = [f"--{name}={value}" for name, value in given_options.items()]
    with folder() as elsewhere:
        here = copied(sandbox, elsewhere / "here")
        options = [option.replace(str(sandbox), str(here)) for option in options]
        program = [command] if command == "generate" else ["checkpoint", command]
        ended = call(program[0], [*program[1:], *options], here).check()
        assert ended.code != 4, ended  # nothing is damaged


@given(data=st.data(), command=st.sampled_from(COMMANDS))
@few
def test_any_options_end_in_a_line(sandbox, data, command):
    check_options(sandbox, command, data.draw(options_of(command, sandbox)))


def check_damaged(source, command, found):
    """One program on a run's folder with damaged files; it is as it was after a refusal."""
    with folder() as elsewhere:
        here = copied(source, elsewhere / "here")
        for one in found:
            damage(here / "run", *one)
        program, *options = command
        call(program, options, here).check()


ON_RUNS = (
    ("generate", "--workdir=run", "--num_tokens=3"), ("checkpoint", "inspect", "--workdir=run", "--html=a.html"),
    ("checkpoint", "verify", "--workdir=run"), ("checkpoint", "reshard", "--from=run", "--to=new"),
    ("checkpoint", "export_params", "--workdir=run", "--out=new"),
    ("checkpoint", "to_hf", "--workdir=run", "--out=new"),
)  # fmt: skip


def test_options_that_the_long_search_found_end_in_a_line(sandbox):
    check_options(sandbox, "to_hf", {"dtype": "--", "out": "new/a/b", "workdir": "run"})
    check_options(sandbox, "export_params", {"out": f"{sandbox}/to_loop/", "workdir": "run"})
    check_options(sandbox, "export_params", {"out": "/dev/null", "workdir": "run"})
    check_options(sandbox, "verify", {"workdir": "file:///dev/null/x"})
    check_options(sandbox, "reshard", {"from": "run", "to": "file:///dev/null/x"})
    check_options(sandbox, "to_hf", {"out": "d/" * 2000 + "d", "workdir": "run"})


@pytest.mark.parametrize("length", [math.nan, math.inf, "x", -1, 10**400])
def test_shapes_that_the_long_search_found_end_in_a_line(source, length):
    name = "checkpoints/2/state/params.layers.attn_join.h_bias/zarr.json"
    with folder() as elsewhere:
        here = copied(source, elsewhere / "here")
        found = json.loads((here / "run" / name).read_bytes())
        (here / "run" / name).write_text(json.dumps(found | {"shape": [length, *found["shape"][1:]]}))
        ended = call("checkpoint", ["inspect", "--workdir=run", "--html=a.html"], here).check()
        assert ended.code == 4 and "checkpoints/2 cannot be looked at" in ended.err, ended


def test_links_that_the_long_search_found_end_in_a_line(source):
    with folder() as elsewhere:
        here = copied(source, elsewhere / "here")
        (here / "run/tokenizer/zaya_tokenizer.json").unlink()
        (here / "run/tokenizer/zaya_tokenizer.json").symlink_to("nowhere")
        ended = call("checkpoint", ["reshard", "--from=run", "--to=new"], here).check()
        assert ended.code == 4 and "zaya_tokenizer.json" in ended.err, ended
        assert not (here / "new").exists()


@given(data=st.data(), command=st.sampled_from(ON_RUNS))
@few
def test_a_damaged_run_ends_in_a_line(source, data, command):
    found = data.draw(st.lists(damages(source / "run"), min_size=1, max_size=2, unique_by=lambda one: one[0]))
    check_damaged(source, command, found)


@pytest.fixture(scope="module")
def model(golden_dir):
    """A model directory, and the workdir that is made of it."""
    with folder() as here:
        copied(golden_dir / "base", here / "model")
        yield here


def check_model(model, found):
    with folder() as elsewhere:
        here = copied(model, elsewhere / "here")
        for one in found:
            damage(here / "model", *one)
        call("checkpoint", ["from_hf", "--model=model", "--workdir=new"], here).check()


@given(data=st.data())
@few
def test_a_damaged_model_directory_ends_in_a_line(model, data):
    check_model(model, [data.draw(damages(model / "model"))])


@pytest.mark.parametrize("content", [b"[" * 30_000, b"\xff"])
def test_json_that_is_none_is_named(source, model, content):
    """In the files by which all others are read: no example is left to chance."""
    for file in ("config.json", "checkpoints/2/checksums.json", "checkpoints/2/meta/data.json"):
        for command in (ON_RUNS[0], ON_RUNS[1]):
            check_damaged(source, command, [(file, "content", content)])
    check_model(model, [("config.json", "content", content)])


REPORTED = (
    "metrics.jsonl",
    "environment.json",
    "sample.txt",
    "samples.jsonl",
    "config.json",
    "tokenizer/zaya_tokenizer.json",
)


def check_complete(source, one):
    """pretrain on a run that is complete checks it and writes its report."""
    with folder() as elsewhere:
        here = copied(source, elsewhere / "here")
        damage(here / "run", *one)
        (here / "texts").mkdir()
        (here / "texts" / "a.txt").write_text("text\n" * 999)
        (here / "c.py").write_text(CONFIG)
        call("pretrain", ["--config=c.py", "--workdir=run"], here).check()


@given(data=st.data())
@few
def test_a_report_of_damaged_figures_ends_in_a_line(source, data, one_device):
    check_complete(source, data.draw(damages(source / "run", REPORTED)))


@pytest.mark.slow
@given(data=st.data(), command=st.sampled_from(COMMANDS))
@many
def test_many_options_end_in_a_line(sandbox, data, command):
    check_options(sandbox, command, data.draw(options_of(command, sandbox)))


@pytest.mark.slow
@given(data=st.data(), command=st.sampled_from(ON_RUNS))
@many
def test_many_damaged_runs_end_in_a_line(source, data, command):
    found = data.draw(st.lists(damages(source / "run"), min_size=1, max_size=3, unique_by=lambda one: one[0]))
    check_damaged(source, command, found)


@pytest.mark.slow
@given(data=st.data())
@many
def test_many_damaged_model_directories_end_in_a_line(model, data):
    check_model(model, data.draw(st.lists(damages(model / "model"), min_size=1, max_size=2)))


@pytest.mark.slow
@given(data=st.data())
@many
def test_many_reports_end_in_a_line(source, data, one_device):
    check_complete(source, data.draw(damages(source / "run")))
