"""Orbax's own functions and Checkpointer save and load by this package's engine, over one process
or several."""

import random

import jax
import jax.numpy as jnp
import multiprocess_runs
import numpy as np
import optax
import pytest
from checkpoint_helpers import put, same
from orbax.checkpoint import v1 as ocp
from refusals import check_storage_error

import zaya_jax as zj
from zaya_jax.checkpoint import layout, partial
from zaya_jax.checkpoint.vault import Vault
from zaya_jax.config import StorageError

SEVERAL = """
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


def rows(seed):
    """The numbers of the programs above."""
    return np.random.default_rng(seed).normal(size=(64, 512)).astype("float32")


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
    with ocp.training.Checkpointer(
        tmp_path, context=zj.checkpoint.Handler.context()
    ) as checkpointer:
        given, other = state(1), state(0, (2, 4))
        saving = checkpointer.save_async(1, given)
        jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)(given)
        assert given["params"]["layers"]["w"].is_deleted() and saving.result()
        got = checkpointer.load(1, other)
    same(got, state(1))
    assert got["params"]["layers"]["w"].sharding == other["params"]["layers"]["w"].sharding
    same(partial.read(tmp_path / "1")["params"], jax.tree.map(np.asarray, state(1)["params"]))
    # without the handler
    same(ocp.load(tmp_path / "1")["params"], jax.tree.map(np.asarray, state(1)["params"]))


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
        check_storage_error(
            r"w has the shape \[0, 3\], so no numbers",
            lambda: ocp.save(tmp_path / "2", {"w": jnp.ones((0, 3))}),
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


def test_each_flipped_bit_is_found(tmp_path):
    with zj.checkpoint.Handler.context():
        ocp.save(tmp_path / "2", state(2))
        listed, generator = Vault(tmp_path).read_seal(2).files, random.Random(0)
        for name in [layout.MARKER, *listed]:
            file = tmp_path / "2" / name
            content = file.read_bytes()
            at = generator.randrange(8 * len(content))
            file.write_bytes(
                content[: at // 8]
                + bytes([content[at // 8] ^ 1 << at % 8])
                + content[at // 8 + 1 :]
            )
            check_storage_error("damaged", ocp.load, tmp_path / "2", state(2))
            file.write_bytes(content)
        same(ocp.load(tmp_path / "2", state(2)), state(2))


def test_a_disk_that_fails_in_one_process_leaves_no_step(tmp_path):
    arguments = ["-c", SEVERAL, tmp_path / "steps"]
    with multiprocess_runs.start(arguments, 2, tmp_path) as run:
        for result in run.wait(120):
            assert result.code == 0, result.err
            assert "2 is not saved: File too large" in result.out and "(process 1)" in result.out
    assert sorted(p.name for p in (tmp_path / "steps").iterdir() if p.name.isdecimal()) == [
        "1",
        "3",
    ]
