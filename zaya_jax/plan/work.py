"""Estimates FLOPs, HBM bytes and launches of a step on one device by scope and stage, without
compiling it.

    for part in work.list_work(case): part.scope, part.stage, part.flops, part.bytes

PASSES says which arrays the kernels of a layer read and write; around the layers stand the
embedding, the head and the optimizer. The numbers were read off programs compiled for MI300X on 22
and 23 November 2026, kernel by kernel (`python -m benchmarks.plan`), which benchmarks/plan.md holds
against these formulas. Where the model's code changes, so must they.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping

from pallas_kernels import chip
from pallas_kernels.attention.triton import visited
from pallas_kernels.cross_entropy import chunk_rows
from pallas_kernels.linear_attention import CHUNK
from zaya_jax.model.lookup import MAX_WORD_SHARE
from zaya_jax.optim.muon import newton_schulz_flops
from zaya_jax.parallel import dispatch
from zaya_jax.plan.case import COPY_BYTES, StepCase, itemsize

FORWARD, AGAIN, BACKWARD = "forward", "again", "backward"
Passes = tuple[str, str, float, float]  # see PASSES

# Arrays, as sizes on a device; N tokens, and formats float32 (4) or to compute in (2):
#
#     x4 x2    N of the model's width
#     r4       N of the router's width
#     p2       N of packed queries and keys
#     q2 v2    N of the queries; of the keys or the values alone
#     c2       N of packed columns and values
#     h2 f2    N of the experts' gate and up; of their width
#     s2       the states of linear attention's chunks
#     w4 w2    the part's weights of a layer
#     wh       the same weights as the kernels find them
#
# "2*x4 + q2" are two passes over x4 and one over q2.
#
# For each part of a layer, and each stage, or kind of remat where "again" is less or more: arrays
# read and written by products, which a GPU does under the multiplication where that takes longer;
# by all other kernels; launches; FLOPs over those of the forward pass. Weights are turned to the
# compute format, their gradients are float32.
# fmt: off
PASSES: dict[str, dict[str, Passes]] = {
    "cca": {  # norm; q, k and v, some delayed; o
        FORWARD: ("2*x2 + c2 + q2 + w2", "x4 + x2 + 2*v2 + w4 + w2", 10, 1),
        AGAIN: ("2*x2 + c2 + q2 + w2", "x4 + x2 + 2*v2 + w4 + w2", 9, 1),
        "elementwise": ("", "x4 + x2 + 7*v2", 6, 0),
        BACKWARD: ("4*x2 + 2*c2 + 2*q2 + w2 + 2*w4", "3*x4 + x2 + 2*v2 + w4", 12, 2),
    },
    "mix": {
        # convolutions, norms and rotation by their own kernels: three for gradients, two convolve
        # again
        FORWARD: ("", "2.1*p2", 1, 0), AGAIN: ("", "2.1*p2", 1, 0), BACKWARD: ("", "9.3*p2", 4, 2),
    },
    "mix by XLA": {  # where columns come from a neighbour too, or layers have several rotary tables
        FORWARD: ("3*p2", "13*p2 + 2*q2 + 8*v2", 14, 0),
        AGAIN: ("3*p2", "13*p2 + 2*q2 + 8*v2", 14, 0),
        BACKWARD: ("6*p2", "28*p2 + c2 + 9*v2", 28, 0),
    },
    "softmax": {
        # q, k, v r, out w; dq: q, k, v, out, d r; dk and dv: q, k, v, d r: two and seven products
        # of scores
        FORWARD: ("", "2*q2 + 2*v2", 3, 1),
        "layer": ("", "2*q2 + 2*v2", 3, 1),
        BACKWARD: ("", "6*q2 + 6*v2", 5, 3.5),
    },
    "linear": {
        # features of k; states of chunks, their sums; the output. Where that is kept, states alone
        # again
        FORWARD: ("", "2*q2 + 6*v2 + 6*s2", 4, 1),
        AGAIN: ("", "4*v2 + 5*s2", 3, 0.1),
        "layer": ("", "2*q2 + 6*v2 + 6*s2", 4, 1),
        BACKWARD: ("", "9*q2 + 9*v2 + 7*s2", 5, 2.5),
    },
    "router": {  # join and norm; to the router's width; three products there
        FORWARD: ("x4 + 6*r4 + w4", "2*x4 + 2*x2 + 9*r4", 12, 1),
        AGAIN: ("x4 + 6*r4 + w4", "2*x4 + 2*x2 + 11*r4", 13, 1),
        "elementwise": ("", "2*x4 + 2*x2 + 7*r4", 7, 0),
        BACKWARD: ("x4 + x2 + 13*r4 + 3*w4", "3*x4 + 4*x2 + 16*r4", 20, 2),
    },
    "experts": {  # rows r, hidden and activation w; activation r, y w; weights as they are. Join
        FORWARD: ("wh + 2*x2 + h2 + 2*f2", "2*x4 + x2", 7, 1),
        AGAIN: ("wh + 2*x2 + h2 + 2*f2", "", 7, 1),
        "elementwise": ("", "", 5, 0),
        BACKWARD: ("wh + w4 + 4*x2 + 4*h2 + 2*f2", "3*x4 + 2*x2", 8, 2),
    },
    "attention": {  # of a dense model: q, k, v and o; rotation; norm and sum
        FORWARD: ("2*x2 + q2 + c2 + w2", "3*x4 + 2*x2 + 10*v2", 14, 1),
        AGAIN: ("2*x2 + q2 + c2 + w2", "6*x4 + 2*x2 + 7*v2", 11, 1),
        "elementwise": ("", "x4 + x2 + 10*v2", 6, 0),
        BACKWARD: ("8*x2 + 2*q2 + 2*c2 + w2 + w4", "8*x4 + 4*x2 + 10*v2", 25, 2),
    },
    "mlp": {  # gate, up and down, which is not needed again; f2 is their width
        FORWARD: ("2*x2 + 3*f2 + x4 + w2", "3*f2 + 4*x4 + x2 + w4 + w2", 9, 1),
        AGAIN: ("2*x2 + 2*f2 + 0.67*w2", "3*f2 + 3*x4 + 0.67*w4 + 0.67*w2", 7, 2 / 3),
        "elementwise": ("", "3*x4 + x2 + 3*f2", 4, 0),
        BACKWARD: ("6*f2 + 7*x2 + w2 + w4", "5*f2 + x4 + x2 + w4 + w2", 12, 2),
    },
}
# fmt: on
# How often the optimizer's exchange reads and writes on the device what each kind sends.
EXCHANGE_PASSES = {
    "reduce-scatter": 1,
    "all-gather": 1,
    "all-to-all": 2,
    "exchange": 4,
    "all-reduce": 2,
}
LAYER_SCOPES = ("cca", "attention", "router", "experts", "mlp")
RATES = {"experts": "grouped", "router": "float32", "softmax": "attention", "linear": "attention"}
# Where experts lie over devices, buffers have more rows than an even load
# (`parallel.dispatch.SLACK`): rows of products, as they come sorted by expert, and back. And each
# exchange: into slots, through two all-to-alls, and out.
ROUND, SENT = "10*x2", "13*x2"
# Arrays of a layer kept for the backward pass: written forward, read backward. "products": over
# fsdp and TSP, where nothing is computed again, the products' results, and nothing made of gathered
# weights.
KEPT = {
    "zaya": {
        "layer": "x4 + r4",
        "attention": "x4 + r4 + q2",
        "elementwise": "x4 + 2*x2 + h2 + c2 + q2 + 4*r4",
        "none": "2*x4 + 3*x2 + h2 + 2*c2 + 3*q2 + 10*r4",
        "products": "x4 + 3*x2 + c2 + p2 + q2 + h2 + 5*r4",
    },
    "dense": {
        "layer": "x4",
        "attention": "x4 + q2",
        "elementwise": "x4 + 2*x2 + c2 + q2 + 2*f2",
        "none": "3*x4 + 2*x2 + c2 + 2*q2 + v2 + 3*f2",
        "products": "x4 + x2 + c2 + q2 + 2*f2",
    },
}


@dataclasses.dataclass(frozen=True)
class ScopeWork:
    """The work of the kernels of one scope and stage."""

    scope: str
    stage: str  # "" for work after the backward pass
    flops: float = 0.0
    products: float = 0.0  # bytes that products read and write
    others: float = 0.0  # bytes of all other kernels
    launches: float = 0.0
    kind: str = "products"  # whose rate its FLOPs run at: products, grouped, attention, float32

    @property
    def bytes(self) -> float:
        """HBM traffic."""
        return self.products + self.others


def list_work(case: StepCase) -> list[ScopeWork]:
    """All parts of a step."""
    parts = [*_layers(case), *_outside_layers(case), *_optimizer(case)]
    return [p for p in parts if p.bytes or p.flops]


def array_bytes(case: StepCase) -> dict[str, float]:
    """Bytes of the kinds of arrays, weights aside."""
    m, n, b = case.model, case.tokens, itemsize(case.config.precision.compute)
    heads = case.spread.head_shards
    q = m.num_attention_heads * m.head_dim / heads
    kv = max(m.num_key_value_heads / heads, 1) * m.head_dim
    inner = m.moe_intermediate_size if m.model_type == "zaya" else m.intermediate_size
    width = inner / heads
    return {
        "x4": 4.0 * n * m.hidden_size,
        "x2": b * n * m.hidden_size,
        "r4": 4.0 * n * m.router_hidden_size,
        "p2": b * n * (q + kv),
        "q2": b * n * q,
        "v2": b * n * kv,
        "c2": b * n * (q + 2 * kv),
        "h2": b * n * 2 * width,
        "f2": b * n * width,
        "s2": b * n * kv * m.head_dim / CHUNK,
    }


@functools.cache
def _units(words: str) -> tuple[tuple[float, str], ...]:
    """ "2*x4 + q2" as ((2, "x4"), (1, "q2"))."""
    units = []
    for term in filter(None, words.split(" + ")):
        times, _, array = term.rpartition("*")
        units.append((float(times or 1), array))
    return tuple(units)


def bytes_moved(words: str, sizes: Mapping[str, float]) -> float:
    """Bytes of so many passes over arrays of these sizes."""
    return sum(times * sizes[name] for times, name in _units(words))


def saved_bytes(case: StepCase) -> float:
    """Bytes that are kept of a layer for the backward pass."""
    remat = case.config.remat
    if remat == "offload":
        remat = "attention"
    elif remat == "none" and gathers_weights(case):
        remat = "products"
    return bytes_moved(KEPT[case.model.model_type][remat], array_bytes(case))


def experts_in_place(case: StepCase) -> bool:
    """Whether kernels read the experts' weights, and write their gradients, where all layers'
    lie."""
    s = case.spread
    return case.model.model_type == "zaya" and not (s.fsdp or s.tsp or s.expert_axes)


def kept_in_place_bytes(case: StepCase) -> float:
    """Bytes of `saved_bytes` that kernels write and read where all layers' lie: the scan copies
    none of them."""
    keeps = case.config.remat in ("none", "elementwise") and experts_in_place(case)
    return array_bytes(case)["h2"] if keeps else 0.0


def rounded_numel(case: StepCase) -> float:
    """Numbers of the experts' weights that a step rounds for these kernels: those that do not lie
    rounded already."""
    if not experts_in_place(case) or "layers/experts/gate_up" not in case.layout.copy_dtypes:
        return 0.0
    numbers = case.model.num_hidden_layers * case.layer_numel["experts"]
    return numbers - case.copied_numel.get("experts", 0)


def gathers_weights(case: StepCase) -> bool:
    """Whether a layer's weights come from other devices, in which case the layer is
    recomputed unless remat says otherwise."""
    return case.spread.fsdp or (case.spread.tsp and case.model.model_type == "zaya")


def recomputes(case: StepCase) -> bool:
    """Whether layers are computed again in the backward pass, whole or in part."""
    return case.config.remat != "none" or gathers_weights(case)


def layer_parts(case: StepCase) -> list[tuple[str, str, int]]:
    """The parts of layers: the name in PASSES, the scope, and how many layers have it."""
    layers, mixer = case.model.num_hidden_layers, case.mixer
    parts = [("softmax", mixer, layers - case.linear_layers), ("linear", mixer, case.linear_layers)]
    if mixer == "cca":
        # Our kernel has no columns of a neighbour, and one rotary table at most.
        rotary_tables = len(set(case.model.kinds) - {"hybrid_linear"})
        ours = case.spread.sequence_parts == 1 and rotary_tables <= 1
        parts.append(("mix" if ours else "mix by XLA", "cca", layers))
    parts += [(name, name, layers) for name in case.layer_numel if name in PASSES]
    return [part for part in parts if part[2]]


def _layers(case: StepCase) -> Iterator[ScopeWork]:
    """The work of all layers and micro-batches."""
    for name, scope, count in layer_parts(case):
        yield from _part_of_layers(case, name, scope, case.micro_batches * count)


def _part_of_layers(case: StepCase, name: str, scope: str, times: int) -> Iterator[ScopeWork]:
    """One part, at each stage at which it runs."""
    weights = case.layer_numel.get(name, 0.0)
    copied: float = case.copied_numel.get(name, 0)
    if name == "experts":
        copied += rounded_numel(case)
    sizes = array_bytes(case) | {
        "w4": 4 * weights,
        "w2": itemsize(case.config.precision.compute) * weights,
        "wh": 4 * weights - (4 - COPY_BYTES) * copied / case.model.num_hidden_layers,
    }
    over_devices = name == "experts" and bool(case.spread.expert_axes)
    if over_devices:  # a round's buffers, though no more rows are computed
        sizes |= {array: dispatch.SLACK * sizes[array] for array in ("h2", "f2")}
    for stage, row in _stages(case, PASSES[name]):
        products, others, launches, flops = row
        # the sum over devices reads and writes it
        if weights and case.spread.head_shards > 1 and name != "router":
            others += " + 2*x2"
        if over_devices:
            others += " + " + ROUND
            sent = times * bytes_moved(SENT, sizes)
            yield ScopeWork("experts/exchange", stage, 0.0, 0.0, sent, 5 * times)
        in_place = name == "experts" and experts_in_place(case)
        if in_place and stage == BACKWARD and case.micro_batches > 1:
            others += " + w4"  # the sum so far
        yield ScopeWork(
            scope,
            stage,
            times * flops * forward_flops(case, name),
            times * bytes_moved(products, sizes),
            times * bytes_moved(others, sizes),
            times * launches,
            RATES.get(name, "products"),
        )


def _stages(case: StepCase, rows: dict[str, Passes]) -> Iterator[tuple[str, Passes]]:
    """The stages at which a part runs, with its passes."""
    yield FORWARD, rows[FORWARD]
    if recomputes(case):
        again = rows.get(case.config.remat, rows.get(AGAIN))
        if again:
            yield AGAIN, again
    yield BACKWARD, rows[BACKWARD]


def forward_flops(case: StepCase, name: str) -> float:
    """FLOPs of a part of one layer in one micro-batch."""
    m, heads, b = case.model, case.spread.head_shards, 2.0 * case.tokens
    d, c, r = m.hidden_size, m.head_dim, m.router_hidden_size
    q, kv = m.num_attention_heads / heads, max(m.num_key_value_heads / heads, 1)
    convolution = (q + kv) * c * c * m.cca_time1
    match name:
        case "cca":
            return b * (d * 2 * (q + kv) * c + convolution)
        case "mix":
            return b * convolution
        case "softmax":
            return 4.0 * case.sequences_per_device * q * c * _area(case)
        # queries with a chunk's keys, a quarter of them left out by tiles; and with states
        case "linear":
            return b * c * (2 * q * 0.75 * CHUNK + c * (q + kv))
        case "router":
            return b * (d * r + 2 * r * r + r * (m.num_experts + 1))
        case "experts":
            return b * 3 * d * m.moe_intermediate_size / heads
        case "attention":
            return b * 2 * d * (q + kv) * c
        case "mlp":
            return b * 3 * d * m.intermediate_size / heads
    return 0.0


def _area(case: StepCase) -> float:
    """Scores of one head and sequence that a device computes, the mean of layers with a softmax,
    after causality and windows."""
    m, whole, parts = case.model, case.config.data.seq_len, case.spread.sequence_parts
    chunk = whole // (2 * parts) if parts > 1 else whole
    window_of = {"hybrid_sliding": m.sliding_window}
    windows = [window_of.get(kind) for kind in m.kinds if kind != "hybrid_linear"]
    share = visited(chunk, whole, range(0, whole, chunk), windows or [None])
    return case.tokens_per_row * whole * share


def head_chunks(case: StepCase) -> tuple[int, int]:
    """Tokens whose loss a device computes at once, and how often it does in a micro-batch."""
    n = case.tokens // case.spread.head_shards
    maker = "NVIDIA" if case.chip in ("h100", "h200") else "gfx"
    with chip.making(chip.Chip("gpu", maker)):
        chunk = min(chunk_rows(n, case.model.vocab_size), n)
    return chunk, -(-n // chunk)


def _outside_layers(case: StepCase) -> Iterator[ScopeWork]:
    """Embedding, head, arrays stacked over the layers, and work without a scope."""
    m, mb, layers = case.model, case.micro_batches, case.model.num_hidden_layers
    b, several, fsdp = itemsize(case.config.precision.compute), mb > 1, case.spread.fsdp
    x4 = array_bytes(case)["x4"]
    table4, table2 = 4.0 * m.vocab_size * m.hidden_size, b * m.vocab_size * m.hidden_size
    chunk, chunks = head_chunks(case)
    logits4, logits2 = 4.0 * chunk * chunks * m.vocab_size, b * chunk * chunks * m.vocab_size
    # The sum over equal words turns as often as the longest run needs; each turn adds, and copies
    # its carry.
    turns = math.ceil(math.log2(max(MAX_WORD_SHARE * case.tokens, 1)))
    # The look-ups' gradient onto the head's: where that lies, or under the head's last product.
    onto = 0.0
    if chunks > 1 and several:
        onto = 4 * table4
    elif chunks > 1 and (case.layout.sharded or fsdp):
        onto = 3 * table4
    yield ScopeWork(
        "embed", BACKWARD, others=mb * ((2 * turns + 7) * x4 + onto), launches=mb * (turns + 41)
    )
    yield ScopeWork(
        "head",
        FORWARD,
        mb * 3 * 2.0 * chunk * chunks * m.hidden_size * m.vocab_size,
        # Logits w; their gradient r twice; the table r twice, its gradient rw; rows.
        mb * (logits4 + 2 * logits2 + chunks * (2 * table2 + 2 * table4) + 3 * x4),
        # The logits' maxima with their sums; the gradient made of the logits; the table to the
        # compute format; rows, and their gradients into place.
        mb * (2 * logits4 + logits2 + table4 + table2 + 17 * x4),
        mb * (15 * chunks + 6),
    )
    saved = (saved_bytes(case) - kept_in_place_bytes(case)) * layers
    # Each layer's gradient is read, added and put into zeros, or, with several micro-batches, put
    # back: except gradients that kernels write in place, and those reduced right
    # after their layer. Kept arrays go in and out.
    layers_numel = sum(case.layer_numel.values()) * layers
    large = case.layer_numel.get("experts", case.layer_numel.get("mlp", 0.0)) * layers
    stacked = layers_numel - (large if experts_in_place(case) or fsdp else case.early_numel)
    yield ScopeWork(
        "stacks", BACKWARD, others=mb * (28.0 * stacked + 4 * saved), launches=mb * 48 * layers
    )
    # Zeros for kept arrays and for the table's gradient; the carry of the embedding's sum; o's
    # weights converted.
    rest = mb * (2.0 * case.layer_numel[case.mixer] * layers + saved + 2 * turns * x4)
    rest += min(chunks, 2) * table4
    if several:
        # zeros to add to, and the table's sum, carried from one to the next; fsdp adds up parts of
        # it alone
        rest += 4.0 * sum(n for path, n in case.numel.items() if path.startswith("layers/"))
        if not fsdp:
            rest += mb * (3 if chunks > 1 else 1) * table4
    if fsdp:
        # Gathers of a layer to compute with, and again in float32; its gradient packed and
        # scattered; the table's both.
        gathered = 4.0 * layers_numel
        rest += mb * (
            (gathered * (2 + b / 4) + 2 * table4) * (1 + 1 / case.spread.data) + 8 * gathered
        )
    yield ScopeWork("other", FORWARD, others=rest, launches=mb * (14.5 * layers + 85))


def _optimizer(case: StepCase) -> Iterator[ScopeWork]:
    """Muon and AdamW on a device's share, the exchange around them, and the new weights."""
    layout, step, rounds = case.layout, case.muon_itemsize, case.config.optim.newton_schulz_steps
    shapes = layout.state_shapes()
    flops = x4 = gram4 = adamw4 = 0.0
    launches = 160.0
    for name, method in layout.methods.items():
        shape = shapes[name]
        numbers = math.prod(shape) / layout.num_shards(name)
        if method == "adamw":
            adamw4 += 4 * numbers
            continue
        matrices = numbers / math.prod(shape[-2:])
        flops += matrices * newton_schulz_flops(shape[-2:], rounds)
        x4 += 4 * numbers
        gram4 += 4 * matrices * min(shape[-2:]) ** 2
        launches += 30 * max(numbers / 2**23, 1)
    # A round: x r, gram w; r, its square w; factor r with x, their product w. Results are float32.
    wide = 4 / step
    products = rounds * ((2 + wide) * x4 + (2 + 2 * wide) * gram4) * step / 4
    # Its sums, with their roundings where the products' format is narrower.
    rounding = (1 + wide) * (wide > 1)
    sums = rounds * ((2 + wide) * x4 + (2 + wide + rounding) * gram4) * step / 4
    local = sum(case.numel.values()) - sum(case.copied_numel.values())
    # The states; weights rw, directions r; norms of each device's part, or gradients weighed, cut
    # and put away whole.
    others = sums + (10 + 3 * step / 4) * x4 + 7 * adamw4 + 8.0 * local + direction_bytes(case)
    others += (4.0 * local + direction_bytes(case)) / case.devices
    if case.devices == 1:
        others += 20.0 * local
    others += (4.0 + COPY_BYTES) * rounded_numel(case)
    yield ScopeWork("optimizer", "", flops, products, others, launches)
    if layout.sharded:
        launches = 24 if case.devices <= 8 else 160
        yield ScopeWork("optimizer/exchange", "", 0, 0, _exchanged(case), launches)


