"""Which dimensions of a model and a run fall off a chip's fast path, each with a better value and its price.

    for advice in sizing_rules.advise(config, chip, num_devices): print(advice)

An estimate before anything runs, worst first: `cost` is the share of a step's time that the better value could save at
most, taking products at the chip's peak. The numbers of CHIPS are published; figures that `experiments.characterize`
measured on such a chip take their place. docs/hardware.md has the rules as a table.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from zaya_jax import schedule
from zaya_jax.config import Config, UserError
from zaya_jax.hardware import chips
from zaya_jax.hardware.measure.figures import Figures
from zaya_jax.model import zaya
from zaya_jax.parallel import sharding
from zaya_jax.parallel.mesh import shape_of
from zaya_jax.parallel.spread import spread_of

ZAYA1 = "ZAYA1 on MI300X, arXiv:2511.17127"  # vocabulary and heads by 64; memory as measured; links of a node
CODESIGN = (
    "co-design of model and hardware, arXiv:2401.14489"  # multiples of 64, tiles, waves, large micro-batches
)
CUBLAS = "NVIDIA's guide to matrix multiplication"
BLASLT = "hipBLASLt's large tiles"
NODE = 8  # GPUs
# Of HBM that a weight takes in a micro-batch: read in float32 and turned to bfloat16, forward and again backward; its
# gradient written, and added to the sum.
BYTES_A_PASS = 28
LEAST = 0.01  # of a step's time: what costs less is not worth a line
MISALIGNED = {8: 0.5, 64: 0.1}  # estimated loss of a product that loads no whole 16 bytes, or no whole 128


class Chip(NamedTuple):
    """The part of a chip that the rules need."""

    peak: str  # its row in chips.PEAKS
    multiple_by: str  # who says that a width should be a multiple of 64 numbers, 128 bytes
    tile: int  # side of the tile that large products are computed in
    tile_by: str
    units: int  # that work on a tile each
    memory: float  # bytes/s, as measured where somebody published it
    link: float = 0.0  # bytes/s between two GPUs of a node, where each pair has a link of its own


CHIPS = {
    "mi300x": Chip("MI300X", ZAYA1, 256, BLASLT, 304, 4.33e12, link=64e9),
    "mi355x": Chip("MI355X", CODESIGN, 256, BLASLT, 256, 8.0e12, link=76.8e9),
    "h200": Chip("H200", CUBLAS, 128, CUBLAS, 132, 4.8e12),
    "h100": Chip("H100", CUBLAS, 128, CUBLAS, 132, 3.35e12),
}


@dataclasses.dataclass(frozen=True)
class Advice:
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
    return next((row for row in CHIPS if row in name.lower()), None)


def notes(config: Config, devices: list) -> list[str]:
    """The worst three, a line each, for a run of one phase on these devices; none where their chip is not known."""
    name = chip_named(devices[0].device_kind)
    return [] if name is None else [str(advice) for advice in _of_phase(config, name, len(devices))[:3]]


def advise(config: Config, name: str, num_devices: int, figures: Figures | None = None) -> list[Advice]:
    """What is off a chip's fast path in any phase that fits the devices, worst first; each dimension once a rule."""
    found: dict[tuple, Advice] = {}
    judged, misfit = 0, None
    for segment in schedule.make_plan(config).segments:
        try:
            of_phase = _of_phase(schedule.phase_config(config, segment.phase), name, num_devices, figures)
        except UserError as error:  # a mesh that needs more devices: another start's
            misfit = misfit or error
            continue
        judged += 1
        for a in of_phase:
            a = dataclasses.replace(a, key=_key_of(config, segment.phase_index, a.key))
            key = a.rule, a.key, a.value
            if key not in found or found[key].cost < a.cost:
                found[key] = a
    if misfit and not judged:
        raise misfit
    return sorted(found.values(), key=lambda a: -a.cost)


def _key_of(config: Config, index: int, key: str) -> str:
    """The key that decides a value in a phase: a phase may have a mesh and a micro-batch of its own."""
    group, _, name = key.partition(".")
    if group == "mesh":
        return f"{schedule.key(config, index, 'mesh').removeprefix('config.')}.{name}"
    return schedule.key(config, index, name).removeprefix("config.") if key == "data.micro_batch" else key


def _of_phase(config: Config, name: str, num_devices: int, figures: Figures | None = None) -> list[Advice]:
    if figures is not None and chip_named(figures.device) != name:
        figures = None  # of another chip
    here = _Phase(config, CHIPS[name], num_devices, figures)
    asked = (_widths, _head_dim, _rows_of_experts, _tiles, _passes_over_weights, _fabric)
    return sorted((a for rule in asked for a in rule(here) if a.cost >= LEAST), key=lambda a: -a.cost)


class _Product(NamedTuple):
    """A product of tokens with weights, of which a device has one of `cut` parts."""

    name: str
    key: str  # decides its width
    factor: int  # of the width, over the key's value
    cut: int
    n: int  # its width on a device
    share: float  # of the model's FLOPs


