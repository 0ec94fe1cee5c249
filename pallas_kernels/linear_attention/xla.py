"""Linear attention chunk by chunk: a scan that carries the state, and computes a chunk's weights
again backward."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def sums(
    q: Float[Array, "B K G S C"],
    k: Float[Array, "B K S C"],
    v: Float[Array, "B K S C"],
    segments: Int[Array, "B S"] | None,
    chunk: int,
) -> tuple[Float[Array, "B K G S C"], Float[Array, "B K G S"]]:
    """See `pallas_kernels.linear_attention`."""
    batch, num_kv, group, seq, channels = q.shape
    pad = -seq % chunk  # tokens after the last one, which no real token sees

    def chunks(x, dim):
        x = jnp.pad(x, [(0, pad if i == dim else 0) for i in range(x.ndim)])
        return jnp.moveaxis(x.reshape(*x.shape[:dim], -1, chunk, *x.shape[dim + 1 :]), dim, 0)

    causal = jnp.tril(jnp.ones((chunk, chunk), bool))

    def step(carry, inputs):
        state, ended = carry
        q, k, v, documents = inputs
        mask, goes_on = causal, None
        if documents is not None:
            mask = (causal & (documents[:, :, None] == documents[:, None, :]))[:, None, None]
            goes_on = documents == ended[:, None]
        weights = jnp.where(mask, _product("bkgic,bkjc->bkgij", q, k), 0)
        numerator = _product("bkgij,bkjd->bkgid", weights.astype(v.dtype), v)
        past = read(q, state, goes_on)
        added = summary(k, v, documents)
        if goes_on is None:
            carry = state + added, None
        else:
            carry = jnp.where(goes_on[:, -1, None, None, None], state, 0) + added, documents[:, -1]
        return carry, (numerator + past[0], weights.sum(-1) + past[1])

    state = jnp.zeros((batch, num_kv, channels, channels + 1), jnp.float32)
    documents, ended = None, None
    if segments is not None:
        # the state is empty: any document may go on
        documents, ended = (chunks(segments, 1), segments[:, 0])
    inputs = (chunks(q, 3), chunks(k, 2), chunks(v, 2), documents)
    _, (numerator, denominator) = lax.scan(
        jax.checkpoint(step, prevent_cse=False), (state, ended), inputs
    )
    shape = (batch, num_kv, group, -1)
    numerator = jnp.moveaxis(numerator, 0, 3).reshape(*shape, channels)
    return numerator[:, :, :, :seq], jnp.moveaxis(denominator, 0, 3).reshape(shape)[..., :seq]


def summary(
    k: Float[Array, "B K S C"],
    v: Float[Array, "B K S C"],
    segments: Int[Array, "B S"] | None = None,
) -> Float[Array, "B K C C1"]:
    """The state that tokens leave behind: that of the document which the last one belongs to."""
    if segments is not None:
        k = jnp.where((segments == segments[:, -1:])[:, None, :, None], k, 0)
    products = _product("bksc,bksd->bkcd", k, v)
    return jnp.concatenate([products, k.astype(jnp.float32).sum(2)[..., None]], axis=-1)


def read(
    q: Float[Array, "B K G S C"], state: Float[Array, "B K C C1"], goes_on: Array | None = None
) -> tuple[Float[Array, "B K G S C"], Float[Array, "B K G S"]]:
    """A state's share of numerator and denominator, for the queries [B, S] of the document that
    goes on."""
    if goes_on is not None:
        q = jnp.where(goes_on[:, None, None, :, None], q, 0)
    products, total = state[..., :-1], state[..., -1]
    numerator = _product("bkgsc,bkcd->bkgsd", q, products)
    return numerator, (q.astype(jnp.float32) * total[:, :, None, None]).sum(-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """einsum in x's number format, accumulated and given in float32, with the cotangent in that
    format too.

    Plain einsum would run both backward products in float32, and round the gradient of a state.
    """
    return jnp.einsum(spec, x, y.astype(x.dtype), preferred_element_type=jnp.float32)


def _product_fwd(spec, x, y):
    return _product(spec, x, y), (x, y)


def _product_bwd(spec, saved, d_out):
    x, y = saved
    operands, out = spec.split("->")
    x_spec, y_spec = operands.split(",")
    d_out = d_out.astype(x.dtype)
    dx = jnp.einsum(
        f"{out},{y_spec}->{x_spec}", d_out, y.astype(x.dtype), preferred_element_type=jnp.float32
    )
    dy = jnp.einsum(f"{out},{x_spec}->{y_spec}", d_out, x, preferred_element_type=jnp.float32)
    return dx.astype(x.dtype), dy.astype(y.dtype)


_product.defvjp(_product_fwd, _product_bwd)
