"""What a function of arrays gives, with its gradients; and trees of arrays, compared."""

import functools

import jax
import jax.numpy as jnp
import numpy as np


@functools.partial(jax.jit, static_argnames="function")
def values_and_gradients(function, arrays, given=()):
    """What function(*arrays, *given) is, and the gradients of the arrays, where those of the
    results are random numbers that bfloat16 has too."""

    def objective(*arrays):
        out, rng = function(*arrays, *given), np.random.default_rng(0)
        weighed = [
            x.astype(jnp.float32) * jnp.asarray(rng.standard_normal(x.shape), jnp.bfloat16)
            for x in jax.tree.leaves(out)
        ]
        return sum(map(jnp.sum, weighed)), out

    numbers = tuple(range(len(arrays)))
    (_, out), gradients = jax.value_and_grad(objective, numbers, has_aux=True)(*arrays)
    return out, gradients


def assert_near(ours, theirs, tolerance=2e-5):
    """Arrays of the same format, finite, and as near as that to the others or their greatest
    number."""
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype and np.isfinite(a).all() and np.isfinite(b).all()
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        near = tolerance * max(np.abs(b).max(initial=0), 1)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=near)


def assert_all_close(ours, theirs, **tolerance):
    """Every number of every array is as near as that."""
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), b, **tolerance)


def assert_norms_close(ours, theirs, share, least=0.0):
    """Every array is within this share of its norm, or within `least`."""
    for (path, a), b in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        error = np.linalg.norm(np.asarray(a, np.float32) - b)
        assert error <= share * np.linalg.norm(b) + least, (jax.tree_util.keystr(path), error)
