"""Cross entropy chunk by chunk, for XLA: a scan that carries the sums and the table's gradient."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import chip
from pallas_kernels.products import sum_rows

# Of float32 logits at once; 2.25 GiB elsewhere. On one H200 of 141 GB, where the head sets the peak
# memory, twice as many take 3 GB more; an MI300X has 192.
LOGITS = {"rocm": 4608 << 20}


def chunk_rows(num: int, vocab: int) -> int:
    """Those of `LOGITS` bytes: a GPU wants long products.

    Fewer chunks are better: each reads and writes the table's gradient, 2 GB of ZAYA1's 262,272
    words. Its 16,384 tokens a device are 4 chunks on an MI300X; 8 would move 25 GB of 819 more.
    Matrix units take 128 rows at once.
    """
    return even_chunk(num, LOGITS.get(chip.current().maker, 2304 << 20) // (4 * vocab), 128)


def even_chunk(num: int, limit: int, unit: int) -> int:
    """Rows of each of the fewest equal chunks for `num` rows: whole units, at most `limit`; fewer
    than a unit stay one.

    So less than a unit of each chunk is padding. A limit below one unit counts as one.
    """
    if num < unit:
        return num
    chunks = -(-num // max(limit // unit * unit, unit))
    return -(-num // (chunks * unit)) * unit


def product(hidden, table, bias) -> tuple[jax.Array, jax.Array, jax.Array]:
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


def sums(
    hidden, embedding, bias, targets, weights, dtype, z_weight, chunk
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.cross_entropy`."""
    table = embedding.astype(dtype)

    def step(carry, piece):
        h, t, w = piece
        loss, z, _ = _chunk_loss(product(h.astype(dtype), table, bias), t, w, z_weight)
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


def forward(
    hidden, embedding, bias, targets, weights, dtype, z_weight, chunk
) -> tuple[tuple, tuple]:
    """See `pallas_kernels.cross_entropy`."""
    table = embedding.astype(dtype)

    def step(carry, piece):
        h, t, w = piece
        loss_sum, z_sum, d_table, d_bias = carry
        loss, z, (shares, total, log_z) = _chunk_loss(
            product(h.astype(dtype), table, bias), t, w, z_weight
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
