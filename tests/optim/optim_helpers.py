"""The parameters of a small model with every kind of weight, and how experts lie on a mesh."""

import jax
from jax.sharding import PartitionSpec

from zaya_jax.config import Model, Precision
from zaya_jax.model import zaya

FLOAT32 = Precision(newton_schulz="float32")


def shapes(L=5, D=32, H=2, K=1, C=8, E=4, F=16, R=8, V=50):
    """The parameter tree's shapes."""
    model = Model(
        num_hidden_layers=L,
        hidden_size=D,
        num_attention_heads=H,
        num_key_value_heads=K,
        head_dim=C,
        num_experts=E,
        moe_intermediate_size=F,
        router_hidden_size=R,
        vocab_size=V,
        lm_head_bias=True,
    )
    return zaya.abstract(model)


def expert_specs(tree):
    """Experts over the expert axis, all else everywhere."""
    specs = jax.tree.map(lambda x: PartitionSpec(), tree)
    experts = dict.fromkeys(("gate_up", "down"), PartitionSpec(None, "expert"))
    return specs | {"layers": specs["layers"] | {"experts": experts}}
