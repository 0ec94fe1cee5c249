"""Settles what depends on a machine's speed: from figures that `experiments.characterize` measured
on it, otherwise from published ones.

    sizing.value("tokens per expert", "mi300x", figures)     what one rule says, and its source
    sizing.settled(config, num_devices)                      a phase's mesh as measured figures ask
    sizing.set_for_platform(path)                            the compiler's flags of a GPU run
    for advice in sizing.advise(config, chip, num_devices): print(advice)

RULES is the one table. Some rows settle what a run does, others judge a model's and a run's sizes.
`config.hardware.figures` names the file. Importing this brings no JAX: a backend reads the flags
when it starts. docs/hardware.md has the table for people.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, NamedTuple

from zaya_jax import schedule
from zaya_jax.config import Config, UserError
from zaya_jax.hardware import chips, clusters

if TYPE_CHECKING:
    from zaya_jax.hardware.measured import Measured

ZAYA1 = "ZAYA1 on MI300X, arXiv:2511.17127"
CODESIGN = "co-design of model and hardware, arXiv:2401.14489"
MIB = 1 << 20
NEAREST = ("tensor", "context", "expert")  # axes, those of neighbours first
LOADED = 64  # numbers of two bytes that are loaded at once
EMPTY = 0.02  # the share of whole tiles that a product may leave empty
REACHED = 0.8  # the share of a whole node's rate under which a part of it is named
COMBINED = ("all-reduce", "reduce-scatter", "all-gather")  # whose calls the compiler joins
MESHED = ("mi300x", "mi355x")  # Infinity Fabric: each pair of a node's devices has its own link

# ################################################################################################
# The table
# ##################################################################################################


class Rule(NamedTuple):
    """A value that depends on the machine; `asked` is what it is asked about: a phase's config, of
    "fabric" a number of devices."""

    published: Callable[[str, Any], Any]  # for a name in chips.CHIPS; None where nothing is known
    source: str  # of the published value
    # from figures; None where they do not have it
    measured: Callable[["Measured", Any], Any] = lambda *_: None
    shown: str = ""  # in a run's line; "" where it judges sizes alone


def _two_levels(figures: "Measured", asked: Any) -> int | None:
    """One level takes a step for each device of a node; two send a layer over its links once
    more."""
    start, rate = figures.ring_step(), figures.best("reduce-scatter", figures.node, 1)
    return round(start * rate / 4) if start and rate else None


def _across(figures: "Measured", config: Config) -> bool | None:
    """Inside, a part of a node has a part of its links; across, each device has its own card."""
    count = config.mesh.context
    inside, across = figures.best("all-gather", count, 1), figures.best("all-gather", count, count)
    if not inside or not across:
        return None
    return config.mesh.across or across > inside


def _ring(figures: "Measured", config: Config) -> bool | None:
    """Gathered keys and values are waited for: 4 K C bytes of each token of other devices. A ring's
    travel under the attention, but each part is merged: 12 H C bytes read and written."""
    model, count = config.model, config.mesh.context
    nodes = count if config.mesh.across else math.ceil(count / max(figures.node, 1))
    gather, memory = figures.best("all-gather", count, nodes), figures.memory_bandwidth()
    if not gather or not memory:
        return None
    waited, merged = 4 * model.num_key_value_heads / gather, 12 * model.num_attention_heads / memory
    return config.mesh.ring or waited > merged


def _part_of_node(figures: "Measured", count: int) -> float | None:
    part, whole = figures.best("all-gather", count, 1), figures.best("all-gather", figures.node, 1)
    return part / whole if part and whole else None


def _rows(chip: str, config: Config) -> int | None:
    """A weight of two bytes serves one multiply-add a row: at so many rows reading takes as
    long."""
    if chip not in chips.CHIPS:
        return None
    sheet = chips.CHIPS[chip]
    return math.ceil(sheet.peaks[config.precision.compute] / sheet.measured_bandwidth)


def _links(chip: str, count: int) -> float:
    """The share of its node's links that so many of its devices have to each other."""
    if chip not in MESHED:
        return 1.0
    return (count - 1) / (clusters.of_chip(chip).node - 1)


