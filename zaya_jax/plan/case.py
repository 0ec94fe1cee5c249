"""Describes one program to plan: a phase's config on a mesh with so many sequences, and a device's
share of it.

    case = StepCase(config, spread, chip="mi300x", sequences=4096, micro_batches=1)
    case.tokens, case.layer_numel, case.layout

Nothing is compiled. Weights have the model's own shapes and the optimizer's own layout, so padding
and shares are those of the run. Letters: N tokens of a device in a micro-batch, D model, L layers.
"""

import collections
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from zaya_jax.config import Config, Model, Optim, Precision
from zaya_jax.hardware import clusters, sizing
from zaya_jax.model import zaya
from zaya_jax.optim import chain, zero
from zaya_jax.optim.zero.by_layer import ByLayer
from zaya_jax.parallel import sharding
from zaya_jax.parallel.spread import AXES, Spread

COPY_BYTES = 2  # bytes of a number of the copies that devices hold of some weights


@dataclasses.dataclass(frozen=True)
class StepCase:
    """A step of one phase (`schedule.phase_config`) on one mesh of one chip."""

    config: Config
    spread: Spread
    chip: str
    sequences: int  # per step, over all devices
    micro_batches: int

    @property
    def model(self) -> Model:
        """The architecture."""
        return self.config.model

    @property
    def devices(self) -> int:
        """The devices of the mesh."""
        return math.prod(self.axes.values())

    @property
    def axes(self) -> dict[str, int]:
        """The mesh's sizes."""
        return {axis: getattr(self.spread, axis) for axis in AXES}

    @property
    def sequences_per_device(self) -> int:
        """Sequences, or parts of them, that a device has at once."""
        return self.sequences // self.micro_batches // (self.spread.data * self.spread.expert)

    @property
    def tokens_per_row(self) -> int:
        """Tokens of a sequence that a device has."""
        return self.config.data.seq_len // self.spread.sequence_parts

    @property
    def tokens(self) -> int:
        """N: of a device in a micro-batch."""
        return self.sequences_per_device * self.tokens_per_row

    @property
    def tokens_per_device(self) -> float:
        """Tokens of a step over devices."""
        return self.sequences * self.config.data.seq_len / self.devices

    @property
    def linear_layers(self) -> int:
        """Layers with linear attention."""
        return self.model.kinds.count("hybrid_linear")

    @property
    def mixer(self) -> str:
        """The scope that mixes a layer's tokens."""
        return "attention" if self.model.model_type == "dense" else "cca"

    @property
    def muon_itemsize(self) -> int:
        """Bytes of a number in Muon's iteration, and of its directions."""
        precision = self.config.precision
        if precision.newton_schulz == "compute":
            return itemsize(precision.compute)
        return itemsize(precision.newton_schulz)

    @functools.cached_property
    def layout(self) -> zero.Layout:
        """Where the optimizer's work and state lie."""
        node, config = 1, self.config
        if not self.spread.across:
            node = clusters.of_chip(self.chip).of_devices(self.devices).node
        under = sizing.two_levels_under(config)
        return _layout(config.model, config.optim, config.precision, self.spread, node, under)

    def exchange_bytes(self, name: str) -> collections.Counter[str]:
        """Bytes of the optimizer's exchange of a bucket, by kind of collective."""
        back = 4  # bytes of a number of an update
        if name in self.layout.copied.values():
            back = COPY_BYTES
        elif self.layout.methods[name] == "muon":
            back = self.muon_itemsize
        return collections.Counter(self.layout.bucket_of[name].traffic(name, back))

    @functools.cached_property
    def muon_numel(self) -> int:
        """Numbers of Muon's weights on a device."""
        weights = (weight for weight in self.layout.weights if weight.method == "muon")
        return sum(math.prod(weight.local(self.layout.grid)) for weight in weights)

    @functools.cached_property
    def early_buckets(self) -> dict[str, ByLayer]:
        """The buckets whose gradients are reduced as they leave their layer; none with several
        micro-batches."""
        if self.micro_batches > 1:
            return {}
        return {way.bucket.name: way for way in self.layout.by_layer.values()}

    @functools.cached_property
    def early_numel(self) -> int:
        """How many numbers the weights of `early_buckets` have."""
        return sum(
            way.layers * way.matrices * math.prod(way.bucket.matrix)
            for way in self.early_buckets.values()
        )

    @functools.cached_property
    def copied_numel(self) -> dict[str, int]:
        """Numbers of the weights that a device holds as copies, by scope."""
        numel: collections.Counter[str] = collections.Counter()
        for path in self.layout.copied:
            weight = self.layout.by_layer[path].bucket.weights[0]
            numel[path.split("/")[1]] += math.prod(weight.shape)
        return dict(numel)

    @functools.cached_property
    def optimizer_bytes(self) -> int:
        """The optimizer's state on a device: one number a weight for Muon, two for AdamW; and of
        copies the weights."""
        bytes_of = {"muon": itemsize(self.config.precision.momentum), "adamw": 8}
        layout, total = self.layout, 0
        for name, shape in layout.state_shapes().items():
            each = bytes_of[layout.methods[name]]
            if name in layout.copied.values():
                each += 4
            total += math.prod(shape) // layout.num_shards(name) * each
        return total

    @functools.cached_property
    def numel(self) -> dict[str, int]:
        """How many numbers of each weight a device holds, by path."""
        return dict(_local(self.model, self.config.precision, self.spread))

    @functools.cached_property
    def layer_numel(self) -> dict[str, float]:
        """Weights of one layer as a device computes with them, by scope, and "vectors"."""
        whole = dataclasses.replace(self.spread, fsdp=False)
        if self.spread.tsp:
            whole = dataclasses.replace(whole, tensor=1, tsp=False)
        numel: dict[str, float] = {}
        for path, number in _local(self.model, self.config.precision, whole):
            if path.startswith("layers/"):
                scope = path.split("/")[1]
                if scope not in ("cca", "router", "experts", "attention", "mlp"):
                    scope = "vectors"
                numel[scope] = numel.get(scope, 0) + number / self.model.num_hidden_layers
        return numel


@functools.lru_cache(maxsize=1024)
def _local(model: Model, precision: Precision, spread: Spread) -> tuple[tuple[str, int], ...]:
    """Each weight's path and how many of its numbers a device holds."""
    weights = jax.tree_util.tree_leaves_with_path(zaya.abstract(model, precision))
    specs = jax.tree.leaves(sharding.param_specs(model, precision, spread))
    numel = []
    for (path, x), spec in zip(weights, specs, strict=True):
        number = math.prod(x.shape)
        for axis in jax.tree.leaves(tuple(spec)):  # of some dims, several
            number //= getattr(spread, axis)
        numel.append(("/".join(key.key for key in path), number))
    return tuple(numel)


@functools.lru_cache(maxsize=1024)
def _layout(
    model: Model, optim: Optim, precision: Precision, spread: Spread, node: int, under: int
) -> zero.Layout:
    return chain.build(
        optim,
        precision,
        zaya.abstract(model, precision),
        specs=sharding.param_specs(model, precision, spread),
        axes={axis: getattr(spread, axis) for axis in AXES},
        node=node,
        two_levels_under=under,
    ).layout


def itemsize(dtype: str) -> int:
    """Bytes of a number."""
    return jnp.dtype(dtype).itemsize
