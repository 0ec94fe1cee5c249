"""A row of several documents equals the documents run alone: logits and gradients, whatever the tap counts."""

import jax
import jax.numpy as jnp
import model_helpers
import numpy as np
import pytest

from zaya_jax.model import zaya

LENGTHS = (7, 1, 12, 2, 5)  # some shorter than the convolutions reach
TOTAL = sum(LENGTHS) + 3  # and padding


def logits(model, params, bias, ids, **rows):
    out = zaya.apply(model, params, bias, ids, precision=model_helpers.EXACT, **rows)
    return zaya.logits(model, params, out.hidden, model_helpers.EXACT), out.counts


@pytest.mark.parametrize(
    "taps", [(3, 4), *(pytest.param(t, marks=pytest.mark.slow) for t in ((2, 2), (1, 2), (2, 1)))]
)
def test_packed_documents_equal_lone_ones(taps):
    model = model_helpers.small(cca_time0=taps[0], cca_time1=taps[1])
    params, bias = model_helpers.weights(model)
    rng = np.random.default_rng(0)
    docs = [rng.integers(0, model.vocab_size, n) for n in LENGTHS]
    packed, segments, positions = np.zeros((3, 1, TOTAL), np.int32)
    alone, real = np.zeros((2, len(docs), max(LENGTHS)), np.int32)
    starts = np.cumsum([0, *LENGTHS])
    for i, doc in enumerate(docs):
        row = slice(starts[i], starts[i + 1])
        packed[0, row], segments[0, row], positions[0, row] = doc, i + 1, range(len(doc))
        alone[i, : len(doc)], real[i, : len(doc)] = (
            doc,
            1,
        )  # what follows a document cannot reach back into it
    weight = rng.standard_normal((int(real.sum()), model.vocab_size)).astype(np.float32)

    def run_packed(params):
        out, counts = logits(model, params, bias, packed, segments=segments, positions=positions)
        out = out[0, : starts[-1]]
        return jnp.sum(out * weight), (out, counts)

    def run_alone(params):
        out, _ = logits(model, params, bias, alone)
        out = out[np.nonzero(real)]
        return jnp.sum(out * weight), out

    with jax.default_matmul_precision("highest"):
        (_, (ours, counts)), our_grads = jax.jit(jax.value_and_grad(run_packed, has_aux=True))(params)
        (_, theirs), their_grads = jax.jit(jax.value_and_grad(run_alone, has_aux=True))(params)
    np.testing.assert_allclose(ours, theirs, atol=2e-5)
    assert counts.sum(1).tolist() == [sum(LENGTHS)] * model.num_hidden_layers  # padding is not counted

    def near(path, ours, theirs):
        error = np.linalg.norm(ours - theirs)
        assert error <= 1e-4 * np.linalg.norm(theirs) + 1e-6, jax.tree_util.keystr(path)

    jax.tree_util.tree_map_with_path(near, our_grads, their_grads)


def test_without_segments_documents_do_see_each_other():
    """The cut is what makes the difference above: without it the second document's logits change."""
    model = model_helpers.small()
    params, bias = model_helpers.weights(model)
    ids = np.arange(12)[None] % model.vocab_size
    segments = np.repeat([1, 2], 6)[None]
    cut, _ = logits(model, params, bias, ids, segments=segments)
    whole, _ = logits(model, params, bias, ids)
    np.testing.assert_allclose(cut[:, :6], whole[:, :6], atol=1e-5)
    assert np.abs(cut[:, 6:] - whole[:, 6:]).max(axis=-1).min() > 1e-3
