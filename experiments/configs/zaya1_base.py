"""ZAYA1-base: the full-size model and all phases of its recipe.

    python -m experiments.pretrain --config=experiments/configs/zaya1_base.py --workdir=runs/zaya1_base \
        --config.data.tokenizer=TOKENIZER --config.data.path=PREPARED [--config.data.workers=8]

Hardware: 128 nodes of 8 MI300X. 8,840,488,784 parameters, 760M of them active without the embedding.
Expected: 2.5 s a step of 16.8M tokens on that cluster (published), 8T + 4T + 1.2T + 0.66T tokens in all.

Phases, contexts, RoPE bases and the batch of pre-training are the published ones; batches after it, the ramp, the
learning rate and its schedule are this project's choice. The last two phases need the sequence spread over devices:
2 of them at 32K tokens, 8 at 131K.
"""

from ml_collections import ConfigDict

from zaya_jax import config

TRILLION = 10**12


def get_config() -> ConfigDict:
    """The whole config of the run."""
    c = config.default()
    c.name = "zaya1_base"

    # The architecture is the default one of zaya_jax/config.py: 40 layers, 16 experts, width 2048.
    c.model.max_position_embeddings = 131_072
    c.model.rope_parameters.hybrid.rope_theta = 10_000.0

    c.data.seq_len = 4096
    c.data.global_batch = 4096
    c.data.micro_batch = 1024  # one sequence a device at a time on 1,024 of them

    c.optim.lr = 1e-3
    c.optim.weight_decay = 0.1
    c.optim.clip_norm = 1.0
    c.optim.z_loss = 1e-5
    c.balance.lr = 1e-3
    c.remat = "attention"

    c.schedule.warmup_fraction = 0.002
    c.schedule.decay_fraction = 0.15
    c.schedule.phases = (
        config.Phase(  # web-heavy; the batch is reached by doublings
            name="pretrain 1", tokens=8 * TRILLION, seq_len=4096, rope_theta=1e4, global_batch=4096,
            ramp_from=1024, ramp_tokens=TRILLION // 10,
        ),
        config.Phase(  # more code, mathematics, reasoning
            name="pretrain 2", tokens=4 * TRILLION, seq_len=4096, rope_theta=1e4, global_batch=4096,
        ),
        config.Phase(  # 86% long reasoning traces
            name="midtrain", tokens=1_200 * TRILLION // 1000, seq_len=32_768, rope_theta=1e6, global_batch=1024,
        ),
        config.Phase(  # 75% long traces, packed best-fit-decreasing
            name="sft", tokens=660 * TRILLION // 1000, seq_len=131_072, rope_theta=5e6, global_batch=1024,
        ),
    )  # fmt: skip
    c.run.num_steps = 2**31 - 1  # the phases end it
    c.run.skip_update = "spike"
    c.eval.every = 1000
    c.checkpoint.every_steps = 500
    return c
