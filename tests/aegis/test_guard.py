"""What the training's guardian says of figures beside spikes."""

import numpy as np

from zaya_jax import config
from zaya_jax.aegis import events
from zaya_jax.aegis.guard import Guard


def test_dead_experts_are_named_by_layer_and_again_when_there_are_more(tmp_path):
    guard = Guard(config.Guard(), tmp_path, [], {}, 0)
    for step, dead in enumerate(([0, 0], [0, 2], [0, 2], [1, 2], [0, 0], [0, 1]), start=1):
        guard.see(step, 0, {"loss": 1.0, "grad_norm": 1.0, "dead_experts": np.array(dead, np.int32)})
    told = events.read(tmp_path)
    assert [(event.kind, event.step) for event in told] == [("dead experts", step) for step in (2, 4, 6)]
    assert "2 experts" in told[0].seen and told[0].seen.endswith("in layers 1")
    assert "3 experts" in told[1].seen and told[1].seen.endswith("in layers 0, 1")
