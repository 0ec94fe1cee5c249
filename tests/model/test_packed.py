"""A row of several documents equals the documents run alone: logits and gradients, for any tap
counts."""

import jax
import model_helpers
import numpy as np
import pytest
from compared import assert_norms_close, values_and_gradients
from rows import slow

from zaya_jax.config import LAYER_KINDS
from zaya_jax.model import zaya
from zaya_jax.model.placement import DecodeStep, Placement, PrefillPiece, TokenRows

LENGTHS = (7, 1, 12, 2, 5)  # some shorter than the convolutions reach
TOTAL = sum(LENGTHS) + 3  # and padding


def logits(model, params, bias, ids, *rows):
    out = zaya.apply(model, params, bias, TokenRows(ids, *rows), precision=model_helpers.EXACT)
    return zaya.logits(model, params, out.hidden, model_helpers.EXACT), out.counts


FULL, SLIDING, LINEAR = LAYER_KINDS
BOTH = FULL, SLIDING
SLOW = [((2, 2), BOTH), ((1, 2), BOTH), ((2, 1), BOTH), ((2, 2), (LINEAR, FULL, LINEAR, SLIDING))]


PADDED = np.asarray([[1, 1, 2, 0], [3, 0, 0, 0]])


@pytest.mark.parametrize(
    ("placement", "real"),
    [
        (Placement(), np.ones((2, 4), bool)),
        (Placement(segments=PADDED), PADDED > 0),
        (Placement(mask=np.fliplr(PADDED > 0)), np.fliplr(PADDED > 0)),
        (PrefillPiece(column=0, counts=np.asarray([3, 1]), first=True), PADDED > 0),
        (DecodeStep(column=4, valid=PADDED > 0), np.ones((2, 1), bool)),
    ],
    ids=["no padding", "segments", "mask", "piece of a prompt", "new token"],
)
def test_a_placement_says_which_tokens_are_real(placement, real):
    np.testing.assert_array_equal(placement.real(np.zeros((*real.shape, 5))), real)


@pytest.mark.parametrize(
    ("taps", "kinds"),
    [
        ((3, 4), BOTH),
        ((2, 2), "dense"),
        slow((2, 2), (LINEAR, LINEAR)),
        *(slow(*case) for case in SLOW),
    ],
)
def test_packed_documents_equal_lone_ones(taps, kinds):
    model = model_helpers.of_kinds(kinds, cca_time0=taps[0], cca_time1=taps[1])
    params, bias = model_helpers.weights(model)
    rng = np.random.default_rng(0)
    docs = [rng.integers(0, model.vocab_size, n) for n in LENGTHS]
    # packed, then each alone
    ids, segments, positions = np.zeros((3, 1 + len(docs), TOTAL), np.int32)
    starts = np.cumsum([0, *LENGTHS])
    for i, doc in enumerate(docs):
        for row, start, name in ((0, starts[i], i + 1), (i + 1, 0, 1)):
            place = slice(start, start + len(doc))
            ids[row, place], segments[row, place], positions[row, place] = (
                doc,
                name,
                range(len(doc)),
            )

    def of_documents(params, rows, columns):
        """The documents' logits where they stand in these rows and columns."""
        out, counts = logits(model, params, bias, ids, segments, positions)
        return out[rows, columns], counts

    apart, within = np.nonzero(segments[1:])
    packed, alone = (np.zeros_like(apart), np.arange(starts[-1])), (apart + 1, within)
    with jax.default_matmul_precision("highest"):
        (ours, counts), our_grads = values_and_gradients(of_documents, (params,), packed)
        (theirs, _), their_grads = values_and_gradients(of_documents, (params,), alone)
    np.testing.assert_allclose(ours, theirs, atol=2e-5)
    # padding is not counted
    assert counts.sum(1).tolist() == [2 * sum(LENGTHS)] * model.num_hidden_layers
    assert_norms_close(our_grads, their_grads, 1e-4, 1e-6)


@pytest.mark.parametrize(
    "implementation", ["cpu", *(slow(name) for name in ("xla", "triton"))], indirect=True
)
def test_padding_of_weights_as_transformers_initialises_them_changes_no_gradient(implementation):
    """There the padding id's row of the embedding is zero and so are biases: layer 0 sees a padded
    token as zeros."""
    kind = {"layer_types": ("hybrid", "hybrid_linear"), "head_dim": 32, "sliding_window": None}
    model = model_helpers.small(pad_token_id=0, initializer_range=0.5, **kind)
    params, bias = zaya.init(model, jax.random.key(0)), zaya.init_balance(model)
    params["embed"]["embedding"] = params["embed"]["embedding"].at[0].set(0)
    rows = np.random.default_rng(0).integers(1, model.vocab_size, (2, 18))
    real, padding = np.ones_like(rows), np.arange(18) >= 12

    def likelihoods(params, ids, segments):
        """Of tokens behind which there are others: none looks at them."""
        out, _ = logits(model, params, bias, ids, segments)
        return jax.nn.log_softmax(out)[:, :12, 3]

    padded = np.where(padding, 0, rows), np.where(padding, 0, real)
    with jax.default_matmul_precision("highest"):
        ours, our_grads = values_and_gradients(likelihoods, (params,), padded)
        theirs, their_grads = values_and_gradients(likelihoods, (params,), (rows, real))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert_norms_close(our_grads, their_grads, 1e-4, 1e-6)
