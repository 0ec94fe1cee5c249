"""What each remat policy costs: the training step's greatest temporary memory, and its time.

    python benchmarks/remat.py memory      compiles only: bytes of temporaries, by XLA's own account
    python benchmarks/remat.py time        seconds a step of those that fit a small machine, in turns

The memory is `compiled.memory_analysis().temp_size_in_bytes` of the whole step (forward, backward, optimizer), without
state and batch. On a CPU, "offload" is "attention": the host's memory is the device's.
"""

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.configs import tiny
from zaya_jax import cli
from zaya_jax import config as config_lib
from zaya_jax.config import Config, Data
from zaya_jax.hardware import host
from zaya_jax.model import zaya
from zaya_jax.optim import chain
from zaya_jax.parallel.mesh import make_mesh
from zaya_jax.training import state as states
from zaya_jax.training import step as steps

POLICIES = ("none", "elementwise", "attention", "layer", "offload")
ROUNDS, TURN = 5, 2  # of `time`: rounds, steps of each in a round
WIDE = {  # "1.3B"
    "vocab_size": 32_768, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "moe_intermediate_size": 1024, "num_experts": 16,
    "router_hidden_size": 128,
}  # fmt: skip
CASES = {  # name: (keys of the model other than tiny's, sequences, tokens in each)
    "tiny, 16 x 256": ({}, 16, 256),
    "tiny, 2 x 4096": ({}, 2, 4096),
    "1.3B, 4 x 4096": (WIDE, 4, 4096),
    "1.3B, 32 x 4096": (WIDE, 32, 4096),
}
TIMED = ("tiny, 16 x 256", "tiny, 2 x 4096")


def settings(case: str, policy: str) -> Config:
    """The config of a case."""
    keys, sequences, seq_len = CASES[case]
    c = tiny.get_config()
    c.model.max_position_embeddings = 4096
    c.model.update(keys)
    config = config_lib.check(c)
    data = Data(seq_len=seq_len, global_batch=sequences)
    return dataclasses.replace(config, data=data, remat=policy)


def compiled_step(config: Config) -> tuple[jax.stages.Compiled, Callable]:
    """The compiled step, and a function that makes its state."""
    mesh = make_mesh(config.mesh)
    optimizer = states.build_optimizer(config, mesh)
    make_state = lambda: states.init(config, optimizer, mesh)  # noqa: E731
    shape = (1, config.data.global_batch, config.data.seq_len)
    batch = {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in BATCH.items()}
    step = steps.make_train_step(config, config.model, optimizer, mesh)
    lr = jax.ShapeDtypeStruct((), jnp.float32)
    return step.lower(jax.eval_shape(make_state), batch, lr).compile(), make_state


BATCH = {
    "tokens": jnp.int32, "targets": jnp.int32, "segment_ids": jnp.int32, "positions": jnp.int32,
    "loss_mask": jnp.float32,
}  # fmt: skip


def host_batch(config: Config) -> dict[str, np.ndarray]:
    """Random tokens, one document a row."""
    shape = (1, config.data.global_batch, config.data.seq_len)
    ids = np.random.default_rng(0).integers(0, 256, shape).astype(np.int32)
    ones = np.ones(shape, np.int32)
    positions = np.broadcast_to(np.arange(shape[-1], dtype=np.int32), shape)
    parts = (ids, np.roll(ids, -1, -1), ones, positions, ones.astype(np.float32))
    return dict(zip(BATCH, parts, strict=True))


def update_alone(config: Config) -> int:
    """Bytes of temporaries of the optimizer's update and the gradients that it gets."""
    optimizer = chain.build(config.optim, config.precision, zaya.abstract(config.model, config.precision))

    def update(state, params):
        grads = jax.lax.optimization_barrier(jax.tree.map(lambda p: 2 * p, params))  # as if just computed
        updates, state = optimizer.update(grads, state, params, lr=1e-3)
        return optax.apply_updates(params, updates), state

    params = zaya.abstract(config.model, config.precision)
    state = jax.eval_shape(optimizer.init)
    lowered = jax.jit(update, donate_argnums=(0, 1)).lower(state, params)
    return lowered.compile().memory_analysis().temp_size_in_bytes


def memory() -> None:
    """Prints the table of temporaries."""
    print("| shape | " + " | ".join(POLICIES) + " | gradients and update alone |")
    print("|---|" + "---|" * (len(POLICIES) + 1))
    for case in CASES:
        config = settings(case, "none")
        sizes = [compiled_step(settings(case, policy))[0].memory_analysis().temp_size_in_bytes for policy in POLICIES]
        sizes.append(update_alone(config))
        print(f"| {case} | " + " | ".join(f"{size / 2**20:,.0f} MiB" for size in sizes) + " |", flush=True)


def timed() -> None:
    """Prints the table of times."""
    policies = [p for p in POLICIES if p != "offload" or jax.default_backend() != "cpu"]
    print("| shape | " + " | ".join(f"{p}, ms" for p in policies) + " |")
    print("|---|" + "---|" * len(policies))
    for case in TIMED:
        batch = host_batch(settings(case, "none"))
        programs = {p: compiled_step(settings(case, p)) for p in policies}
        states = {p: make_state() for p, (_, make_state) in programs.items()}
        seconds: dict[str, list[float]] = {p: [] for p in policies}
        for round_ in range(ROUNDS + 1):
            for p in policies:
                begun = time.perf_counter()
                for _ in range(TURN if round_ else 1):
                    states[p], _ = jax.block_until_ready(programs[p][0](states[p], batch, np.float32(1e-3)))
                if round_:
                    seconds[p].append((time.perf_counter() - begun) / TURN)
        print(f"| {case} | " + " | ".join(f"{1e3 * statistics.median(seconds[p]):,.0f}" for p in policies) + " |")


def main() -> int:
    """One of the two commands."""
    parser = cli.Parser(description=__doc__)
    parser.add_argument("command", choices=("memory", "time"))
    options = parser.parse_args()
    host.keep_memory()
    host.keep_compiled()
    {"memory": memory, "time": timed}[options.command]()
    return cli.DONE


if __name__ == "__main__":
    sys.exit(cli.exit_code(main))
