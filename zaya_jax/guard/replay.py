"""Checks that the devices compute correctly: a step's gradients again, on the same devices and on
others.

    replay = Replay(config, setup)                  of a phase; `faults` on purpose go through `hook`
    finding = replay(params, bias, batch)           None, or a Mismatch, the same in all processes

Every device hashes the gradient of each weight as it leaves its layer, before anything is summed
over data, and its share of the loss. That is done twice on the same devices, and once with the
batch moved on by one along the data axis: all data shards have the same weights, so sound devices
give the same bits wherever a part of the batch lies. One that differs from itself does not
reproduce. Otherwise two places differ about a part of the batch, and a third one tells which of
them is wrong; with two data shards both are named. With one, or with fsdp, all devices are one part
that can only differ from itself: it is wrong if one of REPEATS results is another, and the program
does not reproduce if more are.

Devices that compute a part together (the axes expert, context and tensor; with fsdp all) are named
as a group, since an error of one is in the others' results. With fsdp gradients are summed over
data before they can be seen, in another order when the batch has moved: then the move compares only
the sums of the loss.

It sees one micro-batch. A hash changes with each bit of a gradient, and with its place.
"""

import dataclasses
import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from zaya_jax import trees
from zaya_jax.config import Config
from zaya_jax.parallel.mesh import batch_spec
from zaya_jax.parallel.spread import AXES
from zaya_jax.training import step as steps
from zaya_jax.training.gradients import gradients
from zaya_jax.training.state import REPLICATED, Setup

HALVES = 4  # 64 bits, sixteen in each float: the gradient of a layer's slot is float32
REPEATS = 6  # of a computation that differed and that no other devices repeat
FIGURES = "loss"  # stands for the loss's sums among the names of weights


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """The devices that compute wrongly, as far as can be determined, by their places in the
    mesh."""

    # "itself": differs from itself; "others": from the others; "program": nearly all differ from
    # themselves
    kind: str
    devices: tuple[int, ...]  # of several it is not known which
    weights: tuple[str, ...]  # whose gradients differ
    why: str


class Replay:
    """The check of one phase."""

    def __init__(self, config: Config, setup: Setup, hook: Any = None):
        mesh, self._spread = setup.mesh, setup.spread
        self._names: list[str] = []
        spread = self._spread
        loss_fn = steps.make_loss(config, config.model, spread)

        def hashes(params, bias, batch, frozen):
            total = float(math.prod(batch["tokens"].shape[1:]) * spread.data * spread.expert)
            by_layer: dict[str, Any] = {
                path: _Hashed(x.shape[0])
                for path, x in trees.flat(params, "/").items()
                if path.startswith("layers/") and not frozen
            }

            def loss_of(params, micro, stored):
                return loss_fn(params, bias, micro, total, stored, frozen)

            found, sums = gradients(loss_of, params, batch, by_layer, in_place=False)
            found = trees.flat(found, "/")
            rest = {path: x for path, x in found.items() if path not in by_layer}
            rest = hook(rest) if hook else rest
            words = {path: hashed(x) for path, x in rest.items()}
            words |= {path: found[path].reshape(-1) for path in by_layer}
            words[FIGURES] = jnp.concatenate([hashed(x) for x in jax.tree.leaves(sums)])
            self._names = [path for path, x in words.items() for _ in range(x.size)]
            return jnp.concatenate(list(words.values()))[None]

        def move(batch, by):
            size = spread.data
            one = jax.tree.map(lambda x: x[:1], batch)
            there = [(i, (i + by) % size) for i in range(size)]
            return jax.tree.map(lambda x: lax.ppermute(x, "data", there), one)

        batches, everywhere = batch_spec(spread), PartitionSpec(AXES)
        specs = (setup.specs["params"], REPLICATED, batches, setup.specs.get("frozen", {}))
        self._program = steps.on_mesh(config, mesh, hashes, specs, out=everywhere)
        self._moves = [
            steps.on_mesh(
                config, mesh, lambda batch, by=by: move(batch, by), (batches,), out=batches
            )
            for by in range(3)
        ]
        self._gather = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, REPLICATED))

    def __call__(
        self, params: Any, bias: jax.Array, batch: dict, frozen: Any = None
    ) -> Mismatch | None:
        """Computes it and compares; all processes together. `frozen`: the weights under params that
        are adapters."""

        def compute(by: int) -> np.ndarray:
            return np.asarray(
                self._gather(self._program(params, bias, self._moves[by](batch), frozen or {}))
            )

        first, second = compute(0), compute(0)
        parts = 1 if self._spread.fsdp else self._spread.data
        found = differs_from_itself(first, second, parts, self._names)
        if found and parts == 1:
            # No other part shows whether all differ so: a program whose order of sums varies
            # differs often, a device that is wrong seldom.
            others = [compute(0) for _ in range(REPEATS - 2)]
            return found if all_but_one_agree([first, second, *others]) else irreproducible(found)
        if found or self._spread.data == 1:
            return found
        seen = [first, compute(1)]
        compared = np.array([name == FIGURES or not self._spread.fsdp for name in self._names])
        found = differs_from_others(seen, compared, self._spread.data, self._names)
        if found and self._spread.data > 2:
            found = differs_from_others(
                [*seen, compute(2)], compared, self._spread.data, self._names
            )
        return found


