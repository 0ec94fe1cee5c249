"""Cross entropy on a GPU: `xla`'s chunks, with a product that also gives the soft-max's maxima and
sums.

Each tile of the product writes its float32 logits, and of each of its tokens the greatest and the
sum of exp(logit - greatest). So nothing reads a chunk's logits, 2.1 GB of ZAYA1's, before their
gradient is made of them; XLA takes two passes over them. Logits that never reach HBM would cost the
first product twice more, in the gradients of both sides: a quarter of all FLOPs of ZAYA1's step.

Tokens and channels must fill tiles (`fits`); other shapes are XLA's.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import chip, tiles
from pallas_kernels.cross_entropy import xla
from pallas_kernels.cross_entropy.xla import chunk_rows

__all__ = ["chunk_rows", "forward", "sums"]

WORDS, CHANNELS = 128, 64  # of a tile
# On NVIDIA two blocks of 128 rows fit a multiprocessor: one writes its logits while the other multiplies.
TILES = {
    "rocm": tiles.Product(256, WORDS, CHANNELS, warps=8),
    "cuda": tiles.Product(128, WORDS, CHANNELS, warps=8, stages=3),
}


def fits(tokens: int, channels: int, dtype) -> bool:
    """Whether the kernel takes a chunk of so many tokens."""
    return tokens % 128 == 0 and channels % CHANNELS == 0 and dtype in (jnp.bfloat16, jnp.float32)


def sums(
    hidden, embedding, bias, targets, weights, dtype, z_weight, chunk
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.cross_entropy`."""
    chosen = product if fits(chunk, hidden.shape[-1], dtype) else xla.product
    return xla.sums(hidden, embedding, bias, targets, weights, dtype, z_weight, chunk, chosen)


def forward(
    hidden, embedding, bias, targets, weights, dtype, z_weight, chunk
) -> tuple[tuple, tuple]:
    """See `pallas_kernels.cross_entropy`."""
    chosen = product if fits(chunk, hidden.shape[-1], dtype) else xla.product
    return xla.forward(hidden, embedding, bias, targets, weights, dtype, z_weight, chunk, chosen)


def product(hidden, table, bias) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Like `xla.product`."""
    (tokens, channels), vocab = hidden.shape, table.shape[0]
    wide = hidden.dtype == jnp.float32
    tile = TILES[chip.current().maker]
    tile = tile._replace(depth=CHANNELS // 2) if wide else tile
    tile = tile.suited("cross_entropy", hidden.dtype)
    rows, width = min(tile.rows, 128 if wide or tokens % 256 else 256), tile.depth
    down, across = tokens // rows, -(-vocab // WORDS)
    given = (hidden, table) if bias is None else (hidden, table, bias)

    def body(hidden, table, *others):
        offsets = None if bias is None else others[0]
        logits, tops, totals = others[-3:]
        _tile(hidden, table, offsets, logits, tops, totals, down, width, vocab)

    one = jax.ShapeDtypeStruct((across, tokens), jnp.float32)
    logits, tops, totals = tiles.call(
        body,
        *given,
        name="head_logits",
        grid=(down * across,),
        out_shapes=[jax.ShapeDtypeStruct((tokens, vocab), jnp.float32), one, one],
        work=tiles.Work(2.0 * tokens * vocab * channels),
        warps=tile.warps,
        stages=tile.stages,
    )
    top = tops.max(0)
    return logits, top, jnp.sum(totals * jnp.exp(tops - top), 0)


def _tile(hidden, table, bias, logits, tops, totals, down, width, vocab):
    # Neighbours share the words' rows of the table; all tokens' rows, 16.8 MB, fit MI300X's
    # Infinity Cache.
    across, first = tiles.program_id(0) // down, tiles.program_id(0) % down
    num = logits.shape[0] // down
    tokens, words = tiles.slice_of(first * num, num), tiles.slice_of(across * WORDS, WORDS)
    real = across * WORDS + jnp.arange(WORDS) < vocab if vocab % WORDS else None

    def step(i, acc):
        channels = tiles.slice_of(i * width, width)
        x = tiles.load(hidden.at[tokens, channels])
        w = table.at[words, channels]
        if real is None:
            w = tiles.load(w)
        else:
            w = tiles.load(w, mask=jnp.broadcast_to(real[:, None], (WORDS, width)), other=0.0)
        return acc + tiles.dot(x, w, transpose_y=True)

    found = jax.lax.fori_loop(
        0, hidden.shape[1] // width, step, jnp.zeros((num, WORDS), jnp.float32)
    )
    if bias is not None:
        found += tiles.load(bias.at[words], mask=real, other=0.0 if vocab % WORDS else None)
    inside = found if real is None else jnp.where(real, found, -jnp.inf)
    top = inside.max(-1)
    tops[across, tokens] = top
    # Words that a bias of -inf takes away may fill a tile: they add nothing, where -inf less -inf
    # is NaN.
    level = jnp.where(top == -jnp.inf, 0.0, top)
    totals[across, tokens] = jnp.exp(inside - level[:, None]).sum(-1)
    whole = None if real is None else jnp.broadcast_to(real, (num, WORDS))
    tiles.store(logits.at[tokens, words], found, mask=whole)
