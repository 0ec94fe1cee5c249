"""Every way a model directory can be wrong is one error that names it, and nothing is written."""

import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from zaya_jax import cli
from zaya_jax.checkpoint import audit, lock, store
from zaya_jax.config import Model, UserError
from zaya_jax.pytorch import exchange, hf
from zaya_jax.pytorch import hf_names as names

MODEL = Model(
    vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=4,
    moe_intermediate_size=4, num_experts=2, router_hidden_size=4, max_position_embeddings=32,
)  # fmt: skip
NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture
def source(tmp_path):
    """A good directory, to be spoilt."""
    folder = tmp_path / "in"
    folder.mkdir()
    tensors = {name: np.ones(shape, np.float32) for name, shape in hf.expected_shapes(MODEL).items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(names.model_to_json(MODEL, "float32")))
    return folder


def refused(folder, says):
    """Loading and importing fail with one line that says so, and leave nothing behind."""
    for use in (lambda: hf.load(folder), lambda: exchange.from_hf(folder, folder.parent / "work")):
        with pytest.raises(UserError, match=says) as caught:
            use()
        assert "\n" not in str(caught.value)
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def change_config(folder, **changes):
    held = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(held))


def test_the_directory_itself(tmp_path, source):
    with pytest.raises(UserError, match="nowhere is not a directory"):
        hf.load(tmp_path / "nowhere")
    (source / "model.safetensors").unlink()
    refused(source, r"model\.safetensors is missing")


def test_a_missing_tensor(source):
    change_tensors(source, lambda t: t.pop(NORM))
    refused(source, f"lacks tensor {NORM}, which")


def test_several_missing_tensors_are_counted(source):
    change_tensors(
        source, lambda t: [t.pop(name) for name in sorted(t) if name.startswith("model.layers.1.")]
    )
    refused(source, r"lacks tensor model\.layers\.1\.[a-z_.]+ and \d+ more")


def test_an_extra_tensor(source):
    change_tensors(source, lambda t: t.update({"model.layers.2.foo": np.ones(1, np.float32)}))
    refused(source, r"unknown tensor model\.layers\.2\.foo;")


@pytest.mark.parametrize(
    "name", ["²", "model.layers.²", "9" * 5000, "model.layers." + "1" * 5000 + ".x", "a\nb"]
)
def test_names_that_no_model_has(source, name, capsys):
    change_tensors(source, lambda t: t.update({name: np.ones(1, np.float32)}))
    code = cli.exit_code(lambda: exchange.from_hf(source, source.parent / "work"))
    said = capsys.readouterr().err
    assert code == cli.BAD_INPUT and said.startswith("error: ") and said.count("\n") == 1 and len(said) < 1600
    assert "unknown tensor" in said


def test_a_misshapen_tensor(source):
    change_tensors(source, lambda t: t.update({NORM: np.ones((8, 1), np.float32)}))
    refused(source, rf"{NORM} has shape \(8, 1\), expected \(8,\)")


def test_a_tensor_of_another_kind(source):
    change_tensors(source, lambda t: t.update({NORM: np.ones(8, np.int64)}))
    refused(source, f"{NORM} has dtype I64, save it as one of F32")


@pytest.mark.parametrize("name", [NORM, names.EMBEDDING, names.balance_name(0)])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite(source, name, bad):
    change_tensors(source, lambda t: t[name].reshape(-1).__setitem__(0, bad))
    refused(source, rf"{name} has 1 of [\d,]+ numbers that are not finite")


@pytest.mark.parametrize("pickle", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt"])
def test_pickles_alone(source, pickle):
    (source / "model.safetensors").rename(source / pickle)
    refused(source, rf"no safetensors but {pickle}, which may run code .* safe_serialization=True")


def test_no_model_type(source):
    held = json.loads((source / "config.json").read_text())
    del held["model_type"]
    (source / "config.json").write_text(json.dumps(held))
    refused(source, "it has no model_type; only models of transformers' 'zaya'")


def test_an_untied_head(source):
    change_tensors(source, lambda t: t.update({names.HEAD: 2 * t[names.EMBEDDING]}))
    refused(source, "the head must be tied")


@pytest.mark.parametrize("keep", [0, 7, 100, 0.5, -1])
def test_a_truncated_file(source, keep):
    whole = (source / "model.safetensors").read_bytes()
    cut = int(len(whole) * keep) if isinstance(keep, float) else keep
    (source / "model.safetensors").write_bytes(whole[:cut])
    refused(source, r"model\.safetensors cannot be read, it is truncated or damaged")


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}',
        b"\xff\xfe",
    ],
)
def test_a_damaged_header(source, header):
    raw = len(header).to_bytes(8, "little") + header + bytes(8)
    (source / "model.safetensors").write_bytes(raw)
    refused(source, r"model\.safetensors cannot be read, it is truncated or damaged")


