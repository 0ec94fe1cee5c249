"""Checkpoints read in part, by other programs, and while their run goes on, all bit for bit;
Orbax's states, in each of its layouts, become weights here, and its functions save by this
package's engine."""

import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import multiprocess_runs
import numpy as np
import optax
import pytest
import tiny_runs
from checkpoint_helpers import cut, flip, put, same, save, train
from orbax.checkpoint import v1 as ocp
from refusals import check_refused, check_storage_error

import zaya_jax as zj
from zaya_jax import trees
from zaya_jax.checkpoint import boxes, layout, partial, seal
from zaya_jax.checkpoint.orbax_source import open_source
from zaya_jax.checkpoint.run import retention, store
from zaya_jax.checkpoint.vault import Vault
from zaya_jax.config import Checkpoint, StorageError, UserError
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
WHOLE = ["ocdbt", "zarr2", "zarr3", "zstd", "v0", "steps", "tensors", "sealed"]
LAYOUTS = [*WHOLE, "alone", "bare"]  # "sealed" is our `Handler`'s
# the others' arrays are read by two processes below
FAST = {"ocdbt", "tensors", "sealed", "alone", "bare"}
IDS = np.arange(1, 65).reshape(8, 8)


@pytest.fixture(scope="module")
def model():
    return zj.create(tiny_runs.settings(), seed=3)


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    """The folder of all layouts."""
    root = tmp_path_factory.mktemp("orbax")
    state = {"params": model.params, "balance": {"bias": model.balance}}
    np.savez(root / "state.npz", **trees.flat(state))
    command = [sys.executable, "-c", SAVE, root / "state.npz", root]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    ours = zj.checkpoint.Handler.context()
    with ocp.training.Checkpointer(root / "sealed", context=ours) as checkpointer:
        checkpointer.save(4, state)
    return root


@pytest.mark.parametrize(
    "layout", [x if x in FAST else pytest.param(x, marks=pytest.mark.slow) for x in LAYOUTS]
)
def test_each_layout_comes_in(model, saved, layout, tmp_path, capsys):
    """Parameters alone begin with fresh balancing biases."""
    place, alone = saved / layout, layout in ("alone", "bare")
    balance = zaya.init_balance(model.config.model) if alone else model.balance
    state = {"params": model.params, "balance": {"bias": balance}}
    source, locations = open_source(str(place)), boxes.of_tree(state)
    partial.require_fit(source, locations.weights().arrays)
    same(source.restore(locations.leaves, locations), trees.flat(state))
    loaded = zj.load(place, config=model.config)
    note = capsys.readouterr().out
    assert ("without checksums" in note) == (layout != "sealed")
    assert note.endswith("; its balancing biases begin anew, since it has none\n") == alone
    again = zj.load(loaded.save(tmp_path / "run"))  # with checksums
    assert Vault(tmp_path / "run" / "checkpoints").verify(0) == []
    for got in (loaded, again):
        same((got.params, got.balance), (model.params, balance))
        assert alone or got.loss(IDS, IDS) == model.loss(IDS, IDS)


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
    arguments = ["-c", SEVERAL, saved / "state.npz", saved, *WHOLE]
    with multiprocess_runs.start(arguments, 2, tmp_path) as run:
        for result in run.wait(120):
            assert result.code == 0, result.err
            assert result.out.count("equal") == 2 * len(WHOLE)


def params(layers=2, experts=3, width=8, seed=0):
    keys = iter(jax.random.split(jax.random.key(seed), 20))
    normal = lambda *shape: jax.random.normal(next(keys), shape)  # noqa: E731
    return {
        "params": {
            "embed": {"embedding": normal(50, width)},
            "layers": {
                "experts": {"down": normal(layers, experts, 4, width)},
                "router": {
                    "out": {"kernel": normal(layers, 6, experts + 1)},
                    "eda": normal(layers, 6),
                },
            },
        },
        "balance": {"bias": normal(layers, experts + 1), "steps": jnp.int32(3)},
        "optimizer": {"momentum": normal(50, width)},
    }


@pytest.fixture
def workdir(tmp_path):
    """A run's folder with steps 4 and 9."""
    return train(tmp_path / "run", 4, 9, state=lambda step: params(seed=step)).parent


