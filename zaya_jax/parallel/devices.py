"""The devices of a training mesh: chooses a layer's placement and weights by a `Spread`, and maps
functions over them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from pallas_kernels import chip
from zaya_jax.config import Model, Precision
from zaya_jax.model.placement import Devices, Placement, Weights
from zaya_jax.parallel import context, dispatch, heads, tsp
from zaya_jax.parallel.spread import NO_SPREAD, Spread, gather_over_data


@dataclasses.dataclass(frozen=True)
class MeshDevices(Devices):
    """The devices that a spread describes."""

    spread: Spread

    @property
    def alone(self) -> bool:  # type: ignore[override]
        return self.spread == NO_SPREAD

    def weights(self, model: Model, dtype: Any) -> Weights:
        spread = self.spread
        common: dict[str, Any] = {"dtype": dtype}
        if spread.fsdp:
            common["gather"] = gather_over_data
        if spread.expert_axes:
            common["expert_mlp"] = functools.partial(dispatch.expert_mlp, spread=spread)
        if spread.tsp and model.model_type == "dense":
            return tsp.Travelling(**common, parts=spread.tensor)
        if spread.tsp:
            return tsp.Fetched(**common)
        if spread.head_shards > 1:
            return heads.Heads(
                **common,
                all_heads=model.num_attention_heads,
                all_kv=model.num_key_value_heads,
                shards=spread.head_shards,
            )
        return Weights(**common)

    def sequences(self, length: int, segments: Any, mask: Any, weights: Weights) -> Placement:
        if self.spread.sequence_parts > 1:
            return context.zigzag_placement(self.spread, length, segments, mask, weights)
        return super().sequences(length, segments, mask, weights)


def over_mesh(
    function: Callable,
    precision: Precision,
    target: chip.Chip,
    mesh: Mesh | None,
    in_specs: Any,
    out_specs: Any,
) -> Callable:
    """A function of a device's parts as one of whole arrays, with the precision's products, made
    for the target; without a mesh one device has all.

    No check of replicated values: `function` sums over devices itself, or returns partial sums, as
    the optimizer takes the gradients of replicated weights.
    """

    def precise(*args: Any) -> Any:
        with chip.making(target), jax.default_matmul_precision(precision.matmul):
            return function(*args)

    if mesh is None:
        return precise
    return jax.shard_map(
        precise, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
