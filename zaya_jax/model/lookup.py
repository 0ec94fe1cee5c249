"""Rows of a table by index, and the table's gradient in one order of summation on any chip.

Automatic differentiation gives a scatter-add, which a GPU does by atomic additions: a frequent word
gets its sum in another order each time, so two runs of one program differ in bits. Sorting costs a
CPU 0.5% of a step of `tiny` (1.005 and 1.004 in bfloat16 and float32, medians of 20 pairs on two
cores). Letters: N look-ups, V rows, D numbers each.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.loops import expected_turns

MAX_WORD_SHARE = 0.05  # of a text's most frequent word


@jax.custom_vjp
def lookup(table: Float[Array, "V D"], index: Int[Array, "*N"]) -> Float[Array, "*N D"]:
    """table[index]; indices must be within the table. Inside `shard_map` only with
    check_vma=False."""
    return table[index]


def _lookup_fwd(table, index):
    return table[index], (jnp.asarray(index), jnp.zeros((table.shape[0], 0), table.dtype))


def _lookup_bwd(saved, d):
    index, like = saved
    summed = sum_by_index(d.reshape(-1, d.shape[-1]), index.reshape(-1), like.shape[0])
    return summed.astype(like.dtype), None


lookup.defvjp(_lookup_fwd, _lookup_bwd)


def sum_by_index(x: Float[Array, "N D"], index: Int[Array, "N"], num: int) -> Float[Array, "V D"]:
    """The sum of the rows of x that have each index below `num`, in an order that depends only on
    the indices.

    Rows are sorted by index and each run is summed in passes: after the k-th one a row holds the
    sum of the last 2^k rows of its run. A pass reads x twice and writes it once; as many run as the
    longest run needs.
    """
    if not index.size:
        return jnp.zeros((num, x.shape[1]), x.dtype)
    order = jnp.argsort(index, stable=True)
    index, x = index[order], x[order]
    place = jnp.arange(index.size, dtype=jnp.int32)
    begins = jnp.concatenate([jnp.ones(1, bool), index[1:] != index[:-1]])
    rank = place - lax.cummax(jnp.where(begins, place, 0))  # within its run
    longest = rank.max() + 1

    def add(carry):
        reach, x = carry
        return 2 * reach, x + jnp.where((rank >= reach)[:, None], jnp.roll(x, reach, axis=0), 0)

    with expected_turns(math.ceil(math.log2(max(MAX_WORD_SHARE * index.size, 1)))):
        _, x = lax.while_loop(lambda carry: carry[0] < longest, add, (jnp.int32(1), x))
    ends = jnp.concatenate([begins[1:], jnp.ones(1, bool)])
    # A run's last row is written; the others go to distinct places after the table, where they are
    # dropped.
    target = jnp.where(ends, index, num + place)
    return jnp.zeros((num, x.shape[1]), x.dtype).at[target].set(x, mode="drop", unique_indices=True)
