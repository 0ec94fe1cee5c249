"""One name for a model in every program: a run, a step of it, a directory of transformers, the
hub's name. Every way a model directory can be wrong is one error that names it."""

import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from refusals import check_refused
from safetensors.numpy import load_file, save_file
from test_exchange import read_json, write_model

import zaya_jax as zj
from experiments import generate
from experiments.configs import finetune
from experiments.evaluate import __main__ as evaluate
from zaya_jax import cli, config, trees
from zaya_jax.checkpoint import boxes, partial
from zaya_jax.config import Model
from zaya_jax.pytorch import any_model, exchange, hf
from zaya_jax.pytorch import hf_names as names

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
same = functools.partial(jax.tree.map, np.testing.assert_array_equal)
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
    """The hub has the directory under one name; the revisions that it was asked for."""
    asked = []

    def download(name, revision, allow_patterns):
        assert name == "Zyphra/ZAYA1-tiny" and "*.safetensors" in allow_patterns
        asked.append(revision)
        return places[2]["HF"]

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return asked


@pytest.mark.parametrize("name", NAMES)
def test_each_name_works_wherever_a_model_is_asked_for(places, hub, called, tmp_path, name):
    model, root, folders = places
    for short, folder in folders.items():
        name = name.replace(short, folder)
    before = sorted(root.rglob("*"))
    same(zj.load(name).params, model.params)
    revisions = {"Zyphra/ZAYA1-tiny": [None], "Zyphra/ZAYA1-tiny@v2": ["v2"]}
    assert hub == revisions.get(name, [])  # asked once
    settings = finetune.get_config(name)
    found = settings.model.hidden_size, settings.run.init_from, settings.data.seq_len
    assert found == (16, name, 64)
    state = {"params": model.params, "balance": {"bias": model.balance}}
    source, held = any_model.open_weights(name), boxes.of_tree(state)
    partial.require_fit(source, held.arrays)
    same(source.restore(held.leaves, held), trees.flat(state))
    exported = exchange.to_hf(name, tmp_path / "out") / "model.safetensors"
    assert exported.read_bytes() == Path(folders["HF"], "model.safetensors").read_bytes()
    code, out, _ = called(generate, f"--model={name}", "--prompt=ab", "--num_tokens=4")
    assert code == cli.DONE and "ab" in out
    options = f"--data={root / 'text.txt'}", f"--out={tmp_path / 'eval'}"
    assert called(evaluate, f"--model={name}", *options)[0] == cli.DONE
    assert before == sorted(root.rglob("*"))  # ten tokens take no copy


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("run/typo", "run/typo is not a folder; give a run's folder"),  # not asked of the hub
        (
            "nobody/nothing",
            "nobody/nothing is not a folder here, and could not be downloaded from the Hugging Face hub",
        ),
        ("run@7", "run has no checkpoint of step 7; it has 0"),
    ],
)
def test_a_name_that_nothing_has_is_one_line(places, monkeypatch, name, says):
    monkeypatch.chdir(places[1])
    check_refused(f"^{says}", any_model.find, name)


SMALLEST = Model(
    vocab_size=20,
    hidden_size=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    moe_intermediate_size=4,
    num_experts=2,
    router_hidden_size=4,
    max_position_embeddings=32,
)
NORM = "model.layers.1.input_layernorm.weight"
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def source(tmp_path):
    """A good directory, to be spoilt."""
    return write_model(tmp_path / "in", SMALLEST)[0]


@pytest.fixture
def sharded(source):
    """The same in two files and an index."""
    tensors = load_file(source / FILE)
    (source / FILE).unlink()
    where = {name: f"model-{1 + (name > NORM)}.safetensors" for name in tensors}
    for file in set(where.values()):
        save_file({name: x for name, x in tensors.items() if where[name] == file}, source / file)
    (source / INDEX).write_text(json.dumps({"weight_map": where}))
    return source, where


def refused(folder, says):
    """Loading and importing fail with one line that says so, and leave nothing behind."""
    check_refused(says, lambda: any_model.find(folder).load_weights())
    check_refused(says, exchange.from_hf, folder, folder.parent / "work")
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def change_config(folder, **changes):
    changed = read_json(folder / "config.json") | changes
    (folder / "config.json").write_text(json.dumps(changed))


