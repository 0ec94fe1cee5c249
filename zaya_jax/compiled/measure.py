"""Compiles the training step from shapes alone and measures the program, for devices that may not
be here.

It is the very program that `pretrain` runs, made by the same functions, for arrays that have a
shape, a number format and a place on the mesh, but no content.
"""

import collections
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from zaya_jax.compiled import buffers, hlo, launches
from zaya_jax.config import Config
from zaya_jax.hardware import chips
from zaya_jax.hardware.clusters import Cluster
from zaya_jax.parallel.mesh import batch_spec
from zaya_jax.training import state as states
from zaya_jax.training import step as steps

LARGEST = 12  # buffers that are named
# Seconds from one kernel's start to the next one's, where they do next to nothing; an assumption.
LAUNCH = 3e-6


def batch_like(
    config: Config, setup: states.Setup, sequences: int, micro_batches: int
) -> dict[str, Any]:
    """The shapes of a batch of so many sequences."""
    sharding = NamedSharding(setup.mesh, batch_spec(setup.spread))
    shape = (micro_batches, sequences // micro_batches, config.data.seq_len)

    def like(dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    whole = dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), like(jnp.int32))
    return whole | {"loss_mask": like(jnp.float32)}


def lower(
    config: Config, setup: states.Setup, sequences: int, micro_batches: int
) -> jax.stages.Lowered:
    """The step of a phase (`schedule.phase_config`) for so many sequences over all devices."""
    step: Any = steps.make_train_step(config, setup)
    batch = batch_like(config, setup, sequences, micro_batches)
    # a number that lies nowhere yet, as `pretrain` gives it
    rate = jax.ShapeDtypeStruct((), jnp.float32)
    return step.lower(states.abstract(config, setup), batch, rate)


def measure(
    config: Config,
    mesh: Mesh,
    sequences: int,
    micro_batches: int,
    cluster: Cluster | None,
    capacity: int | None = None,
) -> dict[str, Any]:
    """Compiles the step and returns its costs: memory, traffic, launches, FLOPs, collectives, a
    bound on its time.

    All of one device and one step, in bytes and seconds, as plain numbers for JSON.
    """
    begun = time.perf_counter()
    setup = states.set_up(config, mesh)
    lowered = lower(config, setup, sequences, micro_batches)
    lowered_at = time.perf_counter()
    compiled, memory = buffers.compile_watched(lowered)
    seconds = {"lowering": lowered_at - begun, "compiling": time.perf_counter() - lowered_at}
    program = launches.read_program(compiled)
    collectives = hlo.collectives(compiled)
    cluster = cluster and cluster.of_devices(mesh.size)
    kind, matmul = mesh.devices.flat[0].device_kind, config.precision.matmul
    tokens = sequences * config.data.seq_len / mesh.size
    return {
        "sequences": sequences,
        "micro_batches": micro_batches,
        "seq_len": config.data.seq_len,
        "tokens_per_device": tokens,
        "remat": config.remat,
        "kernels": list(config.kernels),
        "mesh": setup.spread.facts(),
        "seconds": seconds,
        "memory": {
            "capacity": capacity,
            **_memory(memory, states.abstract(config, setup), program),
        },
        "launches": program.launches,
        "hbm_bytes": program.bytes,
        "flops": program.flops,
        "traffic": _by_scope(program, config, tokens),
        "unknown_loops": program.unknown,
        "collectives": [_collective(c, program) for c in collectives if not c.scalar],
        "bound": bound_of(program, collectives, kind, cluster, matmul),
    }


def _memory(
    memory: buffers.ProgramMemory, state: dict[str, Any], program: launches.Program
) -> dict[str, Any]:
    """Bytes by kind where most are in use. Outside the state, shape and scope decide: as large as a
    weight, with its dims, and float32 or bfloat16: a gradient; stacked over the layers: kept for
    the backward pass."""
    all_weights = state["params"], state.get("frozen")
    weights = sum(map(states.bytes_per_device, jax.tree.leaves(all_weights)))
    optimizer = sum(map(states.bytes_per_device, jax.tree.leaves(state["optimizer"])))
    of_weights = set()
    for x in jax.tree.leaves(state["params"]):
        shape = x.sharding.shard_shape(x.shape)
        # Products have the columns of gate and up as one dim.
        merged = (*shape[:-2], math.prod(shape[-2:]))
        of_weights |= {_dims(shape), _dims(merged)}
    layers = {x.shape[0] for x in jax.tree.leaves(state["params"]["layers"])}
    makers = {kernel.name: kernel for kernel in program.kernels}
    kinds = dict.fromkeys(("gradients", "activations", "exchange", "other temporaries"), 0)
    largest: list[dict[str, Any]] = []
    for buffer in memory.at_peak():
        maker = makers.get(buffer.name)
        array = max(hlo.arrays(buffer.shape), key=lambda a: a.bytes)
        if maker and (maker.collective or maker.scope.endswith("exchange")):
            kind = "exchange"
        elif _dims(array.shape) in of_weights:
            kind = "gradients"
        elif array.shape and array.shape[0] in layers and len(array.shape) > 1:
            kind = "activations"
        else:
            kind = "other temporaries"
        kinds[kind] += buffer.size
        largest.append(
            {
                "bytes": buffer.size,
                "shape": f"{array.dtype}{list(array.shape)}",
                "kind": kind,
                "scope": maker.scope if maker else "",
                "op_name": maker.op_name if maker else "",
            }
        )
    kinds["gaps"] = memory.temporaries - sum(kinds.values())
    return {
        "peak": memory.peak,
        "weights": weights,
        "optimizer": optimizer,
        "batch and figures": memory.peak - memory.temporaries - weights - optimizer,
        **kinds,
        "largest": largest[:LARGEST],
    }


