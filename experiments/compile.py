"""Compiles the training step for chips that need not be here, and says what it takes of each.

    python -m experiments.compile --config=FILE --target=mi300x --devices=1024 --out=DIR [--config.KEY=VALUE ...]
        [--phase=NAME] [--at_once=N]

It is the very step that `pretrain` runs, for each phase of the schedule: its memory by kind over the course of the
program, its HBM traffic and kernel launches by scope, its FLOPs and how many of them are of use, its collectives, and a
bound on its time. Where it does not fit, what would is found by trying. Written are compile.md, compile.json and
compile.html. GPUs need their compilers once: make setup-targets.

A batch ramp's smaller steps are not compiled: they take less. --at_once=N takes N sequences at once on each row of
data x expert, whatever the config's batch, which is rounded to whole micro-batches: so one config serves any number of
devices.
"""

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

import jax
from absl import flags

from zaya_jax import cli, schedule
from zaya_jax import config as config_lib
from zaya_jax.config import Config, UserError
from zaya_jax.config.files import write
from zaya_jax.data import token_ids, tokenizers
from zaya_jax.hardware import clusters, host, targets
from zaya_jax.parallel import rules
from zaya_jax.parallel.mesh import make_mesh
from zaya_jax.report import compiled as page
from zaya_jax.schedule import Segment
from zaya_jax.train import compiling, recipe

CONFIG = cli.define_config(str(Path(__file__).parent / "configs" / "zaya1_base.py"))
TARGET = flags.DEFINE_enum("target", "cpu", targets.names(), "The chip to compile for.")
DEVICES = flags.DEFINE_integer("devices", 1, "How many of them.", lower_bound=1, upper_bound=2**20)
OUT = flags.DEFINE_string("out", None, "The folder for what is found.")
PHASE = flags.DEFINE_string("phase", None, "The one phase to compile, by its name; by default all.")
AT_ONCE = flags.DEFINE_integer(
    "at_once", 0, "Sequences at once on each row of data x expert; 0: as the config says.", lower_bound=0
)


def main() -> int:
    """One row of the table for each phase."""
    out = cli.out_folder(OUT.value, "what is found")
    config = _with_ids(config_lib.check(CONFIG.value))
    host.require_x32()
    if TARGET.value == "cpu":
        more = f"--xla_force_host_platform_device_count={DEVICES.value}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {more}".strip()
    jax.config.update("jax_platforms", "cpu")  # nothing is asked of GPUs that may be here
    plan = schedule.make_plan(config)
    last = {segment.phase_index: segment for segment in plan.segments}  # of a ramp, the full batch
    chosen = [s for s in last.values() if PHASE.value in (None, s.phase.name)]
    if not chosen:
        names = ", ".join(repr(s.phase.name) for s in last.values())
        raise UserError(f"--phase={PHASE.value} is no phase of {config.name}; it has {names}")
    devices = targets.devices(TARGET.value, DEVICES.value)
    capacity = targets.usable(TARGET.value)
    programs = [
        _program(config, segment, devices) for segment in chosen
    ]  # what is wrong is said before any is compiled

    found: list[dict[str, Any]] = []
    seen: dict[Any, dict[str, Any]] = {}
    for segment, (here, mesh, sequences, micro_batches) in zip(chosen, programs, strict=True):
        name = segment.phase.name
        same = dataclasses.replace(here, data=dataclasses.replace(here.data, packing="concat"))
        key = (same, sequences, micro_batches)
        if key in seen:
            print(f"{name}: the same program as {seen[key]['phase']!r}", flush=True)
            found.append({**seen[key], "phase": name, "same_as": seen[key]["phase"]})
            continue
        print(f"{name}: compiling for {len(devices)} {TARGET.value} ...", flush=True)
        begun = time.perf_counter()
        row = {"phase": name, **_measure(here, mesh, sequences, micro_batches, capacity)}
        print(f"{name}: {page.headline(row)} ({time.perf_counter() - begun:.0f} s)", flush=True)
        if capacity and row["memory"]["peak"] > capacity:
            row["fits_with"] = _what_fits(here, mesh, sequences, micro_batches, capacity)
        seen[key] = row
        found.append(row)

    result = {
        "config": config.name, "target": TARGET.value, "devices": len(devices), "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d"), "phases": found,
    }  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    write(out / "compile.json", json.dumps(result, indent=1).encode())
    write(out / "compile.md", page.text(result).encode())
    write(out / "compile.html", page.render(result).encode())
    print(page.text(result))
    print(f"written: {out}/compile.md, compile.json, compile.html")
    return cli.DONE


