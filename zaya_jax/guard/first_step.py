"""Tries a run's step on a small model before the run trusts it, against numbers from a CPU.

Wrong gradients without a message come from the layers below as much as from our kernels: compilers'
schedules, fusions, collectives. So the run's own program makes two steps of a small model: with its
mesh, kernels, kinds of layers, remat, micro-batches, number formats and compiler flags. The loss,
the routing, the gradient of every weight, and what the update does to the loss, are compared with
those of one CPU in float32. The package carries these, with model and batch (EXPECTED, written by
`tools/golden/make_first_step.py`).

    error = first_step.try_step(config, mesh, micro_batches, say)     a line; "" if right

A gradient is read from the optimizer's first moment as a checkpoint would hold it, so its way over
the devices is tried too. Gradients are compared by a random projection to SUMS numbers (`sketch`),
which preserves distances approximately.
"""

import contextlib
import dataclasses
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from pallas_kernels import chip, table
from zaya_jax import config as config_lib
from zaya_jax import trees
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
LR = 0.02
SUMS = 8
SEED = 44
CODES = 16  # kinds of tokens
ROUTER_SCALE = 8.0  # makes the choice of experts sharp
AFTER_UPDATE = "the loss after an update"
# How far numbers may lie from the expected ones, in spacings of the coarsest format in the step
# (docs/guard.md has what right steps were seen to need).
TOLERANCE = 16
UPDATE_TOLERANCE = 64  # of AFTER_UPDATE
# What says that a step cannot be made here, and nothing about its numbers.
NOT_TRIED = (UserError, NotImplementedError, jax.errors.JaxRuntimeError)


def small_config(config: Config) -> Config:
    """The config with a small model of the same kinds of layers, trained by plain Muon or AdamW."""
    models = files.read_json(EXPECTED)["models"]
    return dataclasses.replace(
        config,
        model=config_lib.check({"model": models[small_model_name(config.model)]}).model,
        optim=config_lib.Optim(name=config.optim.name, clip_norm=0.0),
        balance=config_lib.Balance(),
        run=dataclasses.replace(
            config.run, lora=None, base="compute", preference="none", skip_update="never"
        ),
    )


def small_model_name(model: config_lib.Model) -> str:
    """The small model of these kinds of layers."""
    return " ".join([model.model_type, *sorted(set(model.kinds))])


def small_weights(model: config_lib.Model) -> Any:
    """Weights of non-trivial magnitude, from a stream that NumPy has frozen; fresh weights are
    zeros in part.

    A token's kind (its number modulo CODES) is in the first CODES channels of the residual stream.
    No layer adds to these, and they alone decide the token's expert: rounding to bfloat16 must not
    send a token to another one.
    """
    random = np.random.RandomState(SEED)

    def make_weight(path: Any, x: Any) -> np.ndarray:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        mean = float(name.endswith(("scale", "temperature", "eda")))
        # The axis of inputs; a stacked weight of gate and up has one more axis behind it.
        input_axis = -3 if name == "layers/experts/gate_up" else -2
        deviation = 0.1 if len(x.shape) < 3 else x.shape[input_axis] ** -0.5
        weight = (mean + deviation * random.standard_normal(x.shape)).astype(np.float32)
        if name.endswith(("/o/kernel", "experts/down", "mlp/down/kernel")):
            weight[..., :CODES] = 0
        elif name == "embed/embedding":
            weight[:, :CODES] = 4 * np.eye(CODES)[np.arange(len(weight)) % CODES]
        elif name == "layers/router/down/kernel":
            weight[:, CODES:] *= 0.01
        elif name == "layers/router/out/kernel":
            weight *= ROUTER_SCALE
        return weight

    return jax.tree_util.tree_map_with_path(make_weight, zaya.abstract(model))


