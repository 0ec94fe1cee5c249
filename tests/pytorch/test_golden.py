"""The model equals the public PyTorch implementation: the golden cases, through the public API, in
float32; and thirty steps of training give the losses that benchmarks/torch_parity.py --out stored.

Forward, gradients and decoding, each with the algorithm of a CPU and with that of a GPU.

Bounds: 2e-5 of the greatest magnitude (at least 1) for values, 1e-4 of its norm (and 1e-7) for
every gradient, and generated tokens exactly.
"""

import functools
import json
import runpy
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from rows import slow
from safetensors.numpy import load_file

import zaya_jax as zj
from pallas_kernels import chip, tiles
from zaya_jax import functions
from zaya_jax.model import decode, zaya
from zaya_jax.model.placement import TokenRows
from zaya_jax.pytorch import named

CPU = [(folder, "cpu") for folder in ("base", "sliding", "taps", "mixed")]
FAST = CPU[1:]  # "base" has nothing that the others have not
# all of a GPU's own kernels, interpreted, and its algorithm for the rest
KERNELS = ("mixed", "kernels")
SLOW = [
    ("mixed", "gpu"),
    ("taps", "cuda"),  # NVIDIA's experts are loops of their own
    ("mixed", "attention"),
    ("base", "gpu"),
    ("sliding", "gpu"),
    ("base", "kernels"),
    ("sliding", "kernels"),
]


def cases(fast):
    """All cases as rows of a test, these in the default run."""
    rows = [case if case in fast else slow(case) for case in (*CPU, KERNELS, *SLOW)]
    return pytest.mark.parametrize(
        "golden_case", rows, indirect=True, ids=lambda case: "-".join(case)
    )


# Whose kernels run in a golden case's loss and gradients. Not these: cca_mix, since fewer than 16
# pairs of channels turn in heads of 16; linear_attention, which the public implementation does not
# have.
RUN = {"attention", "grouped_mlp", "residual_norm"}


CHIPS = {
    "cpu": chip.Chip("cpu", "cpu", ()),
    "gpu": chip.Chip("gpu", "gpu", ()),
    "cuda": chip.Chip("cpu", "NVIDIA H100", ()),  # on a host, which has no TF32 for the router
    "attention": chip.Chip("cpu", "gfx942", ("attention",)),
    "kernels": chip.Chip("cpu", "gfx942", chip.OPERATORS),
}


@pytest.fixture
def golden_case(request, golden_dir):
    """A golden case's folder, and around the test a chip whose algorithm must give it."""
    folder, platform = request.param
    with chip.making(CHIPS[platform]):
        yield golden_dir / folder


@pytest.fixture
def run_as_kernels(monkeypatch):
    """The operators whose kernels a test's programs were traced with."""
    found, call = set(), tiles.call

    def recorded(*args, **options):
        found.add(sys._getframe(1).f_globals["__name__"].split(".")[-2])
        return call(*args, **options)

    monkeypatch.setattr(tiles, "call", recorded)
    return found


@pytest.fixture(scope="module")
def loaded():
    """Models by folder: a case's programs are compiled once."""
    models = {}
    return lambda folder: models.setdefault(folder, zj.load(folder))


@pytest.fixture
def expected(golden_case):
    return load_file(golden_case / "expected.safetensors")


def assert_near(ours, theirs, name):
    assert ours.shape == theirs.shape, name
    bound = 2e-5 * max(1, np.abs(theirs).max())
    assert np.abs(ours - theirs).max() <= bound, name


@cases(FAST)  # the loss and its gradients pass through the same kernels
def test_every_residual_stream_router_logit_and_logit(golden_case, loaded, expected):
    model = loaded(golden_case)
    found = functions.jitted["forward"](
        model.config, model.params, model.balance, expected["input_ids"], trace=True
    )
    assert_near(found["logits"], expected["logits"], "logits")
    for layer in range(model.config.model.num_hidden_layers):
        for kind in ("hidden_states", "router_logits"):
            theirs = expected[f"{kind}.{layer}"]
            assert_near(found[kind][layer].reshape(theirs.shape), theirs, f"{kind}.{layer}")


@cases([("sliding", "cpu"), ("taps", "cpu"), KERNELS])
def test_the_loss_and_every_gradient(golden_case, loaded, expected, run_as_kernels):
    model = loaded(golden_case)
    loss, grads = model.loss_and_grads(expected["input_ids"], expected["labels"])
    grads = named(grads, model.config.model)
    assert abs(loss - expected["loss"]) <= 2e-5
    theirs = {
        name.removeprefix("grad."): g for name, g in expected.items() if name.startswith("grad.")
    }
    assert set(grads) == set(theirs)
    for name, g in theirs.items():
        assert grads[name].shape == g.shape, name
        assert np.linalg.norm(grads[name] - g) <= 1e-4 * np.linalg.norm(g) + 1e-7, name
    assert run_as_kernels == RUN & set(chip.current().kernels)


@functools.partial(jax.jit, static_argnums=0)
def _padded(config, params, balance, ids, mask):
    with jax.default_matmul_precision("highest"):
        out = zaya.apply(
            config.model, params, balance, TokenRows(ids, mask=mask), precision=config.precision
        )
        return zaya.logits(config.model, params, out.hidden, config.precision)


@cases([("taps", "cpu"), ("mixed", "cpu")])
def test_a_left_padded_batch_at_its_real_positions(golden_case, loaded, expected):
    model = loaded(golden_case)
    arguments = model.params, model.balance, expected["padded_input_ids"], expected["padded_mask"]
    logits = np.asarray(_padded(model.config, *arguments))
    real = expected["padded_mask"].astype(bool)
    assert_near(logits[real], expected["padded_logits"][real], "padded")


@cases(FAST)
def test_greedy_decoding_with_the_cache(golden_case, loaded, expected):
    ids = expected["input_ids"]
    generated = loaded(golden_case).generate(ids, expected["generated"].shape[1] - ids.shape[1])
    np.testing.assert_array_equal(generated, expected["generated"])


@cases([("taps", "cpu"), ("mixed", "cpu")])
def test_greedy_decoding_of_a_left_padded_batch(golden_case, golden_dir, loaded):
    cases = load_file(golden_dir / "padded_generation.safetensors")
    ids, mask, theirs = (
        cases[f"{golden_case.name}.{name}"] for name in ("ids", "mask", "generated")
    )
    model, num = loaded(golden_case), theirs.shape[1] - ids.shape[1]
    decoder = decode.Decoder(
        model.config.model, model.params, model.balance, model.config.precision
    )
    new = decode.generate(decoder, ids, num, mask=mask)
    np.testing.assert_array_equal(new, theirs[:, ids.shape[1] :])


ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.slow
def test_thirty_steps_follow_pytorch(golden_dir):
    parity = runpy.run_path(str(ROOT / "benchmarks" / "torch_parity.py"))
    stored = json.loads((golden_dir / "torch_parity.json").read_text())
    case = golden_dir / "base"
    ids = parity["tokens"](parity["settings_for"](case).model.vocab_size, stored["steps"])
    np.testing.assert_allclose(parity["our_losses"](case, ids), stored["losses"], rtol=0, atol=1e-4)