def _dims(shape: Sequence[int]) -> tuple[int, ...]:
    """The dims of a shape in any order, without those of one number."""
    return tuple(sorted(dim for dim in shape if dim > 1))


def _by_scope(program: launches.Program, config: Config, tokens: float) -> list[dict[str, Any]]:
    """A row a scope, most bytes first: launches, bytes and FLOPs, and the FLOPs that the model needs
    by its formula (`chips`)."""
    rows: dict[str, dict[str, Any]] = {}
    for kernel in program.kernels:
        zeros = dict.fromkeys(("launches", "reads", "writes", "flops"), 0.0)
        fresh = {"scope": kernel.scope, **zeros, "flops_by_stage": collections.Counter()}
        row = rows.setdefault(kernel.scope, fresh)
        row["launches"] += kernel.times
        for name in ("reads", "writes", "flops"):
            row[name] += kernel.times * getattr(kernel, name)
        if kernel.flops:
            row["flops_by_stage"][kernel.stage] += kernel.times * kernel.flops
    useful = chips.flops_by_scope(config.model, config.data.seq_len)
    ordered = sorted(rows.values(), key=lambda row: -row["reads"] - row["writes"])
    for row in ordered:
        around = row["scope"].split("/")[0]  # its need counts once, whatever scopes lie in it
        row["flops_of_use"] = row["flops"]
        if around in useful:
            row["flops_of_use"] = min(useful[around] * tokens, row["flops"])
            useful[around] -= row["flops_of_use"] / tokens
    return ordered


def _collective(c: hlo.Collective, program: launches.Program) -> dict[str, Any]:
    begin, end = program.under.get(c.name, (0, 0))
    return {
        "kind": c.kind,
        "scope": hlo.scope_of(c.op_name),
        "bytes": c.bytes,
        "wire_bytes": c.wire_bytes,
        "group": c.group_size,
        "times": c.times,
        "in_loop": c.in_loop,
        "kernels_beside": end - begin,
    }


def bound_of(
    program: launches.Program,
    collectives: Sequence[hlo.Collective],
    kind: str,
    cluster: Cluster | None,
    matmul: str = "default",
) -> dict[str, Any] | None:
    """The bound on a chip of this kind (JAX's device_kind) in a cluster; None where its rates are
    not known. Seconds of a step by what binds each kernel, and of exposed links; "seconds" is
    their sum, "binds" the largest, and "hidden" the links' time under kernels.

    Caches aside, no such chip runs these kernels any faster. A kernel takes the longest of its
    products at the peak for their format, its bytes at the HBM's bandwidth, and LAUNCH. A copy that
    is started and awaited later moves its bytes while the kernels between leave the HBM idle, as
    products do. A collective takes the time to send its bytes over the links of its group; the part
    that the kernels between its start and its end do not cover is exposed.
    """
    name = chips.named(kind)
    if name is None or cluster is None:
        return None
    chip = chips.CHIPS[name]
    wide = chip.peaks["float32" if matmul == "highest" else "tf32"]

    def seconds(kernel: launches.GpuKernel) -> dict[str, float]:
        """The seconds of one launch, by what may bind it."""
        peak = wide if kernel.wide else chip.peaks["bfloat16"]
        return {
            "compute": kernel.flops / peak,
            "HBM": kernel.bytes / chip.bandwidth,
            "launches": LAUNCH,
        }

    exposed = hidden = 0.0
    times_of = {kernel.name: kernel.times for kernel in program.kernels}
    for c in collectives:
        slowest = min(map(cluster.bandwidth, c.groups), default=math.inf)  # of the groups, or pairs
        sending = c.wire_bytes / slowest + cluster.latency
        times = times_of.get(c.name, 1.0)
        if not times:  # in a loop that does not turn, as a rule: experts' further rounds
            continue
        under = program.kernels[slice(*program.under.get(c.name, (0, 0)))]
        cover = sum(
            max(seconds(kernel).values()) * kernel.times / times
            for kernel in under
            if not kernel.collective
        )
        hidden += times * min(cover, sending)
        exposed += times * max(sending - cover, 0.0)
    parts = _kernel_seconds(program, seconds) | {"links": exposed}
    binds = max(parts, key=lambda name: parts[name])
    return {**parts, "hidden": hidden, "seconds": sum(parts.values()), "binds": binds}


def _kernel_seconds(
    program: launches.Program, seconds: Callable[[launches.GpuKernel], dict[str, float]]
) -> dict[str, float]:
    """The time of all kernels but collectives, by what binds each."""
    parts = [seconds(kernel) for kernel in program.kernels]
    idle = []  # seconds in which each kernel leaves the HBM to copies beside it
    for kernel, part in zip(program.kernels, parts, strict=True):
        beside = kernel.collective or kernel.name in program.under
        idle.append(0.0 if beside else kernel.times * (max(part.values()) - part["HBM"]))
    totals = dict.fromkeys(("compute", "HBM", "launches"), 0.0)
    for kernel, part in zip(program.kernels, parts, strict=True):
        if not kernel.collective:
            binds = max(part, key=lambda name: part[name])
            exposed = kernel.times * part[binds]
            for place in range(*program.under.get(kernel.name, (0, 0))):
                covered = min(exposed, idle[place])
                exposed -= covered
                idle[place] -= covered
            totals[binds] += exposed
    return totals
