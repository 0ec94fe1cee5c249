"""Cross entropy over the tied head in chunks of tokens, so that [N, V] logits never exist in full.

The gradient is computed in the forward pass, chunk by chunk while the chunk's logits are at hand: three products in
all, none repeated. Letters: N tokens, D model, V vocabulary.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from zaya_jax.model.matmul import apart, rows_dot


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
    """(loss, z): the weighted sums over tokens of -log p(target) + z_weight log² Z, and of log² Z (not differentiated).

    Divide by the number of real tokens of the whole batch, not of this piece of it.
    """
    num, vocab = hidden.shape[0], embedding.shape[0]
    chunk = max(min(chunk, num) if chunk else default_chunk(num, vocab), 1)
    pad = -num % chunk
    hidden = jnp.pad(hidden, ((0, pad), (0, 0)))
    targets, weights = jnp.pad(targets, (0, pad)), jnp.pad(weights, (0, pad))
    return _cross_entropy(hidden, embedding, bias, targets, weights, jnp.dtype(dtype), z_weight, chunk)


def default_chunk(num: int, vocab: int) -> int:
    """Tokens whose float32 logits exist at once: 8 MiB of them stay in a CPU's cache, a GPU wants long products.

    There 1.125 GiB hold 1,024 tokens' over ZAYA1's 262,272 words, and matrix units take 128 rows at once. Fewer chunks
    are better: each reads and writes the table's gradient, 2 GB.
    """
    if jax.default_backend() == "cpu":
        return even_chunk(num, max(64, (8 << 20) // (4 * vocab)), 1)
    return even_chunk(num, (1152 << 20) // (4 * vocab), 128)


def even_chunk(num: int, limit: int, unit: int) -> int:
    """Rows of each of the fewest equal chunks for `num` rows: whole units, at most `limit`; fewer than a unit stay one.

    So less than a unit of each chunk is padding. A limit below one unit counts as one.
    """
    if num < unit:
        return num
    chunks = -(-num // max(limit // unit * unit, unit))
    return -(-num // (chunks * unit)) * unit


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _cross_entropy(hidden, embedding, bias, targets, weights, dtype, z_weight, chunk):
    table = embedding.astype(dtype)

    def step(carry, piece):
        h, t, w = piece
        loss, z, _ = _chunk_loss(h, t, w, table, bias, dtype, z_weight)
        return (carry[0] + loss, carry[1] + z), None

    sums, _ = lax.scan(step, (jnp.zeros(()), jnp.zeros(())), _pieces(hidden, targets, weights, chunk))
    return sums


def _pieces(hidden, targets, weights, chunk):
    return hidden.reshape(-1, chunk, hidden.shape[-1]), targets.reshape(-1, chunk), weights.reshape(-1, chunk)


def _chunk_loss(hidden, targets, weights, table, bias, dtype, z_weight):
    logits = jnp.einsum("nd,vd->nv", hidden.astype(dtype), table, preferred_element_type=jnp.float32)
    if bias is not None:
        logits += bias
    top = logits.max(-1)
    shares = apart(jnp.exp(logits - top[:, None]))  # of each word, not yet divided by their sum
    total = shares.sum(-1)
    log_z = top + jnp.log(total)
    at_target = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    z = jnp.sum(weights * log_z**2)
    return jnp.sum(weights * (log_z - at_target)) + z_weight * z, z, (shares, total, log_z)


def _cross_entropy_fwd(hidden, embedding, bias, targets, weights, dtype, z_weight, chunk):
    table = embedding.astype(dtype)

    def step(carry, piece):
        h, t, w = piece
        loss_sum, z_sum, d_table, d_bias = carry
        loss, z, (shares, total, log_z) = _chunk_loss(h, t, w, table, bias, dtype, z_weight)
        hit = t[:, None] == lax.broadcasted_iota(jnp.int32, shares.shape, 1)
        factor = w * (1 + 2 * z_weight * log_z) / total
        d_logits = shares * factor[:, None] - jnp.where(hit, w[:, None], 0.0)
        if d_bias is not None:
            d_bias = d_bias + d_logits.sum(0)
        d_logits = d_logits.astype(dtype)
        d_table = d_table + rows_dot(d_logits, h.astype(dtype))
        dh = jnp.einsum("nv,vd->nd", d_logits, table, preferred_element_type=jnp.float32)
        return (loss_sum + loss, z_sum + z, d_table, d_bias), dh.astype(h.dtype)

    zero = jnp.zeros(())
    start = (
        zero,
        zero,
        jnp.zeros(embedding.shape, jnp.float32),
        None if bias is None else jnp.zeros_like(bias),
    )
    (loss, z, d_table, d_bias), dh = lax.scan(step, start, _pieces(hidden, targets, weights, chunk))
    return (loss, z), (dh.reshape(hidden.shape), d_table, d_bias)


def _cross_entropy_bwd(dtype, z_weight, chunk, saved, cotangents):
    dh, d_table, d_bias = saved
    scale = cotangents[0]
    return (
        (dh * scale).astype(dh.dtype),
        d_table * scale,
        None if d_bias is None else d_bias * scale,
        None,
        None,
    )


_cross_entropy.defvjp(_cross_entropy_fwd, _cross_entropy_bwd)
