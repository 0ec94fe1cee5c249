"""The MLP router: a narrow stream of its own through the layers (EDA), a three-layer MLP, one
choice per token.

The choice is argmax(p + balancing bias); the gate is p of the chosen class, without the bias. The
last class is the skip class. Letters: N tokens, R router width, E experts.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from pallas_kernels.products import full_precision
from zaya_jax.config import Model, Precision
from zaya_jax.model.weights import Linear, RMSNorm, weight


class Router(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, model: Model, precision: Precision):
        d, r, std = model.hidden_size, model.router_hidden_size, model.initializer_range
        self.down = Linear(rngs, d, r, ("embed", "router"), std, bias=True)
        # Layer 0's scale multiplies a zero stream and is not exported.
        self.eda = weight(rngs, (r,), ("router",), "ones")
        self.norm = RMSNorm(rngs, r, "router", model.rms_norm_eps)
        self.fc1 = Linear(rngs, r, r, ("router", None), std, bias=True)
        self.fc2 = Linear(rngs, r, r, ("router", None), std, bias=True)
        self.out = Linear(rngs, r, model.num_experts + 1, ("router", None), std, bias=False)
        self.dtype = jnp.dtype(precision.router)

    def __call__(
        self,
        projected: Float[Array, "N R"],
        stream: Float[Array, "N R"],
        balance: Float[Array, "E1"],
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """(choice [N], gate [N], logits [N, E + 1], the stream for the layer above).

        `projected` is the product of the layer's norm with `down`: the kernel that norms the
        residual stream computes both.
        """
        formats = (self.dtype, jnp.float32, full_precision(self.dtype))
        stream = projected + self.down.bias[...] + self.eda[...] * stream
        z = _gelu(self.fc1(self.norm(stream), *formats))
        z = _gelu(self.fc2(z, *formats))
        logits = self.out(z, *formats)
        p = jax.nn.softmax(logits, axis=-1)
        choice = jnp.argmax(jax.lax.stop_gradient(p) + balance, axis=-1).astype(jnp.int32)
        # A product with a one-hot row instead of a gather: its gradient is no scatter.
        gate = jnp.sum(p * jax.nn.one_hot(choice, p.shape[-1], dtype=p.dtype), axis=-1)
        return choice, gate, logits, stream


def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=False)
