"""Tries a run's step on a small model before the run trusts it, against numbers from a CPU.

Wrong gradients without a message come from the layers below as much as from our kernels: compilers'
schedules, fusions, collectives. So the run's own program makes two steps of a small model: with its
mesh, kernels, kinds of layers, remat, micro-batches, number formats and compiler flags. The loss,
the routing, the gradient of every weight, and what the update does to the loss, are compared with
those of one CPU in float32. The package carries these, with model and batch (EXPECTED, written by
`tools/golden/make_first_step.py`).

    wrong = first_step.fault(config, mesh, micro_batches, say)     a line for a person; "" if right

A gradient is read from the optimizer's first moment as a checkpoint would hold it, so its way over
the devices is tried too. It is compared by a sketch: its numbers, with random signs, in SUMS sums,
which are as far from the expected ones as the gradients are from each other, within chance.
"""

import contextlib
import dataclasses
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from pallas_kernels import chip, table
from zaya_jax import config as config_lib
from zaya_jax import trees
from zaya_jax.checkpoint.boxes import Holding
from zaya_jax.cluster import multihost
from zaya_jax.config import Config, UserError, files
from zaya_jax.hardware import host, sizing
from zaya_jax.model import zaya
from zaya_jax.parallel import mesh as meshes
from zaya_jax.parallel import sharding
from zaya_jax.parallel.spread import spread_of
from zaya_jax.training import snapshot
from zaya_jax.training import state as states
from zaya_jax.training import step as steps
from zaya_jax.version import __version__

EXPECTED = Path(__file__).with_name("first_step.json")
LR, SUMS = 0.02, 8
SEED, CODES, SHARP = 44, 16, 8.0
AFTER = "the loss after an update"
# How far numbers may lie from the expected ones, in spacings of the coarsest format in the step
# (docs/guard.md has what right steps were seen to need).
SAME, UPDATE = 16, 64
# What says that a step cannot be made here, and nothing about its numbers.
NOT_TRIED = (UserError, NotImplementedError, jax.errors.JaxRuntimeError)


def small(config: Config) -> Config:
    """The config with a small model of the same kinds of layers, trained by plain Muon or AdamW."""
    found = files.read_json(EXPECTED)["models"]
    return dataclasses.replace(
        config,
        model=config_lib.check({"model": found[name_of(config.model)]}).model,
        optim=config_lib.Optim(name=config.optim.name, clip_norm=0.0),
        balance=config_lib.Balance(),
        run=dataclasses.replace(config.run, lora=None, skip_update="never"),
    )


def name_of(model: config_lib.Model) -> str:
    """The small model of these kinds of layers."""
    return " ".join([model.model_type, *sorted(set(model.kinds))])


def weights(model: config_lib.Model) -> Any:
    """Weights of some size, from a stream that NumPy has frozen; fresh ones are zeros in part.

    A token's kind (its number modulo CODES) is in channels of the residual stream to which no layer
    adds, and these decide its expert: in bfloat16 no token may come to another one.
    """
    random = np.random.RandomState(SEED)

    def one(path: Any, x: Any) -> np.ndarray:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        around = name.endswith(("scale", "temperature", "eda"))
        rows = -3 if name == "layers/experts/gate_up" else -2
        size = 0.1 if len(x.shape) < 3 else x.shape[rows] ** -0.5
        found = (around + size * random.standard_normal(x.shape)).astype(np.float32)
        if name.endswith(("/o/kernel", "experts/down", "mlp/down/kernel")):
            found[..., :CODES] = 0
        elif name == "embed/embedding":
            found[:, :CODES] = 4 * np.eye(CODES)[np.arange(len(found)) % CODES]
        elif name == "layers/router/down/kernel":
            found[:, CODES:] *= 0.01
        elif name == "layers/router/out/kernel":
            found *= SHARP
        return found

    return jax.tree_util.tree_map_with_path(one, zaya.abstract(model))


