"""The rows of a tile in both attentions' kernels for GPUs: some tokens, times those of a group's
heads that fit."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import chip, table, tiles

LOG2E = math.log2(math.e)


class Tile(NamedTuple):
    """Sizes of a kernel: rows (queries times heads) against keys."""

    rows: int
    keys: int
    warps: int = 4
    stages: int = 1

    @classmethod
    def of(cls, kernel: str, channels: int, dtype: Any) -> "Tile":
        """The table's, for heads of so many channels."""
        variant = table.variant_of(channels, jnp.dtype(dtype).itemsize)
        return tiles.tile_of(cls, kernel, variant)

    def heads_of(self, group: int) -> int:
        """Heads of a group in one tile: the largest power of two that divides the group."""
        return min(group & -group, self.rows)


def formats() -> tuple[Any, ...]:
    """The number formats of the chip's matrix units."""
    return tuple(map(jnp.dtype, chip.current().formats))


def flat(**arrays: jax.Array | None) -> dict[str, jax.Array | None]:
    """[B, S, heads, ..] as the kernels take them, tokens times heads in a row: no copy."""
    return {
        name: x if x is None else x.reshape(len(x), -1, *x.shape[3:]) for name, x in arrays.items()
    }


def flat_like(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """The same of one that a kernel writes."""
    return jax.ShapeDtypeStruct((shape[0], shape[1] * shape[2], *shape[3:]), dtype)


def facing(of_rows: jax.Array, of_keys: jax.Array, by_row: bool) -> tuple[jax.Array, jax.Array]:
    """Numbers of rows and of keys as sides of a tile [rows, keys] if `by_row`, otherwise [keys,
    rows]."""
    if by_row:
        return of_rows[:, None], of_keys[None]
    return of_rows[None], of_keys[:, None]


def wide(channels: int) -> int:
    """Channels of a tile."""
    return max(16, tiles.power(channels))


class HeadRows:
    """A program's access to its rows in arrays of [B, tokens times heads, C], or without C: these
    tokens, of this head, or each of the head beside it in `head`.

    `real` says which of the tokens exist; None: all of them.
    """

    def __init__(self, batch, tokens, head, num_heads: int, channels: int, real: jax.Array | None):
        self.batch, self.tokens, self.channels, self.real = batch, tokens, channels, real
        self.index = tokens * num_heads + head

    def load(self, ref, columns=None, *, inner: bool = False, other: float = 0) -> jax.Array:
        """All channels, or `columns` = (first, how many); zeros behind them and behind the
        sequence.

        An `inner` block does not reach past the sequence's end. `other` is the value there in
        arrays without channels.
        """
        real = None if inner else self.real
        if len(ref.shape) < 3:
            return tiles.load_masked(ref.at[self.batch, self.index], real, other)
        columns, real_columns = self.at_columns(columns)
        return tiles.take(
            ref, self.batch, rows=self.index, columns=columns, real=(real, real_columns)
        )

    def at_columns(self, columns=None) -> tuple[jax.Array, jax.Array | None]:
        """The places of these channels, and which of them exist."""
        start, size = (jnp.int32(0), wide(self.channels)) if columns is None else columns
        return tiles.within(start, size, self.channels)

    def store(self, ref, x: jax.Array) -> None:
        if len(ref.shape) < 3:
            tiles.store(ref.at[self.batch, self.index], x, mask=self.real)
        else:
            columns, real_columns = self.at_columns()
            tiles.put(
                ref, x, self.batch, rows=self.index, columns=columns, real=(self.real, real_columns)
            )

    def ids(self, ref) -> jax.Array | None:
        """The tokens' segments, if any."""
        return (
            None if ref is None else tiles.load_masked(ref.at[self.batch, self.tokens], self.real)
        )
