"""Low-rank updates: the base stays, adapters alone are trained and saved, and what is made of a run
has both merged."""

import json
import shutil

import jax
import numpy as np
import pytest
import tiny_runs
from huggingface_hub import metadata_load
from refusals import refusal
from safetensors.numpy import load_file

import zaya_jax as zj
from zaya_jax import cli, trees
from zaya_jax.checkpoint import merged, partial
from zaya_jax.checkpoint.source import SealedSource
from zaya_jax.config import UserError
from zaya_jax.pytorch import adapters, any_model, exchange, hub
from zaya_jax.pytorch.card import Publication
from zaya_jax.training.loss import make_loss

IDS = np.arange(48).reshape(2, 24) % 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base of two steps, and six steps of low-rank updates over it."""
    root = tmp_path_factory.mktemp("lora")
    corpus = tiny_runs.write_corpus(root / "corpus")
    assert tiny_runs.train(root / "base", data__path=str(corpus), run__num_steps=2) == cli.DONE
    assert train(root, root / "run") == cli.DONE
    return root


def train(root, workdir, devices=1, **keys):
    given = {"data__path": str(root / "corpus"), "run__init_from": f"{root}/base", "run__lora": 4}
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
    """With a rate of 0 B stays zero, and so the logits are the base's."""
    still = {"run__num_steps": 1, "optim__lr": 0.0, "balance__enabled": False}
    assert train(folder, folder / "still", **still) == cli.DONE
    np.testing.assert_array_equal(
        zj.load(folder / "still").logits(IDS), zj.load(folder / "base").logits(IDS)
    )
    moved = zj.load(folder / "run").logits(IDS)
    assert np.abs(moved - zj.load(folder / "base").logits(IDS)).max() > 1e-2
    # before: the held-out loss of the base
    before, first, *_, last = tiny_runs.lines(folder / "run")
    assert before["step"] == 0 and last["loss"] < first["loss"]


def test_a_killed_run_ends_in_the_same_bits(folder, tmp_path):
    shutil.copytree(folder / "run", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "6")
    assert train(folder, tmp_path / "cut") == cli.DONE
    tiny_runs.same_state(folder / "run", tmp_path / "cut")


def test_the_export_is_the_run(folder, tmp_path):
    """The loss of the training step's own function is that of the merged weights, which the export
    has too."""
    model = zj.load(folder / "run")
    loss = make_loss(model.config, model.config.model)
    of_run, base = (partial.read(folder / name, "params.*")["params"] for name in ("run", "base"))
    rows = {"tokens": IDS[:, :-1], "targets": IDS[:, 1:], "segment_ids": None, "positions": None}
    rows |= {"loss_mask": np.ones(rows["targets"].shape, np.float32)}
    adapted = jax.jit(
        lambda params, base: loss(
            params, model.balance, rows, 46.0, frozen={"params": base, "scales": {}}
        )[0]
    )(of_run, base)
    assert adapted == jax.jit(lambda params: loss(params, model.balance, rows, 46.0)[0])(
        model.params
    )
    exported = zj.load(exchange.to_hf(f"{folder}/run", tmp_path / "hf"), dtype="float32")
    np.testing.assert_array_equal(model.logits(IDS), exported.logits(IDS))
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
    with pytest.raises(UserError, match=f"computes otherwise than its base .*{differs}"):
        adapters.to_peft(f"{tmp_path}/run", tmp_path / "adapters")


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
    hub.check_folder(made)
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
    with pytest.raises(
        UserError, match="has moved the balancing biases, for which PEFT has no place"
    ):
        adapters.to_peft(f"{folder}/run", tmp_path / "moved")
    nameless = adapters.to_peft(f"{tmp_path}/run", tmp_path / "nameless")
    with pytest.raises(UserError, match="names its base by a path of this machine"):
        hub.check_folder(nameless)
    with pytest.raises(UserError, match="has no low-rank updates"):
        adapters.to_peft(f"{folder}/base", tmp_path / "none")
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    base = transformers.AutoModelForCausalLM.from_pretrained(
        exchange.to_hf(f"{folder}/base", tmp_path / "hf")
    )
    with torch.no_grad():
        theirs = peft.PeftModel.from_pretrained(base, made)(torch.tensor(IDS)).logits.numpy()
    np.testing.assert_allclose(theirs, zj.load(tmp_path / "run").logits(IDS), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"mesh__expert": 2, "mesh__fsdp": True}])
def test_a_mesh_trains_as_one_device(folder, tmp_path, mesh):
    assert train(folder, tmp_path / "mesh", 4, **mesh) == cli.DONE
    ours, one = (
        trees.flat(partial.read(run, "params.*")) for run in (tmp_path / "mesh", folder / "run")
    )
    for name, x in one.items():
        np.testing.assert_allclose(ours[name], x, atol=2e-3, err_msg=name)
    losses = [
        [line["loss"] for line in tiny_runs.lines(run)[1:]]
        for run in (tmp_path / "mesh", folder / "run")
    ]
    np.testing.assert_allclose(*losses, rtol=1e-4)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"run__lora": 0}, "config.run.lora=0 is out of range; it must be at least 1"),
        ({"run__init_from": ""}, "config.run.lora=4 is given without config.run.init_from"),
        (
            {"mesh__tensor": 2},
            "config.mesh.tensor=2 with config.run.lora=4: LoRA does not support tensor parallelism",
        ),
    ],
)
def test_what_cannot_be_is_said(folder, tmp_path, keys, says):
    assert says in refusal(train, folder, tmp_path / "new", 2, **keys)


def test_a_base_is_known_by_all_its_numbers(folder, tmp_path):
    """However they are stored."""
    state = partial.read(folder / "base") | partial.read(folder / "base", "balance.bias")
    mark = merged.weights_fingerprint(exchange.InMemory(state))
    places = folder / "base", exchange.to_hf(f"{folder}/base", tmp_path / "hf")
    assert {merged.weights_fingerprint(any_model.open_weights(str(place))) for place in places} == {
        mark
    }
    for name, x in trees.flat(state).items():
        last = (-1,) * x.ndim
        before, x[last] = x[last], x[last] + 0.5
        assert merged.weights_fingerprint(exchange.InMemory(state)) != mark, name
        x[last] = before


def test_another_base_is_refused(folder, tmp_path):
    """A folder of the same name with other weights: the run is not loaded, nor does it go on."""
    assert (
        train(folder, tmp_path / "run", run__init_from=f"{folder}/base@2", run__num_steps=1)
        == cli.DONE
    )
    shutil.move(folder / "base", folder / "kept")
    try:
        with pytest.raises(
            UserError, match=r"holds low-rank updates of .*/base@2, which cannot be read"
        ):
            zj.load(tmp_path / "run")
        other = {"data__path": str(folder / "corpus"), "run__num_steps": 2, "run__seed": 1}
        assert tiny_runs.train(folder / "base", **other) == cli.DONE
        with pytest.raises(
            UserError,
            match=r"was trained on top of .* different weights; restore the original base",
        ):
            zj.load(tmp_path / "run")
    finally:
        shutil.rmtree(folder / "base", ignore_errors=True)
        shutil.move(folder / "kept", folder / "base")
