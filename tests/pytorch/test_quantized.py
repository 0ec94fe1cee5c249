"""Quantized experts: the numbers, codes and scales of compressed-tensors, and other schemes refused
(golden cases by tools/golden/make_quantized.py); the older layout is read as the present one."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import check_refused, refusal
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from test_exchange import MODEL, assert_same, read_all, read_json, write_model

import zaya_jax as zj
from zaya_jax.model import quantized
from zaya_jax.pytorch import compressed, exchange, hf, tensor_files
from zaya_jax.pytorch.hf_names import natural

FORMS = {"fp8": "fp8", "fp8_tensor": "fp8", "mxfp4": "mxfp4"}  # of the cases
IDS = np.arange(20).reshape(2, 10)


@pytest.fixture(params=FORMS)
def case(request, golden_dir):
    """A golden case: its directory, its form, and the library's numbers."""
    folder = golden_dir / "quantized" / request.param
    return folder, FORMS[request.param], load_file(folder / "expected.safetensors")


def test_the_numbers_are_compressed_tensors_bit_for_bit(case):
    """On a device too."""
    folder, form, expected = case
    source = hf.Directory(folder)
    for name in (name for name in expected if name.endswith(".decoded")):
        numbers = source.tensor(name.removesuffix(".decoded"))
        assert numbers.dtype == expected[name].dtype
        np.testing.assert_array_equal(numbers.view(np.uint8), expected[name].view(np.uint8), name)
    for name, axis in quantized.INPUT_AXES.items():
        codes, scale = source.stored_codes(form, name, 1)
        np.testing.assert_array_equal(
            quantized.decode(jnp.asarray(codes), jnp.asarray(scale), axis, jnp),
            quantized.decode(codes, scale, axis),
        )


@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
def test_codes_and_scales_are_those_that_compressed_tensors_makes(golden_dir, name):
    folder = golden_dir / "quantized" / name
    theirs = hf.Directory(folder)._tensors
    expected = load_file(folder / "expected.safetensors")
    for tensor in (tensor for tensor in expected if not tensor.endswith(".decoded")):
        ours = quantized.encode(expected[tensor], FORMS[name], -1)
        for numbers, part in zip(ours, ("codes", "scale"), strict=True):
            stored = np.ascontiguousarray(theirs[tensor].read(part))
            np.testing.assert_array_equal(numbers.view(np.uint8), stored.view(np.uint8))


def test_a_quantized_directory_is_a_model_like_any(golden_dir, tmp_path):
    """Loaded, imported, and exported as plain numbers."""
    folder = golden_dir / "quantized" / "mxfp4"
    model = zj.load(folder)
    assert model.generate(IDS, 3).shape == (2, 13)
    imported = exchange.from_hf(folder, tmp_path / "run")
    np.testing.assert_array_equal(zj.load(imported, dtype="float32").logits(IDS), model.logits(IDS))
    plain = exchange.to_hf(imported, tmp_path / "plain")
    assert "quantization_config" not in read_json(plain / "config.json")
    np.testing.assert_array_equal(zj.load(plain).logits(IDS), model.logits(IDS))


