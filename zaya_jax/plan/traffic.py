"""FLOPs, HBM bytes and launches of a step on one device, by scope and stage, and the least that each scope needs.

    for part in traffic.parts(case): part.scope, part.stage, part.flops, part.bytes

The parts are those of the compiled program (`experiments.compile` counts the same), by formula: `passes` says what a
layer's kernels read and write, what stands around the layers is here.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping

from pallas_kernels import chip
from pallas_kernels.attention.triton import visited
from pallas_kernels.cross_entropy.xla import chunk_rows
from pallas_kernels.linear_attention import CHUNK
from zaya_jax.model.lookup import COMMONEST
from zaya_jax.optim.muon import newton_schulz_flops
from zaya_jax.optim.zero import ShardedLayout
from zaya_jax.parallel import expert
from zaya_jax.plan import passes
from zaya_jax.plan.case import Case, size

FORWARD, AGAIN, BACKWARD = "forward", "again", "backward"


@dataclasses.dataclass(frozen=True)
class Part:
    """Kernels of one scope and stage."""

    scope: str
    stage: str  # "" for what follows the backward pass
    flops: float
    products: float  # bytes that products read and write
    others: float  # bytes of all other kernels
    launches: float
    kind: str = "products"  # whose rate its FLOPs run at: products, grouped, attention, float32

    @property
    def bytes(self) -> float:
        """HBM traffic."""
        return self.products + self.others


def parts(case: Case) -> list[Part]:
    """All parts of a step."""
    found = [*_layers(case), *_around(case), *_optimizer(case)]
    return [p for p in found if p.bytes or p.flops]


def sizes(case: Case) -> dict[str, float]:
    """Bytes of the kinds of arrays that `passes` counts, weights aside."""
    m, n, b = case.model, case.tokens, size(case.here.precision.compute)
    heads = case.spread.heads
    q, kv = m.num_attention_heads * m.head_dim / heads, max(m.num_key_value_heads / heads, 1) * m.head_dim
    width = (m.moe_intermediate_size if m.model_type == "zaya" else m.intermediate_size) / heads
    return {
        "x4": 4.0 * n * m.hidden_size, "x2": b * n * m.hidden_size, "r4": 4.0 * n * m.router_hidden_size,
        "p2": b * n * (q + kv), "q2": b * n * q, "v2": b * n * kv, "c2": b * n * (q + 2 * kv),
        "h2": b * n * 2 * width, "f2": b * n * width, "s2": b * n * kv * m.head_dim / CHUNK,
    }  # fmt: skip


def _area(case: Case) -> float:
    """Scores of one head and sequence that a device computes, the mean of layers with a softmax: what causality and
    windows leave."""
    m, whole, parts = case.model, case.here.data.seq_len, case.spread.sequence_parts
    chunk = whole // (2 * parts) if parts > 1 else whole
    windows = [
        m.sliding_window if kind == "hybrid_sliding" else None for kind in m.kinds if kind != "hybrid_linear"
    ]
    return case.length * whole * visited(chunk, whole, range(0, whole, chunk), windows or [None])


def _bytes(units: Mapping[str, float], have: Mapping[str, float]) -> float:
    return sum(times * have[name] for name, times in units.items())


def _add(units: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    return {name: units.get(name, 0) + more.get(name, 0) for name in {**units, **more}}


def kept(case: Case) -> Mapping[str, float]:
    """What is kept of a layer, as `passes` counts."""
    policy, kind = case.here.remat, case.model.model_type
    policy = "attention" if policy == "offload" else policy
    if policy == "none" and fetched(case):
        return passes.KEPT_PRODUCTS[kind]
    return (passes.KEPT if kind == "zaya" else passes.KEPT_DENSE)[policy]


def in_place(case: Case) -> bool:
    """Whether kernels read the experts' weights, and write their gradients, where all layers' lie."""
    s = case.spread
    return case.model.model_type == "zaya" and not (s.fsdp or s.tsp or s.expert_axes)


def fetched(case: Case) -> bool:
    """Whether a layer's weights come from other devices, so that it is computed again where nothing else is asked."""
    return case.spread.fsdp or (case.spread.tsp and case.model.model_type == "zaya")


