"""Which arrays the program's kernels read and write, per layer and micro-batch: the passes behind its HBM traffic.

A row is one part of the step at one stage: how often arrays of a kind are read or written, by products (what a GPU
does under the multiplication where that takes longer) and by all other kernels. The kinds are sizes on a device:

    x4 x2   N tokens of the model's width, float32 and in the compute format       r4      N of the router's, float32
    p2      N of packed queries and keys                  q2 v2   of the queries; of the keys or the values alone
    c2      N of packed columns and values                h2 f2   N of the experts' gate and up; of their width
    s4 s2   scores of all heads as far as strips compute them, float32 and in the compute format
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
    # q, k, v and o: x r, out r; columns w, y w. Convolution: taps r, out w.
    "forward": Passes(
        {"x2": 2, "q2": 1, "c2": 1, "w2": 1, "p2": 3},
        # Norm: h r, x w. Split: p2 rw. Taps: 2 r, 2 w. First convolution: 2 r, w. Norms of q and k: 2 p2 r each,
        # q4 w, k4 w. Rotation, delayed values. Join: y r, h rw.
        {"x4": 3, "x2": 2, "p2": 13, "q2": 2, "v2": 11},
        24,
    ),
    "again": Passes(
        {"x2": 2, "q2": 1, "c2": 1, "w2": 1, "p2": 3},
        # Norm's sums: h r twice; taps without the first convolution's; k's mean on its own.
        {"x4": 3, "x2": 1, "p2": 15, "q2": 2, "v2": 19},
        23,
    ),
    # dx and dw of both products: dy r, x r, dx w; of the convolution.
    "backward": Passes(
        {"x2": 4, "q2": 1, "c2": 2, "w2": 1, "w4": 2, "p2": 6},
        # Norm: 4 x4 r, x4 w; join: h r, y r, dy w; dx as float32 and back. Convolution: taps of d 8, sums 6, dq and dk
        # through the norm 13.5; columns w.
        {"x4": 7, "x2": 3, "p2": 28, "q2": 1, "c2": 1, "v2": 9},
        40,
    ),
}  # fmt: skip
# Of a sequence that strips serve: scores w, and r for their top, their sum and their weights' products; slices of q, k
# and v for each strip.
STRIPS = {
    "forward": Passes({"s4": 1, "s2": 1, "q2": 3, "v2": 9}, {"s4": 2, "s2": 1, "q2": 6, "v2": 16}, 49),
    # Scores and their gradients w and r, weights and d_scores w, and r by three products; slices; sums of dk and dv.
    "backward": Passes({"s4": 2, "s2": 3, "q2": 6, "v2": 30}, {"s4": 2, "s2": 2, "q2": 8, "v2": 87}, 82),
}
ROUTER = {
    "forward": Passes({"x4": 1, "r4": 6, "w4": 1}, {"x4": 2, "r4": 9}, 12),
    "again": Passes({"x4": 1, "r4": 6, "w4": 1}, {"x4": 4, "r4": 11}, 15),
    "backward": Passes({"x4": 2, "r4": 12, "w4": 2}, {"x4": 7, "x2": 2, "r4": 13}, 22),
}
EXPERTS = {
    # Grouped products: rows r, hidden w, activation r, y w.
    "forward": Passes(
        {"w2": 1, "x2": 2, "h2": 1, "f2": 1},
        # Weights to the compute format; activation; sorting and back: x4 r, x2 rw; gate and join.
        {"w4": 1, "w2": 1, "h2": 1, "f2": 1, "x4": 3, "x2": 4},
        14,
    ),
    "again": Passes(
        {"w2": 1, "x2": 2, "h2": 1, "f2": 1}, {"w4": 1, "w2": 1, "h2": 1, "f2": 1, "x4": 2, "x2": 3}, 15,
    ),
    # Both products' dx and dw.
    "backward": Passes(
        {"w2": 2, "x2": 4, "h2": 2, "f2": 2}, {"h2": 2, "f2": 1, "x4": 6, "x2": 2}, 10,
    ),
}  # fmt: skip
# Where experts lie over devices, buffers have twice the rows of an even load (`parallel.expert.SLACK`): the products'
# rows, what comes sorted by expert and back. And each exchange: rows into slots, through two all-to-alls, and out.
ROUND, SENT = {"x2": 10}, {"x2": 13}
# A dense model's: q, k, v and o; rotation; norm and sum.
ATTENTION = {
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
# Of a longer sequence, or one with a window or over several devices: loops over pairs of blocks. t2 is q2 for each turn
# of the inner loop, whose sums are carried in float32: read, scaled, added and written; launches are of one pair.
BLOCKS = {
    "forward": Passes({"s4": 1, "s2": 1, "t2": 3}, {"s4": 2, "s2": 1, "t2": 8}, 14.5),
    "backward": Passes({"s4": 2, "s2": 3, "t2": 13}, {"s4": 2, "s2": 2, "t2": 18}, 20),
}
# Linear attention by chunks, whose weights are computed again backward; launches are of a chunk.
LINEAR = {
    "forward": Passes({"q2": 14}, {"q2": 38}, 11),
    "backward": Passes({"q2": 32}, {"q2": 75}, 31),
}
# What is kept of a layer for the backward pass: written forward, read backward.
KEPT: Mapping[str, Mapping[str, float]] = {
    "layer": {"x4": 1, "r4": 1},
    "attention": {"x4": 1, "r4": 1, "q2": 1},
    "none": {"x4": 4, "x2": 4, "h2": 1, "q2": 3, "p2": 2, "v2": 2, "r4": 11},
}
KEPT_DENSE: Mapping[str, Mapping[str, float]] = {
    "layer": {"x4": 1},
    "attention": {"x4": 1, "q2": 1},
    "none": {"x4": 3, "x2": 2, "c2": 1, "q2": 2, "v2": 1, "f2": 3},
}
# Over fsdp and TSP: what products gave, and nothing made of gathered weights.
KEPT_PRODUCTS: Mapping[str, Mapping[str, float]] = {
    "zaya": {"x4": 1, "x2": 3, "c2": 1, "p2": 1, "q2": 1, "h2": 1, "r4": 5},
    "dense": {"x4": 1, "x2": 1, "c2": 1, "q2": 1, "f2": 2},
}
# With nothing recomputed norms still are, and the backward pass reads less that it has just made.
NONE_AGAIN: Mapping[str, Mapping[str, float]] = {"cca": {"x4": 3.5}, "router": {"x4": 2}}
NONE_BACKWARD: Mapping[str, Mapping[str, float]] = {"experts": {"w4": 1, "w2": 1}, "router": {"x4": -2}}
