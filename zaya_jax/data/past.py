"""Where a run's data stood, written so that another run (`run.fork`) can go on there with other batches or sources.

A record is of one era and the stretch of steps that was due in it:

    {"version", "seed", "number": the era's, "seq_len", "packing",
     "first_step", "batch", "weights": [[source, weight], ..],      the stretch
     "given": {source: rows it gave before first_step},  "orders": {source: [most, share], see order.Order},
     "entry": where its table began, "left_out": [[step, batches], ..]}      only where batches were left out

Sources go by their fingerprints, so that neither paths nor the other run's data are needed. What a fork does with it is
what a phase does that follows on another: of the same context and packing, each source goes on in its order where it
stood; otherwise orders begin anew, as an era of their own.
"""

from collections.abc import Sequence
from typing import Any

from zaya_jax.data import order
from zaya_jax.data.mix import Mixture, Stretch

Record = dict[str, Any]


def record(
    number: int,
    seed: int,
    seq_len: int,
    packing: str,
    mixture: Mixture,
    sources: Sequence[str],
    step: int,
    orders: dict[str, tuple[int, int]],
) -> Record:
    """The record of an era in which the batch of `step` is the next; `sources` are the mixture's, `orders` theirs."""
    _, stretch = mixture.at(step)
    out = {
        "version": order.VERSION, "seed": seed, "number": number, "seq_len": seq_len, "packing": packing,
        "first_step": stretch.first_step, "batch": stretch.batch, "weights": weights(stretch, sources),
        "given": {name: mixture.before(step, k) for k, name in enumerate(sources) if name in orders},
        "orders": {name: list(pair) for name, pair in orders.items()},
    }  # fmt: skip
    return out | ({"entry": stretch.entry} if stretch.entry else {})


def weights(stretch: Stretch, sources: Sequence[str]) -> list[list]:
    """The sources that a stretch takes from, in their order, with their weights."""
    return [[name, weight] for name, weight in zip(sources, stretch.weights, strict=True) if weight]


def given_until(found: Record, step: int) -> dict[str, int]:
    """How many rows each source of a record had given before a step of its stretch."""
    names = [name for name, _ in found["weights"]]
    shares = tuple(weight for _, weight in found["weights"])
    stretch = Stretch(found["first_step"], found["batch"], shares, found.get("entry", 0))
    mixture = Mixture([stretch], tuple(found["given"][name] for name in names))
    return found["given"] | {name: mixture.until(step, k) for k, name in enumerate(names)}


def choose(records: Sequence[Record], seed: int, seq_len: int, packing: str) -> tuple[Record | None, str]:
    """The record in whose order batches of this context and packing can go on; otherwise why none can."""
    if not records:
        return None, "its checkpoint is an older version's, which does not say where each source stood"
    if records[0]["version"] != order.VERSION:
        return (
            None,
            f"it came in another order (version {records[0]['version']}, this program has {order.VERSION})",
        )
    if records[0]["seed"] != seed:
        return None, f"run.seed was {records[0]['seed']}, now it is {seed}"
    for found in records:
        if (found["seq_len"], found["packing"]) == (seq_len, packing):
            return found, ""
    was = records[0]
    return (
        None,
        f"rows were of {was['seq_len']} tokens ({was['packing']}), now they are of {seq_len} ({packing})",
    )
