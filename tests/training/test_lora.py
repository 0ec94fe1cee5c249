"""Low-rank updates: the base stays, in few bits too, adapters alone are trained and saved, and what is
made of a run has both merged."""

import json
import shutil

import jax
import numpy as np
import pytest
import tiny_runs
from huggingface_hub import metadata_load
from refusals import check_refused, refusal
from safetensors.numpy import load_file

import zaya_jax as zj
from zaya_jax import cli, trees
from zaya_jax.checkpoint import few_bits, merged, partial
from zaya_jax.checkpoint.source import SealedSource
from zaya_jax.model import lora, quantized
from zaya_jax.parallel.spread import NO_SPREAD
from zaya_jax.pytorch import adapters, any_model, exchange, hf
from zaya_jax.pytorch.card import Publication
from zaya_jax.training.loss import loss_of_tokens

SIZES = {"model__hidden_size": 32, "model__moe_intermediate_size": 32}  # for a scale of 32 inputs
DENSE = {"model__model_type": "dense", "model__intermediate_size": 32, "model__num_experts": 1}
IDS = np.arange(48).reshape(2, 24) % 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base of two steps, and six steps of low-rank updates over it."""
    root = tmp_path_factory.mktemp("lora")
    assert tiny_runs.train(root / "base", run__num_steps=2) == cli.DONE
    assert train(root, root / "run") == cli.DONE
    return root


def train(root, workdir, devices=1, **keys):
    given = {"run__init_from": f"{root}/base", "run__lora": 4}
    given |= {"run__num_steps": 6, "optim__lr": 1e-2}
    return tiny_runs.train(workdir, devices, **given | keys)


def test_only_adapters_are_trained_and_saved(folder):
    base, run = partial.read(folder / "base", "*"), partial.read(folder / "run", "*")
    params = trees.flat(run["params"])
    assert {name.rpartition(".")[2] for name in params} == {"a", "b"}
    assert params["layers.experts.gate_up.a"].shape == (2, 4, 16, 4)
    assert trees.flat(run["optimizer"]["mean"]).keys() == params.keys()
    whole = trees.flat(zj.load(folder / "run").params)
    for name, x in trees.flat(base["params"]).items():
        assert (f"{name}.a" in params) == bool(np.any(np.asarray(whole[name]) != x)), name


def test_a_run_begins_as_its_base(folder):
    """Its held-out loss before the first step is the base's after its last."""
    before, first, *_, last = tiny_runs.lines(folder / "run")
    ended = tiny_runs.lines(folder / "base")[-1]["eval/loss"]
    assert before["step"] == 0 and before["eval/loss"] == pytest.approx(ended, rel=1e-6)
    assert last["loss"] < first["loss"]
    moved, still = (zj.load(folder / name).logits(IDS) for name in ("run", "base"))
    assert np.abs(moved - still).max() > 1e-2


def check_export(workdir, model, frozen, out):
    """The loss of the training step's own function is that of the merged weights, which the export
    has too."""
    loss = loss_of_tokens(model.config, NO_SPREAD).value
    rows = {"tokens": IDS[:, :-1], "targets": IDS[:, 1:], "segment_ids": None, "positions": None}
    rows |= {"loss_mask": np.ones(rows["targets"].shape, np.float32)}
    adapted = jax.jit(lambda params, base: loss(params, model.balance, rows, 46.0, frozen=base)[0])(
        partial.read(workdir, "params.*")["params"], frozen
    )
    whole = jax.jit(lambda params: loss(params, model.balance, rows, 46.0)[0])(model.params)
    assert adapted == whole
    exported = zj.load(exchange.to_hf(str(workdir), out), dtype="float32")
    np.testing.assert_array_equal(model.logits(IDS), exported.logits(IDS))


def test_the_export_is_the_run(folder, tmp_path):
    model = zj.load(folder / "run")
    base = partial.read(folder / "base", "params.*")["params"]
    check_export(folder / "run", model, {"params": base, "scales": {}}, tmp_path / "hf")
    assert zj.load(model.save(tmp_path / "saved")).loss(IDS, IDS) == model.loss(IDS, IDS)


def test_the_merged_weights_are_the_bases_own_numbers_and_the_updates(folder, monkeypatch):
    """As PEFT has them, also where the run holds the base in another format."""
    run, base = SealedSource(folder / "run"), SealedSource(folder / "base")
    meta = run.meta()
    meta["config"]["precision"]["compute"] = "bfloat16"
    monkeypatch.setattr(run, "meta", lambda: meta)
    found = trees.flat(partial.read(merged.MergedSource(run, base)))
    pairs = trees.flat(partial.read(run))
    for name, x in trees.flat(partial.read(base)).items():
        if f"{name}.a" in pairs:
            x = x + (pairs[f"{name}.a"] @ pairs[f"{name}.b"]).reshape(x.shape)
        np.testing.assert_allclose(found[name], x, atol=1e-7, err_msg=name)


