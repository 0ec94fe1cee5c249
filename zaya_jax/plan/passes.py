"""Which arrays the program's kernels read and write, per layer and micro-batch: the passes behind its HBM traffic.

A row is one part of the step at one stage: how often arrays of a kind are read or written, by products (what a GPU
does under the multiplication where that takes longer) and by all other kernels. The kinds are sizes on a device:

    x4 x2   N tokens of the model's width, float32 and in the compute format       r4      N of the router's, float32
    p2      N of packed queries and keys                  q2 v2   of the queries; of the keys or the values alone
    c2      N of packed columns and values                h2 f2   N of the experts' gate and up; of their width
    s2      the states of linear attention's chunks
    w4 w2   the part's weights of a layer, float32 and in the compute format

The numbers were read off programs compiled for MI300X, kernel by kernel (`experiments.compile`); benchmarks/plan.md
holds plan and program against each other. Where the model's code changes, so must they.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Passes(NamedTuple):
    """Of one part of the program in one layer."""

    products: dict[str, float]
    others: dict[str, float]
    launches: float


# Each comment lists what the numbers are made of; r: read, w: written.
CCA = {
    # q, k and v: x r, columns w. o: out r, y w.
    "forward": Passes(
        # Norm: h r, x w. Delayed values rw. Weights to the compute format.
        {"x2": 2, "c2": 1, "q2": 1, "w2": 1}, {"x4": 1, "x2": 1, "v2": 2, "w4": 1, "w2": 1}, 10,
    ),
    "again": Passes(
        {"x2": 2, "c2": 1, "q2": 1, "w2": 1}, {"x4": 1, "x2": 1, "v2": 2, "w4": 1, "w2": 1}, 9,
    ),
    # dx and dw of both products, the latter in two parts. Norm: h r, d twice r, d w.
    "backward": Passes(
        {"x2": 4, "c2": 2, "q2": 2, "w2": 1, "w4": 2}, {"x4": 3, "x2": 1, "v2": 2, "w4": 1}, 12,
    ),
}  # fmt: skip
# Its own kernels: columns and tables r, q and k w; and for the gradients three, each with columns and one gradient.
MIX = {
    "forward": Passes({}, {"p2": 2.1}, 1),
    "backward": Passes({}, {"p2": 9.3}, 4),
}
# And those of XLA, where columns come from a neighbour too, or layers have several rotary tables.
MIX_XLA = {
    "forward": Passes({"p2": 3}, {"p2": 13, "q2": 2, "v2": 8}, 14),
    "backward": Passes({"p2": 6}, {"p2": 28, "c2": 1, "v2": 9}, 28),
}
# Attention: q, k, v r, out w; dq: q, k, v, out, d r; dk and dv: q, k, v, d r. The numbers of products of scores.
ATTENTION = {
    "forward": (2, Passes({}, {"q2": 2, "v2": 2}, 3)),
    "backward": (7, Passes({}, {"q2": 6, "v2": 6}, 5)),
}
ROUTER = {
    # Join and norm: h, y r, h, x w. Of h to the router's width; three products there.
    "forward": Passes({"x4": 1, "r4": 6, "w4": 1}, {"x4": 2, "x2": 2, "r4": 9}, 12),
    "again": Passes({"x4": 1, "r4": 6, "w4": 1}, {"x4": 2, "x2": 2, "r4": 11}, 13),
    # dx as float32; all of join and norm at once: d of both, h, y r, d of both w.
    "backward": Passes({"x4": 2, "r4": 13, "w4": 3}, {"x4": 4, "x2": 3, "r4": 16}, 20),
}
EXPERTS = {
    # Rows r, hidden and activation w; activation r, y w; weights r as they are. Join: h, y r, h w.
    "forward": Passes({"w4": 1, "x2": 2, "h2": 1, "f2": 2}, {"x4": 2, "x2": 1}, 7),
    "again": Passes({"w4": 1, "x2": 2, "h2": 1, "f2": 2}, {}, 7),
    # d r twice, x r, dx w; hidden r twice, its gradient w and r twice; both weights r, their gradients w.
    "backward": Passes({"w4": 2, "x2": 4, "h2": 4, "f2": 2}, {"x4": 3, "x2": 2}, 8),
}
# Where experts lie over devices, buffers have twice the rows of an even load (`parallel.expert.SLACK`): the products'
# rows, what comes sorted by expert and back. And each exchange: rows into slots, through two all-to-alls, and out.
ROUND, SENT = {"x2": 10}, {"x2": 13}
# A dense model's: q, k, v and o; rotation; norm and sum.
DENSE = {
    "forward": Passes({"x2": 2, "q2": 1, "c2": 1, "w2": 1}, {"x4": 3, "x2": 2, "v2": 10}, 14),
    "again": Passes({"x2": 2, "q2": 1, "c2": 1, "w2": 1}, {"x4": 6, "x2": 2, "v2": 7}, 11),
    "backward": Passes({"x2": 8, "q2": 2, "c2": 2, "w2": 1, "w4": 1}, {"x4": 8, "x2": 4, "v2": 10}, 25),
}
MLP = {
    # Gate, up and down; f2 is their width. Weights to the compute format; the activation 3; norm; y and h to h.
    "forward": Passes({"x2": 2, "f2": 3, "x4": 1, "w2": 1}, {"f2": 3, "x4": 4, "x2": 1, "w4": 1, "w2": 1}, 9),
    # Down's product is not needed again.
    "again": Passes({"x2": 2, "f2": 2, "w2": 2 / 3}, {"f2": 3, "x4": 3, "x2": 1, "w4": 2 / 3, "w2": 2 / 3}, 7),
    "backward": Passes(
        {"f2": 6, "x2": 7, "w2": 1, "w4": 1}, {"f2": 5, "x4": 1, "x2": 1, "w4": 1, "w2": 1}, 12,
    ),
}  # fmt: skip
# Linear attention: k r, its features w; k, v r, states w, these r, their sums w; q, k, v, sums r, out w. Backward the
# features of k again; q, k, v, sums, d, out r, dq and the features of q w; these and d r, states as before; q, k, v, d,
# the former k, sums r, dk and dv w. Where the output is kept, the states alone are made again. `s2` are the chunks'.
LINEAR = {
    "forward": Passes({}, {"q2": 2, "v2": 6, "s2": 6}, 4),
    "again": Passes({}, {"v2": 4, "s2": 5}, 3),
    "backward": Passes({}, {"q2": 9, "v2": 9, "s2": 7}, 5),
}
# What is kept of a layer for the backward pass: written forward, read backward.
KEPT: Mapping[str, Mapping[str, float]] = {
    "layer": {"x4": 1, "r4": 1},
    "attention": {"x4": 1, "r4": 1, "q2": 1},
    "elementwise": {"x4": 1, "x2": 2, "h2": 1, "c2": 1, "q2": 1, "r4": 4},
    "none": {"x4": 2, "x2": 3, "h2": 1, "c2": 2, "q2": 3, "r4": 10},
}
KEPT_DENSE: Mapping[str, Mapping[str, float]] = {
    "layer": {"x4": 1},
    "attention": {"x4": 1, "q2": 1},
    "elementwise": {"x4": 1, "x2": 2, "c2": 1, "q2": 1, "f2": 2},
    "none": {"x4": 3, "x2": 2, "c2": 1, "q2": 2, "v2": 1, "f2": 3},
}
# Over fsdp and TSP: what products gave, and nothing made of gathered weights.
KEPT_PRODUCTS: Mapping[str, Mapping[str, float]] = {
    "zaya": {"x4": 1, "x2": 3, "c2": 1, "p2": 1, "q2": 1, "h2": 1, "r4": 5},
    "dense": {"x4": 1, "x2": 1, "c2": 1, "q2": 1, "f2": 2},
}
# Where products are kept: norms, and what lies between products.
ELEMENTWISE_AGAIN = {
    "cca": Passes({}, {"x4": 1, "x2": 1, "v2": 7}, 6),
    "router": Passes({}, {"x4": 2, "x2": 2, "r4": 7}, 7),
    "experts": Passes({}, {}, 5),
    "attention": Passes({}, {"x4": 1, "x2": 1, "v2": 10}, 6),
    "mlp": Passes({}, {"x4": 3, "x2": 1, "f2": 3}, 4),
}