def _layers(case: Case) -> Iterator[Part]:
    """Of all layers and micro-batches."""
    m, have, weights = case.model, sizes(case), case.layer
    times = case.micro_batches * m.num_hidden_layers
    dense = m.model_type == "dense"
    again = case.here.remat != "none" or fetched(case)
    zaya = {"cca": passes.CCA, "router": passes.ROUTER, "experts": passes.EXPERTS}
    tables = {"attention": passes.DENSE, "mlp": passes.MLP} if dense else zaya
    for scope, stages in tables.items():
        numbers = weights["cca" if scope == "attention" else scope]
        b = size(case.here.precision.compute)
        own = have | {"w4": 4 * numbers, "w2": b * numbers}
        if (
            scope == "experts" and case.spread.expert_axes
        ):  # a round's buffers, though no more rows are computed
            own |= {name: expert.SLACK * own[name] for name in ("h2", "f2")}
        for stage, p in stages.items():
            if stage == AGAIN and not again:
                continue
            if stage == AGAIN and case.here.remat == "elementwise":
                p = passes.ELEMENTWISE_AGAIN.get(scope, p)
            flops = times * _products(case, scope) * (2 if stage == BACKWARD else 1)
            flops *= stage != AGAIN or bool(p.products)
            kind = {"experts": "grouped", "router": "float32"}.get(scope, "products")
            extra: Mapping[str, float] = {}
            if scope == "experts" and stage == BACKWARD and case.micro_batches > 1 and in_place(case):
                extra = {"w4": 1}  # the sum so far
            if case.spread.heads > 1 and scope != "router":  # the sum over devices reads and writes it
                extra = _add(extra, {"x2": 2})
            if scope == "experts" and case.spread.expert_axes:
                extra = _add(extra, passes.ROUND)
                sent = times * _bytes(passes.SENT, own)
                yield Part("experts/exchange", stage, 0.0, 0.0, sent, 5 * times)
            if stage == AGAIN and scope == "mlp":
                flops *= 2 / 3
            yield Part(
                scope, stage, flops, times * _bytes(p.products, own), times * _bytes(_add(p.others, extra), own),
                times * p.launches, kind,
            )  # fmt: skip
    yield from _mixing(case, have)


def _products(case: Case, scope: str) -> float:
    """FLOPs of one layer's products forward, in one micro-batch, attention's mixing aside."""
    m, n, heads = case.model, case.tokens, case.spread.heads
    d, c, b = m.hidden_size, m.head_dim, 2.0 * n
    kv = max(m.num_key_value_heads / heads, 1)
    packed = (m.num_attention_heads / heads + kv) * c
    match scope:
        case "cca":
            o = m.num_attention_heads / heads * c * d
            return b * (d * (packed + kv * c) + o + packed * c * m.cca_time1)
        case "attention":
            return b * 2 * d * packed
        case "mlp":
            return b * 3 * d * m.intermediate_size / heads
        case "experts":
            return b * 3 * d * m.moe_intermediate_size / heads
    r = m.router_hidden_size
    return b * (d * r + 2 * r * r + r * (m.num_experts + 1))


def _mixing(case: Case, have: Mapping[str, float]) -> Iterator[Part]:
    """Attention proper, by its kernels or linear, and before it what mixes neighbouring tokens."""
    m = case.model
    scope = "attention" if m.model_type == "dense" else "cca"
    softmax = case.micro_batches * (m.num_hidden_layers - case.linear_layers)
    stages = (FORWARD, AGAIN, BACKWARD) if case.here.remat == "layer" else (FORWARD, BACKWARD)
    each = 2.0 * case.rows * m.num_attention_heads / case.spread.heads * m.head_dim
    for stage in stages if softmax else ():
        number, p = passes.ATTENTION[BACKWARD if stage == BACKWARD else FORWARD]
        yield Part(
            scope, stage, softmax * number * each * _area(case), 0.0, softmax * _bytes(p.others, have),
            softmax * p.launches, "attention",
        )  # fmt: skip
    if case.linear_layers:
        yield from _linear(case, scope)
    if scope == "cca":
        yield from _mix(case, have)


def mixes(case: Case) -> bool:
    """Whether CCA's mixing runs by its own kernels: with no columns of a neighbour, and one rotary table at most."""
    return case.spread.sequence_parts == 1 and len(set(case.model.kinds) - {"hybrid_linear"}) <= 1


def _mix(case: Case, have: Mapping[str, float]) -> Iterator[Part]:
    """CCA's convolutions, norms and rotation; the kernels' products are counted with the other ones."""
    times = case.micro_batches * case.model.num_hidden_layers
    tables = passes.MIX if mixes(case) else passes.MIX_XLA
    # Two of the gradients' kernels compute the convolution over heads again.
    numbers = have["p2"] / size(case.here.precision.compute)
    again = 2 * 2.0 * numbers * case.model.head_dim * case.model.cca_time1
    for stage in (FORWARD, AGAIN, BACKWARD) if case.here.remat != "none" else (FORWARD, BACKWARD):
        p = tables[BACKWARD if stage == BACKWARD else FORWARD]
        flops = times * again if stage == BACKWARD and mixes(case) else 0.0
        yield Part(
            "cca", stage, flops, times * _bytes(p.products, have), times * _bytes(p.others, have), times * p.launches
        )  # fmt: skip


