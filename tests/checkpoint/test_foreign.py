"""States that a program without this package saved with plain Orbax, in each of its layouts, become
weights here."""

import subprocess
import sys

import multiprocess_runs
import numpy as np
import pytest
import tiny_runs
from checkpoint_helpers import same
from orbax.checkpoint import v1 as ocp
from refusals import check_refused

import zaya_jax as zj
from zaya_jax import trees
from zaya_jax.checkpoint import boxes, partial
from zaya_jax.checkpoint.orbax_source import open_source
from zaya_jax.checkpoint.vault import Vault
from zaya_jax.config import UserError
from zaya_jax.model import zaya

SAVE = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np, orbax.checkpoint as v0
from orbax.checkpoint import v1 as ocp
from safetensors.numpy import save_file
flat, root, tree = dict(np.load(sys.argv[1])), Path(sys.argv[2]), {}
for name, x in flat.items():
    *folders, last = name.split(".")
    inner = tree
    for folder in folders:
        inner = inner.setdefault(folder, {})
    inner[last] = jnp.asarray(x)
tree["optimizer"] = [{"count": jnp.ones(2)}, (jnp.ones(3), 5)]
def saved(name, **options):
    context = ocp.Context()
    for key, value in options.items():
        setattr(context.array.saving, key, value)
    with context:
        ocp.save(root / name, tree)
saved("ocdbt")
saved("zarr2", use_ocdbt=False, use_zarr3=False)
saved("zarr3", use_ocdbt=False, use_zarr3=True, use_compression=False)
saved("zstd", use_ocdbt=False, use_zarr3=True)
v0.PyTreeCheckpointer().save(root / "v0", tree)
ocp.save(root / "alone", {"params": tree["params"]})
ocp.save(root / "bare", tree["params"])
ocp.save(root / "int8", jax.tree.map(lambda x: jnp.int8(9 * x), tree))
with ocp.training.Checkpointer(root / "steps") as checkpointer:
    checkpointer.save(4, tree)
(root / "tensors").mkdir()
save_file(flat, root / "tensors" / "model.safetensors")
assert not any(name.startswith("zaya") for name in sys.modules)
"""
SEVERAL = """
import os, sys, numpy as np, jax
count, index = (int(os.environ[f"JAX_{name}"]) for name in ("NUM_PROCESSES", "PROCESS_ID"))
jax.distributed.initialize(os.environ["JAX_COORDINATOR_ADDRESS"], count, index)
from zaya_jax.checkpoint.orbax_source import open_source
mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
name, whole = "params.embed.embedding", np.load(sys.argv[1])["params.embed.embedding"]
for layout, axis in ((layout, axis) for layout in sys.argv[3:] for axis in ("data", None)):
    put = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(axis))
    like = {"params": {"embed": {"embedding": jax.ShapeDtypeStruct(whole.shape, whole.dtype, sharding=put)}}}
    got = open_source(f"{sys.argv[2]}/{layout}").restore(like)
    for shard in got["params"]["embed"]["embedding"].addressable_shards:
        assert (np.asarray(shard.data) == whole[shard.index]).all() and whole.any()
    print("equal", layout, axis)
"""
# the last by our `Handler`
LAYOUTS = ["ocdbt", "zarr2", "zarr3", "zstd", "v0", "steps", "tensors", "sealed"]
FAST = {"ocdbt", "tensors", "sealed"}  # the others' arrays are read by two processes below
IDS = np.arange(1, 65).reshape(8, 8)


@pytest.fixture(scope="module")
def model():
    return zj.create(tiny_runs.settings(), seed=3)


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    """The folder of all layouts."""
    root, state = (
        tmp_path_factory.mktemp("orbax"),
        {"params": model.params, "balance": {"bias": model.balance}},
    )
    np.savez(root / "state.npz", **trees.flat(state))
    command = [sys.executable, "-c", SAVE, root / "state.npz", root]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    with ocp.training.Checkpointer(
        root / "sealed", context=zj.checkpoint.Handler.context()
    ) as checkpointer:
        checkpointer.save(4, state)
    return root


@pytest.mark.parametrize(
    "layout", [x if x in FAST else pytest.param(x, marks=pytest.mark.slow) for x in LAYOUTS]
)
def test_each_layout_comes_in(model, saved, layout, tmp_path):
    place, state = saved / layout, {"params": model.params, "balance": {"bias": model.balance}}
    source, locations = open_source(str(place)), boxes.of_tree(state)
    partial.require_fit(source, locations.weights().arrays)
    same(source.restore(locations.leaves, locations), trees.flat(state))
    assert ("without checksums" in source.warning) == (layout != "sealed")
    loaded = zj.load(place, config=model.config)
    again = zj.load(loaded.save(tmp_path / "run"))  # with checksums
    assert Vault(tmp_path / "run" / "checkpoints").verify(0) == []
    for got in (loaded, again):
        same(got.params, model.params)
        assert got.loss(IDS, IDS) == model.loss(IDS, IDS)


@pytest.mark.parametrize("layout", ["alone", "bare"])
def test_parameters_alone_begin_with_fresh_balancing_biases(model, saved, layout, capsys):
    state = {"params": model.params, "balance": {"bias": zaya.init_balance(model.config.model)}}
    source, locations = open_source(str(saved / layout)), boxes.of_tree(state)
    partial.require_fit(source, locations.weights().arrays)
    same(source.restore(locations.leaves, locations), trees.flat(state))
    got = zj.load(saved / layout, config=model.config)
    same(got.params, model.params)
    np.testing.assert_array_equal(got.balance, state["balance"]["bias"])
    (note,) = capsys.readouterr().out.splitlines()
    assert note.endswith("; its balancing biases begin anew, since it has none")


def test_integers_become_no_weights(model, saved):
    """They did, silently: those of a quantised model, without their scales."""
    place = saved / "int8"
    locations = boxes.of_tree({"params": model.params, "balance": {"bias": model.balance}})
    assert partial.read(place, dtype="float32")["params"]["final_norm"]["scale"].dtype == np.int8
    check_refused(
        r"is of int8, and float32 is needed; multiply quantised",
        zj.load,
        place,
        config=model.config,
    )
    with pytest.raises(UserError, match=r"is of int8, .* multiply quantised"):
        partial.require_fit(open_source(str(place)), locations.arrays)


@pytest.mark.parametrize("layout", ["ocdbt", "tensors"])
def test_it_is_a_model_of_equal_loss_on_a_mesh(model, saved, layout, capsys):
    got = zj.load(saved / layout, config=model.config, mesh={"data": 4, "expert": 2})
    np.testing.assert_allclose(got.loss(IDS, IDS), model.loss(IDS, IDS), rtol=1e-5)
    assert "without checksums" in capsys.readouterr().out


def test_two_processes_each_read_their_parts(saved, tmp_path):
    arguments = ["-c", SEVERAL, saved / "state.npz", saved, *LAYOUTS]
    with multiprocess_runs.start(arguments, 2, tmp_path) as run:
        for result in run.wait(120):
            assert result.code == 0, result.err
            assert result.out.count("equal") == 2 * len(LAYOUTS)
