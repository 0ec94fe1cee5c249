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
    for key, value in {**SIZES, **model}.items():
        c.model[key] = value
    c.precision.compute, c.precision.newton_schulz, c.precision.matmul = (
        "float32",
        "float32",
        "highest",
    )
    c.data.tokenizer, c.data.seq_len, c.data.global_batch = "bytes", 32, 8
    c.data.seq_len = min(32, c.model.max_position_embeddings)
    return c
