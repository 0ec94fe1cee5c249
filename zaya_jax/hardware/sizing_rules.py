"""Finds the dimensions of a model and a run that fall off a chip's fast path, each with a better value.

    for advice in sizing_rules.advise(config, chip, num_devices): print(advice)

An estimate before anything runs, worst first: `cost` is the share of a step's time that the better value could save at
most, taking products at the chip's peak. The numbers of `chips` are published; figures that `experiments.characterize`
measured on such a chip take their place. docs/hardware.md has the rules as a table.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

from zaya_jax import schedule
from zaya_jax.config import Config, UserError
from zaya_jax.hardware import chips
from zaya_jax.hardware.measure.products import of_model
from zaya_jax.hardware.measure.results import Measured
from zaya_jax.model import zaya
from zaya_jax.parallel.mesh import shape_of

ZAYA1 = "ZAYA1 on MI300X, arXiv:2511.17127"
CODESIGN = "co-design of model and hardware, arXiv:2401.14489"
TILES = "large tiles of hipBLASLt and cuBLAS"
# HBM traffic of a weight in a micro-batch: read in float32 and converted to bfloat16, forward and again backward; its
# gradient written, and added to the sum.
BYTES_PER_PASS = 28
LEAST = 0.01  # of a step's time: smaller costs are not worth a line
MISALIGNED = {8: 0.5, 64: 0.1}  # estimated loss of a product that loads no whole 16 bytes, or no whole 128


@dataclasses.dataclass(frozen=True)
class Advice:
    """A dimension off the fast path."""

    rule: str
    key: str  # of the config
    value: int
    better: int | None  # the nearest better value; None where no value of this key alone is
    cost: float  # share of a step's time that it could save, at most
    reason: str
    source: str

    def __str__(self) -> str:
        better = "" if self.better is None else f"; {self.better:,} would do"
        return (
            f"sizing: {self.key}={self.value:,}: {self.reason}{better}; up to {self.cost:.1%} of a step [{self.source}]"
        )


def notes(config: Config, devices: list) -> list[str]:
    """The worst three, a line each, for a run of one phase on these devices; none where their chip is not known."""
    name = chips.named(devices[0].device_kind)
    return [] if name is None else [str(advice) for advice in _of_phase(config, name, len(devices), None)[:3]]


def advise(config: Config, name: str, num_devices: int, figures: Measured | None = None) -> list[Advice]:
    """Advice for every phase that fits the devices, worst first; the same advice for two phases is given once."""
    found: dict[tuple, Advice] = {}
    judged, misfit = 0, None
    for segment in schedule.make_plan(config).segments:
        try:
            of_phase = _of_phase(schedule.phase_config(config, segment.phase), name, num_devices, figures)
        except UserError as error:  # its mesh needs more devices
            misfit = misfit or error
            continue
        judged += 1
        for a in of_phase:
            if a.key == "data.micro_batch":  # a phase may have its own
                own = schedule.key(config, segment.phase_index, "micro_batch")
                a = dataclasses.replace(a, key=own.removeprefix("config."))
            key = a.rule, a.key, a.value
            if key not in found or found[key].cost < a.cost:
                found[key] = a
    if misfit and not judged:
        raise misfit
    return sorted(found.values(), key=lambda a: -a.cost)


def _of_phase(config: Config, name: str, num_devices: int, figures: Measured | None) -> list[Advice]:
    here = _Phase(config, name, num_devices, figures)
    found = [a for rule in (_widths, _head_dim, _rows_of_experts, _micro_batches) for a in rule(here)]
    return sorted((a for a in found if a.cost >= LEAST), key=lambda a: -a.cost)


class _Product(NamedTuple):
    """A product of tokens with weights; a device has one of `cut` parts of these."""

    name: str
    key: str  # of the model: decides the width
    factor: int  # the whole width over the key's value
    cut: int
    n: int  # its width on a device
    share: float  # of the model's FLOPs


class _Phase:
    """Sizes of a phase on one device."""

    def __init__(self, config: Config, name: str, num_devices: int, figures: Measured | None):
        self.config, self.model, self.chip = config, config.model, chips.CHIPS[name]
        self.figures = figures if figures and chips.named(figures.device) == name else None
        self.mesh = shape_of(config.mesh, num_devices)
        self.sequences = config.data.micro_batch or config.data.global_batch
        # With tensor parallelism a token lies on all its devices, but with TSP.
        self.own_tensor = 1 if config.mesh.tsp else self.mesh["tensor"]
        self.tokens = max(1, self.sequences * config.data.seq_len * self.own_tensor // num_devices)  # at once
        self.flops = chips.model_flops(config.model, config.data.seq_len)  # a token
        self.peak = self.chip.peaks[config.precision.compute]
        self.products = list(self._products())

    def _products(self) -> Iterator[_Product]:
        """The large ones; the router's are small."""
        m, tensor = self.model, self.mesh["tensor"]
        d, found = m.hidden_size, of_model(m)
        keys = {"q, k": ("num_attention_heads", tensor), "v": ("num_key_value_heads", tensor), "o": ("hidden_size", 1)}
        if m.model_type == "dense":
            keys |= {"gate, up": ("intermediate_size", tensor), "down": ("hidden_size", 1)}
        else:
            f = m.moe_intermediate_size
            found |= {"experts' gate, up": (d, 2 * f), "experts' down": (f, d)}
            keys |= {
                "experts' gate, up": ("moe_intermediate_size", self.own_tensor),
                "experts' down": ("hidden_size", 1),
            }
        for name, (key, cut) in (keys | {"head": ("vocab_size", 1)}).items():
            k, n = found[name]
            layers = 1 if name == "head" else m.num_hidden_layers
            yield _Product(name, key, n // getattr(m, key), cut, -(-n // cut), 6.0 * k * n * layers / self.flops)

    def better_width(self, p: _Product, multiple: int) -> int:
        """The nearest value of the key that makes a product's width a multiple on every device: of the tile, where
        another multiple would lose 1% to it."""
        step = math.lcm(multiple, p.factor) // p.factor * p.cut
        steps = getattr(self.model, p.key) / step
        found = max(1, math.ceil(steps) if p.key == "vocab_size" else round(steps)) * step  # every token needs its row
        lost = self.lost_to_tiles(p.factor * found // p.cut)
        return found if lost < LEAST else self.better_width(p, self.chip.tile)

    def lost_to_tiles(self, width: int) -> float:
        """The share of whole tiles that a product of this width leaves empty."""
        return 1 - width / (-(-width // self.chip.tile) * self.chip.tile)

    def more_sequences(self, factor: float) -> int | None:
        """A micro-batch that is at least so many times larger and divides a step, if there is one."""
        step = self.config.data.global_batch
        return next((n for n in range(math.ceil(self.sequences * factor), step + 1) if step % n == 0), None)


def _widths(here: _Phase) -> Iterator[Advice]:
    """Multiples of 64, then of the tile of large products; a key counts with all its products."""
    found: dict[str, Advice] = {}
    tile = here.chip.tile
    for p in here.products:
        if p.n % 64:
            lost = next(lost for multiple, lost in MISALIGNED.items() if p.n % multiple)
            rule, multiple, source, what = ("multiple of 64", 64, CODESIGN, "128 bytes, which are loaded at once")
        else:
            lost = here.lost_to_tiles(p.n)
            rule, multiple, source, what = "tile", tile, TILES, f"the tile of {tile}"
        if not lost:
            continue
        # Another number of heads would be another model.
        better = None if p.key.startswith("num_") else here.better_width(p, multiple)
        cost = p.share * lost + (found[p.key].cost if p.key in found else 0)
        reason = f"{p.name} has width {p.n:,}, no multiple of {what}"
        value = getattr(here.model, p.key)
        found[p.key] = Advice(rule, f"model.{p.key}", value, better, cost, reason, source)
    yield from found.values()


def _head_dim(here: _Phase) -> Iterator[Advice]:
    """Attention's kernels hold a head's channels in blocks of 64."""
    c = here.model.head_dim
    better = max(64, round(c / 64) * 64)
    if c != better:
        cost = max(0.0, 1 - sum(p.share for p in here.products)) * (1 - c / (-(-c // 64) * 64))
        reason = "attention computes blocks of 64 channels"
        yield Advice("head_dim", "model.head_dim", c, better, cost, reason, ZAYA1)


def _rows_of_experts(here: _Phase) -> Iterator[Advice]:
    """With few rows an expert's products wait for its weights to be read."""
    if here.model.model_type == "dense":
        return
    # A weight of two bytes serves one multiply-add a row: at peak / bandwidth rows, both take as long.
    needed, source = math.ceil(here.peak / here.chip.measured), "peak over memory bandwidth"
    if here.figures and (knee := here.figures.rows_knee()):
        needed, source = knee, f"measured, {here.figures.date[:10]}"
    spread = here.mesh["expert"] * (here.mesh["tensor"] if here.config.mesh.tsp else 1)
    rows = here.tokens * spread // here.model.num_experts
    if rows < needed:
        better = here.more_sequences(needed / max(rows, 1))
        share = sum(p.share for p in here.products if p.name.startswith("experts"))
        less = "" if better else ", or fewer devices"
        reason = f"{rows:,} tokens per expert and device, of {needed:,} that hide the reading of its weights{less}"
        cost = share * (1 - max(rows, 1) / needed)
        yield Advice("tokens per expert", "data.micro_batch", here.sequences, better, cost, reason, source)


def _micro_batches(here: _Phase) -> Iterator[Advice]:
    """Every micro-batch reads all weights and adds to all gradients, whatever its tokens."""
    step = here.config.data.global_batch
    number = -(-step // here.sequences)
    if number == 1:
        return
    moved = BYTES_PER_PASS * zaya.param_counts(here.model)["total"] / (here.mesh["expert"] * here.own_tensor)
    once, work = moved / here.chip.measured, number * here.tokens * here.flops / here.peak
    better = here.more_sequences(2)
    fewer = number - -(-step // better) if better else 0
    reason = (
        f"{number:,} micro-batches a step; each moves {moved / 1e9:,.0f} GB for weights and gradients besides "
        "its tokens; experiments.compile says how few fit"
    )
    cost = fewer * once / (number * once + work)
    yield Advice("micro-batches", "data.micro_batch", here.sequences, better, cost, reason, "benchmarks/compile.md")