class _Phase:
    """What the rules ask of a config: sizes on one device."""

    def __init__(self, config: Config, chip: Chip, num_devices: int, figures: Figures | None):
        self.config, self.model, self.chip, self.figures = config, config.model, chip, figures
        self.num_devices, self.mesh = num_devices, shape_of(config.mesh, num_devices)
        self.sequences = config.data.micro_batch or config.data.global_batch
        # Over tensor the same tokens lie everywhere, but with TSP.
        self.own_tensor = 1 if config.mesh.tsp else self.mesh["tensor"]
        at_once = self.sequences * config.data.seq_len * self.own_tensor // num_devices
        self.tokens = max(1, at_once)  # on a device
        self.flops = chips.model_flops(config.model, config.data.seq_len)  # a token
        self.peak = chips.PEAKS[chip.peak][config.precision.compute]

    @functools.cached_property
    def products(self) -> list[_Product]:
        """The large ones; the router's are small, and its classes cannot be chosen by tile."""
        m, cut, d = self.model, self.mesh["tensor"], self.model.hidden_size
        heads, kv = m.num_attention_heads, m.num_key_value_heads
        dense = m.model_type == "dense"
        inner, name = ("intermediate_size", "") if dense else ("moe_intermediate_size", "experts' ")
        f, own = getattr(m, inner), cut if dense else self.own_tensor  # with TSP experts stay whole
        rows = (  # name, key, factor, parts, outputs, inputs
            ("q, k", "num_attention_heads", m.head_dim, cut, (heads + kv) * m.head_dim, d),
            ("v", "num_key_value_heads", m.head_dim, cut, kv * m.head_dim, d),
            ("o", "hidden_size", 1, 1, d, heads * m.head_dim),
            (f"{name}gate, up", inner, 2, own, 2 * f, d),
            (f"{name}down", "hidden_size", 1, 1, d, f),
        )
        found = [
            _Product(what, key, factor, parts, -(-n // parts), 6.0 * k * n * m.num_hidden_layers / self.flops)
            for what, key, factor, parts, n, k in rows
        ]
        head = 6.0 * d * m.vocab_size / self.flops
        return [*found, _Product("head", "vocab_size", 1, 1, m.vocab_size, head)]

    def better_width(self, p: _Product, value: int, multiple: int) -> int:
        """The nearest value of a key with which a product's width is a multiple on every device; of the tile, where it
        would lose 1% to that one."""
        step = math.lcm(multiple, p.factor) // p.factor * p.cut
        up = p.key == "vocab_size"  # every token needs its row
        found = max(1, -(-value // step) if up else round(value / step)) * step
        lost = self.lost_to_tiles(p.factor * found // p.cut)
        return found if lost < 0.01 else self.better_width(p, value, self.chip.tile)

    def lost_to_tiles(self, width: int) -> float:
        """The share of whole tiles that a product of this width leaves empty."""
        return 1 - width / (-(-width // self.chip.tile) * self.chip.tile)

    def grown(self, key: str, value: int) -> int:
        """Parameters that another value of a model's key adds."""
        changed: dict[str, Any] = {key: value}
        other = dataclasses.replace(self.model, **changed)
        return zaya.param_counts(other)["total"] - zaya.param_counts(self.model)["total"]

    def more_sequences(self, factor: float) -> int | None:
        """A micro-batch that is at least so many times larger and divides a step, if there is one."""
        step = self.config.data.global_batch
        return next((n for n in range(math.ceil(self.sequences * factor), step + 1) if step % n == 0), None)


def _widths(here: _Phase) -> Iterator[Advice]:
    """Multiples of 64, then of the tile that large products are computed in; a key counts with all its products."""
    found: dict[str, Advice] = {}
    for p in here.products:
        tile = here.chip.tile
        if p.n % 64:
            lost = next(lost for multiple, lost in MISALIGNED.items() if p.n % multiple)
            rule, multiple, source = "multiple of 64", 64, here.chip.multiple_by
            what = "128 bytes, which are loaded at once"
        else:
            lost = here.lost_to_tiles(p.n)
            rule, multiple, source, what = "tile", tile, here.chip.tile_by, f"the tile of {tile}"
        if not lost:
            continue
        value = getattr(here.model, p.key)
        # With another number of heads it would be another model.
        better = None if p.key.startswith("num_") else here.better_width(p, value, multiple)
        cost = p.share * lost + (found[p.key].cost if p.key in found else 0)
        grown = here.grown(p.key, better) if better else 0
        reason = f"{p.name} has width {p.n:,}, no multiple of {what}"
        found[p.key] = Advice(rule, f"model.{p.key}", value, better, grown, cost, reason, source)
    yield from found.values()


def _head_dim(here: _Phase) -> Iterator[Advice]:
    """Attention's kernels hold a head's channels in blocks of 64."""
    c = here.model.head_dim
    better = max(64, round(c / 64) * 64)
    if c != better:
        cost = max(0.0, 1 - sum(p.share for p in here.products)) * (1 - c / (-(-c // 64) * 64))
        yield Advice(
            "head_dim", "model.head_dim", c, better, here.grown("head_dim", better), cost,
            "attention computes blocks of 64 channels", here.chip.multiple_by,
        )  # fmt: skip


def _rows_of_experts(here: _Phase) -> Iterator[Advice]:
    """Below the knee an expert's products wait for its weights to be read."""
    if here.model.model_type == "dense":
        return
    measured = here.figures.rows_knee() if here.figures else None
    # A weight of two bytes serves one multiply-add a row: at peak / bandwidth rows, both take as long.
    needed = measured or math.ceil(here.peak / here.chip.memory)
    spread = here.mesh["expert"] * (here.mesh["tensor"] if here.config.mesh.tsp else 1)
    rows = here.tokens * spread // here.model.num_experts
    if rows < needed:
        better = here.more_sequences(needed / max(rows, 1))
        share = sum(p.share for p in here.products if p.name.startswith("experts"))
        less = "" if better else ", or fewer devices"
        yield Advice(
            "tokens per expert", "data.micro_batch", here.sequences, better, 0, share * (1 - max(rows, 1) / needed),
            f"{rows:,} tokens an expert and device, of {needed:,} that hide the reading of its weights{less}",
            f"measured, {here.figures.date[:10]}" if here.figures and measured else "peak over memory bandwidth",
        )  # fmt: skip


def _tiles(here: _Phase) -> Iterator[Advice]:
    """A product of fewer tiles than the chip has units leaves some idle, or takes smaller, slower tiles."""
    side, units = here.chip.tile, here.chip.units
    cost, narrow = 0.0, []
    for p in here.products:
        experts = here.model.num_experts // here.mesh["expert"] if p.name.startswith("experts") else 1
        tiles = max(-(-here.tokens // side), experts) * -(-p.n // side)
        if tiles < units:
            cost += p.share * (1 - tiles / units)
            narrow.append((tiles, p.name))
    if narrow:
        tiles, name = min(narrow)
        yield Advice(
            "tiles", "data.micro_batch", here.sequences, here.more_sequences(min(2.0, units / tiles)), 0, cost,
            f"{here.tokens:,} tokens at once on a device make {tiles} tiles of {side} x {side} in {name}, for {units} "
            "units; the more the better, as far as memory goes", CODESIGN,
        )  # fmt: skip


def _passes_over_weights(here: _Phase) -> Iterator[Advice]:
    """Every micro-batch reads all weights and adds to all gradients, whatever its tokens."""
    step = here.config.data.global_batch
    number = -(-step // here.sequences)
    if number == 1:
        return
    moved = BYTES_A_PASS * zaya.param_counts(here.model)["total"] / (here.mesh["expert"] * here.own_tensor)
    once, work = moved / here.chip.memory, number * here.tokens * here.flops / here.peak
    better = here.more_sequences(2)
    fewer = number - -(-step // better) if better else 0
    yield Advice(
        "micro-batches", "data.micro_batch", here.sequences, better, 0, fewer * once / (number * once + work),
        f"{number:,} micro-batches a step, each of which moves {moved / 1e9:,.0f} GB for weights and gradients beside "
        "its tokens; experiments.compile says how few fit", "benchmarks/compile.md",
    )  # fmt: skip


def _fabric(here: _Phase) -> Iterator[Advice]:
    """Where each pair of GPUs has its own link, a collective of n of them uses n - 1 of the links of each."""
    links, stride = NODE - 1, 1
    for axis, num_bytes in _exchanges(here).items():  # the innermost first
        size = here.mesh[axis]
        stride *= size
        if not here.chip.link or not num_bytes or not 1 < size < NODE or stride > NODE:
            continue
        over_link = num_bytes / ((size - 1) * here.chip.link)
        share = over_link / (over_link + here.flops / here.peak)
        wider = dataclasses.replace(here.config.mesh, data=-1, **{axis: NODE})  # type: ignore[arg-type]
        better: int | None = NODE
        try:
            spread = spread_of(wider, shape_of(wider, here.num_devices))
            sharding.check(here.config, spread, lengths={"data.seq_len": here.config.data.seq_len})
        except UserError:
            better = None
        yield Advice(
            "fabric", f"mesh.{axis}", size, better, 0, share * (1 - (size - 1) / links),
            f"{size} GPUs of a node reach each other over {size - 1} of the {links} links of each", ZAYA1,
        )  # fmt: skip


def _exchanges(here: _Phase) -> dict[str, float]:
    """Bytes a token that a step's layers send along each axis: forward, again backward where remat asks for it, and
    gradients, in bfloat16."""
    m, mesh = here.model, here.mesh
    row, layers = 2 * m.hidden_size, 3 * m.num_hidden_layers
    return {
        "tensor": 0 if here.config.mesh.tsp else layers * 4 * row * (mesh["tensor"] - 1) / mesh["tensor"],
        "context": layers * 4 * m.num_key_value_heads * m.head_dim * (mesh["context"] - 1),
        "expert": layers * 2 * row * (mesh["expert"] - 1) / mesh["expert"],
    }