def _with_ids(config: Config) -> Config:
    """The config with its tokenizer's ids, as `pretrain` has it: with a padding id the embedding is another program."""
    try:
        tokenizer = tokenizers.load(config.data.tokenizer)
    except UserError as error:  # of a run elsewhere
        if config.model.pad_token_id is None:
            print(f"note: compiled without a padding id: {error}", flush=True)
        return config
    return token_ids.agree(config, tokenizer)


def _program(config: Config, segment: Segment, devices: list) -> tuple[Config, Any, int, int]:
    """A phase's config, mesh, sequences per step and micro-batches; UserError where these do not go together."""
    here, _, sequences, micro_batches = recipe.portion(config, segment, len(devices), AT_ONCE.value)
    mesh = make_mesh(here.mesh, devices, schedule.key(config, segment.phase_index, "mesh"))
    return here, mesh, sequences, micro_batches


def _measure(
    here: Config, mesh: Any, sequences: int, micro_batches: int, capacity: int | None
) -> dict[str, Any]:
    cluster = clusters.of_chip(TARGET.value)
    return compiling.measure(here, mesh, sequences, micro_batches, cluster, capacity)


def _what_fits(
    here: Config, mesh: Any, sequences: int, micro_batches: int, capacity: int
) -> dict[str, Any] | None:
    """Changes, one after another on top of each other, until the step fits: what they are and what it then takes."""
    devices, changes = list(mesh.devices.flat), []
    rows = mesh.shape["data"] * mesh.shape["expert"]

    def tried(change: str) -> dict[str, Any] | None:
        changes.append(change)
        row = _measure(here, mesh, sequences, micro_batches, capacity)
        fits = row["memory"]["peak"] <= capacity
        print(f"  with {', '.join(changes)}: {page.headline(row)}{', fits' if fits else ''}", flush=True)
        return {"changes": changes, **row} if fits else None

    if here.remat in ("none", "elementwise"):
        here = dataclasses.replace(here, remat="attention")
        if row := tried("remat=attention"):
            return row
    while sequences // micro_batches > rows:  # a micro-batch of half as many sequences
        at_once = sequences // micro_batches // rows
        smaller = max(n for n in range(1, at_once) if at_once % n == 0)
        micro_batches = sequences // (smaller * rows)
        if row := tried(f"{smaller} sequences at once"):
            return row
    if here.remat != "layer":
        here = dataclasses.replace(here, remat="layer")
        if row := tried("remat=layer"):
            return row
    if here.precision.momentum == "float32" and here.optim.name == "muon":
        here = dataclasses.replace(here, precision=dataclasses.replace(here.precision, momentum="bfloat16"))
        if row := tried("precision.momentum=bfloat16"):
            return row
    if mesh.shape["data"] > 1 and not here.mesh.fsdp:
        here = dataclasses.replace(here, mesh=dataclasses.replace(here.mesh, fsdp=True))
        if row := tried("mesh.fsdp=True"):
            return row
    for context in (2, 4, 8):
        sizes = dataclasses.replace(here.mesh, data=-1, context=here.mesh.context * context)
        try:
            wider = make_mesh(sizes, devices)
            spread = recipe.spread_at(
                dataclasses.replace(here, mesh=sizes), _phase_of(here, sizes), len(devices)
            )
            rules.check(here, spread, rows=sequences)
        except UserError:
            break
        before, here, mesh = mesh, dataclasses.replace(here, mesh=sizes), wider
        sequences = max(sequences * wider.shape["data"] // before.shape["data"], 1)
        if row := tried(f"mesh.context={sizes.context}"):
            return row
    return None


def _phase_of(here: Config, mesh: config_lib.Mesh) -> config_lib.Phase:
    """A phase that has what a config has outside its phases."""
    whole = dataclasses.replace(here, schedule=dataclasses.replace(here.schedule, phases=()), mesh=mesh)
    return schedule.make_plan(whole).segments[0].phase


if __name__ == "__main__":
    cli.leave(cli.run(main))