NOTEBOOK = """
import sys
import jax, numpy as np, optax
from pathlib import Path
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint.options import AtomicityMode
place, out = map(Path, sys.argv[1:])
state = ocp.load_checkpointables(place)["state"]
down = state["params"]["layers"]["experts"]["down"]
np.savez(out, down=down.view(np.uint8), bias=state["balance"]["bias"])
print(down.dtype, sorted(state))
mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
put = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))
table = state["params"]["embed"]["embedding"]
like = {"params": {"embed": {"embedding": jax.ShapeDtypeStruct(table.shape, table.dtype, sharding=put)}}}
def continued(mode):
    context = ocp.Context(atomicity_options=ocp.options.AtomicityOptions(mode=mode))
    context.pytree.loading.partial_load = True
    with context:
        x = ocp.load_checkpointables(place, {"state": like})["state"]["params"]["embed"]["embedding"]
    assert x.sharding == put and (x == table).all()
    with ocp.training.Checkpointer(place.parent, context=context) as checkpointer:
        print("newest", checkpointer.latest.step)
    step = jax.jit(jax.value_and_grad(lambda x: ((x @ x.T - jax.numpy.eye(50)) ** 2).mean()))
    optimizer, losses = optax.adam(0.01), []
    moments = optimizer.init(x)
    for _ in range(3):
        loss, gradients = step(x)
        updates, moments = optimizer.update(gradients, moments)
        x = optax.apply_updates(x, updates)
        losses.append(float(loss))
    return losses
first = continued(AtomicityMode.ATOMIC_RENAME)
assert first[2] < first[1] < first[0] and first == continued(AtomicityMode.COMMIT_FILE)
assert not any(name.startswith("zaya") for name in sys.modules)
"""


@pytest.mark.parametrize("place", ["run/checkpoints/9", "copies/9"])
def test_a_program_without_this_package_loads_shards_and_trains_on(workdir, tmp_path, place):
    """A step that was saved anew after its run had gone back, and its copy."""
    back = {"kind": "spike", "step": 4, "batches": 2, "at": 9, "seen": "a loss"}
    checkpoints = store.Store(workdir, Checkpoint(durable=str(tmp_path / "copies")))
    assert checkpoints.find_newest([back]) == 4
    save(checkpoints, 9, state=lambda _: params(seed=19), **{retention.DECISIONS: [back]})
    checkpoints.close()
    command = [sys.executable, "-c", NOTEBOOK, tmp_path / place, tmp_path / "read.npz"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "float32 ['balance', 'optimizer', 'params']\nnewest 9\nnewest 9\n"
    read, expected = np.load(tmp_path / "read.npz"), params(seed=19)
    np.testing.assert_array_equal(read["bias"], expected["balance"]["bias"])
    down = np.asarray(expected["params"]["layers"]["experts"]["down"])
    np.testing.assert_array_equal(read["down"].view(np.float32), down)


def test_reading_a_part(workdir, tmp_path):
    same(
        partial.read(workdir, "params.*"),
        {"params": jax.tree.map(np.asarray, params(seed=9)["params"])},
    )
    got = partial.read(workdir, "*.router.*", step=4, dtype="bfloat16")
    router = params(seed=4)["params"]["layers"]["router"]
    assert list(got["params"]["layers"]) == ["router"]
    np.testing.assert_array_equal(
        got["params"]["layers"]["router"]["eda"],
        np.asarray(router["eda"]).astype(ml_dtypes.bfloat16),
    )
    assert partial.read(workdir, "balance.*", dtype="float16")["balance"]["steps"].dtype == np.int32
    check_refused(
        r"no array of step 9 .* is called 'parms'; it has balance.*params",
        partial.read,
        workdir,
        "parms",
    )
    # a folder may be called like a step of another
    shutil.copytree(workdir, tmp_path / "out@9")
    same(partial.read(tmp_path / "out@9"), partial.read(workdir))
    same(partial.read(f"{workdir}@4"), partial.read(workdir, step=4))
    cut(next((workdir / "checkpoints" / "9").rglob("params.embed.embedding/c.0.0")))
    partial.read(workdir, "*.router.*")  # other files may be damaged
    check_storage_error(r"array params.embed.embedding\) is truncated", partial.read, workdir)


def test_weights_of_other_shapes_are_refused(workdir):
    larger, width = params(layers=3, experts=5), params(width=12)
    more, fewer = params(), params()
    more["params"]["more"], fewer["params"]["embed"] = jnp.ones(3), {}
    for tree, says in (
        (larger, r"its array balance.bias is \[2, 4\], \[3, 6\] is needed"),
        (width, r"its array params.embed.embedding is \[50, 8\], \[50, 12\] is needed"),
        (more, r"it has no array params.more; give a checkpoint of the same"),
        (fewer, r"it has arrays that are not wanted, such as params.embed.embedding"),
    ):
        wanted = boxes.of_tree(tree).weights().arrays
        check_refused(says, partial.require_fit, open_source(str(workdir)), wanted)


@pytest.mark.parametrize("named", [True, False])
def test_a_step_without_its_list_is_not_taken_for_orbax_s(tmp_path, named):
    """It was read without checksums: an upload under way, or a damaged step."""
    root = train(tmp_path / "run", 1, 2)
    (root / "2" / layout.SEAL_FILE).unlink()
    if not named:
        (root / seal.RUN).unlink()
    assert open_source(root).step == 1
    check_storage_error(r"checksums\.json is missing", open_source, tmp_path / "run")


TWO_PROCESSES = """
import os, resource, sys, numpy as np, jax
from pathlib import Path
from orbax.checkpoint import v1 as ocp
import zaya_jax as zj
root = Path(sys.argv[1])
rows = lambda seed: np.random.default_rng(seed).normal(size=(64, 512)).astype("float32")
count, index = (int(os.environ[f"JAX_{name}"]) for name in ("NUM_PROCESSES", "PROCESS_ID"))
jax.distributed.initialize(os.environ["JAX_COORDINATOR_ADDRESS"], count, index)
mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
put = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
state = lambda seed: {"w": jax.make_array_from_callback((64, 512), put, lambda at: rows(seed)[at]), "step": seed}
kept = resource.getrlimit(resource.RLIMIT_FSIZE)
with zj.checkpoint.Handler.context():
    for step in (1, 2, 3):
        failing = step == 2 and index == 1
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000 if failing else kept[0], kept[1]))
        try:
            ocp.save(root / str(step), state(step))
        except zj.StorageError as error:
            print(error)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    got = ocp.load(root / "3", {"w": jax.ShapeDtypeStruct((64, 512), "float32", sharding=whole), "step": 0})
    assert (np.asarray(got["w"]) == rows(3)).all() and got["step"] == 3
"""


def state(seed, shape=(4, 2)):
    """A state whose optimizer is no tree of dicts, on a mesh."""
    normal = np.random.default_rng(seed).normal(size=(2, 64, 8))
    params = {
        "layers": {"w": put(normal, None, "data", shape=shape)},
        "whole": put(jnp.full((64, 3), seed, jnp.bfloat16), shape=shape),
    }
    return {"params": params, "optimizer": optax.adam(1e-3).init(params), "seen": np.float32(seed)}


def test_what_a_checkpointer_saves_comes_back_on_another_mesh(tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "PART_BYTES", 64)
    ours = zj.checkpoint.Handler.context()
    with ocp.training.Checkpointer(tmp_path, context=ours) as checkpointer:
        given, other = state(1), state(0, (8, 1))  # whose parts are halves of chunks
        saving = checkpointer.save_async(1, given)
        jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)(given)
        assert given["params"]["layers"]["w"].is_deleted() and saving.result()
        got = checkpointer.load(1, other)
    same(got, state(1))
    assert got["params"]["layers"]["w"].sharding == other["params"]["layers"]["w"].sharding
    same(partial.read(tmp_path / "1")["params"], jax.tree.map(np.asarray, state(1)["params"]))
    # without the handler
    same(ocp.load(tmp_path / "1")["params"], jax.tree.map(np.asarray, state(1)["params"]))
    # A flipped bit is found, in an array on a mesh and in a number.
    for name in ("params.whole/c.0.0", "seen/c"):
        file = tmp_path / "1" / "state" / name
        flip(file, 9)
        with ours:
            check_storage_error(f"state/{name} .* is changed", ocp.load, tmp_path / "1", other)
        flip(file, 9)


