"""Causal linear attention: a sum over the past in place of a softmax, so that a state of fixed size stands for it.

    out_t = sum_{s <= t} (f(q_t) . f(k_s)) v_s / sum_{s <= t} f(q_t) . f(k_s)        f(x) = elu(x) + 1

over the tokens s of t's own document. Everything of a document's past that a query needs is its *state*, per head
sum f(k)^T v beside sum f(k): [C, C + 1], float32. Within a device a sequence is taken chunk by chunk; between devices
states travel (zaya_jax/parallel/linear.py). A document's tokens lie together, so a state that comes from the left
counts exactly where the document that it ended with goes on.

Letters: B batch, S sequence, H query heads, K key-value heads, G = H / K queries a group, C head channels.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from zaya_jax.model.attention import SAVED


def features(x: jax.Array) -> jax.Array:
    """elu(x) + 1 in float32, given in x's own format; positive, so that weights are and their sum is never near 0."""
    return (jax.nn.elu(x.astype(jnp.float32)) + 1).astype(x.dtype)


def reference_linear_attention(q, k, v, segments=None) -> jax.Array:
    """The definition, with the whole [S, S] matrix: for tests and for reading."""
    batch, seq, num_heads, channels = q.shape
    q = features(q).reshape(batch, seq, k.shape[2], -1, channels)
    weights = jnp.einsum("bikgc,bjkc->bkgij", q, features(k), preferred_element_type=jnp.float32)
    mask = jnp.tril(jnp.ones((seq, seq), bool))[None]
    if segments is not None:
        mask = mask & (segments[:, :, None] == segments[:, None, :])
    weights = jnp.where(mask[:, None, None], weights, 0)
    weights = weights / weights.sum(-1, keepdims=True)
    out = jnp.einsum("bkgij,bjkc->bikgc", weights, v.astype(jnp.float32))
    return out.reshape(batch, seq, num_heads, channels).astype(v.dtype)


def linear_attention(
    q: Float[Array, "B S H C"],
    k: Float[Array, "B S K C"],
    v: Float[Array, "B S K C"],
    segments: Int[Array, "B S"] | None = None,
    *,
    chunk: int | None = None,
) -> Float[Array, "B S H C"]:
    """Linear attention of whole sequences on one device; memory grows with S times the chunk."""
    return finish(*sums(*heads_first(q, k, v), segments, chunk), v.dtype)


def heads_first(q, k, v) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Features of q [B, K, G, S, C] and of k [B, K, S, C], and v [B, K, S, C]: what the functions below take."""
    batch, seq, _, channels = q.shape
    q = features(q).reshape(batch, seq, k.shape[2], -1, channels).transpose(0, 2, 3, 1, 4)
    return q, features(k).transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)


def finish(numerator, denominator, dtype) -> jax.Array:
    """The quotient, heads behind the sequence again: [B, S, H, C]."""
    batch, num_kv, group, seq, channels = numerator.shape
    out = (numerator / denominator[..., None]).astype(dtype)
    return checkpoint_name(out.transpose(0, 3, 1, 2, 4).reshape(batch, seq, num_kv * group, channels), SAVED)


def sums(
    q: Float[Array, "B K G S C"],
    k: Float[Array, "B K S C"],
    v: Float[Array, "B K S C"],
    segments: Int[Array, "B S"] | None = None,
    chunk: int | None = None,
) -> tuple[Float[Array, "B K G S C"], Float[Array, "B K G S"]]:
    """Numerator and denominator, float32, as if nothing came before; chunk by chunk.

    The backward pass computes a chunk's weights anew: what is kept are the states between chunks.
    """
    batch, num_kv, group, seq, channels = q.shape
    chunk = min(chunk or default_chunk(), seq)
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
        documents, ended = chunks(segments, 1), segments[:, 0]  # the state is empty: any document may go on
    inputs = (chunks(q, 3), chunks(k, 2), chunks(v, 2), documents)
    _, (numerator, denominator) = lax.scan(jax.checkpoint(step, prevent_cse=False), (state, ended), inputs)
    shape = (batch, num_kv, group, -1)
    numerator = jnp.moveaxis(numerator, 0, 3).reshape(*shape, channels)
    return numerator[:, :, :, :seq], jnp.moveaxis(denominator, 0, 3).reshape(shape)[..., :seq]


def default_chunk() -> int:
    """Tokens a chunk: as many as a head has channels balances the two products; a CPU's cache likes fewer."""
    return 64 if jax.default_backend() == "cpu" else 128


def summary(
    k: Float[Array, "B K S C"], v: Float[Array, "B K S C"], segments: Int[Array, "B S"] | None = None
) -> Float[Array, "B K C C1"]:
    """The state that tokens leave behind: that of the document which the last one belongs to."""
    if segments is not None:
        k = jnp.where((segments == segments[:, -1:])[:, None, :, None], k, 0)
    products = _product("bksc,bksd->bkcd", k, v)
    return jnp.concatenate([products, k.astype(jnp.float32).sum(2)[..., None]], axis=-1)


def read(
    q: Float[Array, "B K G S C"], state: Float[Array, "B K C C1"], goes_on: Array | None = None
) -> tuple[Float[Array, "B K G S C"], Float[Array, "B K G S"]]:
    """What a state adds to numerator and denominator of the queries [B, S] in which its document goes on."""
    if goes_on is not None:
        q = jnp.where(goes_on[:, None, None, :, None], q, 0)
    products, total = state[..., :-1], state[..., -1]
    numerator = _product("bkgsc,bkcd->bkgsd", q, products)
    return numerator, (q.astype(jnp.float32) * total[:, :, None, None]).sum(-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """einsum in x's number format, accumulated and given in float32, with the cotangent in that format too.

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
    dx = jnp.einsum(f"{out},{y_spec}->{x_spec}", d_out, y.astype(x.dtype), preferred_element_type=jnp.float32)
    dy = jnp.einsum(f"{out},{x_spec}->{y_spec}", d_out, x, preferred_element_type=jnp.float32)
    return dx.astype(x.dtype), dy.astype(y.dtype)


_product.defvjp(_product_fwd, _product_bwd)


def decode_linear_attention(
    q: Float[Array, "B 1 H C"],
    k: Float[Array, "B 1 K C"],
    v: Float[Array, "B 1 K C"],
    state: Float[Array, "B K C C1"],
) -> tuple[Float[Array, "B 1 H C"], Float[Array, "B K C C1"]]:
    """One new token a row: its output, and the state with it."""
    q, k, v = heads_first(q, k, v)
    state = state + summary(k, v)
    return finish(*read(q, state), v.dtype), state


def prompt_state(k, v, visible=None) -> Float[Array, "B K C C1"]:
    """The state after a prompt, k and v [B, S, K, C]; `visible` is as for the attention of the prompt."""
    return summary(features(k).transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), visible)
