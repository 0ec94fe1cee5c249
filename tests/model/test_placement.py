"""A layer does not know the places of its tokens: a placement made here gives one device's results."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import model_helpers
import numpy as np
import pytest

from zaya_jax.config import LAYER_KINDS, Rope, RopeKinds
from zaya_jax.model import zaya
from zaya_jax.model.placement import ALONE, Before, Devices, Placement, Rows

SMALL = model_helpers.small()
DENSE = model_helpers.small(
    **model_helpers.DENSE, rope_parameters=RopeKinds(Rope(rope_theta=1e4), Rope(rope_theta=100.0))
)


@dataclasses.dataclass(frozen=True)
class Halves(Placement):
    """The halves of each sequence as rows, the later ones first."""

    def rows(self, x):
        early, late = jnp.split(x, 2, axis=1)
        return jnp.concatenate([late, early])

    def joined(self, x):
        late, early = jnp.split(x, 2)
        return jnp.concatenate([early, late], axis=1)

    def positions(self, batch, length):
        return self.rows(super().positions(batch // 2, 2 * length))

    def before(self, x, project, history, nothing):
        late, early = jnp.split(x, 2)
        reach = max(history, 1)
        columns, *_, values = project(early[:, -reach:])
        none = jnp.zeros_like(columns)
        segments = self.segments
        if segments is not None:
            ids = jnp.split(segments, 2)[1][:, -reach:]
            segments = jnp.concatenate([ids, jnp.full_like(ids, -1)])
        value = jnp.concatenate([values[:, -1:], nothing[: len(late)]])
        return Before(jnp.concatenate([columns, none])[:, reach - history :], value, segments)

    def attend(self, q, k, v, **last):
        whole = Placement(*(None if x is None else self.joined(x) for x in (self.segments, self.mask)))
        out, kept = whole.of_layer(self.window, self.linear, None).attend(*(self.joined(x) for x in (q, k, v)))
        return self.rows(out), kept


class Two(Devices):
    def sequences(self, length, segments, mask, weights):
        halves = Halves(weights=weights)
        return halves if segments is None else dataclasses.replace(halves, segments=halves.rows(segments))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    "model",
    [SMALL, DENSE, model_helpers.small(layer_types=LAYER_KINDS[::2], cca_time0=3)],
    ids=["zaya", "dense", "linear"],
)
def test_a_placement_of_its_own_gives_what_one_device_gives(model, packed):
    params, bias = model_helpers.weights(model)
    ids = np.random.default_rng(0).integers(0, model.vocab_size, (3, 16))
    segments = np.repeat([[1, 2, 3, 0]], [3, 8, 4, 1], axis=1).repeat(3, axis=0) if packed else None

    def run(devices):
        apply = functools.partial(zaya.apply, model, precision=model_helpers.EXACT, devices=devices)
        return jax.jit(apply)(params, bias, Rows(ids, segments))

    ours, theirs = run(Two()), run(ALONE)
    np.testing.assert_allclose(ours.hidden, theirs.hidden, atol=2e-5)
    np.testing.assert_array_equal(ours.counts, theirs.counts)
