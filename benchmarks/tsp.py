"""Memory and traffic of one training step of a dense 7B model under TP, SP, TP+SP and TSP, read
from compiled programs.

    .venv/bin/python benchmarks/tsp.py [--target=h200] [--schemes=tsp,tp,...] [--tokens=16384,...] [--out=FILE.json]
    .venv/bin/python benchmarks/tsp.py --tables --out=FILE.json   (what FILE.json holds, as tables)

Nothing is allocated: each program is compiled from shapes for eight devices, in a process of its
own with a time limit. `--target=cpu` (the default) compiles for eight virtual CPU devices;
`--target=h200` for eight H200 that need not be there (make setup-targets). The step is the same
everywhere: batch 1, the loss, gradients in float32, AdamW with float32 weights and moments on a
device's part of a weight (no ZeRO: all keep replicated weights), each layer recomputed in the
backward pass.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

SCHEMES = {
    "tp": dict(tensor=8),
    "sp": dict(context=8),
    "tp+sp 4x2": dict(tensor=4, context=2),
    "tp+sp 2x4": dict(tensor=2, context=4),
    "tp+sp folded": dict(tensor=8, tsp=True),
    "tsp": dict(tensor=8, tsp=True),
    "tsp kept": dict(tensor=8, tsp=True),
}
# keeps the attention's output of every layer; all others recompute all
REMAT = {"tsp kept": "attention"}
TOKENS = (16_384, 32_768, 65_536, 131_072)
LIMIT = 900  # seconds a compilation may take


def devices_of(target: str) -> list:
    """Eight devices to compile for."""
    import jax

    if target == "cpu":
        return jax.devices()[:8]
    from zaya_jax.hardware import targets

    return targets.devices(target, 8)


def step_of(settings: Any, scheme: str, tokens: int, devices: list) -> tuple[Callable, list]:
    """The step of a config under a scheme, and its arguments as shapes."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax.sharding import NamedSharding, PartitionSpec

    from zaya_jax.model import zaya
    from zaya_jax.parallel import sharding
    from zaya_jax.parallel.mesh import batch_spec, make_mesh
    from zaya_jax.parallel.spread import spread_of
    from zaya_jax.training.loss import make_loss

    if scheme == "tp+sp folded":
        zaya.LAYERS["dense"] = folded_layer()
    mesh = make_mesh(settings.mesh, devices)
    spread = spread_of(settings.mesh, mesh.shape)
    sharding.check(settings, spread)
    specs = sharding.param_specs(settings.model, settings.precision, spread)
    loss_fn = make_loss(settings, settings.model, spread)
    optimizer = optax.adamw(1e-4, 0.9, 0.95, weight_decay=0.1)

    def step(params, moments, bias, batch):
        total = jax.lax.psum(jnp.sum(batch["loss_mask"]), spread.token_axes)
        grads, _ = jax.grad(loss_fn, has_aux=True)(params, bias, batch, total)

        def whole(g, spec):  # the sum over devices that hold the same part
            axes = [axis for axis in mesh.axis_names if axis not in spec and mesh.shape[axis] > 1]
            return jax.lax.psum(g, tuple(axes)) if axes else g

        updates, moments = optimizer.update(jax.tree.map(whole, grads, specs), moments, params)
        return optax.apply_updates(params, updates), moments

    def placed(tree, specs):
        def one(x, spec):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

        return jax.tree.map(one, tree, specs)

    params = zaya.abstract(settings.model, settings.precision)
    moments = jax.eval_shape(optimizer.init, params)
    by_moment = optax.tree.map_params(
        optimizer,
        lambda _, spec: spec,
        moments,
        specs,
        transform_non_params=lambda _: PartitionSpec(),
    )
    bias = jax.ShapeDtypeStruct((settings.model.num_hidden_layers, 2), jnp.float32)
    batch = {
        name: jax.ShapeDtypeStruct((1, tokens), jnp.float32 if name == "loss_mask" else jnp.int32)
        for name in ("tokens", "targets", "segment_ids", "positions", "loss_mask")
    }
    rows = PartitionSpec(None, *batch_spec(spread)[2:])
    in_specs = (specs, by_moment, PartitionSpec(), jax.tree.map(lambda _: rows, batch))
    args = [
        placed(tree, spec)
        for tree, spec in zip(
            (params, moments, batch), (specs, by_moment, in_specs[3]), strict=True
        )
    ]
    args.insert(
        2,
        jax.ShapeDtypeStruct(bias.shape, bias.dtype, sharding=NamedSharding(mesh, PartitionSpec())),
    )
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=in_specs, out_specs=in_specs[:2], check_vma=False
    )
    return mapped, args


