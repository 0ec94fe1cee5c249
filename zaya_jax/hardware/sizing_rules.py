"""Which dimensions of a model and a run fall off a chip's fast path, each with a better value and what that costs.

    for finding in sizing_rules.findings(config, chip, num_devices): print(finding)

An estimate before anything runs, worst first: `cost` is the share of a step's time that the better value could save at
most, taking products at the chip's peak. The numbers of CHIPS are published; figures that `experiments.characterize`
measured on such a chip take their place. docs/hardware.md has the rules as a table.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from zaya_jax import schedule
from zaya_jax.config import Config, UserError
from zaya_jax.hardware import chips
from zaya_jax.hardware.measure.figures import Figures
from zaya_jax.model import zaya
from zaya_jax.parallel import rules
from zaya_jax.parallel import spread as spread_lib
from zaya_jax.parallel.mesh import shape_of

ZAYA1 = "ZAYA1 on MI300X, arXiv:2511.17127"  # vocabulary and heads by 64; memory as measured; links of a node
# Multiples of 64, tiles, waves, large micro-batches.
CODESIGN = "co-design of model and hardware, arXiv:2401.14489"
CUBLAS = "NVIDIA's guide to matrix multiplication"
# Of HBM that a weight takes in a micro-batch: read in float32 and turned to bfloat16, forward and again backward; its
# gradient written, and added to the sum.
BYTES_A_PASS = 28
LEAST = 0.01  # of a step's time: what costs less is not worth a line
# What a product loses that loads no whole 16 bytes, or no whole 128: estimates, until odd widths are measured.
MISALIGNED = {8: 0.5, 64: 0.1}


class Chip(NamedTuple):
    """What the rules need to know of a chip."""

    peak: str  # its row in chips.PEAKS
    multiple_by: str  # who says that a width should be a multiple of 64 numbers, 128 bytes
    tile: int  # side of the tile that large products are computed in
    tile_by: str
    units: int  # that work on a tile each
    memory: float  # bytes/s, as measured where somebody published it
    memory_by: str
    link: float = 0.0  # bytes/s between two GPUs of a node, where each pair has a link of its own
    node: int = 8


CHIPS = {
    "mi300x": Chip("MI300X", ZAYA1, 256, "hipBLASLt's large tiles", 304, 4.33e12, ZAYA1, link=64e9),
    "mi355x": Chip(
        "MI355X", CODESIGN, 256, "hipBLASLt's large tiles", 256, 8.0e12, "its data sheet", link=76.8e9
    ),
    "h200": Chip("H200", CUBLAS, 128, CUBLAS, 132, 4.8e12, "its data sheet"),
    "h100": Chip("H100", CUBLAS, 128, CUBLAS, 132, 3.35e12, "its data sheet"),
}
ALSO = {"gfx942": "mi300x", "gfx950": "mi355x"}


@dataclasses.dataclass(frozen=True)
class Finding:
    """A dimension off the fast path."""

    rule: str
    key: str  # of the config
    value: int
    better: int | None  # the nearest better value; None where no value of this key alone is
    parameters: int  # that it adds to the model
    cost: float  # share of a step's time that it could save, at most
    reason: str
    source: str

    def __str__(self) -> str:
        better = "" if self.better is None else f"; {self.better:,} would do"
        grown = f" ({self.parameters:+,} parameters)" if self.parameters else ""
        return (
            f"sizing: {self.key}={self.value:,}: {self.reason}{better}{grown}; up to {self.cost:.1%} of a step "
            f"[{self.source}]"
        )


def chip_named(name: str) -> str | None:
    """The row of CHIPS for a chip by the name that JAX gives it (device_kind); None for one that is not there."""
    words = name.lower()
    return next((row for part, row in {**{c: c for c in CHIPS}, **ALSO}.items() if part in words), None)


def notes(config: Config, devices: list) -> list[str]:
    """The worst three, a line each, for a run of one phase on these devices; none where their chip is not known."""
    name = chip_named(devices[0].device_kind)
    return [] if name is None else [str(f) for f in _of_phase(config, name, len(devices))[:3]]


def findings(config: Config, name: str, num_devices: int, figures: Figures | None = None) -> list[Finding]:
    """What is off a chip's fast path in any phase that fits the devices, worst first; each dimension once a rule."""
    found: dict[tuple, Finding] = {}
    judged, misfit = 0, None
    for segment in schedule.make_plan(config).segments:
        try:
            of_phase = _of_phase(schedule.phase_config(config, segment.phase), name, num_devices, figures)
        except UserError as error:  # a mesh that needs more devices: another start's
            misfit = misfit or error
            continue
        judged += 1
        for f in of_phase:
            f = dataclasses.replace(f, key=_key_of(config, segment.phase_index, f.key))
            key = f.rule, f.key, f.value
            if key not in found or found[key].cost < f.cost:
                found[key] = f
    if misfit and not judged:
        raise misfit
    return sorted(found.values(), key=lambda f: -f.cost)


