"""ZAYA1-base: the full-size model and all phases of its recipe.

    python -m experiments.pretrain --config=experiments/configs/zaya1_base.py --describe
    sbatch --nodes=128 launch/slurm.sbatch --config=experiments/configs/zaya1_base.py --workdir=SHARED_FOLDER \
        --config.data.path=ROOT

ROOT holds the prepared directories that the mixtures name: web, code, math, reasoning (long
traces), chat, and the tokenizer. Traces are trimmed to a phase's context: midtraining has
reasoning_32k, SFT reasoning_131k.

Hardware: 128 nodes of 8 MI300X. 8,840,488,784 parameters, 760M of them active without the
embedding. Expected: 2.5 s a step of 16.8M tokens on that cluster (published), 8T + 4T + 1.2T +
0.66T tokens in all.

Phases, contexts, RoPE bases, context parallelism, SFT's packing, the batch of pre-training, and the
shares of 86% and 75% are the published ones. Second-hand, from readers' notes of the paper's body:
the learning rate of pretrain 1, a cosine from 6e-4 to 2e-4. Ours, for want of anything published:
the warm-up, the learning rates of the other phases, weight decay, clipping and z-loss, the rate of
the balancing biases, the batches after pre-training (as many tokens), the ramp, and the other
shares. A run ends where the mesh changes, after pretraining and after midtraining, and the same
command continues.
"""

from ml_collections import ConfigDict, FieldReference

from zaya_jax import config

TRILLION = 10**12


def get_config() -> ConfigDict:
    """The whole config of the run."""
    c = config.default()
    c.name = "zaya1_base"

    # The architecture is the default one of docs/config.md: 40 layers, 16 experts, width 2048.
    c.model.max_position_embeddings = 131_072

    c.data.path = "data/zaya1"
    root = c.data.get_ref("path")  # the value of --config.data.path, wherever it stands below
    c.data.tokenizer = root + "/tokenizer"

    c.optim.lr = 6e-4  # second-hand
    peak = c.optim.get_ref("lr")  # the rates of all phases follow --config.optim.lr
    c.optim.weight_decay = 0.1  # ours, and the next three too
    c.optim.clip_norm = 1.0
    c.optim.z_loss = 1e-5
    c.balance.lr = 1e-3
    # That cluster's devices have memory to spare: no matrix product is repeated, 24 of 178 TFLOP a
    # step, for 13 GB. For the whole model on one GPU give --config.remat=attention.
    c.remat = "elementwise"

    c.schedule.warmup_fraction = 0.002  # ours
    c.schedule.phases = _phases(root, peak)
    c.run.num_steps = 2**31 - 1  # the phases end it
    c.run.skip_update = "spike"
    c.eval.every = 1000
    c.checkpoint.every_steps = 500
    return c


def _phases(root: FieldReference, peak: FieldReference) -> tuple[config.Phase, ...]:
    """The phases of sources below `root`, with rates that are parts of `peak`."""
    # A step has 2**24 tokens throughout, on 1,024 devices 16,384 of each in one micro-batch:
    # benchmarks/compile.md says its costs, and those of several of them. On fewer devices give
    # --config.data.micro_batch=N.
    return (
        config.Phase(
            name="pretrain 1",
            tokens=8 * TRILLION,
            seq_len=4096,
            rope_theta=1e4,
            global_batch=4096,
            ramp_from=1024,
            ramp_tokens=TRILLION // 10,
            packing="concat",
            mixture=(root + "/web=0.8", root + "/code=0.12", root + "/math=0.08"),
            lr=peak,
            lr_end=peak / 3,  # 2e-4, second-hand
            schedule="cosine",
        ),
        # From here on the rates are ours: they begin where the phase before ended, and reach 0.
        config.Phase(
            name="pretrain 2",
            tokens=4 * TRILLION,
            seq_len=4096,
            rope_theta=1e4,
            global_batch=4096,
            packing="concat",
            mixture=(
                root + "/web=0.4",
                root + "/code=0.25",
                root + "/math=0.2",
                root + "/reasoning=0.15",
            ),
            lr=peak / 3,
        ),
        config.Phase(
            name="midtrain",
            tokens=1_200 * TRILLION // 1000,
            seq_len=32_768,
            rope_theta=1e6,
            global_batch=512,
            packing="concat",
            mesh=config.Mesh(context=2),
            mixture=(
                root + "/reasoning_32k=0.86",
                root + "/web=0.06",
                root + "/code=0.05",
                root + "/math=0.03",
            ),
            lr=peak / 3,
            lr_end=peak / 6,
            schedule="linear",
        ),
        config.Phase(
            name="sft",
            tokens=660 * TRILLION // 1000,
            seq_len=131_072,
            rope_theta=5e6,
            global_batch=128,
            packing="best_fit",
            mesh=config.Mesh(context=8),
            mixture=(root + "/reasoning_131k=0.75", root + "/chat=0.25"),
            lr=peak / 6,
            lr_end=0.0,
            schedule="linear",
        ),
    )
