"""generate and checkpoint under generated options, and on workdirs and model directories with
damaged files."""

import functools

import jax
import pytest
from damage import copied, damage, damages
from harness import Accepted, call, folder, search
from hypothesis import given
from hypothesis import strategies as st
from places import MODEL, make_places, make_run, places

from zaya_jax import config, generation
from zaya_jax.training import notes

NUMBERS = (
    "-1",
    "0",
    "1",
    "2",
    "5",
    "nan",
    "inf",
    "-inf",
    "1e999",
    "1e-320",
    "",
    "x",
    "9" * 30,
    "9" * 5000,
    "0x10",
    "1.5",
    "-0",
    " 1",
    "1_0",
    "\u0661",
    "4294967295",
    "4294967296",
    "1e6",
    "1000001",
)
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


def accepted(*args, **keys):
    raise Accepted


@pytest.fixture(scope="module")
def source():
    """The folders to copy and damage: a run's, and a model directory."""
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
    monkeypatch.setattr(generation, "stream", accepted)
    monkeypatch.setattr(notes, "describe_run", accepted)
    monkeypatch.setattr("signal.signal", lambda *args: None)


@pytest.fixture
def one_device(monkeypatch):
    devices = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *args: devices)


@functools.cache
def options_of(command, sandbox):
    """A command line of a program with some of its options, each with any value."""
    there = st.one_of(
        st.sampled_from(["run", "run", str(sandbox / "run")]), st.sampled_from(places(sandbox))
    )
    new = st.one_of(st.sampled_from(["new/a/b", "new", "empty"]), st.sampled_from(places(sandbox)))
    number, words = (
        st.one_of(st.sampled_from(NUMBERS), st.integers().map(str)),
        st.sampled_from(TEXTS),
    )
    known = {
        "generate": {
            "model": there,
            "prompt": words,
            "prompt_file": there,
            "num_tokens": number,
            "temperature": number,
            "seed": number,
        },
        "inspect": {"workdir": there, "step": number},
        "verify": {"workdir": there, "step": number},
        "reshard": {"from": there, "to": new, "step": number, "chunk_mb": number},
        "export_params": {"workdir": there, "step": number, "out": new, "dtype": words},
        "from_hf": {"model": there, "workdir": new},
        "to_hf": {"model": there, "out": new, "dtype": words, "shard_gb": number},
    }[command]
    needed = {"workdir", "from", "to", "out", "model"} & known.keys()
    return st.lists(st.sampled_from(sorted(known)), max_size=3, unique=True).flatmap(
        lambda names: st.fixed_dictionaries(
            {name: known[name] for name in sorted({*needed, *names})}
        )
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
@search
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
    ("generate", "--model=run", "--num_tokens=3"),
    ("checkpoint", "inspect", "--workdir=run", "--html"),
    ("checkpoint", "verify", "--workdir=run"),
    ("checkpoint", "reshard", "--from=run", "--to=new"),
    ("checkpoint", "export_params", "--workdir=run", "--out=new"),
    ("checkpoint", "to_hf", "--model=run", "--out=new"),
)


@given(data=st.data(), command=st.sampled_from(ON_RUNS))
@search
def test_a_damaged_run_ends_in_a_line(source, data, command):
    found = data.draw(
        st.lists(damages(source / "run"), min_size=1, max_size=3, unique_by=lambda one: one[0])
    )
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
@search
def test_a_damaged_model_directory_ends_in_a_line(model, data):
    check_model(model, data.draw(st.lists(damages(model / "model"), min_size=1, max_size=2)))


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
@search
def test_a_report_of_damaged_figures_ends_in_a_line(source, data, one_device):
    check_complete(source, data.draw(damages(source / "run", REPORTED)))
