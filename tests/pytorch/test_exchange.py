"""What goes in comes out: directories to workdirs and back, bit for bit, streamed, whole or not at
all."""

import dataclasses
import json
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
from refusals import check_refused
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from saved_trees import save_tree

from zaya_jax import config
from zaya_jax.checkpoint.run import store
from zaya_jax.config import Model
from zaya_jax.model import zaya
from zaya_jax.pytorch import any_model, exchange, hf, tensor_files
from zaya_jax.pytorch import hf_names as names
from zaya_jax.text import tokenizers
from zaya_jax.training.workdir import open_workdir

MODEL = Model(
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    moe_intermediate_size=12,
    num_experts=2,
    router_hidden_size=6,
    max_position_embeddings=64,
)


def write_model(folder, model=MODEL, dtype_of=lambda name: "float32", **further):
    """A directory as transformers writes it, with random weights."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.standard_normal(shape).astype(exchange.DTYPES[dtype_of(name)])
        for name, shape in hf.expected_shapes(model).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(names.model_to_json(model, "float32") | further))
    return folder, tensors


def read_all(folder):
    return {
        k: x for file in sorted(folder.glob("*.safetensors")) for k, x in load_file(file).items()
    }


def assert_same(ours, theirs):
    assert set(ours) == set(theirs)
    for name, x in theirs.items():
        assert ours[name].dtype == x.dtype and ours[name].shape == x.shape, name
        assert ours[name].tobytes() == x.tobytes(), name


def mixed_dtypes(name):
    if name.endswith((names.BALANCE, "temp", "norm.weight")):
        return "float32"
    return "float16" if "conv" in name else "bfloat16"


@pytest.mark.parametrize("shard_gb", [5.0, 4e-6])
@pytest.mark.parametrize("dtype_of", [lambda name: "float32", mixed_dtypes])
def test_there_and_back_gives_the_same_bits_and_config(tmp_path, dtype_of, shard_gb):
    source, tensors = write_model(
        tmp_path / "in", dtype_of=dtype_of, transformers_version="5.0", chunk_size_feed_forward=7
    )
    exchange.from_hf(source, tmp_path / "work")
    out = exchange.to_hf(tmp_path / "work", tmp_path / "out", shard_gb=shard_gb)
    assert_same(read_all(out), tensors)
    files = sorted(out.glob("*.safetensors"))
    assert (len(files) > 1) == (shard_gb < 1) == (out / "model.safetensors.index.json").exists()
    with safe_open(files[0], framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}  # which transformers asks for
    assert json.loads((out / "config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )
    # And written shards are read again.
    exchange.from_hf(out, tmp_path / "again")
    assert_same(read_all(exchange.to_hf(tmp_path / "again", tmp_path / "out2")), tensors)


def test_golden_cases_come_back_bit_for_bit(golden_case, tmp_path):
    exchange.from_hf(golden_case, tmp_path / "work")
    out = exchange.to_hf(tmp_path / "work", tmp_path / "out")
    assert_same(load_file(out / "model.safetensors"), load_file(golden_case / "model.safetensors"))
    for name in ("config.json", "generation_config.json"):
        assert json.loads((out / name).read_text()) == json.loads((golden_case / name).read_text())


def test_a_repeated_tied_head_is_repeated_again(tmp_path):
    source, tensors = write_model(tmp_path / "in")
    tensors[names.HEAD] = tensors[names.EMBEDDING]
    save_file(tensors, source / "model.safetensors")
    exchange.from_hf(source, tmp_path / "work")
    assert_same(read_all(exchange.to_hf(tmp_path / "work", tmp_path / "out")), tensors)


def test_a_chosen_dtype_leaves_balancing_biases_float32(tmp_path):
    source, tensors = write_model(tmp_path / "in")
    exchange.from_hf(source, tmp_path / "work")
    out = exchange.to_hf(tmp_path / "work", tmp_path / "out", dtype="bfloat16")
    for name, x in read_all(out).items():
        kept = name.endswith(names.BALANCE)
        assert x.dtype == (np.float32 if kept else ml_dtypes.bfloat16), name
        np.testing.assert_array_equal(x, tensors[name].astype(x.dtype))
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def train_state(workdir, settings, step):
    """A workdir such as pretrain leaves: a checkpoint with an optimizer's state in it."""
    open_workdir(workdir, settings)
    params = zaya.init(settings.model, jax.random.key(1))
    bias = jax.random.normal(jax.random.key(2), (MODEL.num_hidden_layers, MODEL.num_experts + 1))
    checkpoints = store.Store(workdir)
    save_tree(
        checkpoints,
        step,
        {"params": params, "optimizer": {"mean": params}, "balance": {"bias": bias}},
        {"step": step},
    )
    checkpoints.close()
    return params, bias