def _linear(case: Case, scope: str) -> Iterator[Part]:
    """Linear attention by its kernels: products of a chunk's queries with its keys, of which tiles leave out a quarter,
    and with states. Where the output is kept, those of keys alone are made again."""
    m = case.model
    times = case.micro_batches * case.linear_layers
    heads, c = m.num_attention_heads / case.spread.heads, m.head_dim
    have = sizes(case)
    of_keys, of_state = heads * 0.75 * CHUNK, c * (heads + m.num_key_value_heads / case.spread.heads)
    kept = case.here.remat != "layer"
    stages = (FORWARD, BACKWARD) if case.here.remat == "none" else (FORWARD, AGAIN, BACKWARD)
    for stage in stages:
        p = passes.LINEAR[stage if stage != AGAIN or kept else FORWARD]
        weights, states = {FORWARD: (2, 1), AGAIN: (0, 0.2) if kept else (2, 1), BACKWARD: (6, 2)}[stage]
        flops = 2.0 * case.tokens * c * (weights * of_keys + states * of_state)
        yield Part(
            scope, stage, times * flops, times * _bytes(p.products, have), times * _bytes(p.others, have),
            times * p.launches, "attention",
        )  # fmt: skip


def table_alone(case: Case) -> bool:
    """Whether the table's gradient travels as it is, without large vectors beside it."""
    layout = case.layout
    if not isinstance(layout, ShardedLayout):
        return False
    cut = [name for name in layout.methods if name.startswith("adamw cut")]
    return all(layout.traffic(name).get("reduce-scatter") == 4 * case.numbers["embedding"] for name in cut)


