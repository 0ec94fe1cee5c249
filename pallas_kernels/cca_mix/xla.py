"""CCA's convolutions and the path around them, for XLA: taps by padding, each head's convolution as
one matrix product.

Letters as in `pallas_kernels.cca_mix`. Heads lead: a CPU has no bfloat16 product with a batch
dimension in the middle.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.products import sum_rows
from pallas_kernels.rotary import rotate

NORM_FLOOR = 1.1920929e-07  # float32's epsilon, the port's floor under a head's norm


def convolve(x, before, by_channel, by_head, segments, dtype) -> jax.Array:
    """See `pallas_kernels.cca_mix`."""
    extended, segments = _extended(x, before, segments, dtype)
    y = _each_channel(extended, by_channel, segments)
    z = _each_head(y, by_head.astype(dtype), segments).reshape(y.shape)
    return z[:, :, z.shape[2] - x.shape[2] :]


def convolve_gradients(x, before, by_channel, by_head, segments, dtype, d_out) -> tuple:
    """See `pallas_kernels.cca_mix`.

    A token's gradient is a convolution of those of the tokens after it; tokens before count where
    they are given.
    """
    given = x
    _, heads, channels, _ = by_head.shape
    t0, t1 = by_channel.shape[0] - 1, by_head.shape[0] - 1
    # tokens ahead of those whose gradients are wanted
    lead0, lead1 = (0, 0) if before is None else (t0, t1)
    (x, segments), d_out = _extended(x, before, segments, dtype), d_out.astype(dtype)
    length = d_out.shape[2]

    later = _side_by_side([_passed(d_out, segments, d, lead1) for d in range(t1, -1, -1)])
    weights = by_head.astype(dtype).transpose(1, 2, 0, 3).reshape(heads, channels, -1)
    dy = jnp.einsum("gno,gio->gni", later, weights, preferred_element_type=dtype)
    y = _each_channel(x, by_channel, segments)
    y = y[:, :, y.shape[2] - length - lead1 :]
    d_by_head = sum_rows("gni", "gno", "gio", _side_by_side([y]), later)
    d_by_head = d_by_head.reshape(heads, channels, -1, channels).transpose(2, 0, 1, 3)

    dy = dy.reshape(heads, x.shape[1], -1, channels)
    passed = [_passed(dy, segments, d, lead0) for d in range(t0, -1, -1)]
    dx = sum(
        p.astype(jnp.float32) * w[:, None, None] for p, w in zip(passed, by_channel, strict=True)
    )
    current = x[:, :, x.shape[2] - dx.shape[2] :].astype(jnp.float32)
    d_by_channel = jnp.stack([(p.astype(jnp.float32) * current).sum((1, 2)) for p in passed])

    dx = dx.astype(given.dtype)
    d_before = None if before is None else dx[:, :, : t0 + t1].astype(before.dtype)
    dx = dx if before is None else dx[:, :, t0 + t1 :]
    return dx, d_before, d_by_channel, d_by_head.astype(by_head.dtype)


def _extended(x, before, segments, dtype):
    """x with the tokens before it, where they are given, and the segments of these and of as many
    before them."""
    if before is None:
        return x.astype(dtype), segments
    if segments is not None:  # columns before the first count as zero, in any segment
        segments = jnp.pad(segments, ((0, 0), (before.shape[2], 0)))
    return jnp.concatenate([before.astype(dtype), x.astype(dtype)], axis=2), segments


def _each_channel(x, kernel, segments):
    last = kernel.shape[0] - 1
    taps = [_tap(x, segments, d) * kernel[last - d][:, None, None] for d in range(last, -1, -1)]
    return sum(taps[1:], taps[0]).astype(x.dtype)


def _each_head(y, kernel, segments):
    last, (heads, channels) = kernel.shape[0] - 1, kernel.shape[1:3]
    taps = [_tap(y, segments, d) for d in range(last, -1, -1)]
    weights = kernel.transpose(1, 0, 2, 3).reshape(heads, -1, channels)
    return jnp.einsum("gni,gio->gno", _side_by_side(taps), weights, preferred_element_type=y.dtype)


def _tap(x, segments, distance):
    """The column `distance` before each token, if in its segment; zero before the first one."""
    around = ((0, 0, 0), (0, 0, 0), (distance, -distance, 0), (0, 0, 0))
    return _within(lax.pad(x, jnp.zeros((), x.dtype), around), segments, distance)


def _passed(dz, segments, distance, lead):
    """The value that each token, from `lead` ones before, gets from the one `distance` after it, if
    in its segment."""
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


def queries_and_keys(
    by_head, mixed, bias, temperature, rope, num_kv, mean_q, before_norm=lambda x: x
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.cca_mix`."""
    num_heads = mixed.shape[0] - num_kv
    q, k = jnp.split(by_head.astype(jnp.float32), (num_heads,))
    if mean_q is None:
        q, k = _with_means(q, k)
    else:  # its queries are on several devices
        q, k = (q + _each(k, num_heads)) * 0.5, (mean_q.transpose(2, 0, 1, 3) + k) * 0.5
    mixed_q, mixed_k = jnp.split(mixed.astype(jnp.float32) + bias[:, None, None], (num_heads,))
    q, k = before_norm((mixed_q + q, mixed_k + k))
    q, k = _normalise(q), _normalise(k) * temperature[:, None, None, None]
    q, k = (rotate(rope, x, heads=0).astype(by_head.dtype).transpose(1, 2, 0, 3) for x in (q, k))
    return q, k


def _with_means(q, k):
    """Half of each query and of its key, half of each key and of its queries' mean."""
    groups = q.reshape(k.shape[0], -1, *q.shape[1:])
    total = sum((groups[:, i] for i in range(1, groups.shape[1])), groups[:, 0])
    return (q + _each(k, q.shape[0])) * 0.5, (k + total / groups.shape[1]) * 0.5


def _each(k, num_heads):
    """The key of each query's group."""
    groups = jnp.broadcast_to(k[:, None], (k.shape[0], num_heads // k.shape[0], *k.shape[1:]))
    return groups.reshape(num_heads, *k.shape[1:])


def _normalise(x):
    # The floor is inside the root: at zero the root's own gradient is infinite, and 0 times that is
    # NaN.
    norm = jnp.sqrt(jnp.maximum(jnp.sum(x * x, -1, keepdims=True), NORM_FLOOR**2))
    return x * (x.shape[-1] ** 0.5 / norm)
