"""Owners and traffic for every number of devices, from layouts: sizes, no program."""

import functools

import numpy as np
import pytest
from scipy.optimize import linprog

from zaya_jax.config import Mesh, Model, Optim, Precision
from zaya_jax.model import zaya
from zaya_jax.optim import chain, zero
from zaya_jax.optim.zero import owners
from zaya_jax.parallel import sharding
from zaya_jax.parallel.spread import AXES, Spread, spread_of

MOST = 16_384
MODELS = {
    "zaya1_base": Model(),
    "a small one": Model(
        vocab_size=32_000,
        hidden_size=512,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        moe_intermediate_size=512,
        num_experts=8,
        router_hidden_size=64,
    ),
    "a dense one": Model(
        model_type="dense",
        vocab_size=128_000,
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        num_experts=1,
        intermediate_size=14_336,
    ),
    "a tiny one": Model(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        moe_intermediate_size=64,
        num_experts=4,
        router_hidden_size=16,
    ),
}
SAMPLE = (*range(2, 12), 24, 127, 640, 1016, 1024, 1025, 3072, 16_381)


@functools.cache
def shapes(name: str):
    return zaya.abstract(MODELS[name], Precision())


def layout_of(name: str, fsdp: bool = False, **axes: int) -> zero.Layout:
    """The layout of a model's optimizer on a mesh."""
    sizes = dict.fromkeys(AXES, 1) | axes
    spread: Spread = spread_of(Mesh(fsdp=fsdp), sizes)
    specs = sharding.param_specs(MODELS[name], Precision(), spread)
    return chain.build(Optim(), Precision(), shapes(name), specs=specs, axes=sizes).layout


def meshes(name: str, devices: int) -> list[dict]:
    """Only data, and every other axis with it if it divides the devices and the model."""
    model, found = MODELS[name], [dict(data=devices)]
    experts = [] if model.model_type == "dense" else [dict(expert=4), dict(expert=4, tensor=2)]
    for other in (*experts, dict(tensor=2), dict(context=2), dict(tensor=2, context=2)):
        data, rest = divmod(devices, int(np.prod(list(other.values()))))
        found += [dict(data=data, **other)] if data and not rest else []
    if model.hidden_size % devices == 0:
        found.append(dict(data=devices, fsdp=True))
    return found


def padding_share(layout: zero.Layout) -> float:
    """The share of all that travels that is padding."""
    found = [bucket.traffic(name, 4) for name, bucket in layout.bucket_of.items()]
    padding = sum(kinds.pop("padding", 0) for kinds in found)
    return padding / max(sum(sum(kinds.values()) for kinds in found), 1)


def kinds_of(layout: zero.Layout) -> list[tuple[int, int]]:
    """(work, how many) of all matrices over all devices, the dearest first."""
    found: dict[int, int] = {}
    for bucket in layout.matrices.values():
        kind = bucket.work_item
        found[kind.cost] = found.get(kind.cost, 0) + kind.number * len(kind.groups)
    return sorted(found.items(), reverse=True)


