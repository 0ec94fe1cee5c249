"""Experts spread over devices: equal to all of them on one; traffic and memory of the exchange."""

import functools

import formulas
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from rows import slow

from zaya_jax.compiled import hlo
from zaya_jax.model import experts
from zaya_jax.parallel import dispatch
from zaya_jax.parallel.spread import Spread

E, D, F = 8, 16, 12
TOKENS, EXPERTS = PartitionSpec(("data", "expert")), PartitionSpec("expert")
ARGUMENTS = (TOKENS, TOKENS, TOKENS, EXPERTS, EXPERTS)


def mesh_of(spread):
    shape = (spread.data, spread.expert)
    devices = jax.devices()[: spread.data * spread.expert]
    return jax.make_mesh(
        shape, ("data", "expert"), axis_types=(AxisType.Auto,) * 2, devices=devices
    )


def gated(mlp, num_experts=E):
    """An `expert_mlp` times the gates, as the join multiplies them."""

    def run(x, choice, gate, gate_up, down):
        return mlp(x, choice, gate_up, down) * jnp.where(choice < num_experts, gate, 0.0)[:, None]

    return run


def on_devices(spread):
    """The function of whole arrays and its gradients: each device's of its part of the loss, then
    summed over data."""
    mlp = gated(functools.partial(dispatch.expert_mlp, dtype=jnp.float32, spread=spread))

    def run(x, choice, gate, gate_up, down, d_out):
        y, pull = jax.vjp(lambda *a: mlp(a[0], choice, *a[1:]), x, gate, gate_up, down)
        dx, d_gate, *d_weights = pull(d_out)
        return y, dx, d_gate, *(lax.psum(d, "data") for d in d_weights)

    out = (TOKENS, TOKENS, TOKENS, EXPERTS, EXPERTS)
    return jax.jit(
        jax.shard_map(
            run, mesh=mesh_of(spread), in_specs=(*ARGUMENTS, TOKENS), out_specs=out, check_vma=False
        )
    )


@jax.jit
def on_one(x, choice, gate, gate_up, down, d_out):
    mlp = gated(functools.partial(experts.expert_mlp, dtype=jnp.float32))
    y, pull = jax.vjp(lambda *a: mlp(a[0], choice, *a[1:]), x, gate, gate_up, down)
    return y, *pull(d_out)


def choices(who, key, num):
    """Mixed: every device's own mixture. Uneven: a few experts for most tokens, of some devices
    only."""
    mixed = jax.random.randint(key, (num,), 0, E + 1)
    return {
        "mixed": mixed,
        "uneven": jnp.where(jnp.arange(num) < num // 2, jnp.minimum(mixed, 3), E - 1),
        "all one": jnp.full((num,), E - 2),
        "all skip": jnp.full((num,), E),
    }[who].astype(jnp.int32)


@pytest.mark.parametrize(
    ("spread", "num"),
    [(Spread(data=2, expert=4), 30), slow(Spread(expert=8), 13)],
    ids=["2x4", "1x8"],
)
def test_equal_to_one_device_whatever_the_router_chose(spread, num):
    run = on_devices(spread)
    num *= spread.data * spread.expert
    keys = jax.random.split(jax.random.key(0), 6)
    x, d_out = (jax.random.normal(key, (num, D)) for key in keys[:2])
    gate = jax.random.uniform(keys[2], (num,))
    weights = jax.random.normal(keys[3], (E, D, 2 * F)), jax.random.normal(keys[4], (E, F, D))
    with jax.default_matmul_precision("highest"):
        for who in ("mixed", "uneven", "all one", "all skip"):
            args = (x, choices(who, keys[5], num), gate, *weights, d_out)
            for name, a, b in zip(
                ("y", "dx", "d_gate", "d_gate_up", "d_down"), run(*args), on_one(*args), strict=True
            ):
                assert np.linalg.norm(a - b) <= 1e-6 * np.linalg.norm(b), (who, name)


def test_one_round_up_to_twice_the_even_load_and_no_more_than_stated_beyond():
    devices, num = 8, 32
    spread = Spread(expert=devices)

    def rounds(sizes):
        def body(own):
            counts = lax.all_gather(own[0], "expert").reshape(devices, devices, -1)
            return dispatch.Rounds(counts, num, ("expert",)).needed

        mapped = jax.shard_map(
            body, mesh=mesh_of(spread), in_specs=EXPERTS, out_specs=PartitionSpec(), check_vma=False
        )
        return int(jax.jit(mapped)(jnp.asarray(sizes, jnp.int32)))

    even = np.full((devices, E), num // E)
    assert rounds(even) == 1
    double = np.zeros((devices, E))
    double[:, ::2] = 2 * num // E
    assert rounds(double) == 1
    to_one = np.zeros((devices, E))
    to_one[:, 3] = num
    assert rounds(to_one) == dispatch.most_rounds(num, devices) == 4
    assert rounds(0 * even) == 0


def lowered(spread, num, dim, width, num_experts, backward):
    """Values alone, or gradients alone, from shapes; `num` tokens per device."""
    devices = spread.data * spread.expert
    mesh = mesh_of(spread)

    def shape(spec, *dims, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, spec))

    args = (
        shape(TOKENS, num * devices, dim),
        shape(TOKENS, num * devices, dtype=jnp.int32),
        shape(TOKENS, num * devices),
        shape(EXPERTS, num_experts, dim, 2 * width),
        shape(EXPERTS, num_experts, width, dim),
    )
    mlp = gated(
        functools.partial(dispatch.expert_mlp, dtype=jnp.float32, spread=spread), num_experts
    )

    def gradients(x, choice, gate, gate_up, down, d_out):
        return jax.vjp(lambda *a: mlp(a[0], choice, *a[1:]), x, gate, gate_up, down)[1](d_out)

    if backward:
        args = (*args, args[0])
    body = gradients if backward else mlp
    in_specs = (*ARGUMENTS, TOKENS) if backward else ARGUMENTS
    out_specs = (TOKENS, TOKENS, EXPERTS, EXPERTS) if backward else TOKENS
    mapped = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped).trace(*args)


@pytest.mark.parametrize(
    ("devices", "num", "dim", "width", "num_experts"),
    [(8, 1024, 128, 128, 16), slow(2, 500, 128, 128, 8), slow(4, 500, 128, 32, 8)],
)
def test_traffic_and_memory_of_a_round(devices, num, dim, width, num_experts):
    """One program serves every load, so its traffic per round and its memory are the same too."""
    rows = 4 * dim * devices * dispatch.slot_rows(num, devices)
    counts = 4 * devices * num_experts
    # Of each round forward there and back; backward cotangents there and back, and later rounds'
    # tokens once more. What the forward pass does is in both programs, since the gate's gradient
    # needs its result.
    for backward, first, later in ((False, 2, 2), (True, 4, 5)):
        traced = lowered(Spread(expert=devices), num, dim, width, num_experts, backward)
        program = traced.lower().compile()
        found = [(c.kind, c.bytes, c.times) for c in hlo.collectives(program)]
        assert sorted(x[:2] for x in found if x[2] is None) == [("all-to-all", rows)] * (
            later if devices > 2 else 0
        )
        once = [("all-gather", counts, 1)] + [("all-to-all", rows, 1)] * first
        assert sorted(x for x in found if x[2] is not None) == once
        own = num_experts // devices
        bound = formulas.most_temporaries(num, devices, dim, width, own, 4, backward)
        assert 0.5 * bound < program.memory_analysis().temp_size_in_bytes <= bound
