"""Whether a run can fit the memory at all, before anything is made: a lower bound, not a plan.

Counted are what there is no way around: a step's batch on the host, and the weights and the optimizer's state as they
lie on the devices. Activations and gradients come on top.
"""

import os

import jax
from jax.sharding import Mesh

from zaya_jax import schedule
from zaya_jax.config import Config, UserError
from zaya_jax.model import zaya
from zaya_jax.schedule import Plan
from zaya_jax.training import recipe
from zaya_jax.training import state as states
from zaya_jax.training.recipe import Recipe

BYTES_A_TOKEN = 20  # of a batch: tokens, targets, segments, positions, mask, four bytes each


def check_host_batch(plan: Plan, parts: int = 1) -> None:
    """UserError where this process's part of a step's batch (one of so many) is more than the machine's memory."""
    for segment in plan.segments:
        needed, has = segment.tokens_per_step * BYTES_A_TOKEN // parts, machine_bytes()
        if needed > has:
            raise UserError(
                f"a step of {segment.sequences:,} sequences (global_batch) of {segment.phase.seq_len:,} tokens "
                f"(seq_len) takes {size(needed)} in this process, the machine has {size(has)}; give a smaller batch "
                "or shorter sequences"
            )


def check_phases(whole: Recipe, reached: int) -> list[str]:
    """UserError where the phase after step `reached` does not fit these devices; notes of later ones that do not.

    Those begin with a start of their own, which may be on more or larger devices. One whose mesh does not go with
    these is passed over here: `recipe.check` says so.
    """
    notes, seen = [], []
    for i, stage in enumerate(whole.coming(reached)):
        late = stage.segments[0].first_step > whole.config.run.num_steps
        if late or stage.mesh is None or stage.config.mesh in seen:
            continue
        seen.append(stage.config.mesh)
        try:
            check_state(stage.config, stage.mesh, schedule.key(whole.config, stage.index, "mesh"))
        except UserError as error:
            if i == 0:
                raise
            notes.append(recipe.cannot_be_trained(stage, error))
    return notes


def check_state(config: Config, mesh: Mesh, key: str = "config.mesh") -> None:
    """UserError where weights and optimizer state are more than the memory of a device, if that is known."""
    device = mesh.local_devices[0]
    has = device_bytes(device)
    if has is None:
        return
    state = states.abstract(config, states.build_optimizer(config, mesh), mesh)
    needed = sum(states.bytes_per_device(x) for x in jax.tree.leaves(state))
    where, spread = (
        f"each {device.device_kind}",
        f"more devices, {key}.fsdp=True, {key}.tensor or expert",
    )
    if device.platform == "cpu":  # its devices share the machine's
        needed *= len(mesh.local_devices)
        where, spread = "the machine", f"{key}.fsdp=True, more machines"
    if needed > has:
        count = zaya.param_counts(config.model)["total"]
        raise UserError(
            f"the model of {count:,} parameters needs {size(needed)} for weights and "
            f"optimizer alone, {where} has {size(has)}; give a smaller config.model, "
            f"or spread it: {spread}"
        )


def device_bytes(device: jax.Device) -> int | None:
    """What a device may hold; None where it does not say. A CPU's is the machine's."""
    if device.platform == "cpu":
        return machine_bytes()
    return (device.memory_stats() or {}).get("bytes_limit")


def machine_bytes() -> int:
    """The memory of the machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def size(count: int) -> str:
    """So many bytes for a person."""
    return f"{count / 2**30:,.1f} GiB"