@pytest.mark.parametrize("form", quantized.FORMATS)
def test_what_is_written_is_read(golden_dir, tmp_path, form):
    """Of a model in either form: its own codes stay, others are rounded."""
    for name, before in FORMS.items():
        source = hf.Directory(golden_dir / "quantized" / name)
        made = hf.Directory(exchange.to_hf(source.path, tmp_path / name, quantize=form))
        with safe_open(made.path / tensor_files.SINGLE, "numpy") as file:
            assert sorted(file.keys(), key=natural) == sorted(source._stored(), key=natural) or (
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
    (folder / "model.safetensors").unlink()  # some schemes have files of other kinds
    config = read_json(folder / "config.json")
    given = config["quantization_config"]
    group = given["config_groups"]["group_0"]
    group["weights"] |= changes.pop("weights", {})
    group |= changes.pop("group_0", {})
    given |= changes
    (folder / "config.json").write_text(json.dumps(config))
    message = refusal(hf.Directory, folder)
    assert f"quantization_config has {says}" in message and "float-quantized (FP8" in message


CONFIG = {  # the keys of ZAYA1-8B-legacy's, at this size
    "architectures": ["ZayaForCausalLM"],
    "model_type": "zaya",
    "activation_func": "swiglu",
    "activation_func_fp8_input_store": False,
    "add_bias_linear": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bias_activation_fusion": True,
    "bos_token_id": 2,
    "cca": True,
    "cca_time0": 2,
    "cca_time1": 2,
    "dtype": "bfloat16",
    "eos_token_id": 3,
    "ffn_hidden_size": 24,
    "gated_linear_unit": True,
    "head_dim": 8,
    "hidden_size": 16,
    "kv_channels": 8,
    "lm_head_bias": False,
    "mamba_cache_dtype": "float32",
    "max_position_embeddings": 64,
    "moe_router_topk": 1,
    "norm_epsilon": 1e-5,
    "normalization": "RMSNorm",
    "num_attention_heads": 2,
    "num_experts": 2,
    "num_hidden_layers": 6,
    "num_key_value_heads": 1,
    "num_query_groups": 1,
    "pad_token_id": 0,
    "partial_rotary_factor": 0.5,
    "residual_in_fp32": True,
    "rope_scaling": False,
    "rope_theta": 5000000,
    "scale_residual_merge": True,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "transformers_version": "4.57.1",
    "use_cache": True,
    "vocab_size": 40,
    "zaya_mlp_expansion": 6,
    "zaya_use_eda": True,
    "zaya_use_mod": True,
}
# of a layer's tensors: the present name, the old layer after twice this layer, the name there
OLD_NAMES = (
    ("input_layernorm", 0, "input_norm"),
    ("post_attention_layernorm", 1, "input_norm"),
    ("post_attention_residual_scale", 1, "res_scale"),
    ("post_mlp_residual_scale", 2, "res_scale"),
    ("self_attn.qkv_proj.q_proj", 0, "self_attn.qkv.linear_q"),
    ("self_attn.qkv_proj.k_proj", 0, "self_attn.qkv.linear_k"),
    ("self_attn.qkv_proj.v_proj_current", 0, "self_attn.qkv.val_proj1"),
    ("self_attn.qkv_proj.v_proj_delayed", 0, "self_attn.qkv.val_proj2"),
    ("self_attn.qkv_proj.conv_qk_depthwise", 0, "self_attn.qkv.conv_qk.0"),
    ("self_attn.qkv_proj.conv_qk_grouped", 0, "self_attn.qkv.conv_qk.1"),
    ("self_attn.qk_norm.temp", 0, "self_attn.qkv.temp"),
    ("self_attn.o_proj", 0, "self_attn.o_proj"),
    ("mlp.gate.router_mlp.norm", 1, "zaya_block.router.rmsnorm_eda"),
    ("mlp.gate.router_mlp.fc1", 1, "zaya_block.router.router_mlp.0"),
    ("mlp.gate.router_mlp.fc2", 1, "zaya_block.router.router_mlp.2"),
    ("mlp.gate.router_mlp.out_proj", 1, "zaya_block.router.router_mlp.4"),
    ("mlp.gate", 1, "zaya_block.router"),
    ("mlp.experts.gate_up_proj", 1, "zaya_block.experts.local_experts.{}.linear_fc1.weight"),
    ("mlp.experts.down_proj", 1, "zaya_block.experts.local_experts.{}.linear_fc2.weight"),
)


def old_name(name):
    """The old name of a tensor of three layers; with "{}" for the number of an expert."""
    if name.startswith("model.input_"):
        return name.replace("model.input_", "model.layers.0.res_scale.")
    if not name.startswith("model.layers."):
        return name.replace("model.norm.", "model.final_norm.")
    _, _, number, rest = name.split(".", 3)
    present, after, old = next(row for row in OLD_NAMES if rest.startswith(row[0]))
    layer = 2 * int(number) + after
    place = f"layers.{layer}." if layer < 6 else ""  # what follows the last layer is the model's
    return f"model.{place}{old}{rest.removeprefix(present)}"


@pytest.fixture
def made(tmp_path):
    """A directory of the older layout, and its tensors under the present names."""
    _, tensors = write_model(tmp_path / "present")
    folder, old = tmp_path / "older", {}
    folder.mkdir()
    for name, x in tensors.items():
        experts = x if "mlp.experts." in name else [x]
        old |= {old_name(name).format(i): matrix for i, matrix in enumerate(experts)}
    save_file(old, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder, tensors


def test_quantized_experts_are_read(made):
    """As compressed-tensors names them in any model: beside each matrix its scale."""
    folder, tensors = made
    stored = load_file(folder / "model.safetensors")
    for name in [name for name in stored if "local_experts" in name]:
        stored[name], stored[f"{name}_scale"] = quantized.encode(stored[name], "fp8", -1)
    specs = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in stored.items()}
    tensor_files.write_sharded(folder, specs, stored.__getitem__, 10**9)
    given = {"quantization_config": compressed.quantization_config("fp8")}
    (folder / "config.json").write_text(json.dumps(CONFIG | given))
    source = hf.Directory(folder)
    for name, x in tensors.items():
        if "mlp.experts." in name:
            x = quantized.decode(*quantized.encode(x, "fp8", -1), -1)
        np.testing.assert_array_equal(source.tensor(name), x, name)
    assert source.stored_codes("fp8", "experts/gate_up", 1)[0].shape == (2, 16, 2, 12)


THIRD = "model.layers.3.zaya_block.experts.local_experts.{}.linear_fc2.weight"


@pytest.mark.parametrize(
    ("number", "columns", "says"),
    [
        (1, 11, r"experts\.1\.down_proj.* has shape .*, but .*experts\.0"),
        # under another's number: the third one had been taken for the second
        (2, 12, r"layers\.1\.mlp\.experts\.down_proj has shape"),
    ],
)
def test_an_expert_of_another_shape_or_number_is_refused(made, number, columns, says):
    folder, _ = made
    stored = load_file(folder / "model.safetensors")
    stored[THIRD.format(number)] = stored.pop(THIRD.format(1))[:, :columns].copy()
    save_file(stored, folder / "model.safetensors")
    check_refused(says, hf.Directory, folder)


def test_it_is_read_as_the_present_layout_and_exported_in_it(made, tmp_path):
    folder, tensors = made
    model = hf.Directory(folder).model
    sizes = (
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "num_experts",
        "moe_intermediate_size",
        "router_hidden_size",
    )
    assert [getattr(model, name) for name in sizes] == [getattr(MODEL, name) for name in sizes]
    assert model.rope_parameters.hybrid.partial_rotary_factor == 0.5
    assert_same(read_all(exchange.to_hf(folder, tmp_path / "out")), tensors)


def read_with(folder, changes):
    """The model of the directory with other keys in its config; None takes one away."""
    config = {key: value for key, value in (CONFIG | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return hf.Directory(folder).model


FULL, SLIDING = "hybrid", "hybrid_sliding"
TYPES = ["full_attention", "sliding_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"swa_layers": [0, 0, 4, 0, 4, 0]}, ((FULL, SLIDING, SLIDING), 5, 5e6)),
        ({"swa_layers": [4, 4, 0]}, ((SLIDING, SLIDING, FULL), 5, 5e6)),
        ({"swa_layers": [0] * 6}, ((FULL,) * 3, None, 5e6)),
        ({"rope_theta": None, "rotary_base": 1000000}, ((FULL,) * 3, None, 1e6)),
        (  # ZAYA1-base's form
            {
                "zaya_layers": ["a", 2] * 3,
                "num_attention_heads": 4,
                "cca_num_q_heads": [2, 0] * 3,
                "num_query_groups": 4,
                "num_query_groups_list": [1, 0] * 3,
                "ffn_hidden_size": 96,
                "ffn_hidden_size_list": [0, 24] * 3,
                "zaya_mlp_expansion": [0, 6] * 3,
                "num_hidden_layers": 9,
                "head_dim": None,
                "final_logit_softcapping": None,
                "use_lora_att": False,
            },
            ((FULL,) * 3, None, 5e6),
        ),
    ],
)
def test_each_way_of_saying_the_same_is_read(made, changes, expected):
    model = read_with(made[0], changes)
    assert (model.kinds, model.sliding_window, model.rope_parameters.hybrid.rope_theta) == expected
    assert (model.num_attention_heads, model.num_experts) == (2, 2)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"activation_func": "gelu"}, "activation_func='gelu' in the older layout; only"),
        ({"zaya_use_mod": False}, "zaya_use_mod=False in the older layout; only"),
        ({"moe_router_topk": 2}, "moe_router_topk=2"),
        ({"clamp_temp": True}, "clamp_temp=True in the older layout; only False"),
        ({"residual_in_fp32": False}, "residual_in_fp32"),
        ({"zaya_high_prec": False}, "zaya_high_prec"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "unknown key 'rope_scaling'"),
        ({"rope_scaling": "yarn"}, "unknown key 'rope_scaling'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "rope_parameters"),
        ({"rope_parameters": {"hybrid": {"rope_theta": 1e6}}}, "rope_parameters"),
        ({"rope_theta": None}, "no rope_theta"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"use_lora_att": True}, "use_lora_att"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"swa_layers": [0, 0, 4, 0, 16, 0]}, "from swa_layers alone, with one width in 3 layers"),
        ({"swa_layers": [0, 4, 4, 0, 4, 0]}, "from swa_layers alone"),
        ({"swa_layers": [4, 4]}, "from swa_layers alone"),
        ({"swa_layers": [4, 4, 0], "sliding_window": 7}, "from swa_layers alone"),
        ({"swa_layers": [4, 4, 0], "layer_types": TYPES}, "from swa_layers alone"),
        ({"sliding_window": 7}, "from swa_layers alone"),
        ({"layer_types": TYPES}, "from swa_layers alone"),
        ({"num_query_groups": 2}, "num_query_groups"),
        (
            {"cca_num_q_heads": 4},
            "cca_num_q_heads or num_attention_heads is 4, but the tensors have 2",
        ),
        ({"num_attention_heads": 4}, "is 4, but the tensors have 2"),
        ({"head_dim": 4}, "head_dim"),
        ({"num_experts": 4}, "is 4, but"),
        ({"ffn_hidden_size": 48}, "is 48"),
        ({"zaya_mlp_expansion": [0, 6, 0, 7, 0, 6]}, "zaya_mlp_expansion"),
        ({"zaya_layers": ["a", 2, "m", 2, "a", 2]}, "zaya_layers"),
    ],
)
def test_what_this_model_has_not_is_named(made, changes, named):
    check_refused(named, read_with, made[0], changes)