def run_small_model(
    config: Config, mesh: Mesh, micro_batches: int, options: Any = None
) -> dict[str, np.ndarray]:
    """Returns what is compared, of the small step on this mesh; all processes together.

    `options` are the compiler's, in the place of those that are set.
    """
    small = small_config(config)
    spread = spread_of(small.mesh, mesh.shape)
    batch = _local_batch(mesh, micro_batches * spread.data * spread.expert)
    sharding.check(small, spread, lengths={"the small step's": batch["tokens"].shape[1]})
    setup = states.set_up(small, mesh, spread)
    state = states.init(small, setup, small_weights(small.model))
    inputs = steps.put_batch(mesh, batch, micro_batches, spread), np.float32(LR)
    step: Any = steps.make_train_step(small, setup)
    program = step.lower(state, *inputs).compile(compiler_options=options)
    state, figures = program(state, *inputs)
    gradients = _gradients(small, setup, state["optimizer"])
    after = program(state, *inputs)[1]
    results: dict[str, Any] = {name: sketch(x) for name, x in gradients.items()}
    results["loss"] = figures["loss"]
    results[AFTER_UPDATE] = float(after["loss"]) - float(figures["loss"])
    results["routing"] = figures.get("load", 1.0)
    return {name: np.asarray(x, np.float64).ravel() for name, x in results.items()}


def _local_batch(mesh: Mesh, multiple: int) -> dict[str, np.ndarray]:
    """This process's rows of the expected batch, which is repeated until `multiple` divides it.

    Repeated rows have the same mean loss and gradients.
    """
    batch = {name: np.array(x) for name, x in files.read_json(EXPECTED)["batch"].items()}
    expected_rows = len(batch["tokens"])
    rows = np.arange(np.lcm(expected_rows, multiple)) % expected_rows
    part, parts = meshes.rows_of_process(mesh)
    local_rows = np.split(rows, parts)[part]
    return {name: x[local_rows].astype(x.dtype.kind + "4") for name, x in batch.items()}


def _gradients(config: Config, setup: states.Setup, optimizer_state: Any) -> dict[str, np.ndarray]:
    """Each weight's gradient, from the first moments after one step.

    A moment that starts at 0 is then (1 - b) times the gradient.
    """
    locations = snapshot.Snapshots(setup.optimizer, states.abstract(config, setup)).locations
    gather = jax.jit(lambda x: x, out_shardings=NamedSharding(setup.mesh, states.REPLICATED))
    moments = jax.device_get(gather(setup.optimizer.arrays(optimizer_state)))
    arrays = trees.flat({"optimizer": moments})
    fractions = {"momentum": 1 - config.optim.momentum, "mean": 1 - config.optim.b1}
    gradients: dict[str, np.ndarray] = {}
    for part in locations.parts:
        kind, _, name = part.name.removeprefix("optimizer.").partition(".")
        if kind not in fractions:
            continue
        leaf = locations.leaves[part.leaf]
        index = leaf.sharding.devices_indices_map(leaf.shape)[part.device]
        shard = np.array(arrays[part.leaf][index], np.float64) / fractions[kind]
        whole = gradients.setdefault(name, np.zeros(locations.arrays[part.name].shape))
        whole[part.box] = part.view(shard)
    return gradients


def sketch(x: np.ndarray) -> np.ndarray:
    """A random projection: each number is added to one of SUMS sums, or subtracted from it."""
    index = np.random.RandomState(0).randint(0, 2 * SUMS, x.size)
    sums = np.bincount(index, x.ravel(), 2 * SUMS)
    return sums[:SUMS] - sums[SUMS:]


def rounding_unit(config: Config, target: chip.Chip) -> float:
    """The spacing of the coarsest number format that a right step rounds to."""
    precision = config.precision
    if "bfloat16" in (precision.compute, precision.router, precision.momentum):
        return 2.0**-8
    if precision.matmul != "highest" and not target.is_host:
        return 2.0**-10  # TF32
    # float32 has 2**-23; three bits for long sums in another order, and products of three TF32
    return 2.0**-20


def differences(config: Config, results: dict[str, np.ndarray], target: chip.Chip) -> list[str]:
    """What differs from the expected numbers by more than the format explains."""
    expected = files.read_json(EXPECTED)["numbers"][small_model_name(config.model)]
    wrong = []
    for name, right in (expected["step"] | expected[config.optim.name]).items():
        error = np.linalg.norm(results[name] - right) / np.linalg.norm(right)
        tolerance = UPDATE_TOLERANCE if name == AFTER_UPDATE else TOLERANCE
        most = tolerance * rounding_unit(config, target)
        if not error <= most:  # also if it is nan
            wrong.append(f"{name} by {error:.2g} of it, at most {most:.2g} would be right")
    return wrong


