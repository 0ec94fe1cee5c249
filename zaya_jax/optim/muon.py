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

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pallas_kernels.loops import turning
from pallas_kernels.newton_schulz import orthogonalize

COEFFICIENTS = ("keller_jordan", "polar_express")
SCALES = ("match_rms_adamw", "spectral")
# As steep at zero as a quintic can be; singular values do not converge to 1 but end in about
# [0.7, 1.2].
KELLER_JORDAN = (3.4445, -4.7750, 2.0315)
# numbers of a stack up to which all of it is orthogonalised at once, its float32 copies included
WHOLE = 2**26
# numbers that go through one turn of the loop over a device's matrices: one of 2048×4096
TURN = 2**23


class MuonState(NamedTuple):
    """The momentum, one array per leaf."""

    momentum: Any


def coefficients(name: str, steps: int) -> tuple[tuple[float, float, float], ...]:
    """One (a, b, c) for each step."""
    if name == "keller_jordan":
        return (KELLER_JORDAN,) * steps
    if name == "polar_express":
        return polar_express(steps)
    raise ValueError(
        f"Newton–Schulz coefficients {name!r} are not one of {', '.join(COEFFICIENTS)}"
    )


@functools.cache
def polar_express(
    steps: int, smallest: float = 1e-3, head_room: float = 1.01, cushion: float = 0.0240733
) -> tuple[tuple[float, float, float], ...]:
    """Polar Express's polynomials: each the odd quintic nearest to 1 on the interval that the
    earlier ones leave.

    The first interval is [smallest, 1]. An interval is taken no wider than a ratio of 1 /
    `cushion`, or the first steps would raise the small singular values by letting the middle ones
    nearly vanish. `head_room` shrinks each argument, so that a singular value that rounding has put
    above 1 stays where the polynomial is tame; at 1 it changes nothing, all later polynomials being
    flat there.
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
    """(a, b, c) of the odd quintic with the least greatest distance from 1 on [low, high], by
    Remez."""
    # The limit: value 1 and two vanishing derivatives at the one remaining point.
    if low / high > 1 - 5e-6:
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


def orthogonalize_first(
    x: jax.Array,
    number: jax.Array | int | None,
    polynomials: tuple[tuple[float, float, float], ...],
    dtype: Any,
) -> jax.Array:
    """The first `number` of matrices [n, a, b], zeros after them; all of them if it is None.

    A loop, whose length may differ from device to device: matrices that a device does not own cost
    nothing. Small matrices go through it several at a time.
    """
    if number is None:
        return orthogonalize(x, polynomials, dtype)
    at_once = min(len(x), max(1, TURN // math.prod(x.shape[1:])))
    if isinstance(number, int) and number == len(x) == at_once:
        return orthogonalize(x, polynomials, dtype)

    def turn(i, result):
        start = jnp.minimum(i * at_once, len(x) - at_once)  # the last turn may do some again
        part = jax.lax.dynamic_slice_in_dim(x, start, at_once)
        return jax.lax.dynamic_update_slice_in_dim(
            result, orthogonalize(part, polynomials, dtype), start, 0
        )

    with turning(-(-len(x) // at_once)):  # on the device that owns most
        return jax.lax.fori_loop(0, -(-number // at_once), turn, jnp.zeros(x.shape, dtype))


def scale_by_muon(
    momentum: float = 0.95,
    nesterov: bool = True,
    polynomials: tuple[tuple[float, float, float], ...] = (KELLER_JORDAN,) * 5,
    dtype: Any = jnp.bfloat16,
    momentum_dtype: Any = jnp.float32,
    owned: Callable[[], Mapping[str, jax.Array | int]] = dict,
) -> optax.GradientTransformation:
    """Gradients [..., in, out] to directions in `dtype`; momentum adds up in float32 however it is
    kept.

    `owned`, called at each update, gives the number of matrices in use (the first ones) of leaves
    that use only some. `clip` is applied to each gradient first. With `keep` false, a number at run
    time, momentum stays as it is, and directions are finite for any gradients.
    """

    def init(params):
        return MuonState(jax.tree.map(lambda p: jnp.zeros(p.shape, momentum_dtype), params))

    def update(updates, state, params=None, *, keep=True, clip=lambda g: g, **extra):
        del params, extra
        numbers = owned()

        def moved(g, kept):
            g, buf = clip(g.astype(jnp.float32)), kept.astype(jnp.float32)
            g = g if keep is True else jnp.where(keep, g, buf)
            buf = buf + (g - buf) * (1 - momentum)
            u, buf = buf + (g - buf) * (1 - momentum) if nesterov else buf, buf.astype(kept.dtype)
            return u, buf if keep is True else jnp.where(keep, buf, kept)

        def step(path, g, kept):
            number = numbers.get(str(getattr(path[-1], "key", ""))) if path else None
            if number is None and g.size > WHOLE:
                return in_turns(g, kept)
            u, kept = moved(g, kept)
            return orthogonalize_first(u, number, polynomials, dtype), kept

        def in_turns(g, kept):
            """A few matrices of a large stack at a time, with its momentum in place."""
            shape, size = g.shape, math.prod(g.shape[-2:])
            g, kept = (x.reshape(-1, *shape[-2:]) for x in (g, kept))
            at_once = max(
                n for n in range(1, len(g) + 1) if len(g) % n == 0 and (n == 1 or n * size <= TURN)
            )

            def turn(i, carry):
                part = functools.partial(
                    jax.lax.dynamic_slice_in_dim, start_index=i * at_once, slice_size=at_once
                )
                u, buf = moved(part(g), part(carry[0]))
                found = buf, orthogonalize(u, polynomials, dtype)
                put = functools.partial(
                    jax.lax.dynamic_update_slice_in_dim, start_index=i * at_once, axis=0
                )
                return tuple(put(x, new) for x, new in zip(carry, found, strict=True))

            kept, result = jax.lax.fori_loop(
                0, len(g) // at_once, turn, (kept, jnp.zeros(g.shape, dtype))
            )
            return result.reshape(shape), kept.reshape(shape)

        grads, structure = jax.tree_util.tree_flatten_with_path(updates)
        pairs = [
            step(*pair, kept)
            for pair, kept in zip(grads, jax.tree.leaves(state.momentum), strict=True)
        ]
        directions, momenta = ([pair[i] for pair in pairs] for i in (0, 1))
        return jax.tree.unflatten(structure, directions), MuonState(
            jax.tree.unflatten(structure, momenta)
        )

    return optax.GradientTransformationExtraArgs(init, update)


def matrix_scale(kind: str, shape: tuple[int, ...]) -> float:
    """The factor that gives an orthogonal direction [..., in, out] its size; see the module's
    head."""
    rows, columns = shape[-2:]
    if kind == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    if kind == "spectral":
        return math.sqrt(max(1.0, columns / rows))
    raise ValueError(f"Muon's scale {kind!r} is not one of {', '.join(SCALES)}")


def newton_schulz_flops(shape: tuple[int, ...], steps: int = 5) -> int:
    """FLOPs for a stack [..., a, b]: steps · (4 m² n + 2 m³) per matrix, m the short side, n the
    long one."""
    m, n = sorted(shape[-2:])
    return math.prod(shape[:-2]) * steps * (4 * m * m * n + 2 * m**3)
