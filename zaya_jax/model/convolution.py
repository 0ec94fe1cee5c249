"""CCA's two causal convolutions: one for each channel, then one for each head, a matrix product in either direction.

Letters: B batch, S sequence, G heads, C channels of a head; the taps of both look back T0 and T1 tokens, T in all. An
array over the sequence also holds the T tokens before it, or the last few of them. Heads lead: a CPU has no bfloat16
product with a batch dimension in the middle.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from zaya_jax.model.matmul import apart, sum_rows, sum_tokens


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def convolve(
    x: Float[Array, "G B S C"],
    before: Float[Array, "G B T C"] | None,
    by_channel: Float[Array, "T0+1 G C"],
    by_head: Float[Array, "T1+1 G C C"],
    segments: Int[Array, "B T+S"] | None,
    dtype,
) -> Float[Array, "G B S C"]:
    """Both convolutions without biases, in `dtype`, as is what passes between them.

    The last tap is the token itself. `before` are the tokens ahead of the first one, None for zeros. A token takes
    nothing from those of other `segments`; None is one segment.
    """
    extended, segments = _extended(x, before, segments, dtype)
    y = _each_channel(extended, by_channel, segments)
    z = _each_head(y, by_head.astype(dtype), segments).reshape(y.shape)
    return z[:, :, z.shape[2] - x.shape[2] :]


def _extended(x, before, segments, dtype):
    """x with the tokens before it, where they are given, and the segments of these and of as many before them."""
    if before is None:
        return x.astype(dtype), segments
    if segments is not None:  # what stands before all counts as zero, whatever its segment
        segments = jnp.pad(segments, ((0, 0), (before.shape[2], 0)))
    return jnp.concatenate([before.astype(dtype), x.astype(dtype)], axis=2), segments


def _each_channel(x, kernel, segments):
    last = kernel.shape[0] - 1
    taps = [_tap(x, segments, d) * kernel[last - d][:, None, None] for d in range(last, -1, -1)]
    return apart(sum(taps[1:], taps[0]).astype(x.dtype))


def _each_head(y, kernel, segments):
    last, (heads, channels) = kernel.shape[0] - 1, kernel.shape[1:3]
    taps = [_tap(y, segments, d) for d in range(last, -1, -1)]
    weights = kernel.transpose(1, 0, 2, 3).reshape(heads, -1, channels)
    return jnp.einsum("gni,gio->gno", _side_by_side(taps), weights, preferred_element_type=y.dtype)


def _convolve_fwd(x, before, by_channel, by_head, segments, dtype):
    out = convolve(x, before, by_channel, by_head, segments, dtype)
    return out, (x, before, by_channel, by_head, segments)


def _convolve_bwd(dtype, saved, d_out):
    """A token's gradient is a convolution of those of the tokens after it; tokens before count where they are given."""
    x, before, by_channel, by_head, segments = saved
    _, heads, channels, _ = by_head.shape
    t0, t1 = by_channel.shape[0] - 1, by_head.shape[0] - 1
    lead0, lead1 = (0, 0) if before is None else (t0, t1)  # tokens ahead of those whose gradients are wanted
    (x, segments), d_out = _extended(x, before, segments, dtype), apart(d_out).astype(dtype)
    length = d_out.shape[2]

    later = _side_by_side([_passed(d_out, segments, d, lead1) for d in range(t1, -1, -1)])
    weights = by_head.astype(dtype).transpose(1, 2, 0, 3).reshape(heads, channels, -1)
    dy = jnp.einsum("gno,gio->gni", later, weights, preferred_element_type=dtype)
    y = _each_channel(x, by_channel, segments)
    y = y[:, :, y.shape[2] - length - lead1 :]
    d_by_head = sum_rows("gni", "gno", "gio", _side_by_side([y]), later)
    d_by_head = d_by_head.reshape(heads, channels, -1, channels).transpose(2, 0, 1, 3)

    dy = dy.reshape(heads, x.shape[1], -1, channels)
    passed = apart([_passed(dy, segments, d, lead0) for d in range(t0, -1, -1)])
    dx = sum(p.astype(jnp.float32) * w[:, None, None] for p, w in zip(passed, by_channel, strict=True))
    own = x[:, :, x.shape[2] - dx.shape[2] :].astype(jnp.float32)
    d_by_channel = jnp.stack([sum_tokens(p.astype(jnp.float32) * own, axis=1) for p in passed])

    dx = apart(dx).astype(saved[0].dtype)
    d_before = None if before is None else dx[:, :, : t0 + t1].astype(before.dtype)
    dx = dx if before is None else dx[:, :, t0 + t1 :]
    return dx, d_before, d_by_channel, d_by_head.astype(by_head.dtype), None


convolve.defvjp(_convolve_fwd, _convolve_bwd)


def _tap(x, segments, distance):
    """What stands `distance` before each token, if in its segment; zero before the first one."""
    around = ((0, 0, 0), (0, 0, 0), (distance, -distance, 0), (0, 0, 0))
    return _within(lax.pad(x, jnp.zeros((), x.dtype), around), segments, distance)


def _passed(dz, segments, distance, lead):
    """What each token, from `lead` ones before, gets from the one `distance` after it, if in its segment."""
    around = ((0, 0, 0), (0, 0, 0), (lead - distance, distance, 0), (0, 0, 0))
    return lax.pad(_within(dz, segments, distance), jnp.zeros((), dz.dtype), around)


def _within(x, segments, distance):
    """x of the last tokens, but zero where the token `distance` before is of another segment."""
    if segments is None or distance == 0:
        return x
    length = x.shape[2]
    ends = segments[:, segments.shape[1] - length :]
    starts = segments[:, segments.shape[1] - length - distance :][:, :length]
    return jnp.where((ends == starts)[..., None], x, 0)


def _side_by_side(taps):
    """[G, B, S, C] each to [G, B S, all their channels]."""
    heads, batch, length, _ = taps[0].shape
    return jnp.concatenate(taps, axis=-1).reshape(heads, batch * length, -1)
