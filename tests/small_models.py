"""Small models to score with, in float32, so that batches and meshes agree closely."""

import zaya_jax as zj

SIZES = dict(
    vocab_size=264,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    moe_intermediate_size=8,
    num_experts=2,
    router_hidden_size=8,
    max_position_embeddings=64,
    initializer_range=0.3,
)


def settings(**model):
    """A config of a small model, with some keys changed."""
    c = zj.config.default()
    c.name = "small"
    c.model.update(SIZES | model)
    c.precision.update(compute="float32", newton_schulz="float32", matmul="highest")
    c.data.update(tokenizer="bytes", global_batch=8)
    c.data.seq_len = min(32, c.model.max_position_embeddings)
    return c