def test_numbers_of_any_type_come_back_and_others_are_refused(tmp_path):
    given = {
        kind: jnp.arange(5).astype(kind) for kind in ("bool", "complex64", "int8", "float8_e5m2")
    }
    given |= {"one": jnp.asarray(True), "order": np.arange(5, dtype=">i4")}
    with zj.checkpoint.Handler.context():
        ocp.save(tmp_path / "1", given)
        native = given | {"order": np.arange(5, dtype=np.int32)}
        same(ocp.load(tmp_path / "1", native), native)
        check_storage_error(
            r"its array one is \[\], \[3\] is asked for",
            ocp.load,
            tmp_path / "1",
            {"one": np.ones(3)},
        )
        check_storage_error("each needs a key", lambda: ocp.save(tmp_path / "2", jnp.ones(3)))
    ocp.save(tmp_path / "plain", {"w": np.ones(3)})
    with (
        zj.checkpoint.Handler.context(),
        pytest.raises(
            StorageError,
            match=r"has no checksums\.json: load checkpoints that Orbax saved on its own outside",
        ),
    ):
        ocp.load(tmp_path / "plain", {"w": np.ones(3)})
    same(ocp.load(tmp_path / "1"), native)  # without the handler


def test_a_disk_that_fails_in_one_process_leaves_no_step(tmp_path):
    arguments = ["-c", TWO_PROCESSES, tmp_path / "steps"]
    with multiprocess_runs.start(arguments, 2, tmp_path) as run:
        for result in run.wait(120):
            assert result.code == 0, result.err
            assert "2 is not saved: File too large" in result.out and "(process 1)" in result.out
    assert sorted(p.name for p in (tmp_path / "steps").iterdir() if p.name.isdecimal()) == [
        "1",
        "3",
    ]
