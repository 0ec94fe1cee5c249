"""Expert parallelism: tokens travel to the devices that hold their experts, and their outputs
travel back.

Device i of X holds experts i E/X to (i + 1) E/X - 1, and N tokens. No token is ever dropped, and no
buffer grows with the router's unevenness: tokens travel in rounds of at most R = min(2, X) N rows
per device. The number of rounds is computed from the counts, which every device has, so that all
agree on it. With rows of D numbers of b bytes a device sends and receives:

                               forward   backward   bytes of each
    all-gather of counts          1         -       4 X E
    exchanges, first round        2         2       slots: X C D b, C = min(ceil(2 N / X), N); 1/X of it stays here
    exchanges, a further round    2         3       ragged: D b for each row that exists, at most R
    rounds                        slots: the most rows that one device has for another, / C;  at most ceil(N / C)
                                  ragged: the most rows that one device gets, / R;            at most ceil(X N / R)

A round has twice the room that even loads need (SLACK): a router that is balanced over the batch is
less so on one device's tokens. Further rounds are a loop, which then does not run at all; on two
devices there are none, since C = N.

A layer keeps its N rows for the backward pass, and those received in the first round; later ones
are sent again, and hidden activations are recomputed, round by round. One round's buffers are R
rows each: sent rows, received rows in the order of arrival and by expert, and the hidden width. A
test bounds them, and with them all that the exchange needs beyond its arguments and results.

All-gathering the tokens and reduce-scattering the results is not a separate form. It moves X N
rows: as many as slots in one round if X <= 2, and in all rounds in the worst case; it needs as many
collectives, because choices have to be gathered too, and memory for X N rows. benchmarks/expert.md
has the figures.

With TSP experts are split over expert x tensor. If the experts' width is split over tensor instead,
the result is a partial sum. It runs inside `jax.shard_map`; gradients of weights are those of the
tokens that came to this device.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from pallas_kernels import chip
from pallas_kernels.chip import Chip
from pallas_kernels.grouped_mlp import PRODUCTS
from pallas_kernels.loops import turning
from zaya_jax.model.experts import gated, of_own_expert, through_groups
from zaya_jax.parallel.spread import Spread

# Rows of a round per row of an even load; above 1, because otherwise any unevenness would take a
# second round.
SLACK = 2
HOST_DEVICES = 8  # accelerators whose links are faster than the network's

Axes = tuple[str, ...]


def expert_mlp(
    x: Float[Array, "N D"],
    choice: Int[Array, "N"],
    gate: Float[Array, "N"] | None,
    gate_up: Float[Array, "EX D 2 F"],
    down: Float[Array, "EX F D"],
    *,
    dtype,
    spread: Spread,
    form: str | None = None,
) -> Float[Array, "N D"]:
    """`model.experts.expert_mlp` with experts split over `spread.expert_axes`.

    `form` is for comparisons and tests; otherwise `exchange_form` decides.
    """
    axes = spread.expert_axes
    num_experts = gate_up.shape[0] * lax.axis_size(axes)
    form = form or exchange_form(spread, chip.current())

    def elsewhere(rows, sizes):
        counts = lax.all_gather(sizes, axes).reshape(lax.axis_size(axes), lax.axis_size(axes), -1)
        return _exchanged(rows, gate_up, down, counts, axes, form)

    y = through_groups(x.astype(dtype), choice, num_experts, elsewhere)
    # Named like the products of one device: a policy that keeps those does not send tokens again
    # for the gate.
    y = checkpoint_name(y, PRODUCTS)
    return y if gate is None else gated(y, choice, gate, num_experts)


def exchange_form(spread: Spread, target: Chip) -> str:
    """ "ragged" (`lax.ragged_all_to_all`) where a group of experts' devices spans hosts, otherwise
     "slots".

    Over the network bytes count: ragged moves only existing rows, slots twice as many. Within a
    host it is the reverse: openxla/xla issue 33386 has ragged at 2% of the rate of the links of
    eight B200, and near the network's limit between hosts, because XLA copies with one kernel of
    its own up to 8 devices and sends by NCCL or RCCL above. CPUs have no ragged form. A group's
    devices are in a row of the mesh, so their span shows whether one host has them.
    """
    span = spread.expert * spread.context * spread.tensor
    return "ragged" if not target.is_host and span > HOST_DEVICES else "slots"


def slot_rows(num_tokens: int, devices: int) -> int:
    """C: the rows per round that a device may send to each other device."""
    return min(-(-SLACK * num_tokens // devices), num_tokens)


def round_rows(num_tokens: int, devices: int, form: str = "slots") -> int:
    """Rows of the buffer in which a device receives a round's tokens."""
    return (
        slot_rows(num_tokens, devices) * devices
        if form == "slots"
        else min(SLACK, devices) * num_tokens
    )


