"""Decoding with the cache equals running the whole sequence again: sliding layers, taps, left
padding, streaming."""

import functools

import jax
import jax.numpy as jnp
import model_helpers
import numpy as np
import pytest
from rows import slow

from zaya_jax.config import LAYER_KINDS
from zaya_jax.model import decode, zaya
from zaya_jax.model.cca import empty_cache
from zaya_jax.model.placement import Cached, Rows
from zaya_jax.model.sampling import Sampling

EXACT = model_helpers.EXACT


FULL, SLIDING, LINEAR = LAYER_KINDS
BOTH, MIXED = (FULL, SLIDING), (LINEAR, FULL, LINEAR, SLIDING)
FAST = [((3, 4), 6, BOTH), ((2, 2), 5, MIXED)]
SLOW = [(taps, prompt, BOTH) for taps in ((2, 2), (3, 4), (1, 1)) for prompt in (1, 6)]
SLOW += [((2, 2), 5, (LINEAR, LINEAR))]


@pytest.mark.parametrize(
    ("taps", "prompt", "kinds"), [*FAST, *(slow(*case) for case in SLOW if case not in FAST)]
)
def test_every_step_with_the_cache_equals_the_whole_pass(taps, prompt, kinds):
    changes = {"cca_time0": taps[0], "cca_time1": taps[1], "layer_types": kinds}
    model = model_helpers.small(num_hidden_layers=len(kinds), **changes)
    params, bias = model_helpers.weights(model)
    length, padded = 14, min(prompt - 1, 3)
    ids = np.random.default_rng(1).integers(0, model.vocab_size, (2, length)).astype(np.int32)
    mask = np.ones_like(ids)
    mask[1, :padded] = 0
    positions = np.maximum(np.cumsum(mask, 1) - 1, 0)
    run = functools.partial(zaya.apply, model, params, bias, precision=EXACT)
    with jax.default_matmul_precision("highest"):
        whole = jax.jit(run)(Rows(ids, positions=positions, mask=mask)).hidden
        cache = empty_cache(model, EXACT, 2, length)
        first = jax.jit(run)(
            Rows(ids[:, :prompt], positions=positions[:, :prompt], mask=mask[:, :prompt]),
            cached=Cached(cache, jnp.int32(0)),
        )
        step, cache, hidden = jax.jit(run), first.cache, [first.hidden]
        for i in range(prompt, length):
            valid = (np.arange(length) <= i) & (mask > 0)
            out = step(
                Rows(ids[:, i : i + 1], positions=positions[:, i : i + 1]),
                cached=Cached(cache, jnp.int32(i), valid=valid),
            )
            cache = out.cache
            hidden.append(out.hidden)
    real = mask > 0
    np.testing.assert_allclose(jnp.concatenate(hidden, 1)[real], whole[real], atol=2e-5)


@pytest.mark.parametrize("temperature", [slow(0.0), 0.9])
def test_the_stream_is_what_generate_gives(temperature):
    model = model_helpers.small()
    params, bias = model_helpers.weights(model)
    ids = [[3, 1, 4, 1, 5]]
    options = {"sampling": Sampling(temperature), "seeds": 3}
    decoder = decode.Decoder(model, params, bias, EXACT)
    at_once, rows, pieces = (
        decode.generate(decoder, ids, 20, **options),
        decode.Generation(decoder, ids, 20, **options),
        [],
    )
    while not rows.ended:
        pieces.append(rows.more())
    assert [len(p[0]) for p in pieces] == [1, 16, 3]
    assert [[token for (row,) in pieces for token in row]] == at_once
    assert decode.generate(decoder, ids, 0) == [[]]
