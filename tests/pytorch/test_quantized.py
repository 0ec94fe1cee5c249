"""Experts in FP8 and MXFP4 are read as compressed-tensors decodes them, and written in its form.

The golden cases are the library's own files and numbers (tools/golden/make_quantized.py).
"""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refusal
from safetensors import safe_open
from safetensors.numpy import load_file

import zaya_jax as zj
from zaya_jax.model import quantized
from zaya_jax.pytorch import exchange, hf, tensor_files
from zaya_jax.pytorch.hf_names import natural

FORMS = {"fp8": "fp8", "fp8_tensor": "fp8", "mxfp4": "mxfp4"}  # of the cases
IDS = np.arange(20).reshape(2, 10)


@pytest.fixture(params=FORMS)
def case(request, golden_dir):
    """A golden case: its directory, its form, and the library's numbers."""
    folder = golden_dir / "quantized" / request.param
    return folder, FORMS[request.param], load_file(folder / "expected.safetensors")


def test_the_numbers_are_compressed_tensors_bit_for_bit(case):
    folder, _, expected = case
    source = hf.Directory(folder)
    for name in (name for name in expected if name.endswith(".decoded")):
        numbers = source.tensor(name.removesuffix(".decoded"))
        assert numbers.dtype == expected[name].dtype
        np.testing.assert_array_equal(numbers.view(np.uint8), expected[name].view(np.uint8), name)
    for name in quantized.INPUT_AXES:
        assert source.stored_codes(case[1], name, 1) is not None


def test_a_device_decodes_the_same_numbers(case):
    folder, form, _ = case
    for name, axis in quantized.INPUT_AXES.items():
        codes, scale = hf.Directory(folder).stored_codes(form, name, 1)
        np.testing.assert_array_equal(
            quantized.decode(jnp.asarray(codes), jnp.asarray(scale), axis, jnp),
            quantized.decode(codes, scale, axis),
        )


@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
def test_codes_and_scales_are_those_that_compressed_tensors_makes(golden_dir, name):
    folder = golden_dir / "quantized" / name
    theirs = hf.Directory(folder)._codes_and_scales
    expected = load_file(folder / "expected.safetensors")
    for part in (0, 1):
        for tensor in (tensor for tensor in expected if not tensor.endswith(".decoded")):
            ours = quantized.encode(expected[tensor], FORMS[name], -1)[part]
            np.testing.assert_array_equal(
                ours.view(np.uint8), np.ascontiguousarray(theirs[part].read(tensor)).view(np.uint8)
            )


def test_a_quantized_directory_is_a_model_like_any(golden_dir, tmp_path):
    """Loaded, imported, and exported as plain numbers."""
    folder = golden_dir / "quantized" / "mxfp4"
    model = zj.load(folder)
    assert model.generate(IDS, 3).shape == (2, 13)
    imported = exchange.from_hf(folder, tmp_path / "run")
    np.testing.assert_array_equal(zj.load(imported, dtype="float32").logits(IDS), model.logits(IDS))
    plain = exchange.to_hf(imported, tmp_path / "plain")
    assert "quantization_config" not in json.loads((plain / "config.json").read_text())
    np.testing.assert_array_equal(zj.load(plain).logits(IDS), model.logits(IDS))


@pytest.mark.parametrize("form", quantized.FORMATS)
def test_what_is_written_is_read(golden_dir, tmp_path, form):
    """Of a model in either form: its own codes stay, others are rounded."""
    for name, before in FORMS.items():
        source = hf.Directory(golden_dir / "quantized" / name)
        made = hf.Directory(exchange.to_hf(source.path, tmp_path / name, quantize=form))
        with safe_open(made.path / tensor_files.SINGLE, "numpy") as file:
            assert sorted(file.keys(), key=natural) == sorted(source._locate(), key=natural) or (
                before != form
            )
        for tensor in hf.expected_shapes(source.model):
            x = source.tensor(tensor).astype(np.float32)
            if "mlp.experts." in tensor and before != form:
                x = quantized.decode(*quantized.encode(x, form, -1), -1)
            np.testing.assert_allclose(made.tensor(tensor).astype(np.float32), x, rtol=2**-8)


@pytest.mark.slow
@pytest.mark.parametrize("form", quantized.FORMATS)
def test_transformers_reads_what_is_written(golden_dir, tmp_path, form):
    """By the lines of the card, where it and compressed-tensors are installed."""
    made = exchange.to_hf(golden_dir / "quantized" / "fp8", tmp_path / "made", quantize=form)
    _, example, *_ = (made / "README.md").read_text().split("```python\n")
    example = example.split("```")[0].replace('"PATH"', repr(str(made)))
    assert "CompressedTensorsConfig(dequantize=True)" in example
    for package in ("torch", "transformers", "compressed_tensors"):
        pytest.importorskip(package)
    found: dict = {}
    exec(example, found)
    source = hf.Directory(made)
    for name, x in found["model"].state_dict().items():
        if name in hf.expected_shapes(source.model) and "balancing" not in name:
            np.testing.assert_array_equal(source.tensor(name).astype(np.float32), x.float())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"quant_method": "gptq"}, "quant_method='gptq'"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme="),
        ({"group_0": {"format": "pack-quantized"}}, "group_0.format='pack-quantized'"),
        ({"weights": {"group_size": 64}}, "group_0.weights.group_size=64"),
        ({"weights": {"actorder": "weight"}}, "group_0.weights.actorder='weight'"),
        ({"weights": {"symmetric": False}}, "group_0.weights.symmetric=False"),
        (
            {"group_0": {"input_activations": {"dynamic": False}}},
            "group_0.input_activations.dynamic=False",
        ),
    ],
)
def test_other_schemes_are_refused(golden_dir, tmp_path, changes, says):
    folder = shutil.copytree(golden_dir / "quantized" / "mxfp4", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    given = config["quantization_config"]
    group = given["config_groups"]["group_0"]
    group["weights"] |= changes.pop("weights", {})
    group |= changes.pop("group_0", {})
    given |= changes
    (folder / "config.json").write_text(json.dumps(config))
    message = refusal(hf.Directory, folder)
    assert f"quantization_config has {says}" in message and "float-quantized (FP8" in message
