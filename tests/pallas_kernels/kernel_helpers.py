"""Arrays for operators, made on the host (a program for each shape would take longer to compile),
and gradients."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import chip

CPU = chip.Chip("cpu", "cpu")


def normal(rng, *shape, dtype=jnp.float32):
    return jnp.asarray(rng.standard_normal(shape, np.float32)).astype(dtype)


def documents(rng, batch, length, share=0.1):
    """Segment ids: documents 1, 2, .. of uneven lengths, this share of tokens beginning one;
    padding (0) at the end."""
    ids = np.cumsum(rng.random((batch, length)) < share, axis=1) + 1
    ids[:, length - length // 8 :] = 0
    return jnp.asarray(ids, jnp.int32)


def with_gradients(function, q, k, v, d_out, made_for=CPU):
    """The output, and the gradients of q, k and v where the output's is d_out."""

    def run(q, k, v):
        out = function(q, k, v)
        return jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32)), out

    with chip.making(made_for):
        (_, out), grads = jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    return (out, *grads)
