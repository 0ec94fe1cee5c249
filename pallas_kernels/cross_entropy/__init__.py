"""Cross entropy over the tied head in chunks of tokens, so that [N, V] logits never exist in full.

The gradient is computed in the forward pass, chunk by chunk while the chunk's logits are at hand:
three products in all, none repeated. Letters: N tokens, D model, V vocabulary.

An implementation (`xla`, `cpu`; `reference` is the definition) has, for N in whole
chunks,

    chunk_rows(num, vocab)                                                   tokens in a chunk
    sums(hidden, embedding, bias, targets, weights, dtype, z_weight, chunk)  → loss, z
    forward(the same)                                                        → (loss, z), (dh, d_embedding, d_bias)

with the gradients of `loss`.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import chip
from pallas_kernels.cross_entropy import cpu, xla

IMPLEMENTATIONS = {"xla": xla, "cpu": cpu}


def cross_entropy(
    hidden: Float[Array, "N D"],
    embedding: Float[Array, "V D"],
    bias: Float[Array, "V"] | None,
    targets: Int[Array, "N"],
    weights: Float[Array, "N"],
    *,
    dtype,
    z_weight: float = 0.0,
    chunk: int | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(loss, z): the weighted sums over tokens of -log p(target) + z_weight log² Z, and of log² Z
    (not differentiated). Targets below 0 are of tokens without weight.

    Divide by the number of real tokens of the whole batch, not of this piece of it.
    """
    num, vocab = hidden.shape[0], embedding.shape[0]
    chunk = max(min(chunk, num) if chunk else chunk_rows(num, vocab), 1)
    pad = -num % chunk
    hidden = jnp.pad(hidden, ((0, pad), (0, 0)))
    # Targets below 0 have no weight; they would index from the end of a chunk's logits.
    targets, weights = jnp.pad(jnp.maximum(targets, 0), (0, pad)), jnp.pad(weights, (0, pad))
    return _cross_entropy(
        hidden, embedding, bias, targets, weights, jnp.dtype(dtype), z_weight, chunk
    )


def chunk_rows(num: int, vocab: int) -> int:
    """Tokens whose float32 logits exist at once."""
    return chip.choose(IMPLEMENTATIONS).chunk_rows(num, vocab)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _cross_entropy(*args):
    return chip.choose(IMPLEMENTATIONS).sums(*args)


def _cross_entropy_fwd(*args):
    return chip.choose(IMPLEMENTATIONS).forward(*args)


def _cross_entropy_bwd(dtype, z_weight, chunk, saved, cotangents):
    dh, d_table, d_bias = saved
    scale = cotangents[0]
    d_bias = None if d_bias is None else d_bias * scale
    return (dh * scale).astype(dh.dtype), d_table * scale, d_bias, None, None


_cross_entropy.defvjp(_cross_entropy_fwd, _cross_entropy_bwd)