RULES = {
    "multiple of 64": Rule(lambda *_: LOADED, CODESIGN),
    "tile": Rule(lambda chip, _: chips.CHIPS[chip].tile, "large tiles of hipBLASLt and cuBLAS"),
    "head_dim": Rule(lambda *_: LOADED, ZAYA1),
    "tokens per expert": Rule(
        _rows, "peak over memory bandwidth", lambda figures, _: figures.rows_knee(), " {:,}"
    ),
    "product": Rule(
        lambda chip, _: 200 if chip == "mi300x" else None,
        f"{ZAYA1}: some 200 GFLOP reach the peak",
        lambda figures, _: figures.product_knee(),
        " {:,.3g} GFLOP",
    ),
    "fabric": Rule(_links, f"{ZAYA1}: n devices have n - 1 links", _part_of_node),
    # Over Pollara's Ethernet a call must be large before it comes near 400 Gb/s a GPU, and RCCL's
    # start-up grows with the number of nodes: XLA's 30 MiB leave both on the table. InfiniBand and
    # NVLink are near their rate earlier; smaller groups can start earlier.
    "fusion buffers": Rule(
        lambda chip, _: 256 * MIB if chip in MESHED else 128 * MIB,
        "our choice, not measured",
        # arrays that travel together also lie in memory together
        lambda figures, _: min(figures.bytes_near_best(COMBINED) or 0, 1024 * MIB) or None,
        " {:,} bytes",
    ),
    # Of a layer's gradient. While a ring's step inside a node begins, its links carry so many.
    "two levels": Rule(
        lambda *_: 164_000,
        "RCCL's 2.1 us for gfx942, at 0.7 of 448 GB/s",
        _two_levels,
        " under {:,} numbers a device",
    ),
    "mesh.across": Rule(
        lambda _, config: config.mesh.across, "our choice, not measured", _across, "={}"
    ),
    "mesh.ring": Rule(lambda _, config: config.mesh.ring, f"{ZAYA1} gathers", _ring, "={}"),
}


class Value(NamedTuple):
    """What a rule says."""

    value: Any
    source: str
    is_measured: bool


def value(rule: str, chip: str = "", figures: "Measured | None" = None, asked: Any = None) -> Value:
    """By these figures where they have it, otherwise as published for the chip."""
    row = RULES[rule]
    if figures and (measured := row.measured(figures, asked)) is not None:
        return Value(measured, f"measured, {figures.date[:10]}", True)
    return Value(row.published(chip, asked), row.source, False)


def figures_at(path: str, kind: str = "") -> "Measured | None":
    """The figures of `config.hardware.figures`, None for ""; UserError where they are not of this
    kind of device."""
    if not path:
        return None
    from zaya_jax.hardware import measured  # brings JAX, which most configs need not wait for

    figures = measured.load(path)
    if kind and (chips.named(kind) or kind) != (chips.named(figures.device) or figures.device):
        raise UserError(
            f"{path} has figures of {figures.num_devices} x {figures.device}, none of {kind}; give"
            " figures of that chip, or leave them out"
        )
    return figures


# ################################################################################################
# What a run does
# ##################################################################################################


def two_levels_under(config: Config) -> int:
    """Numbers of a device's share of a layer's gradient under which the sum has two levels."""
    return value("two levels", figures=figures_at(config.hardware.figures)).value


def settled(config: Config, num_devices: int) -> Config:
    """A phase's config with those switches of its mesh on that its figures ask for; `num_devices` is
    0 where no devices are known."""
    figures, mesh = figures_at(config.hardware.figures), config.mesh
    if not figures or mesh.context == 1 or mesh.tsp:
        return config
    node = figures.num_devices // figures.num_nodes
    nodes = num_devices / node
    if nodes and nodes % mesh.context == 0 and node % mesh.tensor == 0:
        config = _switched(config, "across", figures)
    return _switched(config, "ring", figures)  # whose rule asks where the context's devices are


def _switched(config: Config, switch: str, figures: "Measured") -> Config:
    on = {switch: value(f"mesh.{switch}", "", figures, config).value}
    return dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, **on))