def least_load(kinds: list[tuple[int, int]], devices: int) -> float:
    """A lower bound on the busiest device's work for any placement: the mean, the largest one,
    pigeonholes."""
    costs, ends = np.array([c for c, _ in kinds]), np.cumsum([n for _, n in kinds])
    bound = max(float(costs[0]), sum(c * n for c, n in kinds) / devices)
    # of the k · devices + 1 largest, k + 1 meet
    for k in range(1, min(64, -(-int(ends[-1]) // devices))):
        bound = max(bound, (k + 1) * float(costs[np.searchsorted(ends, k * devices, side="right")]))
    return bound


def packs(kinds: list[tuple[int, int]], devices: int, most: float) -> bool:
    """Whether the dearest matrices fit with no device above `most`, were fractions of devices
    allowed."""
    large = [(c, n) for c, n in kinds if 4 * c > most][:3]
    patterns = [()]
    for cost, _ in large:
        patterns = [
            (*p, k)
            for p in patterns
            for k in range(
                int((most - sum(a * c for a, (c, _) in zip(p, large, strict=False))) // cost) + 1
            )
        ]
    table = np.array([p for p in patterns if any(p)])
    found = linprog(np.ones(len(table)), A_ub=-table.T, b_ub=[-n for _, n in large], method="highs")
    return found.status == 0 and found.fun <= devices * (1 + 1e-9)


def check(name: str, devices: int, of_mesh: dict) -> None:
    layout = layout_of(name, **of_mesh)
    assert padding_share(layout) <= 0.05, (name, of_mesh)
    work = sum(
        bucket.work_item.cost * bucket.counts.astype(int) for bucket in layout.matrices.values()
    )
    kinds, busiest = kinds_of(layout), int(work.max())
    assert sum(c * n for c, n in kinds) == work.sum()
    if busiest > 1.25 * least_load(kinds, devices):
        assert not packs(kinds, devices, busiest / 1.25), (
            name,
            of_mesh,
            busiest / least_load(kinds, devices),
        )


@pytest.mark.parametrize("name", MODELS)
def test_padding_and_balance_at_some_counts(name):
    for devices in SAMPLE if name == "zaya1_base" else SAMPLE[1::4]:
        check(name, devices, dict(data=devices))
    for devices in (24, 64, 1016):
        for mesh in meshes(name, devices)[1:]:
            check(name, devices, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_padding_and_balance_at_many_counts(name):
    """Every count of one pod, then counts of no common divisor: all up to the most take hours."""
    for devices in (*range(2, 513), *range(513, MOST, 61), MOST):
        check(name, devices, dict(data=devices))
        if devices % 16 == 0:
            for mesh in meshes(name, devices)[1:]:
                check(name, devices, mesh)


def test_where_matrices_are_few_small_ones_share_devices():
    """On 1,024 devices 640 have a gate_up, 256 others two downs, 128 one: 12, where stacks side by
    side gave 16."""
    group = np.arange(1024)[None]
    items = [owners.WorkItem(640, 10, group), owners.WorkItem(640, 6, group)]
    counts = owners.assign(items, 1024)
    assert (10 * counts[0] + 6 * counts[1]).max() == 12
    assert [np.bincount(c[0]).tolist() for c in counts] == [[384, 640], [640, 128, 256]]


def test_an_exchange_takes_few_rounds_and_moves_less_than_a_share():
    """Each device sends and gets one piece a round; of ZAYA1's 40 matrices of a kind on 16,384
    devices, too."""
    for devices in (3, 8, 127, 1024, 16_384):
        layout = layout_of("zaya1_base", data=devices)
        for bucket in layout.matrices.values():
            if bucket.summed_whole:
                continue
            assert len(bucket.plan.joins) + len(bucket.plan.out) <= 20
            for pairs in (
                *bucket.plan.joins,
                *(leg.pairs for leg in bucket.plan.out if leg.pairs is not None),
            ):
                assert all(len(set(column.tolist())) == len(pairs) for column in pairs.T)
        found = [bucket.traffic(name, 2) for name, bucket in layout.bucket_of.items()]
        total = {
            kind: sum(f.get(kind, 0) for f in found) for kind in ("reduce-scatter", "exchange")
        }
        assert total["exchange"] <= 5 * total["reduce-scatter"] / devices
    # 80 on each: nothing moves
    assert layout_of("zaya1_base", data=8).matrices["muon 2048x2x2048"].plan.is_noop


def test_tiny_stacks_are_summed_as_a_whole():
    """A model of 800,000 numbers on 16,381 devices would be mostly padding."""
    assert not any(b.summed_whole for b in layout_of("zaya1_base", data=1024).matrices.values())
    layout = layout_of("a tiny one", data=16_381)
    assert all(b.summed_whole for b in layout.matrices.values()) and padding_share(layout) == 0