def _exchanged(case: StepCase) -> float:
    """Bytes that the optimizer's exchange reads and writes on the device itself."""
    # Gradients for owners: zeros, put in order, sent; in two rounds again, and in another order.
    total = padded_copy_bytes(case)
    for way in case.early_buckets.values():
        total += 4.0 * way.buffer_size * (8 if way.stages > 1 else 5)
        # A layer's gradients are copied where padding goes behind them.
        if way.padded > way.matrices * math.prod(way.bucket.matrix):
            total += 8.0 * way.layers * way.padded
    for name in case.layout.methods:
        sent = case.exchange_bytes(name)
        total += sum(times * sent[kind] for kind, times in EXCHANGE_PASSES.items())
    return total


def direction_bytes(case: StepCase) -> float:
    """Bytes of the optimizer's directions for all weights of a device, and of copies that are cut
    out of padding."""
    copied, weights = sum(case.copied_numel.values()), sum(case.numel.values())
    return (
        case.muon_itemsize * (case.muon_numel - copied)
        + 4.0 * (weights - case.muon_numel)
        + padded_copy_bytes(case)
    )


def padded_copy_bytes(case: StepCase) -> float:
    """Bytes of new copies that come with padding; others are gathered into their own place."""
    buckets = (case.layout.matrices[name] for name in case.layout.copied.values())
    return float(sum(COPY_BYTES * b.local_size for b in buckets if b.padded_rows > b.rows))
