"""The static sizes of linear attention's kernels for GPUs, and how tiles fill them."""

from typing import Any, NamedTuple

from pallas_kernels import tiles
from pallas_kernels.rows import Tile, wide

CHUNK = 128  # tokens: as many as a head has channels balances the two products


def chunk_of(chunk: int | None, seq: int) -> int:
    """A power of two, of at least a tile."""
    return max(16, tiles.power(min(chunk or CHUNK, seq)))


class Shape(NamedTuple):
    """The static sizes of the kernels."""

    batch: int
    length: int
    heads: int  # of queries
    num_kv: int
    channels: int
    chunk: int
    whole: bool  # features and quotient are made here
    segments: bool
    dtype: Any

    @property
    def group(self) -> int:
        return self.heads // self.num_kv

    @property
    def chunks(self) -> int:
        return -(-self.length // self.chunk)

    @property
    def wide(self) -> int:
        """Channels of a tile."""
        return wide(self.channels)

    @property
    def slice(self) -> int:
        """Channels of a state that a product takes at once: an operand's slice is loaded, not
        cut."""
        return min(self.wide, 32)

    def tile_of(self, kernel: str) -> "FilledTile":
        """A kernel's tile, as this shape fills it."""
        sizes = Tile.of(f"linear_{kernel}", self.channels, self.dtype)
        heads = sizes.heads_of(self.group)
        queries = min(max(sizes.rows // heads, 1), self.chunk)
        return FilledTile(sizes, heads, self.group // heads, queries, min(sizes.keys, self.chunk))


class FilledTile(NamedTuple):
    """The part of a chunk that a program has at once."""

    sizes: Tile  # of the table
    heads: int  # of a group in one tile
    parts: int  # tiles that a group's heads are cut into
    queries: int
    keys: int

    @property
    def rows(self) -> int:
        return self.heads * self.queries


def shape_of(q, k, segments, chunk, whole) -> Shape:
    """That of a call, arrays as the model has them."""
    batch, length, heads, channels = q.shape
    return Shape(
        batch, length, heads, k.shape[2], channels, chunk, whole, segments is not None, q.dtype
    )
