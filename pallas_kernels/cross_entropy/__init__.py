"""Cross entropy over the tied head in chunks of tokens, so that [N, V] logits never exist in full.

The gradient is computed in the forward pass, chunk by chunk while the chunk's logits are at hand:
three products in all, none repeated, in a scan that carries the sums and the table's gradient.
`reference` is the definition. Letters: N tokens, D model, V vocabulary.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import chip
from pallas_kernels.products import sum_rows

# Bytes of float32 logits at once, by the chip's maker. A CPU's stay in its cache. On one H200 of 141
# GB, where the head sets the peak memory, twice as many take 3 GB more; an MI300X has 192.
LOGITS = {"cpu": 8 << 20, "cuda": 2304 << 20, "rocm": 4608 << 20}


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
    """Tokens whose float32 logits exist at once, those of `LOGITS` bytes.

    A GPU wants long products, and fewer chunks are better: each reads and writes the table's
    gradient, 2 GB of ZAYA1's 262,272 words. Its 16,384 tokens a device are 4 chunks on an MI300X; 8
    would move 25 GB of 819 more. Matrix units take 128 rows at once.
    """
    maker = chip.current().maker
    limit = LOGITS.get(maker, LOGITS["cuda"]) // (4 * vocab)
    if maker == "cpu":
        return _even_chunk(num, max(64, limit), 1)
    return _even_chunk(num, limit, 128)


def _even_chunk(num: int, limit: int, unit: int) -> int:
    """Rows of each of the fewest equal chunks for `num` rows: whole units, at most `limit`; fewer
    than a unit stay one.

    So less than a unit of each chunk is padding. A limit below one unit counts as one.
    """
    if num < unit:
        return num
    chunks = -(-num // max(limit // unit * unit, unit))
    return -(-num // (chunks * unit)) * unit


def _product(hidden, table, bias) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Logits in float32, the greatest of each token, and the sum of exp(logit - greatest).

    On a GPU both are of one reduction, so that the logits are read once for them.
    """
    logits = jnp.einsum("nd,vd->nv", hidden, table, preferred_element_type=jnp.float32)
    if bias is not None:
        logits += bias
    if chip.current().maker == "cpu":
        top = logits.max(-1)
        return logits, top, jnp.exp(logits - top[:, None]).sum(-1)

    def of_both(one, other):
        top = jnp.maximum(one[0], other[0])
        return top, one[1] * jnp.exp(one[0] - top) + other[1] * jnp.exp(other[0] - top)

    least = jnp.finfo(jnp.float32).min  # not -inf, which a bias may have: the difference is NaN
    top, total = lax.reduce((logits, jnp.ones_like(logits)), (least, 0.0), of_both, (1,))
    return logits, top, total


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _cross_entropy(hidden, embedding, bias, targets, weights, dtype, z_weight, chunk):
    table = embedding.astype(dtype)

    def step(carry, piece):
        h, t, w = piece
        loss, z, _ = _chunk_loss(_product(h.astype(dtype), table, bias), t, w, z_weight)
        return (carry[0] + loss, carry[1] + z), None

    both, _ = lax.scan(
        step, (jnp.zeros(()), jnp.zeros(())), _pieces(hidden, targets, weights, chunk)
    )
    return both


def _pieces(hidden, targets, weights, chunk):
    return (
        hidden.reshape(-1, chunk, hidden.shape[-1]),
        targets.reshape(-1, chunk),
        weights.reshape(-1, chunk),
    )


def _chunk_loss(given, targets, weights, z_weight):
    logits, top, total = given
    log_z = top + jnp.log(total)
    at_target = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    z = jnp.sum(weights * log_z**2)
    shares = jnp.exp(logits - top[:, None])  # of each word, not yet divided by their sum
    # A place of weight 0 may have a target that a bias of -inf takes away: infinite, and 0 times
    # that is NaN.
    loss = jnp.sum(jnp.where(weights == 0, 0.0, weights * (log_z - at_target)))
    return loss + z_weight * z, z, (shares, total, log_z)


def _cross_entropy_fwd(hidden, embedding, bias, targets, weights, dtype, z_weight, chunk):
    """(loss, z), and the gradients of the loss."""
    table = embedding.astype(dtype)

    def step(carry, piece):
        h, t, w = piece
        loss_sum, z_sum, d_table, d_bias = carry
        loss, z, (shares, total, log_z) = _chunk_loss(
            _product(h.astype(dtype), table, bias), t, w, z_weight
        )
        hit = t[:, None] == lax.broadcasted_iota(jnp.int32, shares.shape, 1)
        factor = w * (1 + 2 * z_weight * log_z) / total
        d_logits = shares * factor[:, None] - jnp.where(hit, w[:, None], 0.0)
        if d_bias is not None:
            d_bias = d_bias + d_logits.sum(0)
        d_logits = d_logits.astype(dtype)
        d_table = d_table + sum_rows("nv", "nd", "vd", d_logits, h.astype(dtype))
        dh = jnp.einsum("nv,vd->nd", d_logits, table, preferred_element_type=jnp.float32)
        return (loss_sum + loss, z_sum + z, d_table, d_bias), dh.astype(h.dtype)

    zero = jnp.zeros(())
    d_table = jnp.zeros(embedding.shape, jnp.float32)
    start = (zero, zero, d_table, None if bias is None else jnp.zeros_like(bias))
    (loss, z, d_table, d_bias), dh = lax.scan(step, start, _pieces(hidden, targets, weights, chunk))
    return (loss, z), (dh.reshape(hidden.shape), d_table, d_bias)


def _cross_entropy_bwd(dtype, z_weight, chunk, saved, cotangents):
    dh, d_table, d_bias = saved
    scale = cotangents[0]
    d_bias = None if d_bias is None else d_bias * scale
    return (dh * scale).astype(dh.dtype), d_table * scale, d_bias, None, None


_cross_entropy.defvjp(_cross_entropy_fwd, _cross_entropy_bwd)