@pytest.fixture
def sharded(source):
    """The same in two files and an index."""
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    where = {name: f"model-{1 + (name > NORM)}.safetensors" for name in tensors}
    for file in set(where.values()):
        save_file({name: x for name, x in tensors.items() if where[name] == file}, source / file)
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return source, where


def write_index(folder, where):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def test_a_good_index_passes(sharded):
    hf.load(sharded[0])


def test_an_index_naming_an_absent_file(sharded):
    folder, where = sharded
    write_index(folder, where | {NORM: "model-9.safetensors"})
    refused(folder, r"model-9\.safetensors is missing")


@pytest.mark.parametrize("file", ["../model-1.safetensors", "/etc/model.safetensors", "", "..", 3])
def test_an_index_naming_a_file_elsewhere(sharded, file):
    folder, where = sharded
    write_index(folder, where | {NORM: file})
    refused(folder, rf"places {NORM} in|is missing")


def test_an_index_that_disagrees_with_a_file(sharded):
    folder, where = sharded
    write_index(folder, where | {NORM: "model-2.safetensors"})
    refused(folder, rf"model-2\.safetensors lacks {NORM}, which|model-1\.safetensors holds {NORM}, unknown")
    write_index(folder, {name: file for name, file in where.items() if name != NORM})
    refused(folder, rf"model-1\.safetensors holds {NORM}, unknown to")


@pytest.mark.parametrize("index", ["{}", '{"weight_map": []}', "nothing", '{"weight_map": {}}'])
def test_an_index_that_is_none(sharded, index):
    (sharded[0] / "model.safetensors.index.json").write_text(index)
    refused(sharded[0], r"index\.json (has no weight_map|cannot be read as JSON)")


