"""The embedded default: a small ZAYA on the Python standard library's own sources, byte by byte.

    python -m experiments.pretrain

Hardware: two CPU cores, no network, no data; three to five minutes.
Expected: a held-out loss of about 1.31 nats per byte (1.9 bits), and text that looks like Python.
"""

from ml_collections import ConfigDict

from zaya_jax import config


def get_config() -> ConfigDict:
    """The whole config of the run."""
    c = config.default()
    c.name = "tiny"

    c.model.vocab_size = 264  # bytes and eight special tokens
    c.model.hidden_size = 192
    c.model.num_hidden_layers = 4
    c.model.num_attention_heads = 4
    c.model.num_key_value_heads = 2
    c.model.head_dim = 32
    c.model.moe_intermediate_size = 256
    c.model.num_experts = 8
    c.model.router_hidden_size = 48
    c.model.max_position_embeddings = 1024
    # 0.02 would leave the fresh router's probabilities closer to each other than one step of
    # balancing moves its biases: for 30 steps all tokens went to one expert after the other
    # (benchmarks/balance.md).
    c.model.initializer_range = 0.05
    c.model.bos_token_id, c.model.eos_token_id, c.model.pad_token_id = 256, 257, 258

    c.data.path = "stdlib"
    c.data.tokenizer = "bytes"
    c.data.seq_len = 256
    c.data.global_batch = 16

    c.optim.lr = 3e-3
    c.run.num_steps = 400
    c.eval.every = 100
    c.checkpoint.every_steps = 100
    return c
