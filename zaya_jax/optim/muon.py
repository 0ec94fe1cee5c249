"""Muon: momentum, orthogonalised by a Newton–Schulz iteration, for every weight that multiplies as a matrix.

`scale_by_muon` is an Optax transformation from gradients to directions (nearly orthogonal matrices, in the
number format of the iteration, so that they can travel between devices in it); `matrix_scale` is their size.
The last two dims of a leaf are the matrix [in, out]; all dims before them are a stack of matrices, never
folded into one. `zaya_jax.optim.chain` puts the parts together with AdamW.

    momentum   buf <- lerp(buf, g, 1 - mu);   with Nesterov u = lerp(g, buf, mu), else u = buf direction  X =
    u / max(|u|_F, eps);   then for each (a, b, c): G = X X^T,  X <- a X + (b G + c G G) X scale
    match_rms_adamw 0.2 sqrt(max(in, out)): an orthogonal [in, out] has root mean square 1/sqrt(max(in, out)),
               and 0.2 is about that of an AdamW update, so that one learning rate and one decay serve both
               spectral        sqrt(max(1, out / in)): a unit step in the norm from root mean square to root
               mean square
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zaya_jax.model.matmul import whole

COEFFICIENTS = ("keller_jordan", "polar_express")
SCALES = ("match_rms_adamw", "spectral")
# As steep at zero as a quintic can be; singular values do not converge to 1 but end in about [0.7, 1.2].
KELLER_JORDAN = (3.4445, -4.7750, 2.0315)


class MuonState(NamedTuple):
    """The momentum, one array a leaf."""

    momentum: Any


def coefficients(name: str, steps: int) -> tuple[tuple[float, float, float], ...]:
    """One (a, b, c) for each step."""
    if name == "keller_jordan":
        return (KELLER_JORDAN,) * steps
    if name == "polar_express":
        return polar_express(steps)
    raise ValueError(f"Newton–Schulz coefficients {name!r} are not one of {', '.join(COEFFICIENTS)}")


@functools.cache
def polar_express(
    steps: int, smallest: float = 1e-3, head_room: float = 1.01, cushion: float = 0.0240733
) -> tuple[tuple[float, float, float], ...]:
    """Polar Express's polynomials: each the odd quintic nearest to 1 on the interval that those before it
    leave.

    The first interval is [smallest, 1]. An interval is taken no wider than a ratio of 1 / `cushion`, or the
    first steps would raise the small singular values by letting the middle ones nearly vanish. `head_room`
    shrinks each argument, so that a singular value that rounding has put above 1 stays where the polynomial
    is tame; at 1 it changes nothing, all later polynomials being flat there.
    """
    low, high, result = smallest, 1.0, []
    for _ in range(steps):
        a, b, c = _nearest_quintic(max(low, cushion * high), high)
        value = lambda x: a * x + b * x**3 + c * x**5  # noqa: B023, E731
        if cushion * high > low:  # centre the wider interval's image on 1
            centre = 2 / (value(low) + value(high))
            a, b, c = a * centre, b * centre, c * centre
        low = a * low + b * low**3 + c * low**5
        high = 2 - low
        result.append((float(a / head_room), float(b / head_room**3), float(c / head_room**5)))
    return tuple(result)


def _nearest_quintic(low: float, high: float) -> tuple[float, float, float]:
    """(a, b, c) of the odd quintic with the least greatest distance from 1 on [low, high], by Remez."""
    if (
        low / high > 1 - 5e-6
    ):  # the limit: value 1 and two vanishing derivatives at the one point that is left
        return 15 / 8 / high, -10 / 8 / high**3, 3 / 8 / high**5
    inner = [(3 * low + high) / 4, (low + 3 * high) / 4]
    for _ in range(100):
        points = np.array([low, *inner, high])
        system = np.stack([points, points**3, points**5, [1.0, -1.0, 1.0, -1.0]], 1)
        a, b, c, _ = np.linalg.solve(system, np.ones(4))
        root = math.sqrt(9 * b * b - 20 * a * c)
        moved = [math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c))]
        if np.allclose(moved, inner, rtol=1e-14, atol=0):
            break
        inner = moved
    return a, b, c


def orthogonalize(
    x: jax.Array,
    polynomials: tuple[tuple[float, float, float], ...],
    dtype: Any = jnp.bfloat16,
    eps: float = 1e-7,
) -> jax.Array:
    """Pushes the singular values of each matrix [..., a, b] towards 1, in `dtype`; zero stays zero.

    Leading dims are batch dims of every product and are nowhere reshaped: sharded over them, it runs without
    a collective.
    """
    tall = x.shape[-2] > x.shape[-1]
    norm = jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), (-2, -1), keepdims=True))
    x = (x / jnp.maximum(norm, eps)).astype(dtype)
    if tall:
        x = jnp.swapaxes(x, -1, -2)
    x = _row_major(x)
    # Sums and coefficients in float32, one rounding each: with 3.4445 and the products in bfloat16 the result
    # is five times as far from the float32 iteration's (0.059 against 0.015, PyTorch's 0.015), and no faster.
    float32 = jnp.float32
    product = functools.partial(jnp.einsum, precision=whole(dtype), preferred_element_type=float32)
    for a, b, c in polynomials:
        gram = product("...ij,...kj->...ik", x, x).astype(dtype)
        factor = b * gram.astype(float32) + c * product("...ij,...jk->...ik", gram, gram)
        x = a * x.astype(float32) + product("...ij,...jk->...ik", factor.astype(dtype), x)
        x = x.astype(dtype)
    return jnp.swapaxes(_row_major(x), -1, -2) if tall else x


def _row_major(x: jax.Array) -> jax.Array:
    """Pins the memory order of the matrices: the compiler may not push a transposition through the iteration.

    Without it XLA:CPU keeps a tall matrix transposed throughout, finds no bfloat16 product for that order and
    multiplies in float32: half as fast (32 of 1408×512: 1.45 s against 0.78 s on two cores). Elsewhere it
    costs one copy at most.
    """
    flat = jax.lax.optimization_barrier(x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1]))
    return flat.reshape(x.shape)


def scale_by_muon(
    momentum: float = 0.95,
    nesterov: bool = True,
    polynomials: tuple[tuple[float, float, float], ...] = (KELLER_JORDAN,) * 5,
    dtype: Any = jnp.bfloat16,
    momentum_dtype: Any = jnp.float32,
) -> optax.GradientTransformation:
    """Gradients [..., in, out] to directions in `dtype`; momentum adds up in float32 however it is kept."""

    def init(params):
        return MuonState(jax.tree.map(lambda p: jnp.zeros(p.shape, momentum_dtype), params))

    def update(updates, state, params=None):
        del params

        def step(g, kept):
            g, buf = g.astype(jnp.float32), kept.astype(jnp.float32)
            buf = buf + (g - buf) * (1 - momentum)
            u = buf + (g - buf) * (1 - momentum) if nesterov else buf
            return orthogonalize(u, polynomials, dtype), buf.astype(kept.dtype)

        grads, structure = jax.tree.flatten(updates)
        pairs = [step(g, kept) for g, kept in zip(grads, jax.tree.leaves(state.momentum), strict=True)]
        directions, momenta = ([pair[i] for pair in pairs] for i in (0, 1))
        return jax.tree.unflatten(structure, directions), MuonState(jax.tree.unflatten(structure, momenta))

    return optax.GradientTransformation(init, update)


def matrix_scale(kind: str, shape: tuple[int, ...]) -> float:
    """The factor that gives an orthogonal direction [..., in, out] its size; see the module's head."""
    rows, columns = shape[-2:]
    if kind == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    if kind == "spectral":
        return math.sqrt(max(1.0, columns / rows))
    raise ValueError(f"Muon's scale {kind!r} is not one of {', '.join(SCALES)}")


def newton_schulz_flops(shape: tuple[int, ...], steps: int = 5) -> int:
    """FLOPs for a stack [..., a, b]: steps · (4 m² n + 2 m³) a matrix, m the short side, n the long one."""
    m, n = sorted(shape[-2:])
    return math.prod(shape[:-2]) * steps * (4 * m * m * n + 2 * m**3)
