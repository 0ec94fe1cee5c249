"""Rotary positions: cos and sin of each position's angles, and the rotation by them."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rope_table(
    positions: Int[Array, "B S"], base: float, rotary_dim: int
) -> Float[Array, "B S half2"]:
    """cos and sin (side by side) of each position's angles, float32; `rotary_dim` channels turn in
    pairs."""
    inverse = 1.0 / base ** (jnp.arange(0, rotary_dim, 2, dtype=jnp.float32) / rotary_dim)
    angles = positions[..., None].astype(jnp.float32) * inverse
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def apply_rope(x: jax.Array, table: jax.Array) -> jax.Array:
    """Rotates channel i with channel i + rotary_dim / 2; the channels past rotary_dim pass
    through."""
    rotary_dim = table.shape[-1]
    cos, sin = jnp.split(table, 2, axis=-1)
    first, second, rest = jnp.split(x, (rotary_dim // 2, rotary_dim), axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def rotate(rope: list[tuple[Any, jax.Array]], x: jax.Array, heads: int = 2) -> jax.Array:
    """x [B, S, H, C], or with its heads at another place, rotated by the table of the layer's kind.

    Kinds that rotate other numbers of channels differ in data. An empty list means no rotation.
    """
    if not rope:
        return x
    out = apply_rope(x, jnp.expand_dims(rope[0][1], heads))
    for selected, table in rope[1:]:
        out = jnp.where(selected, apply_rope(x, jnp.expand_dims(table, heads)), out)
    return out
