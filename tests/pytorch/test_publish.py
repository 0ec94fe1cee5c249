"""Exports go to the hub whole, once, and by their owner's word; a card says what the hub and a person
need, and nothing by a path of this machine.

The hub is a small one on loopback; huggingface_hub talks to it as to the real one, but without
hf_xet, whose storage it does not have.
"""

import functools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from hub_server import TOKEN, serving
from huggingface_hub import constants, metadata_load
from saved_trees import save_tree

from experiments.checkpoint import __main__ as checkpoint
from zaya_jax import config
from zaya_jax.checkpoint.run import store
from zaya_jax.model import zaya
from zaya_jax.pytorch import any_model, exchange, hub
from zaya_jax.pytorch.card import UNPUBLISHED, Publication
from zaya_jax.text import tokenizers
from zaya_jax.training.workdir import open_workdir


@pytest.fixture
def server(monkeypatch, tmp_path):
    with serving() as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.address)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield found


@pytest.fixture
def run(called):
    return functools.partial(called, checkpoint)


@pytest.fixture(scope="module")
def export(tmp_path_factory, golden_dir):
    """A directory with a card that names a license."""
    out = tmp_path_factory.mktemp("publish") / "out"
    return exchange.to_hf(golden_dir / "base", out, publication=Publication(license="mit"))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_export_is_pushed_in_one_commit_and_stays(golden_dir, tmp_path):
    """In a process of its own, which HF_ENDPOINT sends to the hub."""
    out, base = tmp_path / "out", golden_dir / "base"
    with serving() as found:
        environment = {"HF_ENDPOINT": found.address, "HF_TOKEN": TOKEN}
        environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        options = (f"--model={base}", f"--out={out}", "--license=mit")
        options += ("--push=lab/tiny", "--private")
        done = subprocess.run(
            [sys.executable, "-m", "experiments.checkpoint", "to_hf", *options],
            env=os.environ | environment,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    assert f"written: {out}\npushed: {found.address}/lab/tiny/commit/1\n" in done.stdout
    assert found.repositories["lab/tiny"]["private"]
    assert found.repositories["lab/tiny"]["files"] == contents(out)
    assert found.calls.count("POST /api/models/lab/tiny/commit/main") == 1


# huggingface_hub hands httpx a file by `data`, when it has no hf_xet
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_a_push_that_broke_off_changes_nothing_there_and_is_repeated(run, server, export):
    push = ("push", f"--model={export}", "--to=ann/tiny", "--private")
    server.fails = "/commit/"
    code, _, err = run(*push)
    assert code == 4 and "the hub is in a bad mood" in err
    again = f"python -m experiments.checkpoint push --model={export} --to=ann/tiny --private"
    assert err.endswith(f"push it again, as often as you like: {again}\n")
    assert not server.repositories["ann/tiny"]["files"]
    server.fails = ""
    sent = [call for call in server.calls if call.startswith("PUT ")]
    for _ in range(2):
        assert run(*push)[0] == 0
    assert server.repositories["ann/tiny"]["files"] == contents(export)
    assert [call for call in server.calls if call.startswith("PUT ")] == sent
    assert server.calls.count("POST /api/models/ann/tiny/commit/main") == 2


TO_HF = "to_hf --model=BASE --out=NEW"
REFUSED = {
    f"{TO_HF} --push=ann/tiny": "--push=ann/tiny needs a license",
    f"{TO_HF} --push=tiny --license=mit": "--push=tiny is not a repository that this token writes to",
    f"{TO_HF} --push=bob/tiny --license=mit": "it is ann's: give ann/NAME or lab/NAME, or",
    f"{TO_HF} --private": "add --push=OWNER/NAME",
    "push --model=BASE --to=ann/tiny": "README.md names no license; write `license: apache-2.0`",
    "push --model=NEW --to=ann/tiny": "NEW/config.json",
    "push --model=EXPORT --to=ann/public --private": "ann/public is public already",
    "push --model=EXPORT --to=ann/sharded": "has other weights, model-00001-of-00002.safetensors",
}


@pytest.mark.parametrize("command", REFUSED)
def test_what_cannot_be_pushed_is_refused_in_a_line(
    run, server, export, golden_dir, tmp_path, command
):
    shard = {"model-00001-of-00002.safetensors": b""}
    for name, files in (("ann/public", {}), ("ann/sharded", shard)):
        server.repositories[name] = {"id": name, "private": False, "files": dict(files)}
    places = {"BASE": golden_dir / "base", "EXPORT": export, "NEW": tmp_path / "new"}
    says = REFUSED[command].replace("NEW", str(tmp_path / "new"))
    for name, place in places.items():
        command = command.replace(name, str(place))
    code, _, err = run(*command.split())
    assert code == 2 and says in err and err.count("\n") == 1
    assert not (tmp_path / "new").exists()
    assert not [call for call in server.calls if "commit" in call or "PUT" in call]


@pytest.mark.parametrize(
    ("token", "address", "says"),
    [
        ("", None, "no token found. You must provide a token or be logged in"),
        ("hf_wrong", None, "Invalid user token"),
        (
            TOKEN,
            "http://127.0.0.1:9",
            "Connection refused; check the network, HF_ENDPOINT and the token",
        ),
    ],
)
def test_a_missing_token_or_network_is_told_before_the_export(
    run, server, golden_dir, tmp_path, monkeypatch, token, address, says
):
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr(constants, "ENDPOINT", address or server.address)
    options = (f"--model={golden_dir / 'base'}", f"--out={tmp_path / 'out'}", "--license=mit")
    code, _, err = run("to_hf", *options, "--push=ann/tiny")
    assert code == 2 and says in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_license_that_the_hub_does_not_know_is_told_with_its_words(
    run, server, golden_dir, tmp_path
):
    options = (f"--model={golden_dir / 'base'}", f"--out={tmp_path / 'out'}", "--license=secret")
    code, _, err = run("to_hf", *options, "--push=ann/tiny")
    assert code == 4 and "- no license" in err
    assert hub.CARD in contents(tmp_path / "out") and not server.repositories["ann/tiny"]["files"]


SMALL = {
    "vocab_size": 264,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "moe_intermediate_size": 12,
    "num_experts": 2,
    "router_hidden_size": 6,
    "max_position_embeddings": 64,
}
CACHED = "/cache/hub/models--lab--big-base/snapshots/0123abc"


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run of two steps that began with a model of the hub, and evaluations of both."""
    folder = tmp_path_factory.mktemp("card") / "tiny"
    keys = config.default().to_dict()
    keys["model"] |= SMALL
    keys["data"] |= {"seq_len": 16, "mixture": ("/data/web=0.5", "/data/code.v2=0.5")}
    keys["run"]["init_from"] = CACHED
    settings = config.check(keys)
    open_workdir(folder, settings)
    tokenizers.load("bytes").save(folder / "tokenizer")
    params = zaya.init(settings.model, jax.random.key(1))
    meta = {"tokens": 64, "config": config.to_dict(settings), "metrics": {"eval/loss": 1.25}}
    steps = store.Store(folder)
    for step in (1, 2):
        state = {"params": params, "balance": {"bias": jnp.zeros((2, 3))}}
        save_tree(steps, step, state, meta | {"step": step})
        losses = {"/data/python": {"loss": 1.5}, "all": {"loss": None}}
        result = {"model": f"{folder}@{step}", "data": losses if step == 2 else {}}
        result["tasks"] = {"arc_easy": {"acc": [step / 8, 0.01]}}
        (folder / f"evaluation of {step}").mkdir()
        (folder / f"evaluation of {step}" / "evaluation.json").write_text(json.dumps(result))
    steps.close()
    return folder


def card_of(model, out, publication=UNPUBLISHED):
    made = exchange.to_hf(model, out, publication=publication)
    return (made / "README.md").read_text(encoding="utf-8")


def test_the_hub_reads_what_the_owner_and_the_run_say(workdir, tmp_path):
    said = Publication("lab/tiny", "apache-2.0", ("en", "no"), ("lab/web",))
    text = card_of(workdir, tmp_path / "out", said)
    assert metadata_load(tmp_path / "out" / "README.md") == {
        "license": "apache-2.0",
        "library_name": "transformers",
        "base_model": "lab/big-base",
        "datasets": ["lab/web"],
        "language": ["en", "no"],
        "pipeline_tag": "text-generation",
        "tags": ["zaya", "mixture-of-experts"],
    }
    assert "\n# tiny\n" in text and text.count('from_pretrained("lab/tiny")') == 2


def test_a_person_reads_what_it_is_and_how_good(workdir, tmp_path):
    text = card_of(workdir, tmp_path / "out")
    for line in (
        "- from: `tiny@2`, by zaya_jax ",
        "- began with: `lab/big-base`\n",
        "- license: none is chosen\n",
        "- data: `web`, `code.v2`\n",
        "- trained: 2 steps, 64 tokens of this run\n",
        "- held-out loss: 1.2500 nats a token at this step\n",
        "- tokenizer: 264 ids\n",
        "- every text begins with: `<|bos|>`; the tokenizer puts it there, ",
        "context of 64 tokens\n",
        'AutoTokenizer.from_pretrained("PATH")\ninputs = tokenizer("Once upon a time", ',
        "| `python` | loss, nats a token | 1.5000 |\n| `all` | loss, nats a token | ? |\n",
        "| `arc_easy` | acc | 0.2500 ± 0.0100 |\n",
    ):
        assert line in text, line
    assert "license" not in metadata_load(tmp_path / "out" / "README.md")


def test_no_path_of_this_machine_is_in_it(workdir, tmp_path):
    for number, model in enumerate((workdir, f"{workdir}@1", any_model.find(workdir))):
        text = card_of(model, tmp_path / str(number))
        assert not [path for path in ("/data", "/cache", str(workdir.parent)) if path in text]


def test_a_chat_model_is_asked_by_its_template(workdir, tmp_path):
    (workdir / "tokenizer" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    text = card_of(f"{workdir}@1", tmp_path / "out")
    (workdir / "tokenizer" / "chat_template.jinja").unlink()
    assert "inputs = tokenizer.apply_chat_template(\n" in text


def test_the_hub_s_name_of_an_imported_model_stays_with_it(tmp_path, golden_dir):
    """In the hub's cache its folder bears it."""
    cached = tmp_path / "models--lab--base" / "snapshots" / "0123"
    cached.parent.mkdir(parents=True)
    cached.symlink_to(golden_dir / "base")
    exchange.from_hf(cached, tmp_path / "run")
    exchange.to_hf(tmp_path / "run", tmp_path / "out")
    assert metadata_load(tmp_path / "out" / "README.md")["base_model"] == "lab/base"
