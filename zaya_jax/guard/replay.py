"""Checks that the devices compute correctly: a step's gradients again, on the same devices and on
others.

    replay = Replay(config, setup)                  of a phase; `inject` changes gradients: a test's faults
    finding = replay(params, bias, batch)           None, or a Mismatch, the same in all processes

Every device hashes the gradient of each weight as it leaves its layer, before anything is summed
over data, and its share of the loss. It does so twice on the same devices, and once with the batch
moved on by one along the data axis: all data shards have the same weights, so sound devices give
the same bits wherever a part of the batch lies.

    unstable         two results of the same devices differ
    disagrees        two data shards differ about the same part of the batch, and a third decides which
                     of them is wrong; with two data shards both are named
    irreproducible   so many results differ that no device can be at fault, but the program is

With one data shard, or with fsdp, all devices are one part that can only be compared with itself:
it is unstable if one of REPEATS results differs, and the program is irreproducible if more do.

Devices that compute a part together (the axes expert, context and tensor; with fsdp all) are named
as a group, since an error of one is in the others' results. With fsdp gradients are summed over
data before they can be seen, and in another order when the batch has moved: then only the sums of
the loss are compared after the move.

A replay sees one micro-batch. A hash changes with each bit of a gradient, and with its position.
"""

import dataclasses
import functools
import itertools
import math
from collections import Counter
from typing import Any, Literal

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
from zaya_jax.training.gradients import Way, gradients
from zaya_jax.training.state import REPLICATED, Setup

WORDS = 4  # of a hash: 64 bits, sixteen in each float, since a slot's gradient is float32
REPEATS = 6  # of a computation that differed and that no other devices repeat
LOSS = "loss"  # stands for the loss's sums among the names of weights


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """The devices that compute wrongly, as far as can be determined."""

    kind: Literal["unstable", "disagrees", "irreproducible"]
    devices: tuple[int, ...]  # indexes into `mesh.devices.flat`; of several it is not known which
    weights: tuple[str, ...]  # whose gradients differ
    why: str


class Replay:
    """The check of one phase."""

    def __init__(self, config: Config, setup: Setup, inject: Any = None):
        mesh, spread = setup.mesh, setup.spread
        self._spread = spread
        self._weight_of_word: list[str] = []  # written while `hashes` is traced
        loss_fn, adapted = steps.objective_of(config, spread).value, bool(config.run.lora)

        def hashes(params, bias, batch, frozen):
            # Not the number of targets: any constant will do, since only bits are compared.
            total = float(math.prod(batch["tokens"].shape[1:]) * spread.data * spread.expert)
            by_layer: dict[str, Way] = {}
            if not adapted:
                for path, x in trees.flat(params, "/").items():
                    if path.startswith("layers/"):
                        # Only the hash of each layer's gradient leaves, nothing is reduced.
                        by_layer[path] = Way((x.shape[0], WORDS), hashed)

            def loss_of(params, micro, hooks):
                return loss_fn(params, bias, micro, total, hooks, frozen)

            grads, sums = gradients(loss_of, params, batch, by_layer, in_place=False)
            grads = trees.flat(grads, "/")
            of_layers = {path: grads.pop(path).reshape(-1) for path in by_layer}  # hashes already
            if inject:
                grads = inject(grads)
            words = {path: hashed(x) for path, x in grads.items()} | of_layers
            words[LOSS] = jnp.concatenate([hashed(x) for x in jax.tree.leaves(sums)])
            self._weight_of_word = []
            for path, x in words.items():
                self._weight_of_word += [path] * x.size
            return jnp.concatenate(list(words.values()))[None]

        def move(batch, by):
            size = spread.data
            micro = jax.tree.map(lambda x: x[:1], batch)
            pairs = [(i, (i + by) % size) for i in range(size)]
            return jax.tree.map(lambda x: lax.ppermute(x, "data", pairs), micro)

        batches, everywhere = batch_spec(spread), PartitionSpec(AXES)
        specs = (setup.specs["params"], REPLICATED, batches, setup.specs.get("frozen", {}))
        self._program = steps.on_mesh(config, mesh, hashes, specs, out=everywhere)
        self._moves = [
            steps.on_mesh(config, mesh, functools.partial(move, by=by), (batches,), out=batches)
            for by in range(3)
        ]
        self._gather = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, REPLICATED))

    def __call__(
        self, params: Any, bias: jax.Array, batch: dict, frozen: Any = None
    ) -> Mismatch | None:
        """Computes and compares; all processes together. `frozen` are the weights that the loss
        reads beside the parameters."""

        def compute(moved_by: int = 0) -> np.ndarray:
            moved = self._moves[moved_by](batch)
            return np.asarray(self._gather(self._program(params, bias, moved, frozen or {})))

        first, second = compute(), compute()
        names = self._weight_of_word
        parts = 1 if self._spread.fsdp else self._spread.data
        finding = differs_from_itself(first, second, parts, names)
        if finding and parts == 1:
            # No other part shows whether all differ so: a program whose order of sums varies
            # differs often, a device that is wrong seldom.
            others = [compute() for _ in range(REPEATS - 2)]
            if not all_but_one_agree([first, second, *others]):
                why = (
                    f"more than one of {REPEATS} computations of the same gradients got different"
                    " bits"
                )
                finding = dataclasses.replace(finding, kind="irreproducible", why=why)
        if finding or self._spread.data == 1:
            return finding
        results = [first, compute(moved_by=1)]
        compared = np.array([name == LOSS or not self._spread.fsdp for name in names])
        finding = differs_from_others(results, compared, self._spread.data, names)
        if finding and self._spread.data > 2:
            results.append(compute(moved_by=2))
            finding = differs_from_others(results, compared, self._spread.data, names)
        return finding


