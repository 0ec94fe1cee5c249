"""Decoding with the cache equals running the whole sequence anew: sliding layers, taps, left padding, streaming."""

import functools

import jax
import jax.numpy as jnp
import model_helpers
import numpy as np
import pytest

from zaya_jax.model import decode, zaya
from zaya_jax.model.cca import empty_cache

EXACT = model_helpers.EXACT


FAST = [((2, 2), 1), ((3, 4), 6)]


@pytest.mark.parametrize(
    ("taps", "prompt"),
    [
        pytest.param(taps, prompt, marks=() if (taps, prompt) in FAST else pytest.mark.slow)
        for taps in ((2, 2), (3, 4), (1, 1))
        for prompt in (1, 6)
    ],
)
def test_every_step_with_the_cache_equals_the_whole_pass(taps, prompt):
    model = model_helpers.small(cca_time0=taps[0], cca_time1=taps[1])
    params, bias = model_helpers.weights(model)
    length, padded = 14, min(prompt - 1, 3)
    ids = np.random.default_rng(1).integers(0, model.vocab_size, (2, length)).astype(np.int32)
    mask = np.ones_like(ids)
    mask[1, :padded] = 0
    positions = np.maximum(np.cumsum(mask, 1) - 1, 0)
    run = functools.partial(zaya.apply, model, params, bias, precision=EXACT)
    with jax.default_matmul_precision("highest"):
        whole = jax.jit(run)(ids, mask=mask, positions=positions).hidden
        cache = empty_cache(model, EXACT, 2, length)
        first = jax.jit(run)(
            ids[:, :prompt], mask=mask[:, :prompt], positions=positions[:, :prompt], cache=cache,
            cache_index=jnp.int32(0),
        )  # fmt: skip
        step, cache, hidden = jax.jit(run), first.cache, [first.hidden]
        for i in range(prompt, length):
            valid = (np.arange(length) <= i) & (mask > 0)
            out = step(
                ids[:, i : i + 1], positions=positions[:, i : i + 1], cache=cache, cache_index=jnp.int32(i),
                cache_valid=valid,
            )  # fmt: skip
            cache = out.cache
            hidden.append(out.hidden)
    real = mask > 0
    np.testing.assert_allclose(jnp.concatenate(hidden, 1)[real], whole[real], atol=2e-5)


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.9])
def test_the_stream_is_what_generate_gives(temperature):
    model = model_helpers.small()
    params, bias = model_helpers.weights(model)
    ids = jnp.asarray([[3, 1, 4, 1, 5]], jnp.int32)
    options = {"precision": EXACT, "temperature": temperature, "key": jax.random.key(3)}
    at_once = decode.generate(model, params, bias, ids, 12, **options)
    pieces = list(decode.stream(model, params, bias, ids, 12, piece=4, **options))
    assert [p.shape[1] for p in pieces] == [1, 4, 4, 3]
    np.testing.assert_array_equal(np.concatenate(pieces, axis=1), at_once)
    assert decode.generate(model, params, bias, ids, 0).shape == (1, 0)


def test_sampling_follows_the_seed():
    model = model_helpers.small()
    params, bias = model_helpers.weights(model)
    ids = jnp.zeros((4, 3), jnp.int32)
    draw = lambda seed: np.asarray(  # noqa: E731
        decode.generate(model, params, bias, ids, 8, EXACT, temperature=1.0, key=jax.random.key(seed))
    )
    np.testing.assert_array_equal(draw(1), draw(1))
    assert (draw(1) != draw(2)).any()
    assert len({row.tobytes() for row in draw(1)}) > 1  # rows are drawn independently
