"""One name for a model in every program: a run, a step of it, a directory of transformers, the
hub's name."""

import jax
import numpy as np
import pytest
from refusals import refusal
from safetensors.numpy import load_file

import zaya_jax as zj
from experiments import generate
from experiments.configs import finetune
from experiments.evaluate import __main__ as evaluate
from zaya_jax import cli, config, trees
from zaya_jax.checkpoint import boxes, partial
from zaya_jax.config import Model
from zaya_jax.pytorch import any_model, exchange

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
)
NAMES = ("RUN", "RUN@0", "HF", "Zyphra/ZAYA1-tiny", "Zyphra/ZAYA1-tiny@v2")


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A model, saved as a run and as a directory of transformers."""
    root = tmp_path_factory.mktemp("any")
    given = config.default().to_dict() | {"model": config.to_dict(MODEL)}
    given["data"]["seq_len"] = 32
    model = zj.create(given)
    (root / "text.txt").write_text("some text to score\n" * 4)
    return model, root, {"RUN": str(model.save(root / "run")), "HF": str(model.to_hf(root / "hf"))}


@pytest.fixture
def hub(places, monkeypatch):
    """The hub has the directory under one name."""

    def download(name, revision, allow_patterns):
        assert (
            name == "Zyphra/ZAYA1-tiny"
            and revision in (None, "v2")
            and "*.safetensors" in allow_patterns
        )
        return places[2]["HF"]

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)


@pytest.mark.parametrize("name", NAMES)
def test_each_name_works_wherever_a_model_is_asked_for(places, hub, called, tmp_path, name):
    model, root, folders = places
    for short, folder in folders.items():
        name = name.replace(short, folder)
    before = sorted(path for path in root.rglob("*"))
    jax.tree.map(np.testing.assert_array_equal, zj.load(name).params, model.params)
    settings = finetune.get_config(name)
    assert (
        settings.model.hidden_size == 16
        and settings.run.init_from == name
        and settings.data.seq_len == 64
    )
    state, source = (
        {"params": model.params, "balance": {"bias": model.balance}},
        any_model.open_weights(name),
    )
    held = boxes.of_tree(state)
    partial.require_fit(source, held.arrays)
    jax.tree.map(
        np.testing.assert_array_equal, source.restore(held.leaves, held), trees.flat(state)
    )
    exported = load_file(exchange.to_hf(name, tmp_path / "out") / "model.safetensors")
    theirs = load_file(f"{folders['HF']}/model.safetensors")
    assert all(x.tobytes() == exported[key].tobytes() for key, x in theirs.items())
    code, out, _ = called(generate, f"--model={name}", "--prompt=ab", "--num_tokens=4")
    assert code == cli.DONE and "ab" in out
    options = f"--data={root / 'text.txt'}", f"--out={tmp_path / 'eval'}"
    assert called(evaluate, f"--model={name}", *options)[0] == cli.DONE
    assert before == sorted(path for path in root.rglob("*"))  # ten tokens take no copy


def test_a_name_that_nothing_has_is_one_line(places, monkeypatch, tmp_path):
    monkeypatch.chdir(places[1])
    for name, says in (
        ("run/typo", "run/typo is not a folder; give a run's folder"),  # not asked of the hub
        (
            "nobody/nothing",
            "nobody/nothing is not a folder here, and could not be downloaded from the Hugging Face hub",
        ),
        ("run@7", "run has no checkpoint of step 7; it has 0"),
    ):
        assert refusal(any_model.find, name).startswith(says)
    says = "config.run.init_from=run@7: run has no checkpoint of step 7; it has 0"
    assert refusal(any_model.open_weights, "run@7").startswith(says)