def compile_step(scheme: str, tokens: int, target: str) -> dict:
    """Bytes of the step's arguments, temporaries and traffic, on one device."""
    import dataclasses

    import jax

    from experiments.configs import dense_7b
    from zaya_jax import config
    from zaya_jax.compiled import hlo

    settings = config.check(dense_7b.get_config())
    sizes = config.Mesh(data=1, **SCHEMES[scheme])
    settings = dataclasses.replace(settings, mesh=sizes, remat=REMAT.get(scheme, "layer"))
    mapped, args = step_of(settings, scheme, tokens, devices_of(target))
    begun = time.perf_counter()
    compiled = jax.jit(mapped, donate_argnums=(0, 1)).lower(*args).compile()
    memory = compiled.memory_analysis()
    collectives = [c for c in hlo.collectives(compiled) if not c.scalar]
    moved: dict[str, float] = {}
    for c in collectives:
        where = "layers" if c.in_loop else "once"
        moved[f"{where} {c.kind}"] = moved.get(f"{where} {c.kind}", 0) + c.wire_bytes * (
            c.times or 1
        )
    return {
        "scheme": scheme,
        "tokens": tokens,
        "target": target,
        "jax": jax.__version__,
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "traffic": moved,
        "unknown_loops": sum(c.times is None for c in collectives),
        "compile_seconds": time.perf_counter() - begun,
    }


def folded_layer() -> type:
    """The dense layer under tensor and sequence parallelism on one axis, weights at rest: for the
    comparison only.

    Between blocks tokens are split over the devices; each block gathers them, computes its heads or
    channels for all of them and scatters the sum.
    """
    import jax
    import jax.numpy as jnp

    from zaya_jax.model import dense
    from zaya_jax.model.placement import Placement
    from zaya_jax.parallel import context

    def block(fn, x, placement):
        gather = lambda x: context.gather(placement.joined(x), placement.chunks.axes)  # noqa: E731
        y = fn(gather(x.astype(jnp.bfloat16)))
        return jax.linear_transpose(gather, jax.ShapeDtypeStruct(x.shape, y.dtype))(y)[0]

    class FoldedLayer(dense.DenseLayer):
        def __call__(self, h, router_state, balance, rope, placement):
            whole = Placement(placement.chunks.segments)
            rope = [(None, context.gather(placement.joined(rope[0][1]), placement.chunks.axes))]
            part = self.attention

            def heads(x):
                kernels = tuple(w.kernel[...] for w in (part.q, part.k, part.v, part.o))
                return dense.self_attention(
                    x.astype(part.dtype), kernels, part.channels, rope, whole
                )[0]

            def mlp(x):
                weights = tuple(w.kernel[...] for w in (self.mlp.gate, self.mlp.up, self.mlp.down))
                return dense.gated_mlp(x, weights).astype(x.dtype)

            h = h + block(heads, self.attn_norm(h), placement)
            h = h + block(mlp, self.mlp_norm(h), placement)
            return h, router_state, jnp.zeros(h.shape[0] * h.shape[1], jnp.int32), None, None

    return FoldedLayer


def tables(path: str) -> str:
    """Memory and traffic as Markdown tables, a row a scheme."""
    with open(path, encoding="utf-8") as file:
        found = {(d["target"], d["scheme"], d["tokens"]): d for d in map(json.loads, file)}
    memory = {key: (d["arguments"] + d["temporaries"]) / 1e9 for key, d in found.items()}
    traffic = {key: sum(d["traffic"].values()) / 1e9 for key, d in found.items()}
    lines = []
    for title, values, target in (
        ("memory, GB, compiled for CPUs", memory, "cpu"),
        ("memory, GB, compiled for H200", memory, "h200"),
        ("traffic, GB, compiled for H200", traffic, "h200"),
    ):
        lines += [
            f"| {title} | " + " | ".join(f"{n // 1024}K" for n in TOKENS) + " |",
            "|---|" + "---|" * len(TOKENS),
        ]
        for scheme in SCHEMES:
            row = [values.get((target, scheme, n)) for n in TOKENS]
            if any(row):
                lines.append(
                    f"| {scheme} | "
                    + " | ".join("" if x is None else f"{x:.1f}" for x in row)
                    + " |"
                )
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Compiles the requested rows and writes them down, or makes the page from the written ones."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", choices=["cpu", "h200"], default="cpu")
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--out", default="tsp.json")
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    schemes, tokens = args.schemes.split(","), [int(n) for n in args.tokens.split(",")]
    if args.one:
        print(json.dumps(compile_step(schemes[0], tokens[0], args.target)))
        return
    if args.tables:
        print(tables(args.out))
        return
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    environment["XLA_FLAGS"] = (
        environment.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    )
    for scheme in schemes:
        for number in tokens:
            command = [
                sys.executable,
                __file__,
                "--one",
                f"--schemes={scheme}",
                f"--tokens={number}",
            ]
            command.append(f"--target={args.target}")
            try:
                done = subprocess.run(
                    command, env=environment, capture_output=True, text=True, timeout=LIMIT
                )
            except subprocess.TimeoutExpired:
                print(f"{scheme} at {number} tokens did not compile in {LIMIT} s", flush=True)
                continue
            if done.returncode:
                print(
                    f"{scheme} at {number} tokens: {done.stderr.strip().splitlines()[-1]}",
                    flush=True,
                )
                continue
            line = done.stdout.strip().splitlines()[-1]
            with open(args.out, "a", encoding="utf-8") as file:
                file.write(line + "\n")
            found = json.loads(line)
            print(
                scheme,
                number,
                f"{(found['arguments'] + found['temporaries']) / 1e9:.1f} GB",
                flush=True,
            )


if __name__ == "__main__":
    main()