TENSORS = {
    "one is missing": (lambda t: t.pop(NORM), f"lacks tensor {NORM}:"),
    "one too many": (
        lambda t: t.update({"model.layers.2.foo": np.ones(1, np.float32)}),
        r"unknown tensor model\.layers\.2\.foo:",
    ),
    "misshapen": (
        lambda t: t.update({NORM: np.ones((8, 1), np.float32)}),
        rf"{NORM} has shape \(8, 1\), expected \(8,\)",
    ),
    "of another kind": (
        lambda t: t.update({NORM: np.ones(8, np.int64)}),
        f"{NORM} is I64, not F32",
    ),
    "an untied head": (
        lambda t: t.update({names.HEAD: 2 * t[names.EMBEDDING]}),
        "the head must be tied",
    ),
} | {
    f"{bad} in {name}": (
        lambda t, name=name, bad=bad: t[name].reshape(-1).__setitem__(0, bad),
        rf"{name} has 1 of [\d,]+ numbers that are not finite",
    )
    for name, bad in (
        (NORM, np.nan),
        (names.EMBEDDING, np.inf),
        (names.LAYER.format(0) + names.BALANCE, -np.inf),
    )
}


@pytest.mark.parametrize("how", TENSORS)
def test_wrong_tensors(source, how):
    change, says = TENSORS[how]
    tensors = load_file(source / FILE)
    change(tensors)
    save_file(tensors, source / FILE)
    refused(source, says)


@pytest.mark.parametrize("kept", [0, 100, -1])
def test_a_file_that_was_cut_off(source, kept):
    (source / FILE).write_bytes((source / FILE).read_bytes()[:kept])
    refused(source, r"model\.safetensors cannot be read, it is missing, truncated or damaged")


def test_files_that_are_missing(source):
    (source / FILE).unlink()
    refused(source, r"model\.safetensors cannot be read, it is missing")
    (source / "config.json").unlink()
    check_refused(r"in.config\.json is missing", hf.Directory, source)
    refused(source, "has no checkpoint; train first, or give a run")


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("model-9.safetensors", r"model-9\.safetensors cannot be read, it is missing"),
        ("model-2.safetensors", f"disagree about {NORM};"),
        (None, rf"model-1\.safetensors disagree about {NORM};"),
    ],
)
def test_an_index_that_names_wrong_files(sharded, file, says):
    folder, where = sharded
    any_model.find(folder).load_weights()
    changed = {name: place for name, place in (where | {NORM: file}).items() if place}
    (folder / INDEX).write_text(json.dumps({"weight_map": changed}))
    refused(folder, says)


def test_a_tensor_that_two_files_have_is_refused(sharded):
    """Which of them counts depends on the reader."""
    folder, _ = sharded
    more = load_file(folder / "model-2.safetensors") | {NORM: np.zeros(8, np.float32)}
    save_file(more, folder / "model-2.safetensors")
    refused(folder, rf"model-2\.safetensors disagree about {NORM};")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_experts_per_tok": 2}, "num_experts_per_tok=2 is out of range"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=False is not one of True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config has quant_method=None"),
        ({"model_type": "llama"}, "model_type is 'llama'; only models of transformers' 'zaya'"),
        ({"num_hidden_layers": 3, "layer_types": None}, r"lacks tensor model\.layers\.2\."),
        ({"eos_token_id": 20}, "eos_token_id=20 is outside the vocabulary"),
        ({"num_shared_experts": 1}, "unknown key 'num_shared_experts'=1"),
        (
            {"layer_types": ["hybrid", "hybrid_linear"]},
            "layer 1 is hybrid_linear, which PyTorch's zaya does not",
        ),
        (
            {"rope_parameters": {"hybrid": {"rope_type": "yarn", "rope_theta": 1e4}}},
            "rope_type='yarn'",
        ),
        (
            {"rope_parameters": {"hybrid": {"rope_theta": 1e4, "factor": 8.0}}},
            "rope_parameters.hybrid.factor",
        ),
    ],
)
def test_a_config_with_a_trait_that_is_not_zaya_s(source, changes, says):
    change_config(source, **changes)
    refused(source, says)


@pytest.mark.parametrize("eos", [7, [7, 9], None])
def test_end_of_text_may_be_several(source, tmp_path, eos):
    change_config(source, eos_token_id=eos)
    exchange.from_hf(source, tmp_path / "work")
    out = exchange.to_hf(tmp_path / "work", tmp_path / "out")
    assert read_json(out / "config.json")["eos_token_id"] == eos