def describe(config: Config, kind: str) -> str:
    """Which of a phase's settings follow from measured figures, and which from published ones; ""
    where there are neither. The config is one that `settled` gave."""
    figures, chip = figures_at(config.hardware.figures, kind), chips.named(kind) or ""
    if not figures and not chip:
        return ""
    settings: dict[bool, list[str]] = {True: [], False: []}  # by whether they were measured
    for name, row in RULES.items():
        if row.shown and (config.mesh.context > 1 or not name.startswith("mesh.")):
            setting = value(name, chip, figures, config)
            if setting.value is not None:
                settings[setting.is_measured].append(name + row.shown.format(setting.value))
    measured, published = ", ".join(settings[True]), ", ".join(settings[False]) or "nothing"
    if not figures:
        return f"settings by published figures (config.hardware.figures is not given): {published}"
    return (
        f"settings by {config.hardware.figures}: {measured or 'nothing'};"
        f" by published figures: {published}"
    )


# ################################################################################################
# The compiler's flags
# ##################################################################################################

Flags = Mapping[str, str | int]
BOTH: Flags = {
    # Starts a collective as early and awaits it as late as its data allow: fsdp's gathers, the
    # ring's and TSP's exchanges run under the matmuls around them.
    "xla_gpu_enable_latency_hiding_scheduler": "true",
    # With XLA's 1, of two exchanges that could travel together one stands before the compute: the
    # ring's backward pass sends keys and values and their gradients, a halo goes both ways
    # (benchmarks/context.md).
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
    # With fsdp the weights of layer l + 1 are gathered inside the scan while layer l computes, and
    # backwards layer l's gradient is scattered while layer l - 1 computes.
    "xla_gpu_enable_pipelined_all_gather": "true",
    "xla_gpu_enable_pipelined_reduce_scatter": "true",
    # The first collective waits for the slowest node's compilation; XLA's own 40 s end a cold start
    # of many nodes.
    "xla_gpu_first_collective_call_terminate_timeout_seconds": 1800,
}

# What makes a collective wait for its turn: slower, and without the schedules in which XLA has had
# errors. (What is given up, an option of a single program, its value there.) The flags of pipelined
# collectives are no such options ("No such compile option"): the passes that do it are left out.
CAUTIOUS: tuple[tuple[str, str, bool | int | str], ...] = (
    ("latency-hiding scheduler", "xla_gpu_enable_latency_hiding_scheduler", False),
    ("overlapping collectives", "xla_gpu_experimental_parallel_collective_overlap_limit", 1),
    ("pipelined gathers", "xla_disable_hlo_passes", "collective-pipeliner-backward"),
    ("pipelined sums and scatters", "xla_disable_hlo_passes", "collective-pipeliner-forward"),
)

PLATFORMS: dict[str, Flags] = {
    # Graphs of collectives end in a segmentation fault.
    "rocm": {**BOTH, "xla_gpu_enable_command_buffer": ""},
    "cuda": BOTH,
}

# JAX takes three quarters of a GPU's memory by default; RCCL, NCCL and the kernels' own need the
# rest. A GPU alone has neither, and may give JAX more, by the variable: its former name, which older
# versions of JAX know too, and its name of today.
MEMORY_SHARE = 0.90
SHARE_VARIABLES = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")


def compiler_flags(platform: str, config: Config | None = None) -> Flags:
    """All flags of a platform, for this config. Collectives of one kind become one call, up to a
    fusion buffer's bytes.

    The gradient itself is in buckets of one array already (zaya_jax/optim/zero: 2 GB and more at
    ZAYA1's size) and passes every threshold; the arrays left to combine are the weights of one
    layer under fsdp, or AdamW's and Muon's buckets of a small model. Arrays gathered together also
    lie in memory together (a layer of ZAYA1 is 0.4 GB in bfloat16). The halos of one layer
    (convolution, delayed value) are kilobytes each and go together; the ring's blocks of keys and
    values must not wait for each other.
    """
    chip = {"rocm": "mi300x", "cuda": "h200"}[platform]  # for all of its maker's
    config = config or Config()
    size = value("fusion buffers", chip, figures_at(config.hardware.figures)).value
    names = (f"xla_gpu_{kind.replace('-', '_')}_combine_threshold_bytes" for kind in COMBINED)
    permute = {"xla_gpu_collective_permute_combine_threshold_bytes": 4 * MIB}
    flags = {**PLATFORMS[platform], **dict.fromkeys(names, size), **permute}
    meshes = [config.mesh, *(phase.mesh for phase in config.schedule.phases)]
    if any(mesh and mesh.tsp for mesh in meshes):
        # XLA's pass ends a large step with tsp in a failed check (jax 0.12.0, dense_7b on either
        # maker's chip).
        flags["xla_gpu_enable_pipelined_reduce_scatter"] = "false"
    return flags


