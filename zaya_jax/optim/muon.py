"""Muon: momentum, orthogonalised by a Newton–Schulz iteration, for every weight that multiplies as
a matrix.

`scale_by_muon` is an Optax transformation from gradients to directions (nearly orthogonal matrices,
in the number format of the iteration, so that they can travel between devices in it);
`matrix_scale` is their size. The last two dims of a leaf are the matrix [in, out]; all dims before
them are a stack of matrices, never folded into one. `zaya_jax.optim.chain` puts the parts together
with AdamW.

    momentum    buf <- lerp(buf, g, 1 - mu)
                u = lerp(g, buf, mu) with Nesterov, otherwise u = buf
    direction   X = u / max(|u|_F, eps)
                for each (a, b, c):  G = X X^T,  X <- a X + (b G + c G G) X
    scale       match_rms_adamw   0.2 sqrt(max(in, out))
                spectral          sqrt(max(1, out / in))

An orthogonal [in, out] has root mean square 1 / sqrt(max(in, out)), and 0.2 is about that of an
AdamW update: with `match_rms_adamw` one learning rate and one decay serve both. `spectral` is a
unit step in the norm from root mean square to root mean square.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from pallas_kernels.loops import expected_turns
from pallas_kernels.newton_schulz import orthogonalize

Polynomials = tuple[tuple[float, float, float], ...]  # (a, b, c) of each step of the iteration

# Of the first steps; further steps repeat the last entry.
COEFFICIENTS: dict[str, Polynomials] = {
    # As steep at zero as a quintic can be. Singular values do not converge to 1 but end in about
    # [0.7, 1.2].
    "keller_jordan": ((3.4445, -4.7750, 2.0315),),
    # Polar Express: each polynomial is the odd quintic closest to 1 on the interval into which the
    # earlier ones map singular values from [0.001, 1]. It takes this interval no wider than a ratio
    # of 1 / 0.0240733; otherwise the first steps would nearly remove the middle singular values
    # to raise the small ones. Arguments are divided by 1.01, so that a singular value that rounding
    # has put above 1 stays where the polynomial is tame.
    "polar_express": (
        (8.205160210537189, -22.901933374246504, 16.46072352487413),
        (4.066395061712614, -2.861153886509466, 0.518399479160231),
        (3.909594823347207, -2.8233515428792058, 0.5250369331027644),
        (3.2855640671843847, -2.4153019961587363, 0.4852940695829987),
        (2.2778733304251326, -1.6198218033865306, 0.3984807910804417),
        (1.8725756556570827, -1.2307042622008915, 0.3585161625593776),
        (1.8564371097556467, -1.2132392819169844, 0.35679978941247253),
        (1.856435641633997, -1.2132376811249082, 0.35679963099749334),
        (1.8564356435643565, -1.2132376849095554, 0.35679963285253075),
    ),
}
# Up to this many numbers a stack is orthogonalised at once, float32 copies included.
MAX_AT_ONCE = 2**26
# The numbers that one iteration of a loop over matrices takes: one matrix of 2048 x 4096.
CHUNK = 2**23


def coefficients(name: str, steps: int) -> Polynomials:
    """One (a, b, c) for each step."""
    table = COEFFICIENTS[name]
    return (table + table[-1:] * steps)[:steps]


def orthogonalize_in_use(
    x: jax.Array, in_use: jax.Array | int | None, polynomials: Polynomials, dtype: Any
) -> jax.Array:
    """Orthogonalises the first `in_use` of the matrices [n, a, b] (None: all), zeros after them.

    It is a loop, whose length may differ from device to device, so matrices that a device does not
    own cost nothing. Small matrices go through it several at a time.
    """
    if in_use is None:
        return orthogonalize(x, polynomials, dtype)
    at_once = min(len(x), max(1, CHUNK // math.prod(x.shape[1:])))
    if isinstance(in_use, int) and in_use == len(x) == at_once:
        return orthogonalize(x, polynomials, dtype)

    def iteration(i: jax.Array, result: jax.Array) -> jax.Array:
        # The last iteration may overlap the one before it.
        start = jnp.minimum(i * at_once, len(x) - at_once)
        part = jax.lax.dynamic_slice_in_dim(x, start, at_once)
        return jax.lax.dynamic_update_slice_in_dim(
            result, orthogonalize(part, polynomials, dtype), start, 0
        )

    with expected_turns(-(-len(x) // at_once)):  # on the device that owns most
        return jax.lax.fori_loop(0, -(-in_use // at_once), iteration, jnp.zeros(x.shape, dtype))


def scale_by_muon(
    momentum: float,
    nesterov: bool,
    polynomials: Polynomials,
    dtype: Any,
    momentum_dtype: Any = jnp.float32,
    owned: Callable[[], Mapping[str, jax.Array | int]] = dict,
) -> optax.GradientTransformationExtraArgs:
    """Turns gradients [..., in, out] into directions in `dtype`. Its state is the momentum of each,
    which adds up in float32 whatever format it is kept in.

    `owned`, called at each update, gives the number of matrices in use (the first ones) of leaves
    that use only some, by name. `clip` is applied to each gradient first. With `keep` false, a
    value at run time, momentum stays as it is, and directions are finite for any gradients.
    """

    def init(params):
        return jax.tree.map(lambda p: jnp.zeros(p.shape, momentum_dtype), params)

    def update(updates, momenta, params=None, *, keep=True, clip=lambda g: g):
        def momentum_step(g, buf):
            """What is orthogonalised, and the new momentum."""
            g = clip(g.astype(jnp.float32))
            old = buf.astype(jnp.float32)
            if keep is not True:
                g = jnp.where(keep, g, old)
            new = old + (g - old) * (1 - momentum)
            direction = new
            if nesterov:
                direction = new + (g - new) * (1 - momentum)
            new = new.astype(buf.dtype)
            if keep is not True:
                new = jnp.where(keep, new, buf)
            return direction, new

        def in_chunks(g, buf):
            """A few matrices of a large stack at a time, with its momentum in place."""
            shape, size = g.shape, math.prod(g.shape[-2:])
            g, buf = g.reshape(-1, *shape[-2:]), buf.reshape(-1, *shape[-2:])
            at_once = greatest_divisor(len(g), max(CHUNK // size, 1))

            def iteration(i, carry):
                buf, result = carry
                start = i * at_once
                part = jax.lax.dynamic_slice_in_dim(g, start, at_once)
                old = jax.lax.dynamic_slice_in_dim(buf, start, at_once)
                direction, new = momentum_step(part, old)
                direction = orthogonalize(direction, polynomials, dtype)
                buf = jax.lax.dynamic_update_slice_in_dim(buf, new, start, 0)
                result = jax.lax.dynamic_update_slice_in_dim(result, direction, start, 0)
                return buf, result

            start = (buf, jnp.zeros(g.shape, dtype))
            buf, result = jax.lax.fori_loop(0, len(g) // at_once, iteration, start)
            return result.reshape(shape), buf.reshape(shape)

        in_use = owned()
        leaves, structure = jax.tree_util.tree_flatten_with_path(updates)
        directions, after = [], []
        for (path, g), buf in zip(leaves, jax.tree.leaves(momenta), strict=True):
            number = in_use.get(path[-1].key) if path else None
            if number is None and g.size > MAX_AT_ONCE:
                direction, new = in_chunks(g, buf)
            else:
                direction, new = momentum_step(g, buf)
                direction = orthogonalize_in_use(direction, number, polynomials, dtype)
            directions.append(direction)
            after.append(new)
        return jax.tree.unflatten(structure, directions), jax.tree.unflatten(structure, after)

    return optax.GradientTransformationExtraArgs(init, update)


def greatest_divisor(n: int, most: int) -> int:
    """The greatest divisor of n that is at most `most`."""
    return next(d for d in range(min(n, most), 0, -1) if n % d == 0)


def matrix_scale(kind: str, shape: tuple[int, ...]) -> float:
    """The factor that gives an orthogonal direction [..., in, out] its size; see the module's
    head."""
    rows, columns = shape[-2:]
    if kind == "spectral":
        return math.sqrt(max(1.0, columns / rows))
    assert kind == "match_rms_adamw"
    return 0.2 * math.sqrt(max(rows, columns))


def newton_schulz_flops(shape: tuple[int, ...], steps: int = 5) -> int:
    """FLOPs for a stack [..., a, b]: steps · (4 m² n + 2 m³) per matrix, m the short side, n the
    long one."""
    m, n = sorted(shape[-2:])
    return math.prod(shape[:-2]) * steps * (4 * m * m * n + 2 * m**3)
