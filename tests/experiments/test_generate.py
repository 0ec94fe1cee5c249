"""Continuing a prompt from the command line: its output, where it stops, and refusals."""

import dataclasses
import functools
import io
import re
import shutil

import jax
import numpy as np
import pytest
from saved_trees import save_tree

from experiments import generate
from zaya_jax import config
from zaya_jax.checkpoint.run import store
from zaya_jax.checkpoint.source import SealedSource
from zaya_jax.config import Model
from zaya_jax.model import decode, zaya
from zaya_jax.pytorch import any_model
from zaya_jax.text import tokenizers
from zaya_jax.training import sample
from zaya_jax.training.workdir import open_workdir, read_config

MODEL = Model(
    vocab_size=264,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    moe_intermediate_size=12,
    num_experts=2,
    router_hidden_size=6,
    max_position_embeddings=64,
    initializer_range=0.5,
    lm_head_bias=True,
)


CACHE = (
    r"cache: [\d,]+ bytes a token and [\d,]+ a row, \d+\.\d MiB on a device for \d of up to \d+"
    r" tokens\n"
)


# biases of the head, with which a model writes only letters, and ends each document
LETTERS = np.where(np.isin(np.arange(264), [*b"abcdefghijklmnopqrstuvwxyz"]), np.float32(100), 0)
ENDS = 1000 * np.eye(264, dtype=np.float32)[257]


def params(step, bias):
    return zaya.init(MODEL, jax.random.key(step)) | {"head": {"bias": bias}}


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run's folder with two steps, whose last model writes only letters."""
    given = config.Config(model=MODEL, data=config.Data(seq_len=16))
    folder = open_workdir(tmp_path_factory.mktemp("runs") / "small", given)
    tokenizers.load("bytes").save(folder / "tokenizer")
    checkpoints = store.Store(folder)
    for step, bias in ((3, ENDS), (5, LETTERS)):
        state = {
            "params": params(step, bias),
            "balance": {"bias": zaya.init_balance(MODEL)},
            "optimizer": {"mean": params(step, bias)},
        }
        save_tree(checkpoints, step, state, {"step": step})
    checkpoints.close()
    return folder


