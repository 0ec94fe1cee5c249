"""Finds the dimensions of a model and a run that fall off a chip's fast path, each with a better
value.

    for advice in sizing_rules.advise(config, chip, num_devices): print(advice)

Facts about shapes, before anything runs: `experiments.plan` estimates the seconds. docs/hardware.md
has the rules as a table. Figures that `experiments.characterize` measured on such a chip take the
place of published ones.
"""

import dataclasses
import math
from collections.abc import Iterator

from zaya_jax import schedule
from zaya_jax.config import Config, UserError
from zaya_jax.hardware import chips
from zaya_jax.hardware.measured import Measured
from zaya_jax.parallel.mesh import shape_of

ZAYA1 = "ZAYA1 on MI300X, arXiv:2511.17127"
CODESIGN = "co-design of model and hardware, arXiv:2401.14489"
TILES = "large tiles of hipBLASLt and cuBLAS"
LOADED = 64  # numbers of two bytes that are loaded at once
EMPTY = 0.02  # the share of whole tiles that a product may leave empty


@dataclasses.dataclass(frozen=True)
class Advice:
    """A dimension off the fast path."""

    rule: str
    key: str  # of the config
    value: int
    better: int | None  # the nearest better value; None where no value of this key alone is
    reason: str
    source: str

    def __str__(self) -> str:
        better = "" if self.better is None else f"; {self.better:,} would do"
        return f"sizing: {self.key}={self.value:,}: {self.reason}{better} [{self.source}]"


def notes(config: Config, devices: list) -> list[str]:
    """A line of advice each, for a run of one phase on these devices; none where their chip is not
    known."""
    name = chips.named(devices[0].device_kind)
    return (
        []
        if name is None
        else [str(advice) for advice in _of_phase(config, name, len(devices), None)]
    )


def advise(
    config: Config, name: str, num_devices: int, figures: Measured | None = None
) -> list[Advice]:
    """Advice for every phase that fits the devices; the same advice for two phases is given
    once."""
    found: dict[Advice, None] = {}
    judged, misfit = 0, None
    for segment in schedule.make_plan(config).segments:
        try:
            of_phase = list(
                _of_phase(schedule.phase_config(config, segment.phase), name, num_devices, figures)
            )
        except UserError as error:  # its mesh needs more devices
            misfit = misfit or error
            continue
        judged += 1
        for advice in of_phase:
            if advice.key == "data.micro_batch":  # a phase may have its own
                own = schedule.key(config, segment.phase_index, "micro_batch")
                advice = dataclasses.replace(advice, key=own.removeprefix("config."))
            found[advice] = None
    if misfit and not judged:
        raise misfit
    return list(found)


def _of_phase(
    config: Config, name: str, num_devices: int, figures: Measured | None
) -> Iterator[Advice]:
    mesh, chip = shape_of(config.mesh, num_devices), chips.CHIPS[name]
    # With tensor parallelism a token lies on all its devices, but with TSP.
    tensor = 1 if config.mesh.tsp else mesh["tensor"]
    yield from _widths(config, tensor, chip.tile)
    if config.model.model_type == "zaya":
        figures = figures if figures and chips.named(figures.device) == name else None
        yield from _rows_of_experts(config, mesh, num_devices, tensor, chip, figures)


def _widths(config: Config, tensor: int, tile: int) -> Iterator[Advice]:
    """Multiples of 64, then of the tile of large products. Another number of heads would be another
    model."""
    model = config.model
    inner = "intermediate_size" if model.model_type == "dense" else "moe_intermediate_size"
    # Gate and up are one product, which tensor parallelism cuts.
    for key, factor, cut in (("hidden_size", 1, 1), (inner, 2, tensor), ("vocab_size", 1, 1)):
        value = getattr(model, key)
        width = -(-value * factor // cut)
        if width % LOADED:
            rule, source, what = (
                "multiple of 64",
                CODESIGN,
                "64, whose 128 bytes are loaded at once",
            )
        elif _empty(width, tile) > EMPTY:
            rule, source, what = "tile", TILES, f"the tile of {tile}"
        else:
            continue
        for multiple in (LOADED, tile):
            step = math.lcm(multiple, factor) // factor * cut
            # every token needs its row
            steps = math.ceil(value / step) if key == "vocab_size" else round(value / step)
            better = max(1, steps) * step
            if _empty(better * factor // cut, tile) <= EMPTY:
                break
        yield Advice(
            rule,
            f"model.{key}",
            value,
            better,
            f"its width on a device, {width:,}, is no multiple of {what}",
            source,
        )
    if model.head_dim % LOADED:
        better = max(LOADED, round(model.head_dim / LOADED) * LOADED)
        reason = "attention computes blocks of 64 channels"
        yield Advice("head_dim", "model.head_dim", model.head_dim, better, reason, ZAYA1)


def _empty(width: int, tile: int) -> float:
    """The share of whole tiles that a product of this width leaves empty."""
    return 1 - width / (-(-width // tile) * tile)


def _rows_of_experts(
    config: Config,
    mesh: dict[str, int],
    num_devices: int,
    tensor: int,
    chip: chips.DataSheet,
    figures: Measured | None,
) -> Iterator[Advice]:
    """With few rows an expert's products wait for its weights to be read."""
    # A weight of two bytes serves one multiply-add a row: at peak / bandwidth rows, both take as
    # long.
    needed, source = (
        math.ceil(chip.peaks[config.precision.compute] / chip.measured),
        "peak over memory bandwidth",
    )
    if figures and (knee := figures.rows_knee()):
        needed, source = knee, f"measured, {figures.date[:10]}"
    batch, sequences = config.data.global_batch, config.data.micro_batch or config.data.global_batch
    tokens = max(1, sequences * config.data.seq_len * tensor // num_devices)  # of a device at once
    spread = mesh["expert"] * (mesh["tensor"] if config.mesh.tsp else 1)
    rows = max(1, tokens * spread // config.model.num_experts)
    if rows < needed:
        least = math.ceil(sequences * needed / rows)
        better = next((n for n in range(least, batch + 1) if batch % n == 0), None)
        less = "" if better else ", or fewer devices"
        reason = (
            f"{rows:,} tokens per expert and device, of {needed:,} that hide the reading of its"
            f" weights{less}"
        )
        yield Advice("tokens per expert", "data.micro_batch", sequences, better, reason, source)
