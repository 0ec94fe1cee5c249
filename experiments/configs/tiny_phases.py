"""A small model through four phases that change everything at each border, as a full-size recipe
does.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m experiments.supervise -- \
        --config=experiments/configs/tiny_phases.py --workdir=runs/tiny_phases

Hardware: two CPU cores as eight virtual devices (one device cannot share a sequence), no network,
no data; about two minutes. Expected: three ends with exit code 75, because every phase has its own
mesh, and after each a new start by the agent; then a held-out loss of about 2.05 nats per byte.
"""

import sysconfig

from ml_collections import ConfigDict

from experiments.configs import tiny
from zaya_jax import config

# its modules and two of its packages: no file is in two sources
LIBRARY = sysconfig.get_paths()["stdlib"]


def get_config() -> ConfigDict:
    """The whole config of the run."""
    c = tiny.get_config()
    c.name = "tiny_phases"

    c.model.hidden_size = 96
    c.model.num_hidden_layers = 2
    c.model.head_dim = 16
    c.model.moe_intermediate_size = 96
    c.model.router_hidden_size = 24

    c.schedule.phases = (
        config.Phase(
            name="pretrain 1",
            tokens=120 * 4096,
            seq_len=128,
            rope_theta=1e4,
            global_batch=32,
            micro_batch=8,
            ramp_from=8,
            ramp_tokens=20 * 4096,
            mixture=(f"{LIBRARY}/*.py=1",),
            packing="concat",
            remat="none",
            lr=3e-3,
            lr_end=1e-3,
            schedule="cosine",
        ),
        config.Phase(
            name="pretrain 2",
            tokens=60 * 4096,
            seq_len=64,
            rope_theta=2e4,
            global_batch=64,
            micro_batch=32,
            mixture=(f"{LIBRARY}/*.py=0.6", f"{LIBRARY}/email=0.4"),
            packing="best_fit",
            mesh=config.Mesh(expert=4, fsdp=True),
            remat="layer",
            eval_seq_len=128,
            lr=1e-3,
        ),
        config.Phase(
            name="midtrain",
            tokens=40 * 4096,
            seq_len=512,
            rope_theta=1e6,
            global_batch=16,
            micro_batch=8,
            ramp_from=8,
            ramp_tokens=10 * 4096,
            mixture=(f"{LIBRARY}/email=0.7", f"{LIBRARY}/asyncio=0.3"),
            packing="concat",
            mesh=config.Mesh(context=2),
            remat="attention",
            eval_seq_len=256,
            lr=2e-3,  # a jump, which the start says
            lr_end=1e-3,
            schedule="1-sqrt",
        ),
        config.Phase(
            name="sft",
            tokens=20 * 4096,
            seq_len=1024,
            rope_theta=5e6,
            global_batch=4,
            micro_batch=2,
            mixture=(f"{LIBRARY}/asyncio=0.75", f"{LIBRARY}/*.py=0.25"),
            packing="best_fit",
            mesh=config.Mesh(context=4, ring=True),
            remat="layer",
            lr=1e-3,
            lr_end=0.0,
            schedule="linear",
        ),
    )
    c.eval.every = 40
    c.eval.windows = 16
    c.log.sample_tokens = 128
    return c