def try_step(config: Config, mesh: Mesh, micro_batches: int, say: Callable[[str], None]) -> str:
    """Tries the step, unless it was already right on this machine; returns an error line, or "".

    All processes together.
    """
    target = chip.made_for(mesh).taking(config.kernels)
    setting = config.guard.try_step
    micro_batches = min(micro_batches, 2)
    if setting == "never" or (setting == "auto" and target.is_host):
        return ""
    record = _record(config, mesh, micro_batches, target)
    known = {"known": float(setting == "auto" and record.exists())}
    if multihost.reduce_figures(known, {"known": np.min})["known"]:
        return ""
    begin = time.monotonic()
    try:
        wrong = differences(config, run_small_model(config, mesh, micro_batches), target)
    except NOT_TRIED as error:
        say(f"note: the step was not tried on this machine: {config_lib.first_line(error)}")
        return ""
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        return (
            "error: the step is wrong on this machine. It differs from a CPU's numbers:"
            f" {'; '.join(wrong[:3])}{more}. {_diagnose(config, mesh, micro_batches, target)}"
        )
    say(f"the step was tried on this machine and is right ({time.monotonic() - begin:.0f} s)")
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
        (meshes.devices_of_node(mesh), sizing.two_levels_under(config)),
        (small_config(config).model, config.optim.name, config.precision, config.remat),
        EXPECTED.read_text(),
    ]
    name = hashlib.sha256(repr(facts).encode()).hexdigest()
    return host.cache_folder() / "steps" / name


class Attempt(NamedTuple):
    """The step with one thing left out."""

    without: str
    config: Config
    mesh: Mesh
    options: dict[str, Any] | None  # of the compiler, beside those that are set
    advice: str  # if the step is right then


def _diagnose(config: Config, mesh: Mesh, micro_batches: int, target: chip.Chip) -> str:
    """What the fault lies in, and what to do about it, found by leaving out one thing at a time."""
    wrong, not_tried = [], []
    for attempt in _attempts(config, mesh, target):
        try:
            results = run_small_model(attempt.config, attempt.mesh, micro_batches, attempt.options)
        except NOT_TRIED as error:
            not_tried.append(f"{attempt.without} ({config_lib.first_line(error)})")
            continue
        if not differences(attempt.config, results, target):
            found = f"It is right without {attempt.without}: {attempt.advice}"
            break
        wrong.append(attempt.without)
    else:
        if jax.process_count() > 1:
            not_tried.append("an exchange between devices (only a start of one process can)")
        found = "There is nothing else to leave out"
        if wrong:
            found = f"It stays wrong without {', and without '.join(wrong)}"
        found += (
            ". XLA or the driver is at fault, or a compiler flag that is not tried. Try another"
            " version of them; --config.guard.try_step=never trains nevertheless"
        )
    if not_tried:
        found = f"What could not be tried: without {'; without '.join(not_tried)}. {found}"
    return found


def _attempts(config: Config, mesh: Mesh, target: chip.Chip) -> Iterator[Attempt]:
    kernels = target.kernels if target.maker in sizing.PLATFORMS else ()
    groups: list[tuple[str, ...]] = [(name,) for name in kernels]
    if len(kernels) > 1:
        groups.append(kernels)
    for names in groups:
        rest = tuple(name for name in kernels if name not in names) or ("none",)
        option = f'"{rest}"' if len(rest) > 1 else rest[0]
        changed = dataclasses.replace(config, kernels=rest)
        advice = f"repeat the command with --config.kernels={option}"
        yield Attempt(f"our kernels of {', '.join(names)}", changed, mesh, None, advice)
    if mesh.size == 1:
        return
    for without, option, value in sizing.CAUTIOUS:
        # XLA_FLAGS has `false` where a program's own option has False
        advice = f'repeat the command with XLA_FLAGS="$XLA_FLAGS --{option}={str(value).lower()}"'
        yield Attempt(f"the compiler's {without}", config, mesh, {option: value}, advice)
    if jax.process_count() == 1:
        alone = dataclasses.replace(config, mesh=config_lib.Mesh())
        device = meshes.make_mesh(alone.mesh, [mesh.devices.flat[0]])
        advice = "check their links, or take fewer devices or another config.mesh"
        yield Attempt("an exchange between devices", alone, device, None, advice)