def most_rounds(num_tokens: int, devices: int, form: str = "slots") -> int:
    """Rounds if all tokens go to one device."""
    return -(-num_tokens * devices // round_rows(num_tokens, devices, form))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _exchanged(rows, gate_up, down, counts, axes, form):
    """The MLP of rows [N, D], sorted by expert; counts [X from, X to, E/X] are of all devices."""
    return _exchanged_fwd(rows, gate_up, down, counts, axes, form)[0]


def _exchanged_fwd(rows, gate_up, down, counts, axes, form):
    exchange = FORMS[form](counts, rows.shape[0], axes)

    def finish(received, y, r):
        return exchange.back(of_own_expert(received, exchange.classes(r), gate_up, down), y, r)

    received = checkpoint_name(exchange.send(rows, 0), PRODUCTS)
    y = finish(received, jnp.zeros_like(rows), 0)
    y = exchange.further_rounds(lambda r, y: finish(exchange.send(rows, r), y, r), y)
    return y, (rows, received, gate_up, down, counts)


def _exchanged_bwd(axes, form, saved, dy):
    rows, received, gate_up, down, counts = saved
    exchange = FORMS[form](counts, rows.shape[0], axes)
    dy = dy.astype(rows.dtype)

    def gradients(received, d_rows, r):
        classes = exchange.classes(r)
        _, pull = jax.vjp(lambda x, *w: of_own_expert(x, classes, *w), received, gate_up, down)
        d_received, *d_weights = pull(exchange.send(dy, r))
        return exchange.back(d_received, d_rows, r), *d_weights

    def another(r, carry):
        d_rows, *d_weights = carry
        d_rows, *more = gradients(exchange.send(rows, r), d_rows, r)
        return d_rows, *map(jnp.add, d_weights, more)

    first = gradients(received, jnp.zeros_like(rows), 0)
    return *exchange.further_rounds(another, first), None


_exchanged.defvjp(_exchanged_fwd, _exchanged_bwd)


class _Exchange:
    """The rows, sorted by expert and so by device, that travel in round r: the common part of both
    forms."""

    form: str
    rounds: jax.Array  # needed for this load

    def __init__(self, counts, num_rows, axes):
        self.axes, self.num_rows, self.devices = axes, num_rows, counts.shape[0]
        self.me = lax.axis_index(axes)
        self.pairs = counts.sum(-1)  # rows from s to d
        # where s's rows for d begin among s's rows
        self.first = jnp.cumsum(self.pairs, 1) - self.pairs
        self.coming = counts[:, self.me]  # rows from s for each expert of this device

    def further_rounds(self, body, carry):
        """carry after body(r, carry) for each round except the first; a loop only if some load
        takes a second one."""
        if most_rounds(self.num_rows, self.devices, self.form) == 1:
            return carry
        with turning(0):  # with an even load
            return lax.fori_loop(1, self.rounds, body, carry)


class _Slots(_Exchange):
    """Every device sends every device C rows per round, the r-th C of its rows for it, and pads
    missing ones."""

    form = "slots"

    def __init__(self, counts, num_rows, axes):
        super().__init__(counts, num_rows, axes)
        self.slots = slot_rows(num_rows, self.devices)
        self.rounds = -(-self.pairs.max() // self.slots)

    @jax.named_scope("exchange")
    def send(self, rows, r):
        """The rows that this device receives in round r, [X C, D], grouped by sender."""
        places = self.first[self.me][:, None] + r * self.slots + jnp.arange(self.slots)
        return lax.all_to_all(
            rows[jnp.minimum(places, self.num_rows - 1).reshape(-1)], self.axes, 0, 0, tiled=True
        )

    def classes(self, r):
        """This device's expert for each of these rows; one past the last for an empty slot."""
        number = r * self.slots + jnp.arange(self.slots)
        return (number[:, None] >= jnp.cumsum(self.coming, 1)[:, None]).sum(-1).reshape(-1)

    @jax.named_scope("exchange")
    def back(self, y, out, r):
        """`out` [N, D] with what came of this device's rows of round r written where they stand."""
        y = lax.all_to_all(y, self.axes, 0, 0, tiled=True)
        place = jnp.arange(self.num_rows)
        first, rows = self.first[self.me], self.pairs[self.me]
        device = (place[:, None] >= first + rows).sum(-1)
        number = place - first[jnp.minimum(device, self.devices - 1)]
        travelled = (device < self.devices) & (number // self.slots == r)
        slot = device * self.slots + number - r * self.slots
        return jnp.where(travelled[:, None], y[jnp.where(travelled, slot, 0)], out)


class _Ragged(_Exchange):
    """A device receives its rows, grouped by sender, `room` of them per round."""

    form = "ragged"

    def __init__(self, counts, num_rows, axes):
        super().__init__(counts, num_rows, axes)
        self.room = round_rows(num_rows, self.devices, self.form)
        # rows that d gets from devices before s
        self.before = jnp.cumsum(self.pairs, 0) - self.pairs
        self.rounds = -(-self.pairs.sum(0).max() // self.room)

    def _part(self, r):
        """Rows from s to d: how many went before round r, how many go now, and their place at d
        now."""
        start, stop = (jnp.clip(n * self.room - self.before, 0, self.pairs) for n in (r, r + 1))
        return start, stop - start, jnp.clip(self.before + start - r * self.room, 0, self.room)

    def send(self, rows, r):
        """The rows that this device receives in round r, [room, D]; zero past the last."""
        start, sizes, landing = self._part(r)
        buffer = jnp.zeros((self.room, rows.shape[1]), rows.dtype)
        source = (self.first + start)[self.me]
        return self._move(rows, buffer, source, sizes[self.me], landing[self.me], sizes[:, self.me])

    def classes(self, r):
        """This device's expert for each of these rows; one past the last for an unused row."""
        ends = jnp.cumsum(self.coming.reshape(-1))
        at = ((r * self.room + jnp.arange(self.room))[:, None] >= ends).sum(-1)
        experts = self.coming.shape[1]
        return jnp.where(at < ends.size, at % experts, experts)

    def back(self, y, out, r):
        """`out` [N, D] with what came of this device's rows of round r written where they stand."""
        start, sizes, landing = self._part(r)
        home = (self.first + start)[:, self.me]
        return self._move(y, out, landing[:, self.me], sizes[:, self.me], home, sizes[self.me])

    @jax.named_scope("exchange")
    def _move(self, rows, buffer, source, sizes, target, coming):
        return lax.ragged_all_to_all(
            rows, buffer, source, sizes, target, coming, axis_name=self.axes
        )


FORMS: dict[str, type[_Slots] | type[_Ragged]] = {"slots": _Slots, "ragged": _Ragged}
