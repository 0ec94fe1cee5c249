"""LASP-2: equal to one device's linear attention; traffic, read from the compiled program."""

import dataclasses
import functools

import formulas
import jax
import jax.numpy as jnp
import mesh_helpers as helpers
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from rows import slow

from pallas_kernels.linear_attention import linear_attention
from zaya_jax import config
from zaya_jax.compiled import hlo
from zaya_jax.model import zaya
from zaya_jax.parallel import linear
from zaya_jax.parallel.context import zigzag
from zaya_jax.parallel.spread import spread_of
from zaya_jax.training import step as steps

B, H, K, C = 2, 4, 2, 8
SPEC = PartitionSpec(None, "context")


def mesh_of(size):
    return jax.make_mesh(
        (size,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size]
    )


def inputs(length):
    keys = jax.random.split(jax.random.key(0), 4)
    q = jax.random.normal(keys[0], (B, length, H, C))
    k, v = (jax.random.normal(key, (B, length, K, C)) for key in keys[1:3])
    return q, k, v, jax.random.normal(keys[3], q.shape)


def documents(length):
    """One row whose documents are long and short, begin on a piece's edge or not; one with a single
    long document."""
    ids = np.ones((B, length), np.int32)
    for start in (3, 16, 17, 40, 41, length // 2, length - 9):
        ids[0, start:] += 1
    ids[:, length - 5 :] = 0
    return jnp.asarray(ids)


def on_devices(function, size, **options):
    """The function on whole arrays: cut over devices, put together again."""
    mapped = jax.shard_map(
        functools.partial(function, axis="context", **options),
        mesh=mesh_of(size),
        in_specs=(SPEC,) * 4,
        out_specs=SPEC,
        check_vma=False,
    )

    def run(q, k, v, segments):
        columns = zigzag(q.shape[1], size)
        out = mapped(*(x[:, columns] for x in (q, k, v, segments)))
        return out[:, np.argsort(columns)]

    return run


@pytest.mark.parametrize("size", [slow(2), 4, slow(8)])
def test_equal_to_one_device(size):
    q, k, v, d_out = inputs(96)
    segments = documents(96)

    def with_gradients(run):
        def loss(q, k, v):
            out = run(q, k, v, segments)
            return jnp.sum(out * d_out), out

        (value, out), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(
            q, k, v
        )
        return value, out, *grads

    ours = with_gradients(on_devices(linear.lasp2, size, chunk=4))
    theirs = with_gradients(functools.partial(linear_attention, chunk=16))
    assert abs(ours[0] - theirs[0]) <= 1e-6 * np.sum(np.abs(theirs[1] * d_out))
    for name, a, b in zip(("out", "dq", "dk", "dv"), ours[1:], theirs[1:], strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b), name


def test_a_sequence_over_two_axes():
    """As with TSP, where the tensor axis carries the sequence too."""
    mesh = jax.make_mesh(
        (2, 2), ("context", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    axes = ("context", "tensor")
    spec = PartitionSpec(None, axes)
    q, k, v, _ = inputs(32)
    columns = zigzag(32, 4)
    mapped = jax.shard_map(
        lambda q, k, v: linear.lasp2(q, k, v, axis=axes),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    out = jax.jit(mapped)(*(x[:, columns] for x in (q, k, v)))
    np.testing.assert_allclose(out, linear_attention(q, k, v)[:, columns], atol=1e-6)


def compiled(function, length, size=8, gradient=False, batch=1, heads=H, kv_heads=K, channels=C):
    """One call compiled for shapes alone."""
    sharding = NamedSharding(mesh_of(size), SPEC)

    def shape(*dims, dtype=jnp.float32):
        return jax.ShapeDtypeStruct((batch, length, *dims), dtype, sharding=sharding)

    q, k = shape(heads, channels), shape(kv_heads, channels)
    mapped = jax.shard_map(
        functools.partial(function, axis="context"),
        mesh=mesh_of(size),
        in_specs=(SPEC,) * 4,
        out_specs=SPEC,
        check_vma=False,
    )

    def backward(q, k, v, segments, d_out):
        return jax.vjp(lambda *a: mapped(*a, segments), q, k, v)[1](d_out)

    segments = shape(dtype=jnp.int32)
    args = (q, k, k, segments, q) if gradient else (q, k, k, segments)
    return jax.jit(backward if gradient else mapped).lower(*args).compile()


@pytest.mark.parametrize("length", [8 * 1024, 512 * 1024])
def test_one_all_gather_each_way_whatever_the_length(length):
    forward, backward = formulas.gathered_bytes(8, 1, K, C)
    assert [
        (c.kind, c.bytes, c.times) for c in hlo.collectives(compiled(linear.lasp2, length))
    ] == [("all-gather", forward, 1)]
    both = hlo.collectives(compiled(linear.lasp2, length, gradient=True))
    assert [(c.kind, c.bytes, c.times) for c in both] == [
        ("all-gather", n, 1) for n in (forward, backward)
    ]


def test_the_states_do_not_wait_for_the_work_within_a_device():
    """The all-gather's operand does not come from the loop over chunks, so both can run at once."""
    text = compiled(linear.lasp2, 8 * 1024).as_text()
    entry = text[text.index("ENTRY") :]
    made = {
        line.split(" = ")[0].split()[-1].lstrip("%"): line
        for line in entry.splitlines()
        if " = " in line
    }
    pending, seen = [name for name, line in made.items() if " all-gather(" in line], set()
    while pending:
        name = pending.pop()
        if name in made and name not in seen:
            seen.add(name)
            pending += [
                word.strip("%,() ") for word in made[name].split(" = ")[1].replace("(", " ").split()
            ]
    assert len(seen) > 2 and not any(" while(" in made[name] for name in seen)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "attention"])
def test_linear_layers_of_a_model_gather_states_alone(remat):
    """Besides the halo's traffic, each layer gathers once forward and once backward, repeated or
    not."""
    settings = helpers.with_model(layer_types=("hybrid_linear",) * 2, sliding_window=None)
    settings = dataclasses.replace(settings, mesh=config.Mesh(context=4), remat=remat)
    mesh, run = helpers.program(settings, 4)
    spread = spread_of(settings.mesh, mesh.shape)
    args = helpers.parameters(settings), zaya.init_balance(settings.model)
    batch = steps.put_batch(mesh, helpers.batch(), 1, spread)
    found = hlo.collectives(run.lower(*args, batch).compile())
    gathers = [(c.bytes, c.times) for c in found if c.kind == "all-gather" and c.in_loop]
    model = settings.model
    expected = formulas.gathered_bytes(4, helpers.ROWS, model.num_key_value_heads, model.head_dim)
    assert gathers == [(n, model.num_hidden_layers) for n in expected]
