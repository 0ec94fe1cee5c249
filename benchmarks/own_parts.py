"""Layers and routers for `benchmarks.ablations`: each is ZAYA's without one of its choices."""

import jax
import jax.numpy as jnp
from flax import nnx

import zaya_jax as zj
from zaya_jax.model.dense import SelfAttention

ALPHA = 0.01  # Switch Transformer's weight of its auxiliary loss


class Grouped(zj.Layer):
    """Grouped-query attention, whose queries, keys and values come straight from the stream."""

    def __init__(self, rngs, model, precision):
        super().__init__(rngs, model, precision)
        self.cca = SelfAttention(rngs, model, precision)


class Sum(nnx.Module):
    """A join without weights."""

    def __call__(self, y, h, gate=None):
        return h + (y if gate is None else y * gate[..., None])

    def join_norm_project(self, y, h, norm, dtype, linear, linear_dtype) -> tuple:
        """The stream after it, its norm, and that norm's product with a kernel."""
        h = h + y
        x = norm(h)
        return (
            h,
            x.astype(dtype),
            jnp.matmul(x.astype(linear_dtype), linear.kernel[...], precision="highest"),
        )


class Unscaled(zj.Layer):
    """A plain sum in place of residual scaling."""

    def __init__(self, rngs, model, precision):
        super().__init__(rngs, model, precision)
        self.attn_join, self.moe_join = Sum(), Sum()


class Alone(zj.Router):
    """No depth averaging: nothing comes from the router below."""

    def __call__(self, projected, stream, balance):
        return super().__call__(projected, jnp.zeros_like(stream), balance)


def chosen(logits, balance) -> tuple[jax.Array, jax.Array]:
    """A router's (choice, gate)."""
    p = jax.nn.softmax(logits)
    choice = jnp.argmax(jax.lax.stop_gradient(p) + balance, axis=-1).astype(jnp.int32)
    return choice, jnp.take_along_axis(p, choice[:, None], axis=-1)[:, 0]


class NoSkip(zj.Router):
    """No class that skips."""

    def __call__(self, projected, stream, balance):
        _, _, logits, stream = super().__call__(projected, stream, balance)
        logits = logits.at[:, -1].set(-jnp.inf)
        return *chosen(logits, balance.at[-1].set(-jnp.inf)), logits, stream


class Linear(zj.Router):
    """One product of the norm, as is usual elsewhere; the config's router width is the number of
    classes."""

    def __init__(self, rngs, model, precision):
        super().__init__(rngs, model, precision)
        del self.eda, self.norm, self.fc1, self.fc2, self.out

    def __call__(self, projected, stream, balance):
        logits = projected + self.down.bias[...]
        return *chosen(logits, balance), logits, stream


@jax.custom_vjp
def carrying(x, loss) -> jax.Array:
    """x; a loss of which x is a part has `loss` added to it."""
    return x


carrying.defvjp(lambda x, loss: (x, None), lambda _, g: (g, jnp.ones(())))


class Auxiliary(zj.Router):
    """Switch Transformer's loss: ALPHA E times the sum over experts of a share of tokens times a
    mean probability."""

    def __call__(self, projected, stream, balance):
        choice, gate, logits, stream = super().__call__(projected, stream, balance)
        share = jnp.mean(jax.nn.one_hot(choice, logits.shape[-1]), axis=0)
        loss = ALPHA * (len(share) - 1) * jnp.sum(share * jnp.mean(jax.nn.softmax(logits), axis=0))
        return choice, carrying(gate, loss), logits, stream