def head(case: Case) -> tuple[int, int]:
    """Tokens whose loss a device computes at once, and how often it does in a micro-batch."""
    n = case.tokens // case.spread.heads
    with chip.making(chip.Chip("gpu", "NVIDIA" if case.cuda else "gfx")):
        chunk = min(chunk_rows(n, case.model.vocab_size), n)
    return chunk, -(-n // chunk)


def _around(case: Case) -> Iterator[Part]:
    """Embedding, head, what is stacked over the layers, and what has no scope."""
    m, have, weights, mb = case.model, sizes(case), case.numbers, case.micro_batches
    b, layers, several = size(case.here.precision.compute), m.num_hidden_layers, case.micro_batches > 1
    n = case.tokens
    x4 = have["x4"]
    table4, table2 = 4.0 * m.vocab_size * m.hidden_size, b * m.vocab_size * m.hidden_size
    chunk, chunks = head(case)
    padded = chunk * chunks
    # The sum over equal words turns as often as the longest run needs; each turn adds, and copies what it carries.
    turns = math.ceil(math.log2(max(COMMONEST * n, 1)))
    # The look-ups' gradient onto the head's: where that lies, or under the head's last product, or by the exchange.
    even = table_alone(case) or case.spread.fsdp
    onto = (4 if several else 3 if even else 0) * (table4 if chunks > 1 else 0.0)
    yield Part("embed", FORWARD, 0, 0, mb * 2 * x4, mb)
    yield Part("embed", BACKWARD, 0, 0, mb * ((2 * turns + 5) * x4 + onto), mb * (turns + 40))
    logits4, logits2 = 4.0 * padded * m.vocab_size, b * padded * m.vocab_size
    yield Part(
        "head", FORWARD, mb * 6.0 * padded * m.hidden_size * m.vocab_size,
        # Logits w; their gradient r twice; the table r twice, its gradient rw; rows.
        mb * (logits4 + 2 * logits2 + chunks * (2 * table2 + 2 * table4) + 3 * x4),
        # The gradient made of the logits; the table to the compute format; rows, and their gradients into place.
        mb * (logits4 + logits2 + table4 + table2 + 10 * x4), mb * 14 * chunks,
    )  # fmt: skip
    yield Part("head", BACKWARD, 0, 0, mb * 7 * x4, mb * 6)
    own = sum(case.layer.values())
    local4, gathered = 4.0 * weights["layers"], 4.0 * own * layers
    held = _bytes(kept(case), have) * layers
    yield Part("stacks", FORWARD, 0, 0, mb * 2 * held, mb * 20 * layers)
    # Each layer's gradient into its place: zeros first, or, with several micro-batches, read, added and put back.
    # Of weights whose kernels write them elsewhere, none; of others two parts, added and put into zeros.
    large = case.layer.get("experts", case.layer.get("mlp", 0.0)) * layers
    elsewhere = large if in_place(case) or case.spread.fsdp else case.leaving
    own4 = 4.0 * (own * layers - elsewhere)
    gradients = 7 * own4 * mb
    gradients += mb * 2 * held  # what was kept is cut out of its stack
    yield Part("stacks", BACKWARD, 0, 0, gradients, mb * 52 * layers)
    cca4 = 4.0 * case.layer["cca"]
    # Zeros for what is kept and for the table's gradient; what the embedding's sum carries; o's weights converted.
    rest = mb * (cca4 / 2 * layers + held + turns * 2 * x4) + (1 if chunks == 1 else 2) * table4
    # Several micro-batches: zeros to add to, and the table's sum, carried from one to the next.
    if several:
        whole = 0 if case.spread.fsdp else 3 if chunks > 1 else 1  # fsdp adds up parts of the table alone
        rest += local4 + mb * whole * table4
    if case.spread.fsdp:
        # Gathers of a layer to compute with, and again in float32; its gradient packed and scattered; the table's both.
        n, w4 = case.spread.data, gathered
        rest += mb * ((w4 * (2 + b / 4) + 2 * table4) * (1 + 1 / n) + 8 * w4)
    yield Part("other", FORWARD, 0, 0, rest, mb * (14.5 * layers + 85))


def _optimizer(case: Case) -> Iterator[Part]:
    """Muon and AdamW on a device's share, the exchange around them, and the new weights."""
    alone = case.devices == 1
    here, layout, step = case.here, case.layout, case.step_bytes
    shapes = layout.state_shapes()
    flops = x4 = gram4 = adamw4 = 0.0
    launches = 160.0
    for name, method in layout.methods.items():
        shape = shapes[name]
        numbers = math.prod(shape) / layout.parts(name)
        if method == "adamw":
            adamw4 += 4 * numbers
            continue
        matrices = numbers / math.prod(shape[-2:])
        flops += matrices * _newton_schulz(shape[-2:], here.optim.newton_schulz_steps)
        x4 += 4 * numbers
        gram4 += 4 * matrices * min(shape[-2:]) ** 2
        launches += 20 * max(numbers / 2**23, 1)
    rounds, x2, gram2 = here.optim.newton_schulz_steps, x4 * step / 4, gram4 * step / 4
    # A round is three kernels: x r, gram w; r, factor w; r with x, its successor w.
    products = rounds * (3 * x2 + 4 * gram2)
    others = 10 * x4 + 3 * x2 + 7 * adamw4
    local = sum(case.numbers.values())
    muon = muon_numbers(case)
    directions = step * muon + 4 * (local - muon)
    # Weights rw, directions r; the norms of each device's part.
    apply = 8.0 * local + directions
    norms = (4.0 * local + directions) / (1 if alone else case.devices)
    if alone:  # gradients are weighed, cut and put away whole
        others += 4.0 * local * 5
    yield Part("optimizer", "", flops, products, others + apply + norms, launches, "products")
    if isinstance(layout, ShardedLayout):
        # What goes to owners: zeros, put in order, sent; in two rounds again, and in another order.
        travel = sum(4.0 * way.sent / way.rounds * (8 if way.rounds > 1 else 5) for way in case.ways.values())
        for name, method in layout.methods.items():
            kinds = layout.traffic(name, step if method == "muon" else 4)
            travel += (
                kinds.get("reduce-scatter", 0) + kinds.get("all-gather", 0) + 2 * kinds.get("all-to-all", 0)
            )
            travel += 4 * kinds.get("exchange", 0) + 2 * kinds.get("all-reduce", 0)
        if not table_alone(case):  # the table's gradient is first put together with those of vectors
            travel += (3 if case.micro_batches == 1 else 2) * case.numbers["embedding"] * 4.0
        yield Part("optimizer/exchange", "", 0, 0, travel, 24 if case.devices <= 8 else 160)


def _newton_schulz(shape: tuple[int, ...], steps: int) -> float:
    """FLOPs of the iteration of one matrix: of symmetric products the tiles on the diagonal and under it."""
    m, n = sorted(shape)
    down = max(m // 128, 1)
    skipped = (2.0 * m * m * n + 2.0 * m**3) * (down - 1) / (2 * down)
    return newton_schulz_flops((m, n), steps) - steps * skipped


def muon_numbers(case: Case) -> float:
    """Of a device's weights, those of Muon."""
    layout = case.layout
    grid = getattr(layout, "grid", None)
    return sum(math.prod(w.local(grid) if grid else w.shape) for w in layout.weights if w.method == "muon")
