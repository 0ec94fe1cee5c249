"""The devices of a training mesh: chooses a layer's placement and weights by a `Spread`."""

import dataclasses
import functools
from typing import Any

from zaya_jax.config import Model
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