@pytest.mark.parametrize("text", ["", "{", "[1]", b"\xff{}"])
def test_a_config_that_is_no_json_object(source, text):
    (source / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(source, r"config\.json (cannot be read as JSON|holds list)")


def test_a_missing_config(source):
    (source / "config.json").unlink()
    refused(source, r"config\.json is missing")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("num_experts_per_tok", 2, "num_experts_per_tok=2 is not supported"),
        ("hidden_act", "gelu", "hidden_act='gelu' is not supported"),
        ("tie_word_embeddings", False, "tie_word_embeddings=False is not supported"),
        ("attention_dropout", 0.1, "attention_dropout=0.1 is not supported"),
        ("quantization_config", {"bits": 4}, "quantization_config is set"),
        ("model_type", "llama", "model_type is 'llama'; only models of transformers' 'zaya'"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps=nan is out of range"),
        ("num_hidden_layers", 10**9, "num_hidden_layers=1000000000 is out of range"),
        ("eos_token_id", 20, "eos_token_id=20 is outside the vocabulary"),
        ("num_shared_experts", 1, "unknown key 'num_shared_experts'=1"),
        ("num_key_value_heads", 3, "is not a multiple"),
        ("hidden_size", "8", "hidden_size='8' has the wrong type"),
        ("layer_types", ["hybrid", "mamba"], "'mamba'"),
        ("layer_types", ["hybrid", "hybrid_sliding"], "sliding_window=None"),
        (
            "layer_types",
            ["hybrid", "hybrid_linear"],
            "layer 1 is hybrid_linear, which PyTorch's zaya does not",
        ),
        ("layer_types", ["hybrid"], "names 1 layers"),
        ("layer_types", "hybrid", "layer_types"),
        ("layer_types", 5, "layer_types is 5; expected a list"),
        ("layer_types", True, "layer_types is True; expected a list"),
        ("rope_parameters", {"hybrid": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type='yarn'"),
        ("rope_parameters", {"hybrid": {"rope_theta": 1e4, "factor": 8.0}}, "rope_parameters.hybrid.factor"),
        ("rope_parameters", {"full": {"rope_theta": 1e4}}, "rope_parameters.full is unknown"),
        ("rope_parameters", {"hybrid": 3}, "rope_parameters.hybrid is unknown"),
        ("rope_parameters", [1], "rope_parameters"),
        ("num_experts", 3, r"gate_up_proj has shape|gate\..* has shape"),
        ("attention_bias", True, "lacks tensor model.layers.0.self_attn"),
        ("eos_token_id", "x", "eos_token_id='x' has the wrong type"),
    ],
)
def test_a_config_with_a_trait_that_is_not_zaya_s(source, key, value, says):
    change_config(source, **{key: value})
    refused(source, says)


@pytest.mark.parametrize(
    ("num_layers", "says"),
    [(3, r"lacks tensor model\.layers\.2\."), (1, r"unknown tensor model\.layers\.1\.")],
)
def test_another_number_of_layers(source, num_layers, says):
    change_config(source, num_hidden_layers=num_layers, layer_types=None)
    refused(source, says)


@pytest.mark.parametrize("eos", [7, [7, 9], None])
def test_end_of_text_may_be_several(source, eos):
    change_config(source, eos_token_id=eos)
    exchange.from_hf(source, source.parent / "work")
    out = exchange.to_hf(source.parent / "work", source.parent / "out")
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == eos


@pytest.mark.parametrize(("module", "name"), [(store, "latest_step"), (audit, "require")])
def test_a_step_that_is_deleted_while_it_is_exported(source, monkeypatch, module, name):
    workdir, function = exchange.from_hf(source, source.parent / "work"), getattr(module, name)

    def then_gone(*args):
        found = function(*args)
        shutil.rmtree(workdir / "checkpoints" / "0", ignore_errors=True)
        return found

    monkeypatch.setattr(module, name, then_gone)
    with pytest.raises(UserError, match=r"^step 0 of .* is gone meanwhile, .*; it has no other$"):
        exchange.to_hf(workdir, source.parent / "out")
    with pytest.raises(UserError, match="is gone meanwhile"):
        exchange.read_weights(workdir, 0, MODEL)
    assert sorted(p.name for p in source.parent.iterdir()) == ["in", "work"]


def test_byte_ranges_that_are_no_integers(source):
    raw = (source / "model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    for kind in (float, bool, str):
        wrong = {n: e | {"data_offsets": [kind(x) for x in e["data_offsets"]]} for n, e in header.items()}
        content = json.dumps(wrong).encode()
        (source / "model.safetensors").write_bytes(
            len(content).to_bytes(8, "little") + content + raw[8 + size :]
        )
        refused(source, r"model\.safetensors cannot be read, it is truncated or damaged")


@pytest.mark.parametrize("file", ["x" * 5000, "a\0b", "x\nb.safetensors", "\ud800"])
def test_an_index_with_a_name_that_no_file_has(sharded, file):
    folder, where = sharded
    write_index(folder, where | {NORM: file})
    refused(folder, rf"places {NORM} in .*, which is no file beside it")


SECOND_IMPORT = """
import sys
from zaya_jax.checkpoint import lock
from zaya_jax.config import UserError
from zaya_jax.pytorch import exchange

lock.PATIENCE = 0.0
try:
    exchange.from_hf(*sys.argv[1:])
except UserError as error:
    print(error)
"""


def test_two_imports_into_one_folder(source, monkeypatch):
    """The second is refused while the first writes, and when it has written."""
    work, close = source.parent / "work", exchange.pieces.Writer.close
    told = []

    def meanwhile(self):
        command = [sys.executable, "-c", SECOND_IMPORT, str(source), str(work)]
        told.append(subprocess.run(command, capture_output=True, text=True, timeout=300).stdout)
        return close(self)

    monkeypatch.setattr(exchange.pieces.Writer, "close", meanwhile)
    exchange.from_hf(source, work)
    assert len(told) == 1 and re.search(r"/work is in use by process \d+ on", told[0]), told
    assert sorted(p.name for p in source.parent.iterdir()) == ["in", "work"]
    assert not (work / lock.NAME).exists()
    with pytest.raises(UserError, match="exists and is not empty"):
        exchange.from_hf(source, work)


def test_a_folder_that_was_made_while_it_waited(source, monkeypatch):
    work, take = source.parent / "work", lock.take

    def waited(folder):
        take(folder)
        work.mkdir()
        (work / "config.json").write_text("another's")

    monkeypatch.setattr(lock, "take", waited)
    with pytest.raises(UserError, match="work exists and is not empty"):
        exchange.from_hf(source, work)
    assert (work / "config.json").read_text() == "another's"
    assert sorted(p.name for p in source.parent.iterdir()) == ["in", "work"]
