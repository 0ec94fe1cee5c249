"""ZAYA1's recipe in small: four phases with its proportions, for `tools.rehearse`.

    python -m tools.rehearse --out=DIR                                            calls it, on data that it makes
    python -m experiments.pretrain --config=tools/rehearse/recipe.py:2 --config.data.path=DIR/data

The number is the length: 1 takes 2 minutes on two CPU cores as eight virtual devices, 4 four times
as long. As in zaya1_base.py: contexts of 1 : 8 : 32, the bases of RoPE and the shares of 86% and
75%, a batch ramp, attention over 2 and then 8 devices, and a mesh of its own for each phase. Its
own choice: each phase's share of the tokens (40, 20, 25, 15%), so that the last two learn
something, and one schedule of warm-up, constant and decay over all phases.
"""

from ml_collections import ConfigDict

from zaya_jax import config

CONTEXTS = (64, 512, 2048)
STEP = 8192  # tokens
SHARES = (0.4, 0.2, 0.25, 0.15)
SMALLEST = 100  # steps of a rehearsal of length 1


def get_config(given: str = "1") -> ConfigDict:
    """The whole config of the run; LENGTH,N has the first N phases alone."""
    length, _, phases = given.partition(",")
    c = config.default()
    c.name = "rehearsal"
    c.model.vocab_size = 1024
    c.model.hidden_size = 96
    c.model.num_hidden_layers = 3
    c.model.num_attention_heads = 4
    c.model.num_key_value_heads = 2
    c.model.head_dim = 16
    c.model.moe_intermediate_size = 96
    c.model.num_experts = 8
    c.model.router_hidden_size = 24
    c.model.initializer_range = 0.05
    c.model.max_position_embeddings = CONTEXTS[-1]

    c.data.path = "data"
    root = c.data.get_ref("path")  # the value of --config.data.path, wherever it stands below
    c.data.tokenizer = root + "/tokenizer"
    c.data.seq_len, c.data.global_batch = CONTEXTS[0], STEP // CONTEXTS[0]
    c.data.on_corrupt = "skip"

    c.optim.lr = 6e-3
    c.precision.compute = "float32"
    short, longer, longest = CONTEXTS
    steps = [max(4, round(share * SMALLEST * float(length))) for share in SHARES]
    first, second, third, fourth = (count * STEP for count in steps)
    c.schedule.warmup_fraction = 0.02
    c.schedule.decay_fraction = 0.3
    c.schedule.phases = (
        config.Phase(
            name="pretrain 1",
            tokens=first,
            seq_len=short,
            rope_theta=1e4,
            global_batch=STEP // short,
            ramp_from=STEP // short // 4,
            ramp_tokens=first // 4,
            packing="concat",
            mixture=(root + "/web=0.8", root + "/code=0.12", root + "/math=0.08"),
        ),
        config.Phase(
            name="pretrain 2",
            tokens=second,
            seq_len=short,
            rope_theta=1e4,
            global_batch=STEP // short,
            packing="concat",
            mesh=config.Mesh(expert=2),
            mixture=(
                root + "/web=0.4",
                root + "/code=0.25",
                root + "/math=0.2",
                root + "/reasoning_64=0.15",
            ),
        ),
        config.Phase(
            name="midtrain",
            tokens=third,
            seq_len=longer,
            rope_theta=1e6,
            global_batch=STEP // longer,
            packing="concat",
            mesh=config.Mesh(context=2),
            mixture=(
                root + "/reasoning_512=0.86",
                root + "/web=0.06",
                root + "/code=0.05",
                root + "/math=0.03",
            ),
        ),
        config.Phase(
            name="sft",
            tokens=fourth,
            seq_len=longest,
            rope_theta=5e6,
            global_batch=STEP // longest,
            packing="best_fit",
            mesh=config.Mesh(context=8),
            mixture=(root + "/reasoning_2048=0.75", root + "/chat=0.25"),
        ),
    )[: int(phases or 4)]
    c.run.num_steps = 2**31 - 1  # the phases end it
    c.eval.every = 50
    c.eval.windows = 16
    c.checkpoint.every_steps = 10
    c.checkpoint.on_corrupt = "previous"
    c.checkpoint.keep = 1000  # each step may be evaluated
    c.log.sample_tokens = 64
    return c