def platform(environ: Mapping[str, str] = os.environ) -> str | None:
    """rocm or cuda, by JAX_PLATFORMS or else by the installed plugin; None for a CPU. Starts no
    backend."""
    chosen = environ.get("JAX_PLATFORMS", "").split(",")[0].lower()
    if chosen in PLATFORMS:
        return chosen
    if chosen not in ("", "gpu"):
        return None
    installed = " ".join(plugin.name for plugin in entry_points(group="jax_plugins"))
    return next((name for name in PLATFORMS if name in installed), None)


def merged(present: str, wanted: Flags) -> str:
    """XLA_FLAGS with those of `wanted` that it does not set yet."""
    named = {word.lstrip("-").split("=", 1)[0] for word in present.split()}
    added = [f"--{name}={value}" for name, value in wanted.items() if name not in named]
    return " ".join([*present.split(), *added])


def set_for_platform(
    config: Config | None = None, environ: MutableMapping[str, str] = os.environ
) -> None:
    """Adds this platform's flags to XLA_FLAGS, before anything asks JAX for a device.

    Flags already there stay as they are, but published values of ours, which an earlier call or the
    program that started this one has set, give way to those of the config.
    """
    if name := platform(environ):
        ours = merged("", compiler_flags(name)).split()
        kept_flags = [word for word in environ.get("XLA_FLAGS", "").split() if word not in ours]
        environ["XLA_FLAGS"] = merged(" ".join(kept_flags), compiler_flags(name, config))
        if not any(map(environ.get, SHARE_VARIABLES)):  # JAX refuses both together
            environ[SHARE_VARIABLES[0]] = str(MEMORY_SHARE)


def memory_share(environ: Mapping[str, str] = os.environ) -> float:
    """The share of a GPU's memory that JAX takes: the environment's, otherwise MEMORY_SHARE."""
    given = filter(None, map(environ.get, SHARE_VARIABLES))
    return float(next(given, MEMORY_SHARE))


# ################################################################################################
# Advice on shapes, before anything runs: `experiments.plan` estimates the seconds
# ##################################################################################################


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
        better = f"; {self.better:,} would do" if self.better else ""
        return f"sizing: {self.key}={self.value:,}: {self.reason}{better} [{self.source}]"


def notes(config: Config, devices: list) -> list[str]:
    """What settles a run of one phase on these devices, and a line of advice each; nothing where
    neither their chip is known nor figures are given."""
    kind = devices[0].device_kind
    lines, name = [describe(config, kind)], chips.named(kind)
    if name:
        figures = figures_at(config.hardware.figures, kind)
        lines += map(str, _of_phase(config, name, len(devices), figures))
    return list(filter(None, lines))


def advise(
    config: Config, name: str, num_devices: int, figures: "Measured | None" = None
) -> list[Advice]:
    """Advice for every phase that fits the devices; the same advice for two phases is given once.
    Figures of another chip count for nothing."""
    advice_of_run: list[Advice] = []
    misfits: list[UserError] = []
    if figures and chips.named(figures.device) != name:
        figures = None
    phases = list(schedule.phases_of(config, schedule.make_plan(config)))
    for _, _, phase_config, key_of in phases:
        try:
            of_phase = list(_of_phase(phase_config, name, num_devices, figures))
        except UserError as error:  # its mesh needs more devices
            misfits.append(error)
            continue
        # the keys that a phase may have of its own
        keys = {"data.micro_batch": key_of("micro_batch")}
        keys |= {f"mesh.{axis}": f"{key_of('mesh')}.{axis}" for axis in NEAREST}
        for advice in of_phase:
            key = keys.get(advice.key, advice.key).removeprefix("config.")
            advice_of_run.append(dataclasses.replace(advice, key=key))
    if len(misfits) == len(phases):
        raise misfits[0]
    return list(dict.fromkeys(advice_of_run))


