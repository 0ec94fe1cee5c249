"""The devices of a training mesh: chooses a layer's placement and weights by a `Spread`."""

import dataclasses
import functools
from typing import Any

from zaya_jax.config import Model
from zaya_jax.model.placement import Devices, Placement, Weights
from zaya_jax.parallel import context, dispatch, heads, tsp
from zaya_jax.parallel.spread import ALONE, Spread, gather_over_data


@dataclasses.dataclass(frozen=True)
class Over(Devices):
    """The devices that a spread describes."""

    spread: Spread

    @property
    def alone(self) -> bool:  # type: ignore[override]
        return self.spread == ALONE

    def weights(self, model: Model, dtype: Any) -> Weights:
        spread = self.spread
        given: dict[str, Any] = {}
        if spread.fsdp:
            given["gather"] = gather_over_data
        if spread.expert_axes:
            given["expert_mlp"] = functools.partial(dispatch.expert_mlp, spread=spread)
        if spread.tsp and model.model_type == "dense":
            return tsp.Travelling(**given, parts=spread.tensor)
        if spread.tsp:
            return tsp.Fetched(**given, dtype=dtype)
        if spread.heads > 1:
            num_heads, num_kv = model.num_attention_heads, model.num_key_value_heads
            return heads.Heads(**given, all_heads=num_heads, all_kv=num_kv, over=spread.heads)
        return Weights(**given)

    def sequences(self, length: int, segments: Any, mask: Any, weights: Weights) -> Placement:
        if self.spread.sequence_parts > 1:
            return context.cut(self.spread, length, segments, mask, weights)
        return super().sequences(length, segments, mask, weights)