def test_a_trained_workdir_is_exported_in_float32_with_its_phase_s_rope(tmp_path):
    given = config.default().to_dict()
    given["model"] = config.to_dict(MODEL)
    given["data"] |= {"seq_len": 16, "global_batch": 2}
    given["schedule"]["phases"] = ({"tokens": 64}, {"tokens": 64, "rope_theta": 777.0})
    params, bias = train_state(tmp_path / "work", config.check(given), 3)
    out = exchange.to_hf(f"{tmp_path / 'work'}@3", tmp_path / "out")
    assert all(x.dtype == np.float32 for x in read_all(out).values())
    assert hf.Directory(out).model.rope_parameters.hybrid.rope_theta == 777.0
    params["layers"]["router"]["eda"] = params["layers"]["router"]["eda"].at[0].set(1.0)
    for name in (out, f"{tmp_path / 'work'}@3"):
        ours, our_bias = any_model.find(name).load_weights()
        jax.tree.map(np.testing.assert_array_equal, ours, params)
        np.testing.assert_array_equal(our_bias, bias)
    check_refused(
        "no checkpoint of step 7; it has 3",
        exchange.to_hf,
        f"{tmp_path / 'work'}@7",
        tmp_path / "out7",
    )


def test_the_tokenizer_goes_along(tmp_path):
    source, _ = write_model(tmp_path / "in", dataclasses.replace(MODEL, vocab_size=300))
    trained = tokenizers.train_bpe(["some words, some more words"] * 20, 270)
    trained.save(source)
    (source / tokenizers.META_FILE).unlink()
    (source / "tokenizer_config.json").write_text('{"model_max_length": 64}')
    exchange.from_hf(source, tmp_path / "work")
    stored = tokenizers.load(tmp_path / "work" / "tokenizer")
    assert stored.encode("some words") == trained.encode("some words")
    out = exchange.to_hf(tmp_path / "work", tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert not (out / tokenizers.META_FILE).exists()


PEAK = """
import resource, sys
from zaya_jax.pytorch import exchange
import jax
jax.devices()
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
if sys.argv[1] == "from_hf":
    exchange.from_hf(sys.argv[2], sys.argv[3])
else:
    exchange.to_hf(sys.argv[2], sys.argv[3], shard_gb=0.04)
print(peak() - before)
"""


@pytest.mark.slow
def test_host_memory_stays_near_one_shard(tmp_path):
    """290 MB with tensors of at most 17 MB: both ways need less than half of it."""
    model = Model(
        vocab_size=8000,
        hidden_size=512,
        num_hidden_layers=12,
        num_attention_heads=4,
        head_dim=32,
        moe_intermediate_size=256,
        num_experts=14,
        router_hidden_size=32,
    )
    source, tensors = tmp_path / "in", hf.expected_shapes(model)
    source.mkdir()
    specs = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in tensors.items()}
    rng = np.random.default_rng(0)
    tensor_files.write_sharded(
        source, specs, lambda n: rng.standard_normal(tensors[n], np.float32), 40_000_000
    )
    (source / "config.json").write_text(json.dumps(names.model_to_json(model, "float32")))
    size = sum(map(tensor_files.num_bytes, specs.values()))
    assert size > 250e6
    for way in (
        ("from_hf", source, tmp_path / "work"),
        ("to_hf", tmp_path / "work", tmp_path / "out"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", PEAK, *map(str, way)], capture_output=True, text=True, check=True
        )
        assert int(done.stdout) < size / 2, way[0]
    there, back = hf.Directory(source), hf.Directory(tmp_path / "out")
    for name in tensors:
        np.testing.assert_array_equal(there.tensor(name), back.tensor(name))


def test_a_model_with_linear_attention_is_not_exported(tmp_path):
    given = config.default().to_dict()
    given["model"] = config.to_dict(MODEL) | {"layer_types": ("hybrid", "hybrid_linear", "hybrid")}
    given["data"]["seq_len"] = 16
    train_state(tmp_path / "work", config.check(given), 3)
    check_refused(
        r"layer 1 is hybrid_linear, which PyTorch's zaya does not have; only",
        exchange.to_hf,
        tmp_path / "work",
        tmp_path / "out",
    )
    assert not (tmp_path / "out").exists()
