"""Every way a model directory can be wrong is one error that names it, and nothing is written."""

import json

import numpy as np
import pytest
from refusals import check_refused
from safetensors.numpy import load_file, save_file

from zaya_jax.config import Model
from zaya_jax.pytorch import any_model, exchange, hf
from zaya_jax.pytorch import hf_names as names

MODEL = Model(
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
    folder = tmp_path / "in"
    folder.mkdir()
    tensors = {
        name: np.ones(shape, np.float32) for name, shape in hf.expected_shapes(MODEL).items()
    }
    save_file(tensors, folder / FILE)
    (folder / "config.json").write_text(json.dumps(names.model_to_json(MODEL, "float32")))
    return folder


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


def read(folder):
    """All of it, as the library does."""
    return any_model.find(folder).load_weights()


def refused(folder, says):
    """Loading and importing fail with one line that says so, and leave nothing behind."""
    for use in (lambda: read(folder), lambda: exchange.from_hf(folder, folder.parent / "work")):
        check_refused(says, use)
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def change_config(folder, **changes):
    found = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(found))


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
    for name, bad in ((NORM, np.nan), (names.EMBEDDING, np.inf), (names.balance_name(0), -np.inf))
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
    refused(source, r"model\.safetensors cannot be read, it is truncated or damaged")


def test_files_that_are_missing(tmp_path, source):
    check_refused(r"nowhere.config\.json is missing", hf.Directory, tmp_path / "nowhere")
    (source / FILE).unlink()
    refused(source, r"model\.safetensors is missing")
    (source / "config.json").unlink()
    refused(source, "holds no model; give a run's folder")


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("model-9.safetensors", r"model-9\.safetensors is missing"),
        ("model-2.safetensors", f"disagree about {NORM};"),
        (None, rf"model-1\.safetensors disagree about {NORM};"),
    ],
)
def test_an_index_that_names_wrong_files(sharded, file, says):
    folder, where = sharded
    read(folder)
    changed = (
        where | {NORM: file} if file is not None else {n: f for n, f in where.items() if n != NORM}
    )
    (folder / INDEX).write_text(json.dumps({"weight_map": changed}))
    refused(folder, says)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_experts_per_tok": 2}, "num_experts_per_tok=2 is not supported"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=False is not supported"),
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


def test_end_of_text_may_be_several(source):
    for eos in (7, [7, 9], None):
        change_config(source, eos_token_id=eos)
        work, out = source.parent / f"work {eos}", source.parent / f"out {eos}"
        exchange.from_hf(source, work)
        assert (
            json.loads((exchange.to_hf(work, out) / "config.json").read_text())["eos_token_id"]
            == eos
        )
