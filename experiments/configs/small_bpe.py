"""A small ZAYA on a prepared directory: the standard library's sources with a BPE of 8,192 trained
on them.

    python -m experiments.prepare_data --input=stdlib --train_bpe=8192 --out=data/stdlib_bpe
    python -m experiments.pretrain --config=experiments/configs/small_bpe.py

Hardware: two CPU cores. The first command takes under a minute, the second about five. Expected: a
held-out loss of about 4.2 nats per token, which is 1.14 nats a byte at 3.7 bytes per token.
"""

from ml_collections import ConfigDict

from zaya_jax import config


def get_config() -> ConfigDict:
    """The whole config of the run."""
    c = config.default()
    c.name = "small_bpe"

    c.model.vocab_size = 8192
    c.model.hidden_size = 192
    c.model.num_hidden_layers = 4
    c.model.num_attention_heads = 4
    c.model.num_key_value_heads = 2
    c.model.head_dim = 32
    c.model.moe_intermediate_size = 256
    c.model.num_experts = 8
    c.model.router_hidden_size = 48
    c.model.max_position_embeddings = 1024
    c.model.bos_token_id, c.model.eos_token_id, c.model.pad_token_id = 0, 1, 2

    c.data.path = "data/stdlib_bpe"
    c.data.tokenizer = "data/stdlib_bpe/tokenizer"
    c.data.seq_len = 256
    c.data.global_batch = 16

    c.optim.lr = 3e-3
    c.run.num_steps = 300
    c.eval.every = 100
    c.checkpoint.every_steps = 100
    return c
