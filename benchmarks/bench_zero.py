"""Seconds of one core to compile ZAYA1-base's optimizer, or its whole step, for a mesh, and what the program exchanges.

    taskset -c 0 .venv/bin/python benchmarks/bench_zero.py 1024 [--expert=8] [--tensor=2] [--fsdp] [--cuda] [--step]

The devices are virtual ones of the CPU; with `--cuda`, H200s that are not there (the plugin's wheels must be). Only
the shapes of weights are needed, so it fits any machine.
"""

import argparse
import os
import time


def main() -> None:
    """Compiles and prints a line of a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("devices", type=int)
    for axis in ("expert", "context", "tensor"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--step", action="store_true", help="the whole training step")
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={1 if options.cuda else options.devices}"

    import jax
    import numpy as np
    from jax.sharding import PartitionSpec

    from zaya_jax import config
    from zaya_jax.hardware import hlo, targets
    from zaya_jax.model import zaya
    from zaya_jax.parallel import sharding
    from zaya_jax.parallel.mesh import make_mesh
    from zaya_jax.parallel.spread import spread_of
    from zaya_jax.training import state as states
    from zaya_jax.training import step as steps

    devices = jax.devices()
    if options.cuda:
        devices = targets.devices("h200", options.devices)
    sizes = dict(expert=options.expert, context=options.context, tensor=options.tensor, fsdp=options.fsdp)
    length = 4096
    settings = config.check({
        "model": {}, "mesh": {"data": -1, **sizes}, "data": {"seq_len": length}, "optim": {"clip_norm": 1.0},
        "remat": "attention",
    })  # fmt: skip
    mesh = make_mesh(settings.mesh, list(devices)[: options.devices])
    spread = spread_of(settings.mesh, mesh.shape)
    optimizer = states.build_optimizer(settings, mesh)
    begun = time.process_time()
    if options.step:
        program = steps.make_train_step(settings, settings.model, optimizer, mesh)
        state = states.abstract(settings, optimizer, mesh)
        rows = jax.ShapeDtypeStruct((1, mesh.shape["data"] * mesh.shape["expert"], length), np.int32)
        batch = dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), rows)
        batch["loss_mask"] = jax.ShapeDtypeStruct(rows.shape, np.float32)
        args = (state, batch, 1e-3)
    else:
        specs = sharding.param_specs(settings.model, settings.precision, spread)

        def update(params, state, lr):
            updates, state = optimizer.update(params, state, params, lr=lr)
            return jax.tree.map(lambda p, u: p + u, params, updates), state

        both = (specs, optimizer.specs())
        mapped = jax.shard_map(update, mesh=mesh, in_specs=(*both, PartitionSpec()), out_specs=both, check_vma=False)
        program = jax.jit(mapped, donate_argnums=(0, 1))
        args = (zaya.abstract(settings.model, settings.precision), jax.eval_shape(optimizer.init), 1e-3)
    lowered = program.lower(*args)
    middle = time.process_time()
    compiled = lowered.compile()
    end = time.process_time()
    found: dict[str, list[int]] = {}
    for c in hlo.collectives(compiled):
        found.setdefault(c.kind, []).append(c.bytes)
    kinds = ", ".join(f"{len(b)} {kind} of {sum(b) / 2**30:.2f} GiB" for kind, b in sorted(found.items()))
    memory = compiled.memory_analysis().temp_size_in_bytes / 2**30
    what, where = "step" if options.step else "optimizer", "H200" if options.cuda else "CPU"
    print(
        f"| {options.devices} | {what} | {where} | {sizes} | "
        f"{middle - begun:.1f} | {end - middle:.1f} | {memory:.1f} | {kinds} |"
    )


if __name__ == "__main__":
    main()
