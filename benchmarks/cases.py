"""The operators that have kernels of their own, at ZAYA1's sizes: one row each for all that judges
them.

`benchmarks.candidates` compiles them for chips that are not here, tests/pallas_kernels/test_targets.py
holds what must be true of that, and `benchmarks.kernels` times them on a chip. A new kernel needs
one more row of FLOPS, and of `pallas_kernels.cases`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import cases
from pallas_kernels.cases import RandomInput, Size, linearized, normal
from pallas_kernels.grouped_mlp import grouped_mlp
from pallas_kernels.linear_attention import CHUNK
from zaya_jax.config import Model

ZAYA = Model()
TINY = Model(
    vocab_size=300,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    moe_intermediate_size=64,
    num_experts=4,
    num_hidden_layers=1,
)

# As a device of `zaya1_base` has them: four sequences in pretraining, one in midtraining and SFT,
# whose context two and eight devices share; here each has all of it.
SIZES = {
    s.label: s
    for s in (
        Size("4K", 4, 4096, ZAYA),
        Size("32K", 1, 32_768, ZAYA),
        Size("131K", 1, 131_072, ZAYA),
    )
}
SMALL = Size("tiny", 2, 64, TINY)


def loads(size: Size) -> RandomInput:
    """Tokens by expert, uneven, the last of them given to none."""

    def draw(rng, shape):
        shares = rng.dirichlet(np.full(shape[0] + 1, 4.0))[:-1]
        return np.floor(shares * size.tokens).astype(np.int32)

    return RandomInput((size.model.num_experts,), jnp.int32, draw)


@dataclasses.dataclass(frozen=True)
class Case(cases.OperatorCase):
    """A case with its work."""

    # Of use, "forward" and "backward". 0 where memory counts.
    flops: Callable[[Size], dict[str, float]]


def function(case: Case, direction: str, dtype: Any = jnp.bfloat16) -> Callable:
    """The function of a direction: of the arguments, or for "backward" of `linearized`'s results
    and the cotangent."""
    if direction == "backward":
        return lambda pull, cotangent: pull(cotangent)
    if direction == "forward":

        def forward(*arguments):
            out, pull = linearized(case, dtype)(*arguments)
            kept = [x for x in jax.tree.leaves(pull) if not any(x is given for given in arguments)]
            return out, kept  # arrays that the caller already has need not be copied

        return forward

    def gradients(*arguments):
        out, pull = linearized(case, dtype)(*arguments)
        return out, pull(jax.tree.map(jnp.ones_like, out))

    return gradients


def _attention_flops(size: Size) -> dict[str, float]:
    m = size.model
    product = 2.0 * size.tokens * m.num_attention_heads * m.head_dim * (size.length + 1) / 2
    return {"forward": 2 * product, "backward": 5 * product}


def _linear_flops(size: Size) -> dict[str, float]:
    """In chunks; products with states are one of queries and one of keys forward, two of each
    backward."""
    m, c = size.model, size.model.head_dim
    of_keys, of_state = (
        (CHUNK + 1) / 2 * m.num_attention_heads,
        c * (m.num_attention_heads + m.num_key_value_heads),
    )
    token = 2.0 * size.tokens * c
    return {
        "forward": token * (2 * of_keys + of_state),
        "backward": token * (5 * of_keys + 2 * of_state),
    }


def _experts_flops(size: Size) -> dict[str, float]:
    product = 6.0 * size.tokens * size.model.hidden_size * size.model.moe_intermediate_size
    return {"forward": product, "backward": 2 * product}


def _moves_alone(size: Size) -> dict[str, float]:
    return {"forward": 0.0, "backward": 0.0}


def _mixing_flops(size: Size) -> dict[str, float]:
    m = size.model
    heads = m.num_attention_heads + m.num_key_value_heads
    product = 2.0 * size.tokens * heads * m.head_dim**2 * m.cca_time1
    return {"forward": product, "backward": 2 * product}


FLOPS: dict[str, Callable[[Size], dict[str, float]]] = {
    "cca_mix": _mixing_flops,
    "grouped_mlp": _experts_flops,
}
WITHOUT_DOCUMENTS = {"attention": _attention_flops, "linear_attention": _linear_flops}


def _rows() -> tuple[Case, ...]:
    """The model's cases with their work, and those that other libraries have too: without
    documents, sorted rows."""
    found = []
    for c in cases.CASES:
        if c.operator in WITHOUT_DOCUMENTS:
            found.append(
                Case(c.operator, "causal", c.call, cases.qkv, WITHOUT_DOCUMENTS[c.operator])
            )
        found.append(
            Case(c.operator, c.label, c.call, c.arguments, FLOPS.get(c.operator, _moves_alone))
        )
        if c.operator == "grouped_mlp":
            rows = lambda s: (normal(s.tokens, s.model.hidden_size), loads(s), *cases.experts(s))  # noqa: E731
            found.append(
                Case(c.operator, "sorted rows", lambda dtype: grouped_mlp, rows, _experts_flops)
            )
    return tuple(found)


CASES = _rows()


def of_operator(name: str) -> list[Case]:
    """All cases of an operator."""
    return [case for case in CASES if case.operator == name]


def bytes_of(*trees: Any) -> int:
    """The bytes of all arrays, each counted once."""
    leaves = jax.tree.leaves(trees)
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in leaves)