def numbers(
    config: Config, mesh: Mesh, micro_batches: int, options: Any = None
) -> dict[str, np.ndarray]:
    """What is compared, of the small step on this mesh; all processes together.

    `options` are compiler flags in the place of those that are set.
    """
    config, spread = small(config), spread_of(config.mesh, mesh.shape)
    batch = {name: np.array(x) for name, x in files.read_json(EXPECTED)["batch"].items()}
    sharding.check(config, spread, lengths={"the small step's": batch["tokens"].shape[1]})
    setup = states.set_up(config, mesh, spread)
    copies = snapshot.Copies(setup.optimizer, states.abstract(config, setup))
    # The same rows again and again have the same loss and gradients.
    rows = np.arange(np.lcm(len(batch["tokens"]), micro_batches * spread.data * spread.expert))
    part, parts = meshes.rows_of_process(mesh)
    rows = np.split(rows % len(batch["tokens"]), parts)[part]
    own = {name: x[rows].astype(x.dtype.kind + "4") for name, x in batch.items()}
    given = steps.put_batch(mesh, own, micro_batches, spread), np.float32(LR)
    state = states.init(config, setup, weights(config.model))
    step: Any = steps.make_train_step(config, setup)
    options = options or host.for_one_call(chip.made_for(mesh))
    program = step.lower(state, *given).compile(compiler_options=options)
    state, figures = program(state, *given)
    gather = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, states.REPLICATED))
    moments = jax.device_get(gather(setup.optimizer.arrays(state["optimizer"])))
    found: dict[str, Any] = _gradients(config.optim, copies.held, moments)
    found = {name: sketch(x) for name, x in found.items()}
    after = float(program(state, *given)[1]["loss"]) - float(figures["loss"])
    found |= {"loss": figures["loss"], AFTER: after, "routing": figures.get("load", 1.0)}
    return {name: np.asarray(x, np.float64).ravel() for name, x in found.items()}


def _gradients(optim: config_lib.Optim, held: Holding, moments: Any) -> dict[str, np.ndarray]:
    """Each weight's gradient, by the share of it that the first moments after one step are."""
    shares = {"momentum": 1 - optim.momentum, "mean": 1 - optim.b1}
    arrays = trees.flat({"optimizer": moments})
    found: dict[str, np.ndarray] = {}
    for part in held.parts:
        kind, _, name = part.name.removeprefix("optimizer.").partition(".")
        if kind in shares:
            leaf = held.leaves[part.leaf]
            place = leaf.sharding.devices_indices_map(leaf.shape)[part.device]
            own = np.array(arrays[part.leaf][place], np.float64) / shares[kind]
            whole = found.setdefault(name, np.zeros(held.arrays[part.name].shape))
            whole[part.box] = part.of(own)
    return found


def sketch(x: np.ndarray) -> np.ndarray:
    """The numbers of an array in SUMS sums, half of them, by chance, subtracted."""
    place = np.random.RandomState(0).randint(0, 2 * SUMS, x.size)
    sums = np.bincount(place, x.ravel(), 2 * SUMS)
    return sums[:SUMS] - sums[SUMS:]


def unit(config: Config, target: chip.Chip) -> float:
    """The spacing of the coarsest number format that a right step rounds to."""
    precision = config.precision
    if "bfloat16" in (precision.compute, precision.router, precision.momentum):
        return 2.0**-8
    if precision.matmul != "highest" and not target.is_host:
        return 2.0**-10  # TF32
    # float32 has 2**-23; three bits for long sums in another order, and products of three TF32
    return 2.0**-20


def differences(config: Config, found: dict[str, np.ndarray], target: chip.Chip) -> list[str]:
    """What differs from the expected numbers by more than the format explains."""
    expected = files.read_json(EXPECTED)["numbers"][name_of(config.model)]
    wrong = []
    for name, right in (expected["step"] | expected[config.optim.name]).items():
        error = np.linalg.norm(found[name] - right) / np.linalg.norm(right)
        most = unit(config, target) * (UPDATE if name == AFTER else SAME)
        if not error <= most:  # as where it is no number
            wrong.append(f"{name} by {error:.2g} of it, at most {most:.2g} would be right")
    return wrong


