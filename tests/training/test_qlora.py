"""Low-rank updates over experts in few bits: decoded where a layer is handed them, the same numbers
in a run, its continuation and its export."""

import shutil

import jax
import numpy as np
import pytest
import tiny_runs
from refusals import refusal

import zaya_jax as zj
from zaya_jax import cli, trees
from zaya_jax.checkpoint import few_bits, partial
from zaya_jax.checkpoint.source import SealedSource
from zaya_jax.model import lora, quantized
from zaya_jax.pytorch import any_model, exchange, hf
from zaya_jax.training.loss import make_loss

IDS = np.arange(48).reshape(2, 24) % 200
SIZES = {"model__hidden_size": 32, "model__moe_intermediate_size": 32}
FORMS = ("mxfp4", pytest.param("fp8", marks=pytest.mark.slow))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A base that was never trained, and its corpus."""
    root = tmp_path_factory.mktemp("qlora")
    tiny_runs.write_corpus(root / "corpus")
    zj.create(tiny_runs.settings(**SIZES), seed=5).save(root / "base")
    return root


@pytest.fixture(scope="module", params=FORMS)
def run(root, request):
    """Six steps over the base in a form."""
    workdir = root / request.param
    assert train(root, workdir, run__base=request.param) == cli.DONE
    return workdir, request.param


def train(root, workdir, devices=1, **keys):
    given = SIZES | {"data__path": str(root / "corpus"), "run__init_from": f"{root}/base"}
    given |= {"run__lora": 4, "run__num_steps": 6, "optim__lr": 1e-2}
    return tiny_runs.train(workdir, devices, **given | keys)


def test_the_base_is_codes_in_memory(root):
    """As many bytes as the forms say, whatever else is in it."""
    model = tiny_runs.settings(**SIZES).model
    number = model.num_hidden_layers * model.num_experts * 3 * 32 * 32
    for form, size in (("compute", 4), ("fp8", 1 + 4 / 32), ("mxfp4", 1 / 2 + 1 / 32)):
        base = lora.abstract_base(model, tiny_runs.settings().precision, form)
        experts = jax.tree.leaves((base["params"]["layers"]["experts"], base["scales"]))
        assert sum(x.size * x.dtype.itemsize for x in experts) == number * size


def test_a_killed_run_ends_in_the_same_bits(root, run, tmp_path):
    workdir, form = run
    shutil.copytree(workdir, tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "6")
    assert train(root, tmp_path / "cut", run__base=form) == cli.DONE
    tiny_runs.same_state(workdir, tmp_path / "cut")
    source = SealedSource(workdir)
    assert source.meta()["base"]["form"] == form
    assert all(name.endswith((".a", ".b")) for name in source.arrays if name.startswith("params."))


def test_the_export_is_the_run(run, root, tmp_path):
    """Merged onto the numbers of the codes, which the step decodes itself."""
    workdir, form = run
    model = zj.load(workdir)
    loss = make_loss(model.config, model.config.model)
    like = lora.abstract_base(model.config.model, model.config.precision, form)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), like)
    frozen = few_bits.FewBits(any_model.open_weights(f"{root}/base"), form).restore(like)
    adapters = partial.read(workdir, "params.*")["params"]
    rows = {"tokens": IDS[:, :-1], "targets": IDS[:, 1:], "segment_ids": None, "positions": None}
    rows |= {"loss_mask": np.ones(rows["targets"].shape, np.float32)}
    adapted = jax.jit(lambda params, base: loss(params, model.balance, rows, 46.0, frozen=base)[0])(
        adapters, frozen
    )
    whole = jax.jit(lambda params: loss(params, model.balance, rows, 46.0)[0])(model.params)
    assert adapted == whole
    exported = zj.load(exchange.to_hf(str(workdir), tmp_path / "hf"), dtype="float32")
    np.testing.assert_array_equal(model.logits(IDS), exported.logits(IDS))
    base = trees.flat(zj.load(root / "base").params)
    for name, x in trees.flat(model.params).items():
        moved = float(np.abs(np.asarray(x) - base[name]).max())
        assert (moved > 0) == (f"{name}.a" in trees.flat(adapters)), name


def test_a_published_base_keeps_its_codes(root, tmp_path):
    """A run has the numbers of a quantized directory, not those of a second rounding."""
    for form in quantized.FORMATS:
        folder = exchange.to_hf(f"{root}/base", tmp_path / form, quantize=form)
        source = hf.Directory(folder)
        decoded = few_bits.FewBits(source, form, decoded=True)
        for name, axis in quantized.INPUT_AXES.items():
            codes, scale = few_bits.FewBits(source, form).of_layer(name, 1)
            path = ("params", "layers", *name.split("/"))
            numbers = quantized.decode(codes, scale, axis)
            np.testing.assert_array_equal(numbers, source.read(path, 1))
            np.testing.assert_array_equal(decoded.read(path, 1), source.read(path, 1))
        other = next(x for x in quantized.FORMATS if x != form)
        assert source.stored_codes(other, "experts/down", 1) is None


@pytest.mark.slow
def test_a_mesh_trains_as_one_device(root, run, tmp_path):
    workdir, form = run
    mesh = {"mesh__expert": 2, "mesh__fsdp": True, "run__base": form}
    assert train(root, tmp_path / "mesh", 4, **mesh) == cli.DONE
    losses = [
        [line["loss"] for line in tiny_runs.lines(folder)[1:]]
        for folder in (tmp_path / "mesh", workdir)
    ]
    np.testing.assert_allclose(*losses, rtol=1e-4)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"run__lora": None}, "config.run.base=mxfp4 is given without config.run.lora"),
        (
            {"model__moe_intermediate_size": 16, "model__hidden_size": 16},
            "mxfp4 has a scale for every 32 inputs of an expert, but here an expert has 16",
        ),
        (
            {"model__model_type": "dense", "model__intermediate_size": 32, "model__num_experts": 1},
            "config.run.base=mxfp4 is for experts",
        ),
    ],
)
def test_what_cannot_be_is_said(root, tmp_path, keys, says):
    assert says in refusal(train, root, tmp_path / "new", run__base="mxfp4", **keys)