class _Hashed:
    """Takes the place of a way in which a layer's gradients travel (`optim.zero.by_layer`), and
    keeps only their hash."""

    def __init__(self, layers: int):
        self.shape = (layers, HALVES)

    @staticmethod
    def share(gradient: jax.Array) -> jax.Array:
        """The hash of one layer's gradient."""
        return hashed(gradient)


def hashed(x: jax.Array) -> jax.Array:
    """Four floats, each a whole number below 2**16: one other bit, or two numbers in each other's
    places, change them.

    Each number is mixed with its place by a function that has an inverse, so a change of one always
    changes the sum.
    """
    unsigned = {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    bits = lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
    place = jnp.zeros(x.shape, jnp.uint32)
    for dim in range(x.ndim):
        place = place * np.uint32(x.shape[dim]) + lax.broadcasted_iota(jnp.uint32, x.shape, dim)
    mixed = _mix(bits + place * np.uint32(0x9E3779B9))
    sums = [
        jnp.sum(_mix(mixed ^ np.uint32(salt)), dtype=jnp.uint32)
        for salt in (0x85EBCA6B, 0xC2B2AE35)
    ]
    halves = [part for one in sums for part in (one & np.uint32(0xFFFF), one >> np.uint32(16))]
    return jnp.stack(halves).astype(jnp.float32)


def _mix(x: jax.Array) -> jax.Array:
    """MurmurHash3's last step: each bit of the input changes about half of the output's; it has an
    inverse."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x ^ (x >> np.uint32(16))


def differs_from_itself(
    first: np.ndarray, again: np.ndarray, parts: int, names: list[str]
) -> Mismatch | None:
    """Of hashes [devices, words]: the parts of the mesh that gave others the second time."""
    wrong = (first != again).reshape(parts, -1, first.shape[1])
    guilty = np.flatnonzero(wrong.any((1, 2)))
    if not len(guilty):
        return None
    group = wrong.shape[1]
    devices = tuple(int(unit * group + i) for unit in guilty for i in range(group))
    weights = _weights(wrong.any((0, 1)), names)
    if len(guilty) > max(parts / 2, 1):
        why = (
            f"{len(guilty)} of {parts} parts of the mesh differ from themselves, which is no"
            " device's fault"
        )
        return Mismatch("program", devices, weights, why)
    return Mismatch("itself", devices, weights, "computed twice, it gave other bits")


def all_but_one_agree(results: list[np.ndarray]) -> bool:
    """Whether these hashes of one computation are the same but for one."""
    _, most = Counter(result.tobytes() for result in results).most_common(1)[0]
    return most == len(results) - 1


def irreproducible(found: Mismatch) -> Mismatch:
    """The same difference, as the program's and no device's."""
    why = f"in {REPEATS} computations of the same gradients more than one gave other bits"
    return dataclasses.replace(found, kind="program", why=why)


def differs_from_others(
    seen: list[np.ndarray], compared: np.ndarray, parts: int, names: list[str]
) -> Mismatch | None:
    """Of hashes [devices, words] of batches moved on by 0, 1 and, if given, 2: the parts of the
    mesh that are wrong."""
    at = [x[:, compared].reshape(parts, -1) for x in seen]
    votes: Counter[int] = Counter()
    for batch in range(parts):
        places = [(batch + by) % parts for by in range(len(at))]
        found = [at[by][place].tobytes() for by, place in enumerate(places)]
        if len(set(found)) > 1:
            most, count = Counter(found).most_common(1)[0]
            votes.update(p for p, x in zip(places, found, strict=True) if count == 1 or x != most)
    if not votes:
        return None
    guilty = sorted(part for part, count in votes.items() if count == max(votes.values()))
    group = seen[0].shape[0] // parts
    devices = tuple(part * group + i for part in guilty for i in range(group))
    moved = np.roll(seen[1].reshape(parts, group, -1), -1, axis=0)
    weights = _weights((seen[0].reshape(moved.shape) != moved).any((0, 1)) & compared, names)
    why = "others computed the same part of the batch, and gave other bits"
    if parts == 2:
        why = (
            "two data shards gave other bits for the same part of the batch, and a third to decide"
            " is not there"
        )
    return Mismatch("others", devices, weights, why)


def _weights(wrong: np.ndarray, names: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name, bad in zip(names, wrong, strict=True) if bad))