def fault(config: Config, mesh: Mesh, micro_batches: int, say: Callable[[str], None]) -> str:
    """Tries the step, unless this machine has seen it right; a line for a person if it is wrong.

    All processes together.
    """
    target = chip.made_for(mesh).taking(config.kernels)
    asked, micro_batches = config.guard.try_step, min(micro_batches, 2)
    if asked == "never" or (asked == "auto" and target.is_host):
        return ""
    record = _record(config, mesh, micro_batches, target)
    known = {"known": float(asked == "auto" and record.exists())}
    if multihost.reduce_figures(known, {"known": np.min})["known"]:
        return ""
    begun = time.monotonic()
    try:
        wrong = differences(config, numbers(config, mesh, micro_batches), target)
    except NOT_TRIED as error:
        say(f"note: the step was not tried on this machine: {config_lib.first_line(error)}")
        return ""
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        way_out = _way_out(config, mesh, micro_batches, target)
        return (
            "error: the step is wrong on this machine. From a CPU's numbers differ:"
            f" {'; '.join(wrong[:3])}{more}. {way_out}"
        )
    say(f"the step was tried on this machine: right, {time.monotonic() - begun:.0f} s")
    with contextlib.suppress(OSError):  # then the next start tries it again
        record.parent.mkdir(parents=True, exist_ok=True)
        record.touch()
    return ""


def _record(config: Config, mesh: Mesh, micro_batches: int, target: chip.Chip) -> Path:
    """The file that says that this step is right here; its name has all that this depends on."""
    facts = [
        (target, table.key(target.kind), table.rows(target.architecture), __version__),
        (mesh.devices.flat[0].client.platform_version, os.environ.get("XLA_FLAGS")),
        (mesh.shape, jax.process_count(), config.mesh, micro_batches),
        (small(config).model, config.optim.name, config.precision, config.remat),
        EXPECTED.read_text(),
    ]
    name = hashlib.sha256(repr(facts).encode()).hexdigest()
    return host.cache_folder() / "steps" / name


def _way_out(config: Config, mesh: Mesh, micro_batches: int, target: chip.Chip) -> str:
    """What the fault lies in, and how to go on, found by leaving out one thing at a time."""

    def right(without: Config, mesh: Mesh = mesh, options: Any = None) -> bool:
        with contextlib.suppress(*NOT_TRIED):
            found = numbers(without, mesh, micro_batches, options)
            return not differences(without, found, target)
        return False

    kernels = target.kernels if target.maker in sizing.PLATFORMS else ()
    for names in [*((name,) for name in kernels), kernels]:
        rest = tuple(name for name in kernels if name not in names) or ("none",)
        if names and right(dataclasses.replace(config, kernels=rest)):
            option = f'"{rest}"' if len(rest) > 1 else rest[0]
            return (
                f"It is right without our kernels of {', '.join(names)}: repeat the command with"
                f" --config.kernels={option}"
            )
    for name, value in sizing.CAUTIOUS.items():
        if mesh.size > 1 and right(config, mesh, {name: value}):
            return (
                f"It is right without the compiler's {name}: repeat the command with"
                f' XLA_FLAGS="$XLA_FLAGS --{name}={value}"'
            )
    alone = dataclasses.replace(config, mesh=config_lib.Mesh())
    several = mesh.size > 1 and jax.process_count() == 1
    if several and right(alone, meshes.make_mesh(alone.mesh, [mesh.devices.flat[0]])):
        return (
            "It is right on one device: the exchange between devices is wrong. Check their links,"
            " or take fewer devices or another config.mesh"
        )
    return (
        "No kernel of ours and no flag explains it: XLA or the driver does. Try another version of"
        " them; --config.guard.try_step=never trains nevertheless"
    )