def hashed(x: jax.Array) -> jax.Array:
    """Four floats, each a whole number below 2**16: one other bit, or two numbers that change
    places, change them.

    Each number is mixed with its position by an invertible function, so a change of one number
    always changes the sum.
    """
    unsigned = {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    bits = lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
    position = jnp.zeros(x.shape, jnp.uint32)
    for dim in range(x.ndim):
        index = lax.broadcasted_iota(jnp.uint32, x.shape, dim)
        position = position * np.uint32(x.shape[dim]) + index
    mixed = _mix(bits + position * np.uint32(0x9E3779B9))
    words = []
    for salt in (0x85EBCA6B, 0xC2B2AE35):
        total = jnp.sum(_mix(mixed ^ np.uint32(salt)), dtype=jnp.uint32)
        words += [total & np.uint32(0xFFFF), total >> np.uint32(16)]
    return jnp.stack(words).astype(jnp.float32)


def _mix(x: jax.Array) -> jax.Array:
    """MurmurHash3's last step: each bit of the input changes about half of the output's; it is
    invertible."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x ^ (x >> np.uint32(16))


def differs_from_itself(
    first: np.ndarray, second: np.ndarray, parts: int, names: list[str]
) -> Mismatch | None:
    """Compares two results, hashes [devices, words], of the same devices.

    `parts` is the number of data shards; their axis is the first of the mesh, so the devices of a
    part stand together. `names` has the weight that each word belongs to.
    """
    wrong = (first != second).reshape(parts, -1, first.shape[1])
    guilty = np.flatnonzero(wrong.any((1, 2))).tolist()
    if not guilty:
        return None
    devices = _devices_of(guilty, wrong.shape[1])
    weights = _weights(wrong.any((0, 1)), names)
    if len(guilty) > max(parts / 2, 1):
        why = (
            f"{len(guilty)} of {parts} parts of the mesh computed the same gradients twice and got"
            " different bits, which is no single device's fault"
        )
        return Mismatch("irreproducible", devices, weights, why)
    return Mismatch(
        "unstable", devices, weights, "it computed the same gradients twice and got different bits"
    )


def all_but_one_agree(results: list[np.ndarray]) -> bool:
    """Whether all but one of these results of the same computation are equal."""
    _, most = Counter(result.tobytes() for result in results).most_common(1)[0]
    return most == len(results) - 1


def differs_from_others(
    results: list[np.ndarray], compared: np.ndarray, parts: int, names: list[str]
) -> Mismatch | None:
    """Compares the results of batches moved on by 0, 1 and, if given, 2 along the data axis.

    The parts that were most often in the minority are wrong.
    """
    by_move = [result[:, compared].reshape(parts, -1) for result in results]
    votes: Counter[int] = Counter()
    for batch in range(parts):
        hashes = {}  # of this part of the batch, by the part of the mesh that computed it
        for moved_by, result in enumerate(by_move):
            part = (batch + moved_by) % parts
            hashes[part] = result[part].tobytes()
        most, count = Counter(hashes.values()).most_common(1)[0]
        for part, value in hashes.items():
            if count == 1 or value != most:
                votes[part] += 1
    if not votes:
        return None
    most_votes = max(votes.values())
    guilty = sorted(part for part, number in votes.items() if number == most_votes)
    group = results[0].shape[0] // parts
    # Back to the places of the batch that did not move.
    moved = np.roll(results[1].reshape(parts, group, -1), -1, axis=0)
    wrong = (results[0].reshape(moved.shape) != moved).any((0, 1)) & compared
    why = "others computed the same part of the batch and got different bits"
    if parts == 2:
        why = (
            "two data shards got different bits for the same part of the batch, and there is no"
            " third to decide"
        )
    return Mismatch("disagrees", _devices_of(guilty, group), _weights(wrong, names), why)


def _devices_of(parts: list[int], group: int) -> tuple[int, ...]:
    """The devices of these parts of the mesh, `group` in each."""
    return tuple(part * group + i for part in parts for i in range(group))


def _weights(wrong: np.ndarray, names: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(itertools.compress(names, wrong)))