def test_a_base_of_another_function_is_said_and_its_adapters_stay_here(folder, tmp_path, capsys):
    """Its own config decides what PEFT computes."""
    base = exchange.to_hf(f"{folder}/base", tmp_path / "hf")
    about = json.loads((base / "config.json").read_text()) | {"rms_norm_eps": 0.05}
    (base / "config.json").write_text(json.dumps(about))
    keys = {"run__init_from": str(base), "run__num_steps": 1, "balance__enabled": False}
    assert train(folder, tmp_path / "run", **keys) == cli.DONE
    differs = "config.model.rms_norm_eps 0.05 there, 1e-05 here"
    assert f"was trained with another model config: {differs}\n" in capsys.readouterr().out
    otherwise = f"computes otherwise than its base .*{differs}"
    check_refused(otherwise, adapters.to_peft, f"{tmp_path}/run", tmp_path / "adapters")


@pytest.mark.slow
def test_adapters_are_apart_in_the_form_of_peft(folder, tmp_path):
    """By PEFT's own names and order, and, where it is installed, by itself: its model is the merged
    one."""
    given = {"balance__enabled": False, "optim__name": "muon"}
    assert train(folder, tmp_path / "run", **given) == cli.DONE
    published = Publication("lab/tuned", license="mit", base_model="lab/base")
    made = adapters.to_peft(f"{tmp_path}/run", tmp_path / "adapters", published)
    about = json.loads((made / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == metadata_load(made / "README.md")["base_model"]
    assert str(folder) not in (made / "README.md").read_text()
    assert (about["r"], about["lora_alpha"], about["target_modules"][0]) == (4, 4, "q_proj")
    found = load_file(made / "adapter_model.safetensors")
    at = "base_model.model.model.layers.1"
    experts = {
        f"{at}.mlp.experts.{inner}lora_{x}.weight" for inner in ("", "base_layer.") for x in "AB"
    }
    assert experts <= found.keys() and len(found) == 2 * 2 * 7
    pairs = partial.read(tmp_path / "run", "params.*")["params"]["layers"]
    a, b = (found[f"{at}.mlp.experts.base_layer.lora_{x}.weight"] for x in "AB")
    # as PEFT multiplies them
    delta = np.einsum("ore,eri->eio", b.reshape(32, 4, 4), a.reshape(4, 4, 16))
    pair = pairs["experts"]["gate_up"]
    np.testing.assert_allclose(delta, pair["a"][1] @ pair["b"][1], atol=1e-6)
    q = pairs["cca"]["q"]["kernel"]
    np.testing.assert_array_equal(
        found[f"{at}.self_attn.qkv_proj.q_proj.lora_A.weight"], q["a"][1].T
    )
    for run, says in (
        (f"{folder}/run", "has moved the balancing biases, for which PEFT has no place"),
        (f"{tmp_path}/run", "names its base by a path of this machine.*--base_model="),
        (f"{folder}/base", "has no low-rank updates"),
    ):
        check_refused(says, adapters.to_peft, run, tmp_path / "none", Publication("lab/tuned"))
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    base = transformers.AutoModelForCausalLM.from_pretrained(
        exchange.to_hf(f"{folder}/base", tmp_path / "hf")
    )
    with torch.no_grad():
        theirs = peft.PeftModel.from_pretrained(base, made)(torch.tensor(IDS)).logits.numpy()
    np.testing.assert_allclose(theirs, zj.load(tmp_path / "run").logits(IDS), atol=1e-4)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"run__lora": 0}, "config.run.lora=0 is out of range; it must be at least 1"),
        ({"run__init_from": ""}, "config.run.lora=4 is given without config.run.init_from"),
        (
            {"mesh__tensor": 2},
            "config.mesh.tensor=2 with config.run.lora=4: LoRA does not support tensor parallelism",
        ),
        (
            {"run__base": "mxfp4", "run__lora": None},
            "config.run.base=mxfp4 is given without config.run.lora",
        ),
        (
            {"run__base": "mxfp4"},
            "mxfp4 has a scale for every 32 inputs of an expert, but here an expert has 16",
        ),
        (SIZES | DENSE | {"run__base": "mxfp4"}, "config.run.base=mxfp4 is for experts"),
    ],
)
def test_what_cannot_be_is_said(folder, tmp_path, keys, says):
    assert says in refusal(train, folder, tmp_path / "new", 2, **keys)


