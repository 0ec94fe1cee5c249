"""Exports go to the hub whole, once, and by their owner's word; a card says what a reader needs.

The hub is a small one on loopback; huggingface_hub talks to it as to the real one, but without
hf_xet, whose storage it does not have.
"""

import functools
import os
import subprocess
import sys

import pytest
from hub_server import TOKEN, serving
from huggingface_hub import constants

from experiments.checkpoint import __main__ as checkpoint
from zaya_jax.pytorch import exchange, hub
from zaya_jax.pytorch.card import Publication


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