def _of_phase(
    config: Config, name: str, num_devices: int, figures: "Measured | None"
) -> Iterator[Advice]:
    from zaya_jax.parallel.mesh import shape_of  # brings JAX

    mesh = shape_of(config.mesh, num_devices)
    # With tensor parallelism a token lies on all its devices, but with TSP.
    tensor = 1 if config.mesh.tsp else mesh["tensor"]
    yield from _widths(config, tensor, value("tile", name).value)
    # over nodes no device of a context has another one beside it
    inside = mesh | {"context": 1} if config.mesh.across else mesh
    yield from _parts_of_nodes(inside, name, figures)
    sequences = config.data.micro_batch or config.data.global_batch
    # of a device at once
    tokens = max(1, sequences * config.data.seq_len * tensor // num_devices)
    model = config.model
    width = 2 * (model.intermediate_size or model.moe_intermediate_size) // tensor
    launch = "a product of {} GFLOP for gate and up, of {} that come near the chip's rate"
    flops = 2.0 * tokens * model.hidden_size * width
    yield from _at_once("product", flops / 1e9, launch, config, value("product", name, figures))
    if model.model_type == "zaya":
        spread = mesh["expert"]  # devices over which experts lie
        if config.mesh.tsp:
            spread *= mesh["tensor"]
        rows = max(1, tokens * spread // model.num_experts)
        needed = value("tokens per expert", name, figures, config)
        reading = "{} tokens per expert and device, of {} that hide the reading of its weights"
        yield from _at_once("tokens per expert", rows, reading, config, needed)


def _widths(config: Config, tensor: int, tile: int) -> Iterator[Advice]:
    """Multiples of 64, then of the tile of large products. Another number of heads would be another
    model."""
    model = config.model
    inner = "intermediate_size" if model.model_type == "dense" else "moe_intermediate_size"
    # Gate and up are one product, which tensor parallelism cuts.
    for key, factor, cut in (("hidden_size", 1, 1), (inner, 2, tensor), ("vocab_size", 1, 1)):
        size = getattr(model, key)
        width = math.ceil(size * factor / cut)
        if width % LOADED:
            rule, what = "multiple of 64", "64, whose 128 bytes are loaded at once"
        elif _empty(width, tile) > EMPTY:
            rule, what = "tile", f"the tile of {tile}"
        else:
            continue
        # every token needs its row
        nearest = math.ceil if key == "vocab_size" else round
        for multiple in (LOADED, tile):
            step = math.lcm(multiple, factor) // factor * cut
            better = max(1, nearest(size / step)) * step
            if _empty(better * factor // cut, tile) <= EMPTY:
                break
        yield Advice(
            rule,
            f"model.{key}",
            size,
            better,
            f"its width on a device, {width:,}, is no multiple of {what}",
            RULES[rule].source,
        )
    if model.head_dim % LOADED:
        better = max(LOADED, round(model.head_dim / LOADED) * LOADED)
        reason = "attention computes blocks of 64 channels"
        source = RULES["head_dim"].source
        yield Advice("head_dim", "model.head_dim", model.head_dim, better, reason, source)


def _empty(width: int, tile: int) -> float:
    """The share of whole tiles that a product of this width leaves empty."""
    return 1 - width / (math.ceil(width / tile) * tile)


def _parts_of_nodes(
    mesh: Mapping[str, int], name: str, figures: "Measured | None"
) -> Iterator[Advice]:
    """Axes along which a part of a node's devices exchange what a layer waits for."""
    node, inner = clusters.of_chip(name).of_devices(math.prod(mesh.values())).node, 1
    for axis in NEAREST:
        count = mesh[axis]
        inner *= count
        if count == 1 or inner > node:
            continue
        share, source, _ = value("fabric", name, figures, count)
        if share < REACHED:
            reason = f"a part of a node: {share:.0%} of the rate that all {node} devices reach"
            yield Advice("fabric", f"mesh.{axis}", count, None, reason, source)


def _at_once(rule: str, has: float, what: str, config: Config, needed: Value) -> Iterator[Advice]:
    """More sequences at once where a device has too few."""
    if needed.value is None or has >= needed.value:
        return
    batch, sequences = config.data.global_batch, config.data.micro_batch or config.data.global_batch
    least = math.ceil(sequences * needed.value / has)
    better = next((size for size in range(least, batch + 1) if batch % size == 0), None)
    reason = what.format(_rounded(has), _rounded(needed.value))
    if not better:
        reason += ", or fewer devices"
    yield Advice(rule, "data.micro_batch", sequences, better, reason, needed.source)


def _rounded(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.2g}"