def test_a_base_is_known_by_all_its_numbers(folder, tmp_path):
    """However they are stored."""
    state = partial.read(folder / "base") | partial.read(folder / "base", "balance.bias")
    mark = merged.weights_fingerprint(exchange.InMemory(state))
    for place in (folder / "base", exchange.to_hf(f"{folder}/base", tmp_path / "hf")):
        assert merged.weights_fingerprint(any_model.open_weights(str(place))) == mark
    for name, x in trees.flat(state).items():
        last = (-1,) * x.ndim
        before, x[last] = x[last], x[last] + 0.5
        assert merged.weights_fingerprint(exchange.InMemory(state)) != mark, name
        x[last] = before


def test_another_base_is_refused(folder, tmp_path):
    """A folder of the same name with other weights: the run is not loaded, nor does it go on."""
    keys = {"run__init_from": f"{folder}/base@2", "run__num_steps": 1}
    assert train(folder, tmp_path / "run", **keys) == cli.DONE
    shutil.move(folder / "base", folder / "kept")
    try:
        gone = r"holds low-rank updates of .*/base@2, which cannot be read"
        check_refused(gone, zj.load, tmp_path / "run")
        assert tiny_runs.train(folder / "base", run__num_steps=2, run__seed=1) == cli.DONE
        another = r"was trained on top of .* different weights; restore the original base"
        check_refused(another, zj.load, tmp_path / "run")
    finally:
        shutil.rmtree(folder / "base", ignore_errors=True)
        shutil.move(folder / "kept", folder / "base")


# ################################################################################################
# Over experts in few bits
# ##################################################################################################


FORMS = ("mxfp4", pytest.param("fp8", marks=pytest.mark.slow))


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    """A base that was never trained."""
    root = tmp_path_factory.mktemp("few bits")
    zj.create(tiny_runs.settings(**SIZES), seed=5).save(root / "base")
    return root


@pytest.fixture(scope="module", params=FORMS)
def in_few_bits(untrained, request):
    """Six steps over the base in a form."""
    workdir = untrained / request.param
    assert train(untrained, workdir, **SIZES, run__base=request.param) == cli.DONE
    return workdir, request.param


def test_the_base_is_codes_in_memory(untrained):
    """As many bytes as the forms say, whatever else is in it."""
    model = tiny_runs.settings(**SIZES).model
    number = model.num_hidden_layers * model.num_experts * 3 * 32 * 32
    for form, size in (("compute", 4), ("fp8", 1 + 4 / 32), ("mxfp4", 1 / 2 + 1 / 32)):
        base = lora.abstract_base(model, tiny_runs.settings().precision, form)
        experts = jax.tree.leaves((base["params"]["layers"]["experts"], base["scales"]))
        assert sum(x.size * x.dtype.itemsize for x in experts) == number * size


def test_a_killed_run_over_few_bits_ends_in_the_same_bits(untrained, in_few_bits, tmp_path):
    workdir, form = in_few_bits
    cut = tiny_runs.without_last(workdir, tmp_path / "cut")
    assert train(untrained, cut, **SIZES, run__base=form) == cli.DONE
    tiny_runs.same_run(workdir, cut)
    assert SealedSource(workdir).meta()["base"]["form"] == form


def test_the_export_is_the_run_over_few_bits(in_few_bits, untrained, tmp_path):
    """Merged onto the numbers of the codes, which the step decodes itself."""
    workdir, form = in_few_bits
    model = zj.load(workdir)
    like = lora.abstract_base(model.config.model, model.config.precision, form)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), like)
    frozen = few_bits.FewBits(any_model.open_weights(f"{untrained}/base"), form).restore(like)
    check_export(workdir, model, frozen, tmp_path / "hf")


def test_a_published_base_keeps_its_codes(untrained, tmp_path):
    """A run has the numbers of a quantized directory, not those of a second rounding."""
    for form in quantized.FORMATS:
        source = hf.Directory(exchange.to_hf(f"{untrained}/base", tmp_path / form, quantize=form))
        decoded = few_bits.FewBits(source, form, decoded=True)
        for name, axis in quantized.INPUT_AXES.items():
            codes, scale = few_bits.FewBits(source, form).of_layer(name, 1)
            path = f"params.layers.{name.replace('/', '.')}"
            numbers = quantized.decode(codes, scale, axis)
            np.testing.assert_array_equal(numbers, source.read(path, 1))
            np.testing.assert_array_equal(decoded.read(path, 1), source.read(path, 1))
        other = next(x for x in quantized.FORMATS if x != form)
        assert source.stored_codes(other, "experts/down", 1) is None


@pytest.mark.slow
def test_a_mesh_trains_as_one_device(untrained, in_few_bits, tmp_path):
    workdir, form = in_few_bits
    mesh = SIZES | {"mesh__expert": 2, "mesh__fsdp": True, "run__base": form}
    assert train(untrained, tmp_path / "mesh", 4, **mesh) == cli.DONE
    ours, theirs = (tiny_runs.by_step(x, "loss") for x in (tmp_path / "mesh", workdir))
    assert ours == pytest.approx(theirs, rel=1e-4)