def tree(folder):
    """Everything below a folder, with its content."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture
def run(called):
    return functools.partial(called, generate)


def test_it_prints_what_the_model_generates(run, workdir):
    code, out, err = run(f"--model={workdir}", "--prompt=abc", "--num_tokens=20")
    assert code == 0 and re.fullmatch(CACHE, err)
    assert re.fullmatch(r"abc[a-z]{20}\n", out)
    precision, balance = read_config(workdir).precision, zaya.init_balance(MODEL)
    decoder = decode.Decoder(MODEL, params(5, LETTERS), balance, precision)
    (new,) = decode.generate(decoder, [[256, *b"abc"]], 20)
    assert out == "abc" + bytes(new).decode() + "\n"


def test_it_takes_the_kernels_that_the_config_leaves_and_so_does_a_runs_sample(
    run, workdir, monkeypatch, tmp_path
):
    heard, making = [], decode.chip.making
    own = read_config(workdir)
    log = dataclasses.replace(own.log, sample_tokens=2, sample_temperature=0.0)
    own = dataclasses.replace(own, kernels=("attention",), log=log)
    monkeypatch.setattr(
        decode.chip, "making", lambda target: heard.append(target.kernels) or making(target)
    )
    monkeypatch.setattr(any_model, "config_at", lambda *_: own)
    folder = tmp_path / "run"
    shutil.copytree(workdir, folder)
    assert run(f"--model={folder}", "--prompt=a", "--num_tokens=2")[0] == 0
    assert len(heard) == 3  # the prompt, its first token, the others
    sample.write_sample(folder, own, tokenizers.load("bytes"), SealedSource(folder, 5))
    assert heard == [("attention",)] * 6


def test_options_without_effect_are_named(run, workdir):
    options = (f"--model={workdir}", "--prompt=abc", "--num_tokens=4")
    plain = run(*options)
    for more, says in (
        (["--top_p=0.5", "--min_p=0.1"], "top_p=0.5, min_p=0.1 without effect: temperature=0"),
        (["--mesh=data=8"], "--mesh has no effect without context=N"),
    ):
        code, out, err = run(*options, *more)
        assert (code, out) == plain[:2] and err.count("note: ") == 1 and f"note: {says}" in err
    assert "note: " not in run(*options, "--top_p=0.5", "--temperature=1", "--mesh=context=2")[2]


def test_sampling_by_seed_and_a_prompt_from_a_file(run, workdir, tmp_path):
    (tmp_path / "prompt.txt").write_bytes("caf\u00e9\r\n".encode())
    options = (
        f"--model={workdir}",
        f"--prompt_file={tmp_path / 'prompt.txt'}",
        "--num_tokens=12",
        "--temperature=3",
    )
    one, same, other = run(*options)[1], run(*options)[1], run(*options, "--seed=1")[1]
    assert one == same != other
    assert re.fullmatch("caf\u00e9\r\n[a-z]{12}\n", one)


def test_it_stops_at_the_end_of_the_document(run, workdir):
    options = (f"--model={workdir}@3", "--prompt=abc", "--num_tokens=20")
    assert run(*options)[:2] == (0, "abc\n")


def test_a_cache_over_eight_devices_gives_the_same_text(run, workdir):
    options = (f"--model={workdir}", "--prompt=abc", "--prompt=a longer one", "--num_tokens=12")
    alone, over = run(*options), run(*options, "--mesh=context=8")
    assert over[:2] == alone[:2] == (0, alone[1]) and re.fullmatch(CACHE, over[2])


LINE = "[a-z]{5}\n"


@pytest.mark.parametrize(
    ("given", "code", "answers", "said"),
    [
        ("h\u00e9?\n\nno".encode(), 0, LINE * 2, CACHE),
        (b"", 0, "", ""),
        (
            b"hi\ncaf\xe9\n",
            2,
            LINE,
            CACHE + r"error: line 2 of the input is not UTF-8 \(byte 0xe9 at 3\).*",
        ),
        (
            b"hi\n" + b"x" * 60,
            2,
            LINE,
            CACHE + "error: line 2 of the input: this turn alone has 80 tokens, and there is room"
            " for 59 beside.*",
        ),
        # Three turns fill the context: the first is left out, and the rest of the conversation
        # goes on; after a reset its answer is the same again.
        (
            b"one\ntwo\nthree\n/reset\none\n",
            0,
            rf"(?P<first>{LINE})({LINE}){{2}}(?P=first)",
            CACHE + "note: the model does not see the 2 oldest turns any more\n",
        ),
    ],
)
def test_it_talks_until_the_input_ends(run, workdir, monkeypatch, given, code, answers, said):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given)))
    found, out, err = run(f"--model={workdir}", "--chat", "--num_tokens=5")
    assert found == code and re.fullmatch(answers, out)
    assert re.fullmatch(said, err, re.DOTALL)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--model=/nowhere"], "is not a folder; give a run's"),
        (["--model={empty}"], "has no checkpoint; train first"),
        (["--model={run}@4"], "no checkpoint of step 4; it has 3, 5"),
        (["--model={run}", "--prompt_file={bad}"], "not UTF-8 (byte 0xe9 at 3)"),
        (
            ["--model={run}", "--num_tokens=64"],
            "that exceeds the model's max_position_embeddings=64",
        ),
        (["--model={run}", "--num_tokens=0"], "argument --num_tokens: '0' must be at least 1"),
        (
            ["--model={run}", "--temperature=nan"],
            "argument --temperature: 'nan' must be at least 0",
        ),
        (["--model={run}", "--seed=4294967296"], "must be at least 0 and at most 4,294,967,295"),
        (["--model={run}", "--prompt=caf\udce9"], "--prompt is not UTF-8; convert it"),
        (["--model={run}", "--chat", "--system=caf\udce9"], "--system is not UTF-8; convert it"),
        (["--model={run}", "--system=a"], "--system applies to a conversation; give --chat"),
        (["--model={run}", "--prompt=a", "--prompt_file=b"], "not allowed with"),
        (["--model={run}", "--stop="], "--stop= is empty"),
        (["--model={run}", "--mesh=context"], "argument --mesh: 'context' is not AXIS=N"),
        (
            ["--model={run}", "--num_tokens=9", "--prompt=a", "--prompt=" + "b" * 70],
            "prompt 2 of 2 has 71 tokens",
        ),
        ([], "required: --model"),
    ],
)
def test_bad_input_is_one_line(run, workdir, tmp_path, options, says):
    (tmp_path / "bad").write_bytes(b"caf\xe9")
    (tmp_path / "empty").mkdir()
    places = {name: tmp_path / name for name in ("bad", "empty")} | {"run": workdir}
    before = tree(tmp_path), tree(workdir)
    code, out, err = run(*(o.format(**places) for o in options))
    assert (code, out) == (2, "") and before == (tree(tmp_path), tree(workdir))
    assert err.startswith("error: ") and err.count("\n") == 1 and says in err and len(err) < 600
