"""Expert parallelism: tokens travel to the devices that hold their experts, and their outputs
travel back.

Device i of X holds experts i E/X to (i + 1) E/X - 1, and N tokens. No token is ever dropped, and no
buffer grows with the router's unevenness: tokens travel in rounds, in each of which a device has C
slots for the rows of every other one. The number of rounds is computed from the counts, which every
device has, so that all agree on it. With rows of D numbers of b bytes a device sends and receives:

                               forward   backward   bytes of each
    all-gather of counts          1         -       4 X E
    exchanges, first round        2         2       X C D b, C = min(ceil(2 N / X), N); 1/X of it stays here
    exchanges, a further round    2         3       the same
    rounds                        the most rows that one device has for another, / C; at most ceil(N / C)

A round has twice the room that even loads need (SLACK): a router that is balanced over the batch is
less so on one device's tokens. Further rounds are a loop, which then does not run at all; on two
devices there are none, since C = N.

A layer keeps its N rows for the backward pass, and those received in the first round; later ones
are sent again, and hidden activations are recomputed, round by round. One round's buffers are X C
rows each: sent rows, received rows in the order of arrival and by expert, and the hidden width. A
test bounds them, and with them all that the exchange needs beyond its arguments and results.

Two other forms are not here. All-gathering the tokens and reduce-scattering the results moves X N
rows, as many as slots do in the worst case, and needs memory for them. `lax.ragged_all_to_all`
moves only the rows that exist, half as many at even loads; XLA does it at 2% of the links' rate
inside a host (openxla/xla issue 33386), and CPUs cannot run it. benchmarks/expert.md has the
figures.

With TSP experts are split over expert x tensor. If the experts' width is split over tensor instead,
the result is a partial sum. It runs inside `jax.shard_map`; gradients of weights are those of the
tokens that came to this device.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_mlp import PRODUCTS
from pallas_kernels.grouped_mlp.tokens import own_expert_mlp, through_groups
from pallas_kernels.loops import expected_turns
from zaya_jax.parallel.spread import Spread

# Slots of a round per row of an even load; above 1, because otherwise any unevenness would take a
# second round.
SLACK = 2


def expert_mlp(
    x: Float[Array, "N D"],
    choice: Int[Array, "N"],
    gate_up: Float[Array, "EX D 2 F"],
    down: Float[Array, "EX F D"],
    *,
    dtype,
    spread: Spread,
) -> Float[Array, "N D"]:
    """`model.experts.expert_mlp` with experts split over `spread.expert_axes`."""
    axes = spread.expert_axes
    devices = lax.axis_size(axes)
    num_experts = gate_up.shape[0] * devices

    def on_expert_devices(rows, sizes):
        counts = lax.all_gather(sizes, axes).reshape(devices, devices, -1)
        return _exchanged(rows, gate_up, down, counts, axes)

    y = through_groups(x.astype(dtype), choice, num_experts, on_expert_devices)
    # Named like the products of one device: a policy that keeps those does not send tokens again.
    return checkpoint_name(y, PRODUCTS)


def slot_rows(num_tokens: int, devices: int) -> int:
    """C: the rows per round that a device may send to each other device."""
    return min(-(-SLACK * num_tokens // devices), num_tokens)


def most_rounds(num_tokens: int, devices: int) -> int:
    """Rounds if all tokens go to one device."""
    return -(-num_tokens // slot_rows(num_tokens, devices))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _exchanged(rows, gate_up, down, counts, axes):
    """The MLP of rows [N, D], sorted by expert; counts [X from, X to, E/X] are of all devices."""
    return _exchanged_fwd(rows, gate_up, down, counts, axes)[0]


def _exchanged_fwd(rows, gate_up, down, counts, axes):
    rounds = Rounds(counts, rows.shape[0], axes)

    def finish(received, y, r):
        out = own_expert_mlp(received, rounds.local_experts(r), gate_up, down)
        return rounds.bring_back(out, y, r)

    received = checkpoint_name(rounds.send(rows, 0), PRODUCTS)
    y = finish(received, jnp.zeros_like(rows), 0)
    y = rounds.after_first(lambda r, y: finish(rounds.send(rows, r), y, r), y)
    return y, (rows, received, gate_up, down, counts)


def _exchanged_bwd(axes, saved, dy):
    rows, received, gate_up, down, counts = saved
    rounds = Rounds(counts, rows.shape[0], axes)
    dy = dy.astype(rows.dtype)

    def gradients(received, d_rows, r):
        experts = rounds.local_experts(r)
        _, pull = jax.vjp(lambda x, *w: own_expert_mlp(x, experts, *w), received, gate_up, down)
        d_received, *d_weights = pull(rounds.send(dy, r))
        return rounds.bring_back(d_received, d_rows, r), *d_weights

    def further(r, carry):
        d_rows, *d_weights = carry
        d_rows, *of_round = gradients(rounds.send(rows, r), d_rows, r)
        return d_rows, *map(jnp.add, d_weights, of_round)

    first = gradients(received, jnp.zeros_like(rows), 0)
    return *rounds.after_first(further, first), None


_exchanged.defvjp(_exchanged_fwd, _exchanged_bwd)


class Rounds:
    """The rows, sorted by expert and so by device, that travel in each round.

    Every device sends every device C rows in round r, the r-th C of its rows for it, and pads
    missing ones.
    """

    needed: jax.Array  # for this load

    def __init__(self, counts: Int[Array, "X X EX"], num_rows: int, axes: tuple[str, ...]):
        self.axes, self.num_rows, self.devices = axes, num_rows, counts.shape[0]
        self.me = lax.axis_index(axes)
        self.pairs = counts.sum(-1)  # rows from s to d
        # where s's rows for d begin among s's rows
        self.first = jnp.cumsum(self.pairs, 1) - self.pairs
        self.incoming = counts[:, self.me]  # rows from s for each expert of this device
        self.slots = slot_rows(num_rows, self.devices)
        self.needed = -(-self.pairs.max() // self.slots)

    def after_first(self, body: Callable, carry: Any) -> Any:
        """carry after body(r, carry) for each round except the first; a loop only if some load
        takes a second one."""
        if most_rounds(self.num_rows, self.devices) == 1:
            return carry
        with expected_turns(0):  # with an even load
            return lax.fori_loop(1, self.needed, body, carry)

    @jax.named_scope("exchange")
    def send(self, rows: Float[Array, "N D"], r: jax.Array | int) -> Float[Array, "XC D"]:
        """The rows that this device receives in round r, grouped by sender."""
        places = self.first[self.me][:, None] + r * self.slots + jnp.arange(self.slots)
        sent = rows[jnp.minimum(places, self.num_rows - 1).reshape(-1)]
        return lax.all_to_all(sent, self.axes, 0, 0, tiled=True)

    def local_experts(self, r: jax.Array | int) -> Int[Array, "XC"]:
        """This device's expert for each of these rows; one past the last for an empty slot."""
        number = r * self.slots + jnp.arange(self.slots)
        return (number[:, None] >= jnp.cumsum(self.incoming, 1)[:, None]).sum(-1).reshape(-1)

    @jax.named_scope("exchange")
    def bring_back(
        self, y: Float[Array, "XC D"], out: Float[Array, "N D"], r: jax.Array | int
    ) -> Float[Array, "N D"]:
        """`out`, with the results of this device's rows of round r written where the rows
        stand."""
        y = lax.all_to_all(y, self.axes, 0, 0, tiled=True)
        place = jnp.arange(self.num_rows)
        first, rows = self.first[self.me], self.pairs[self.me]
        device = (place[:, None] >= first + rows).sum(-1)
        number = place - first[jnp.minimum(device, self.devices - 1)]
        travelled = (device < self.devices) & (number // self.slots == r)
        slot = device * self.slots + number - r * self.slots
        return jnp.where(travelled[:, None], y[jnp.where(travelled, slot, 0)], out)