def _key_of(config: Config, index: int, key: str) -> str:
    """The key that decides a value in a phase: a phase may have a mesh and a micro-batch of its own."""
    group, _, name = key.partition(".")
    if group == "mesh":
        return f"{schedule.key(config, index, 'mesh').removeprefix('config.')}.{name}"
    if key == "data.micro_batch":
        return schedule.key(config, index, "micro_batch").removeprefix("config.")
    return key


def _of_phase(config: Config, name: str, num_devices: int, figures: Figures | None = None) -> list[Finding]:
    if figures is not None and chip_named(figures.device) != name:
        figures = None  # of another chip
    here = _Phase(config, CHIPS[name], num_devices, figures)
    asked = (_widths, _head_dim, _rows_of_experts, _tiles, _passes_over_weights, _fabric, _messages)
    return sorted((f for rule in asked for f in rule(here) if f.cost >= LEAST), key=lambda f: -f.cost)


class _Weights(NamedTuple):
    """A product of tokens with weights: where its width n comes from, and its share of the model's FLOPs."""

    name: str
    n: int
    key: str
    k: int
    share: float
    factor: int  # n over the value of key, on one device of those that cut it: n = factor * value / cut
    cut: int


class _Phase:
    """What the rules ask of a config: sizes on one device."""

    def __init__(self, config: Config, chip: Chip, num_devices: int, figures: Figures | None):
        self.config, self.chip, self.figures, self.num_devices = config, chip, figures, num_devices
        self.mesh = shape_of(config.mesh, num_devices)
        data = config.data
        self.sequences = data.micro_batch or data.global_batch
        # Over tensor the same tokens lie everywhere, but with TSP.
        self.own_tensor = 1 if config.mesh.tsp else self.mesh["tensor"]
        self.tokens = max(
            1, self.sequences * data.seq_len * self.own_tensor // num_devices
        )  # at once on a device
        self.flops = chips.model_flops(config.model, data.seq_len)  # a token
        self.peak = chips.PEAKS.get(chip.peak, {}).get(config.precision.compute)
        self.measured_by = f"measured, {figures.date[:10]}" if figures else ""

    def products(self) -> list[_Weights]:
        """The large ones; the router's are small, and its classes cannot be chosen by tile."""
        m, cut = self.config.model, self.mesh["tensor"]
        heads, kv = "model.num_attention_heads", "model.num_key_value_heads"
        found = [
            (
                "q, k", (m.num_attention_heads + m.num_key_value_heads) * m.head_dim, heads, m.hidden_size,
                m.head_dim, cut,
            ),
            ("v", m.num_key_value_heads * m.head_dim, kv, m.hidden_size, m.head_dim, cut),
            ("o", m.hidden_size, "model.hidden_size", m.num_attention_heads * m.head_dim, 1, 1),
        ]  # fmt: skip
        if m.model_type == "dense":
            f = m.intermediate_size
            found.append(("gate, up", 2 * f, "model.intermediate_size", m.hidden_size, 2, cut))
            found.append(("down", m.hidden_size, "model.hidden_size", f, 1, 1))
        else:
            f = m.moe_intermediate_size
            own = self.own_tensor  # with TSP experts stay whole
            found.append(("experts' gate, up", 2 * f, "model.moe_intermediate_size", m.hidden_size, 2, own))
            found.append(("experts' down", m.hidden_size, "model.hidden_size", f, 1, 1))
        layers = [
            _Weights(name, -(-n // cut), key, k, 6.0 * k * n * m.num_hidden_layers / self.flops, factor, cut)
            for name, n, key, k, factor, cut in found
        ]
        head = 6.0 * m.hidden_size * m.vocab_size / self.flops
        return [*layers, _Weights("head", m.vocab_size, "model.vocab_size", m.hidden_size, head, 1, 1)]

    def nearest(self, p: _Weights, value: int, multiple: int) -> int:
        """The nearest value with which a product's width is a multiple; of the tile, where it would lose 1% there."""
        # In steps that the key can take: every device of `cut` has as many, and they fill whole multiples.
        step = math.lcm(multiple, p.factor) // p.factor * p.cut
        up = p.key == "model.vocab_size"  # every token needs its row
        found = max(step, (-(-value // step) if up else round(value / step)) * step)
        width = p.factor * found // p.cut
        lost = 1 - width / (-(-width // self.chip.tile) * self.chip.tile)
        return found if lost < 0.01 else self.nearest(p, value, self.chip.tile)

    def grown(self, key: str, value: int) -> int:
        """Parameters that another value of a model's key adds."""
        model = self.config.model
        changed: dict[str, Any] = {key.removeprefix("model."): value}
        other = dataclasses.replace(model, **changed)
        return zaya.param_counts(other)["total"] - zaya.param_counts(model)["total"]

    def misaligned(self, width: int, source: str) -> tuple[float, str]:
        """What a product of a width that is no multiple of 64 loses of its rate, and who says so."""
        if self.figures:
            step = next(s for s in (32, 8, 1) if width % s == 0)
            rates = {p.n - 2048: p.rate for p in self.figures.products if p.label.startswith("width")}
            odd = [rates[o] for o in (step, -step) if o in rates]
            if odd and 0 in rates:
                return max(0.0, 1 - sum(odd) / len(odd) / rates[0]), self.measured_by
        return next(lost for multiple, lost in MISALIGNED.items() if width % multiple), source

    def more_sequences(self, factor: float) -> int | None:
        """A micro-batch that is at least so many times larger and divides a step, if there is one."""
        step = self.config.data.global_batch
        return next((n for n in range(math.ceil(self.sequences * factor), step + 1) if step % n == 0), None)

    def wider(self, axis: str, size: int) -> int | None:
        """The size, if the model and the sequences can be cut so."""
        sizes = dataclasses.replace(self.config.mesh, data=-1, **{axis: size})  # type: ignore[arg-type]
        try:
            spread = spread_lib.of(sizes, shape_of(sizes, self.num_devices))
            rules.check(self.config, spread, lengths={"data.seq_len": self.config.data.seq_len})
        except UserError:
            return None
        return size

    def share_of_time(self, num_bytes: float, bandwidth: float) -> float:
        """Of a step, that a token's bytes over a link take beside its products at the chip's peak."""
        assert self.peak is not None
        over_link = num_bytes / bandwidth
        return over_link / (over_link + self.flops / self.peak)


def _widths(here: _Phase) -> Iterator[Finding]:
    """Multiples of 64, then of the tile that large products are computed in; a key counts with all its products."""
    found: dict[str, Finding] = {}
    for p in here.products():
        if p.n % 64:
            multiple, source = 64, here.chip.multiple_by
            lost, source = here.misaligned(p.n, source)
        else:
            multiple, source = here.chip.tile, here.chip.tile_by
            lost = 1 - p.n / (-(-p.n // multiple) * multiple)
        if not lost:
            continue
        value = getattr(here.config.model, p.key.removeprefix("model."))
        better: int | None = here.nearest(p, value, multiple)
        if "num_" in p.key:  # with another number of heads it would be another model
            better = None
        cost = p.share * lost + (found[p.key].cost if p.key in found else 0)
        what = "128 bytes, which are loaded at once" if multiple == 64 else f"the tile of {multiple}"
        found[p.key] = Finding(
            "multiple of 64" if multiple == 64 else "tile", p.key, value, better,
            here.grown(p.key, better) if better else 0, cost,
            f"{p.name} has width {p.n:,}, no multiple of {what}", source,
        )  # fmt: skip
    yield from found.values()


def _head_dim(here: _Phase) -> Iterator[Finding]:
    """Attention's kernels hold a head's channels in blocks of 64."""
    c = here.config.model.head_dim
    better = max(64, round(c / 64) * 64)
    if c == better:
        return
    weights = sum(p.share for p in here.products())
    lost = 1 - c / (-(-c // 64) * 64)
    yield Finding(
        "head_dim", "model.head_dim", c, better, here.grown("model.head_dim", better),
        max(0.0, 1 - weights) * lost, "attention computes blocks of 64 channels", here.chip.multiple_by,
    )  # fmt: skip


def _rows_of_experts(here: _Phase) -> Iterator[Finding]:
    """Below the knee an expert's products wait for its weights to be read."""
    model = here.config.model
    measured = here.figures.rows_knee() if here.figures else None
    if model.model_type == "dense" or not (measured or here.peak):
        return
    # A weight of two bytes serves one multiply-add a row: at peak / bandwidth rows, both take as long.
    rows_needed = measured or math.ceil((here.peak or 0) / here.chip.memory)
    spread = here.mesh["expert"] * (here.mesh["tensor"] if here.config.mesh.tsp else 1)
    rows = here.tokens * spread // model.num_experts
    if rows >= rows_needed:
        return
    share = sum(p.share for p in here.products() if p.name.startswith("experts"))
    better = here.more_sequences(rows_needed / max(rows, 1))
    less = "" if better else ", or fewer devices"
    yield Finding(
        "tokens per expert", "data.micro_batch", here.sequences, better, 0,
        share * (1 - max(rows, 1) / rows_needed),
        f"{rows:,} tokens an expert and device, of {rows_needed:,} that hide the reading of its weights{less}",
        here.measured_by if measured else here.chip.memory_by,
    )  # fmt: skip


def _tiles(here: _Phase) -> Iterator[Finding]:
    """A product of fewer tiles than the chip has units leaves some idle, or takes smaller, slower tiles."""
    chip, cost, narrow = here.chip, 0.0, None
    for p in here.products():
        rows = -(-here.tokens // chip.tile)
        if p.name.startswith("experts"):
            experts = here.config.model.num_experts // here.mesh["expert"] or 1
            rows = max(rows, experts)
        tiles = rows * -(-p.n // chip.tile)
        if tiles < chip.units:
            cost += p.share * (1 - tiles / chip.units)
            narrow = min(narrow or (tiles, p), (tiles, p))
    if narrow is None:
        return
    tiles, p = narrow
    better = here.more_sequences(min(2.0, chip.units / tiles))  # the nearest that is better
    yield Finding(
        "tiles", "data.micro_batch", here.sequences, better, 0, cost,
        f"{here.tokens:,} tokens at once on a device make {tiles} tiles of {chip.tile} x {chip.tile} in "
        f"{p.name}, for {chip.units} units; the more the better, as far as memory goes",
        CODESIGN,
    )  # fmt: skip


def _passes_over_weights(here: _Phase) -> Iterator[Finding]:
    """Every micro-batch reads all weights and adds to all gradients, whatever its tokens."""
    step = here.config.data.global_batch
    number = -(-step // here.sequences)
    if number == 1 or not here.peak:
        return
    own = zaya.param_counts(here.config.model)["total"] / (here.mesh["expert"] * here.own_tensor)
    once = BYTES_A_PASS * own / here.chip.memory
    work = number * here.tokens * here.flops / here.peak
    better = here.more_sequences(2)
    fewer = number - -(-step // better) if better else 0
    yield Finding(
        "micro-batches", "data.micro_batch", here.sequences, better, 0, fewer * once / (number * once + work),
        f"{number:,} micro-batches a step, each of which moves {BYTES_A_PASS * own / 1e9:,.0f} GB for weights and "
        "gradients beside its tokens; experiments.compile says how few fit",
        "benchmarks/compile.md",
    )  # fmt: skip


def _fabric(here: _Phase) -> Iterator[Finding]:
    """Where each pair of GPUs has its own link, a collective of n of them uses n - 1 of the links of each."""
    links = here.chip.node - 1
    if not here.chip.link or not here.peak:
        return
    for axis, size, inside, _, _, num_bytes in _exchanges(here):
        if not inside or not 1 < size < here.chip.node:
            continue
        share = here.share_of_time(num_bytes, (size - 1) * here.chip.link)
        yield Finding(
            "fabric", f"mesh.{axis}", size, here.wider(axis, here.chip.node), 0, share * (1 - (size - 1) / links),
            f"{size} GPUs of a node reach each other over {size - 1} of the {links} links of each", ZAYA1,
        )  # fmt: skip


def _messages(here: _Phase) -> Iterator[Finding]:
    """Messages below the network's knee take longer than their bytes; judged by measured figures alone."""
    if not here.figures or not here.peak:
        return
    for axis, size, inside, name, message, num_bytes in _exchanges(here):
        nodes = 1 if inside else max(2, size // here.chip.node)
        over = [g for g in here.figures.groups() if (g[1] == 1) == (nodes == 1)]
        if not over:
            continue
        group = min(over, key=lambda g: abs(math.log2(g[0] / size)))
        knee = here.figures.message_knee(name, *group)
        points = here.figures.over(name, *group)
        if knee is None or message >= knee:
            continue
        rate = next(
            (c.bus_bandwidth for c in reversed(points) if c.bytes <= message), points[0].bus_bandwidth
        )
        best = max(c.bus_bandwidth for c in points)
        share = here.share_of_time(num_bytes, rate)
        yield Finding(
            "message", f"mesh.{axis}", size, None, 0, share * max(0.0, 1 - rate / best),
            f"{name} of {message:,} bytes, below the {knee:,} at which the network is fast; more tokens at once make "
            "larger ones",
            here.measured_by,
        )  # fmt: skip


def _exchanges(here: _Phase) -> Iterator[tuple[str, int, bool, str, int, float]]:
    """What travels in a layer: (axis, its size, whether inside a node, collective, bytes, bytes a token and step).

    Three times a layer: forward, again backward where remat asks for it, and gradients. Numbers are bfloat16.
    """
    m, mesh, t = here.config.model, here.mesh, here.tokens
    layers, stride = 3 * m.num_hidden_layers, 1
    kv = 4 * m.num_key_value_heads * m.head_dim  # bytes of a token's keys and values
    row = 2 * m.hidden_size
    ring = here.config.mesh.ring
    for axis in ("tensor", "context", "expert"):  # the innermost first
        size = mesh[axis]
        inside, stride = stride * size <= here.chip.node, stride * size
        if size == 1:
            continue
        if axis == "context":
            name, whole = ("neighbour", t * kv) if ring else ("all-gather", size * t * kv)
            yield axis, size, inside, name, whole, layers * kv * (size - 1)
        elif axis == "expert":
            yield axis, size, inside, "all-to-all", t * row, layers * 2 * row * (size - 1) / size
        elif not here.config.mesh.tsp:
            yield axis, size, inside, "all-reduce", t * row, layers * 2 * 2 * row * (size - 1) / size
