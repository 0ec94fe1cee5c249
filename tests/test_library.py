"""zaya_jax as a library: the programs' numbers, on any mesh; saving and loading; plain refusals."""

import copy
import dataclasses
import doctest
import re
import signal
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models
import tiny_runs
from refusals import check_refused, refusal
from test_install import OF_A_MODEL
from traced_once import traced_once

import zaya_jax as zj
from zaya_jax import arguments, functions, library, schedule
from zaya_jax.config import Mesh, Phase
from zaya_jax.data import windows
from zaya_jax.parallel.mesh import make_mesh
from zaya_jax.report import read
from zaya_jax.text import tokenizers
from zaya_jax.training import logs
from zaya_jax.training import state as states
from zaya_jax.training import step as steps

__all__ = ["traced_once"]
ROOT = Path(__file__).resolve().parent.parent
SEGMENTS = np.asarray([[1] * 7, [1, 1, 1, 2, 2, 0, 0]])  # documents end anywhere, and padding
# Sliding and full layers.
KINDS = dict(initializer_range=0.05, layer_types=("hybrid_sliding", "hybrid"), sliding_window=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("library")


@pytest.fixture(scope="module")
def settings(folder):
    """A run of four steps with a checkpoint at every second one; in float32, so that meshes agree
    closely.

    AdamW compiles in half the time of Muon. The z-loss is part of what training minimizes, not of a
    loss that is given.
    """
    lines = (f"line {i} of {i * i} in a text" for i in range(3000))
    (folder / "text.txt").write_text("\n".join(lines))
    c = small_models.settings(**KINDS)
    c.update_from_flattened_dict(
        {
            "optim.name": "adamw",
            "optim.z_loss": 0.1,
            "data.path": str(folder / "text.txt"),
            "data.seq_len": 16,
            "run.num_steps": 4,
            "eval.every": 2,
            "checkpoint.every_steps": 2,
            "log.sample_tokens": 0,
        }
    )
    return c


@pytest.fixture(scope="module")
def trained(folder, settings):
    """The model that `zj.train` gives, of a run on the eight devices."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [*map(signal.getsignal, numbers)]
    model = zj.train(settings, folder / "run")
    assert [*map(signal.getsignal, numbers)] == before
    return model


@pytest.fixture(scope="module")
def run(trained, folder):
    """The run's folder."""
    return folder / "run"


@pytest.fixture(scope="module")
def model(settings):
    """Fresh weights on one device."""
    return zj.create(settings)


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(0).integers(0, 264, (2, 7))


def same(a, b):
    """Whether two trees of arrays are equal bit for bit."""
    a, b = ([np.asarray(x) for x in jax.tree.leaves(tree)] for tree in (a, b))
    return len(a) == len(b) and all(
        x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True)
    )


# ################################################################################################
# The same numbers as the programs
# ##################################################################################################


def test_a_second_model_is_made_without_compiling():
    model = {"model": {"vocab_size": 264, "hidden_size": 32, "num_hidden_layers": 1}}
    first = zj.create(model, seed=3)
    made = functions._fresh.cache_info().misses
    again, other = (zj.create(model, seed=seed) for seed in (3, 4))
    assert functions._fresh.cache_info().misses == made
    of_the_config = zj.create(model | {"run": {"seed": 3}, "data": {"seq_len": 16}})
    assert same(first.params, again.params) and same(first.params, of_the_config.params)
    assert not same(first.params, other.params)


@pytest.fixture
def compiled():
    """The number of programs compiled so far, those that a cache on disk holds included."""
    found = []
    jax.monitoring.register_event_duration_secs_listener(
        note := lambda name, *_, **__: found.append(name)
    )
    yield lambda: sum(name.endswith("backend_compile_duration") for name in found)
    jax.monitoring.unregister_event_duration_listener(note)


def test_sentences_take_two_programs_and_have_the_logits_of_their_own_lengths(compiled):
    sizes = small_models.SIZES | KINDS | {"max_position_embeddings": 512}
    model, rng = zj.create({"model": sizes}), np.random.default_rng(0)
    lengths = (1, 64, 65, 256, *rng.integers(1, 257, 8))
    rows = [rng.integers(0, 264, (1, length)) for length in lengths]
    before = compiled()
    padded = [model.logits(ids) for ids in rows]
    assert compiled() - before == 2 and [x.shape[:2] for x in padded] == [ids.shape for ids in rows]
    own = model.logits(rows[2], segments=np.ones_like(rows[2]))  # segments keep a row's own length
    np.testing.assert_allclose(own, padded[2], rtol=1e-5, atol=1e-6)
    for count in (1, 4):
        model.generate(np.ones((count, 10), int), 3)
    before = compiled()
    for count, length in ((1, 1), (1, 61), (3, 10), (4, 40)):
        assert model.generate(np.ones((count, length), int), 3).shape == (count, length + 3)
    assert compiled() == before
    for ids in rows:
        model.generate(ids, 20)
    assert compiled() - before == 3  # a piece and a cache of 256 columns, a cache of 512


def test_the_loss_on_held_out_data_is_what_the_run_wrote(trained, run, settings):
    written = tiny_runs.by_step(run, "eval/loss")
    assert sorted(written) == [2, 4] and written[4] != written[2]
    checked, tokenizer = arguments.config_of(settings), tokenizers.load("bytes")
    batches = [*windows.eval_batches(checked, tokenizer, batch_rows=8, damaged=set())]
    counts = [batch["loss_mask"].sum() for batch in batches]
    for step, loss in written.items():
        model, losses = zj.load(f"{run}@{step}"), []
        assert model.mesh is None and model.source == f"{run}@{step}"
        for batch in batches:
            labels = np.where(batch["loss_mask"] > 0, batch["targets"], functions.IGNORED)
            given = dict(segments=batch["segment_ids"], shifted=True)
            losses.append(model.loss(batch["tokens"], labels, **given))
        assert np.average(losses, weights=counts) == pytest.approx(loss, rel=1e-6), step


def test_what_train_gives_lies_on_the_run_s_mesh_and_is_its_last_step(trained, run, settings):
    assert dict(trained.mesh.shape) == {"data": 8, "expert": 1, "context": 1, "tensor": 1}
    assert trained.source == f"{run}@4"
    assert same(trained.params, zj.load(run).params)
    again = zj.train(settings, run)  # it is complete
    assert same((again.params, again.balance), (trained.params, trained.balance))


def test_what_train_gives_of_a_fork_lies_on_the_mesh_of_its_last_step(run, settings, folder):
    """Its phases count the parent's tokens too: by these, step 6 is still in the first one."""
    batch = settings.data.global_batch
    tokens = 8 * batch * settings.data.seq_len
    forked = copy.deepcopy(settings)
    forked.run.fork, forked.run.num_steps = f"{run}@4", 6
    forked.schedule.phases = (
        Phase(tokens=tokens, global_batch=2 * batch),
        Phase(tokens=tokens, mesh=Mesh(data=4, expert=2)),
    )
    model = zj.train(forked, folder / "fork")
    assert model.source.endswith("fork@6") and dict(model.mesh.shape)["data"] == 8


@pytest.mark.parametrize(
    ("code", "words"), [(75, "the same call continues"), (3, "exit code 3: see above")]
)
def test_a_run_that_is_not_done_is_an_exception_with_the_exit_code(
    settings, folder, monkeypatch, code, words
):
    monkeypatch.setattr("zaya_jax.run.train", lambda *_: code)
    with pytest.raises(zj.TrainingStopped, match=words) as stopped:
        zj.train(settings, folder / "stopped")
    assert stopped.value.code == code and stopped.value.workdir == folder / "stopped"


# ################################################################################################
# The tokens that it sees, and any mesh
# ##################################################################################################


MESHES = [
    {"data": 2, "expert": 2, "context": 2, "fsdp": True},
    {"context": 4, "ring": True},
    {"tensor": 2, "tsp": True},
    {"context": 2, "tensor": 2, "data": 2, "fsdp": True},
]


@pytest.mark.slow  # tests/parallel has meshes by default
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_mesh_gives_the_same_numbers(model, settings, ids, mesh):
    # No mesh divides these rows and columns.
    over = zj.create(settings, mesh=mesh)
    assert same(over.params, model.params) and over.mesh.size == 8
    assert (over.balance == model.balance).all()
    spread = [x for x in jax.tree.leaves(over.params) if not x.sharding.is_fully_replicated]
    assert bool(spread) == bool({"fsdp", "expert", "tensor"} & set(mesh))
    one, other = model.trace(ids, segments=SEGMENTS), over.trace(ids, segments=SEGMENTS)
    for name in ("logits", "hidden_states", "router_probs", "expert_outputs"):
        np.testing.assert_allclose(
            getattr(other, name), getattr(one, name), rtol=1e-5, atol=1e-5, err_msg=name
        )
    np.testing.assert_array_equal(other.choices, one.choices)
    loss, grads = model.loss_and_grads(ids, ids, segments=SEGMENTS)
    theirs, their_grads = over.loss_and_grads(ids, ids, segments=SEGMENTS)
    assert theirs == pytest.approx(loss, rel=1e-6)
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(their_grads), strict=True):
        assert np.linalg.norm(x - np.asarray(y)) <= 1e-5 * np.linalg.norm(x) + 1e-7


def test_weights_from_other_devices_are_brought_to_the_model_s(settings, model, trained, ids):
    """Weights of a run on eight devices, in a model of one device, and back."""
    one = dataclasses.replace(model, params=trained.params, balance=trained.balance)
    assert one.loss(ids, ids) == pytest.approx(trained.loss(ids, ids), rel=1e-6)
    own = model.loss(ids, ids)
    for params in (model.params, jax.tree.map(np.asarray, model.params)):
        over = dataclasses.replace(trained, params=params, balance=model.balance)
        assert over.loss(ids, ids) == pytest.approx(own, rel=1e-6)


# ################################################################################################
# Writing and reading
# ##################################################################################################


def test_what_is_saved_is_loaded_bit_for_bit_on_a_mesh_too(trained, run, folder, ids):
    saved = trained.save(folder / "saved")
    for mesh in (None, {"expert": 2, "fsdp": True}):
        again = zj.load(saved, mesh=mesh)
        assert same((again.params, again.balance), (trained.params, trained.balance))
    again, original = zj.load(saved), zj.load(run)
    assert again.config.precision == original.config.precision and again.source == f"{saved}@0"
    np.testing.assert_array_equal(again.logits(ids), original.logits(ids))
    assert again.generate("ab", 4) == original.generate("ab", 4)


def test_training_begins_with_what_was_saved(trained, settings, folder):
    saved = trained.save(folder / "begun")
    begun = copy.deepcopy(settings)
    begun.run.num_steps, begun.optim.lr = 1, 1e-30  # so small that only rounding moves anything
    model = zj.train(begun, saved)
    assert model.source == f"{saved}@1"
    for x, y in zip(jax.tree.leaves(model.params), jax.tree.leaves(trained.params), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-12)


def test_a_phase_s_rotary_base_stays_with_the_weights(folder, settings, ids):
    c = copy.deepcopy(settings)
    c.schedule.phases = ({"tokens": 256, "micro_batch": 8}, {"tokens": 256, "rope_theta": 777.0})
    early = zj.create(c)
    assert arguments.as_begun(early.config, None).schedule.phases == ()
    # as `load` has it after the second phase
    second = schedule.phase_config(early.config, schedule.phase_at(early.config, 9)).model
    late = dataclasses.replace(early, config=dataclasses.replace(early.config, model=second))
    again = zj.load(late.save(folder / "phased"))
    assert again.config.model.rope_parameters.hybrid.rope_theta == 777.0
    np.testing.assert_array_equal(again.logits(ids), late.logits(ids))
    assert (again.logits(ids) != early.logits(ids)).any()


# ################################################################################################
# What a trace shows, by the definitions of attention, router and experts
# ################################################################################################


def test_attention_is_what_the_tokens_see_of_each_other(model, ids):
    seen = model.trace(ids, segments=SEGMENTS, attention=True)
    sliding, full = seen.attention
    see = np.tril(np.ones((7, 7), bool)) & (SEGMENTS[:, :, None] == SEGMENTS[:, None, :])
    see = np.broadcast_to(see[:, None], full.shape)
    near = see & np.triu(np.ones((7, 7), bool), -2)  # a sliding layer does not look farther back
    for weights, visible in ((full, see), (sliding, near)):
        assert (weights[visible] > 0).all() and (weights[~visible] == 0).all()
    np.testing.assert_allclose(seen.attention.sum(-1), 1, rtol=1e-6)
    scores = (
        np.einsum("lbqkgc,lbjkc->lbkgqj", seen.queries.reshape(2, 2, 7, 2, 2, 8), seen.keys)
        / 8**0.5
    )
    scores = scores.reshape(seen.attention.shape)[..., 1, :2]  # the second token's, which sees both
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(weights, seen.attention[..., 1, :2], rtol=1e-4)
    assert seen.values.shape == seen.keys.shape == (2, 2, 7, 2, 8)
    plain = model.trace(ids, segments=SEGMENTS)
    biased = plain.router_probs + np.asarray(model.balance)[:, None, None]
    np.testing.assert_array_equal(plain.choices, biased.argmax(-1))
    assert plain.attention is None and len(np.unique(plain.choices)) > 1
    np.testing.assert_array_equal(seen.logits, plain.logits)
    np.testing.assert_array_equal(seen.hidden_states, plain.hidden_states)


def test_the_experts_outputs_are_what_joins_the_stream_times_p(model, ids):
    """With twice the last weights the stream gains the same once more: fresh weights scale
    nothing."""
    model = dataclasses.replace(model, balance=0 * model.balance)  # some tokens skip
    layers = model.params["layers"]
    doubled = {**layers["experts"], "down": 2 * layers["experts"]["down"]}
    other = dataclasses.replace(
        model, params={**model.params, "layers": {**layers, "experts": doubled}}
    )
    one, two = model.trace(ids), other.trace(ids)
    skips = one.choices[0] == 2
    p = np.take_along_axis(one.router_probs[0], one.choices[0][..., None], -1)
    assert skips.any() and not skips.all() and (one.expert_outputs[0][skips] == 0).all()
    gained = two.hidden_states[0] - one.hidden_states[0]
    np.testing.assert_allclose(p * one.expert_outputs[0], gained, rtol=1e-3, atol=1e-7)
    assert np.abs(gained[~skips]).min(-1).all()


# ################################################################################################
# Parts and loops of one's own
# ##################################################################################################


class Unshared(zj.Layer):
    """A layer whose experts' part has a weight of its own, which starts at one, and reads the
    stream once more."""

    def __init__(self, rngs, model, precision):
        super().__init__(rngs, model, precision)
        self.share = zj.weight(rngs, (model.hidden_size,), ("embed",), "ones")

    def __call__(self, h, router_state, balance, rope, placement):
        new, *others = super().__call__(h, router_state, balance, rope, placement)
        return h + self.share[...] * (new - h), *others


def test_a_layer_of_one_s_own_is_in_every_pass(settings, model, ids, folder):
    own = zj.create(settings, layer=Unshared)
    shared = own.params["layers"].pop("share")
    assert shared.shape == (2, 16) and same(own.params, model.params)
    own.params["layers"]["share"] = shared
    np.testing.assert_allclose(own.logits(ids), model.logits(ids), rtol=1e-5, atol=1e-6)
    own.params["layers"]["share"] = jnp.zeros_like(shared)  # now a layer leaves the stream as it is
    seen = own.trace(ids)
    np.testing.assert_array_equal(seen.hidden_states[0], seen.hidden_states[1])
    assert type(own.layer(1)) is Unshared and seen.expert_outputs.any()
    saved = own.save(folder / "own")
    refused(partial(zj.load, saved), "a layer of its own, test_library:Unshared")
    np.testing.assert_array_equal(zj.load(saved, layer=Unshared).logits(ids), own.logits(ids))
    typed = type("Typed", (Unshared,), {"__module__": "builtins"})  # as at a prompt
    unsaved = zj.create(settings, layer=typed)
    refused(partial(unsaved.save, folder / "typed"), "is written in no file")
    refused(partial(zj.create, settings, layer=dict), "layer=", "subclass of Module")
    refused(partial(zj.create, settings, router=dict), "router=", "subclass of Router")


def test_a_loop_of_public_names_trains_as_the_program_does(settings):
    c = arguments.config_of(settings)
    mesh = make_mesh(zj.config.Mesh(), jax.devices()[:1], "mesh")
    ids = np.random.default_rng(1).integers(0, 264, (1, 2, 17)).astype(np.int32)
    ones = np.ones((1, 2, 16), np.int32)
    batch = {
        "tokens": ids[..., :-1],
        "targets": ids[..., 1:],
        "segment_ids": ones,
        "positions": np.cumsum(ones, axis=-1, dtype=np.int32) - 1,
        "loss_mask": ones.astype(np.float32),
    }
    setup = states.set_up(c, mesh)
    step, state = steps.make_train_step(c, setup), states.init(c, setup)
    params, biases = zj.init(c, c.run.seed)
    optimizer, plan = zj.optimizer(c), zj.schedule.make_plan(c)
    own, balance = optimizer.init(), zj.balance.init(*biases.shape[:1], biases.shape[1] - 1)
    loss = jax.jit(
        jax.value_and_grad(zj.training_loss, argnums=1, has_aux=True),
        static_argnums=0,
        static_argnames="shifted",
    )
    for number in (1, 2, 3):
        lr = np.float32(plan.step(number).lr)
        state, figures = step(state, steps.put_batch(mesh, batch, 1), lr)
        (_, counts), grads = loss(
            c, params, balance.bias, ids[0, :, :-1], ids[0, :, 1:], segments=ones[0], shifted=True
        )
        params, own = jax.jit(optimizer.apply)(grads, own, params, lr=lr)
        balance, _ = zj.balance.update(balance, counts, **dataclasses.asdict(c.balance))
        np.testing.assert_allclose(own.figures["grad_norm"], figures["grad_norm"], rtol=1e-5)
    np.testing.assert_allclose(balance.bias, state["balance"].bias, rtol=1e-6, atol=1e-8)
    for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(state["params"]), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-6)


# ################################################################################################
# Refusals
# ##################################################################################################


def refused(call, *parts):
    said = refusal(call)
    assert "--workdir" not in said and all(part in said for part in parts), said


def test_it_continues_whatever_it_is_given(model, ids):
    """Ragged ids, conversations, several of each, and the log-probabilities of what it adds."""
    rows, lengths = [[1, 2], [3, 4, 5]], [2, 3]
    found, scored = model.generate(rows, 5, log_probs=True)
    assert [row[:n] for row, n in zip(found, lengths, strict=True)] == rows
    assert found[1] == model.generate(rows[1], 5)
    log_probs, likeliest = model.scores([found[1][:-1]], [found[1][1:]])
    np.testing.assert_allclose(scored[1], log_probs[0, 2:], rtol=2e-5)
    assert likeliest[0, 2:].all() and len(scored[0]) == 5
    end = found[0][4]
    assert model.generate(rows, 5, ends=[end])[0] == found[0][: found[0].index(end, 2)]
    whole = model.generate("ab", 9)
    (text, until) = model.generate("ab", 9, stop=[whole[5]], log_probs=True)
    assert len(until) == len(text) - 2 < 9  # a character is a token here
    assert len(model.generate([5], 0, log_probs=True)[1]) == 0
    seed = np.int64(7)  # as of an array
    several = model.generate("ab", 4, temperature=1.0, samples=2, seed=seed)
    assert several == model.generate(iter(["ab", "ab"]), 4, temperature=1.0, seed=[7, 8])
    with pytest.warns(UserWarning, match=r"^top_p=0.5 without effect: temperature=0"):
        assert model.generate("ab", 9, top_p=0.5) == whole
    talk = [{"role": "user", "content": "hi"}]
    answers = model.generate([talk, talk], 5)
    assert answers == ["".join(model.stream(talk, 5))] * 2
    assert model.generate(talk[0], 5) == "".join(model.stream(talk[0], 5)) == answers[0]
    asked = [256, 259, *b"user\nhi", 260, *b"\n", 259, *b"assistant\n"]
    for array in (np.asarray(asked), jnp.asarray(asked)):
        assert model.generate(array, 5) == model.generate(asked, 5)
    new = model.generate([asked] * 2, 5, ends=[257, 260])[0][len(asked) :]
    assert model.tokenizer.decode(new) == answers[0]
    for wrong in ([], {}, {"x": 1}, [{"x": 1}], ["a", [1]], [1, 264], [[]]):
        check_refused(
            r"prompt=|a conversation is a list of turns|prompt 1 of 1", model.generate, wrong, 2
        )


def test_a_model_s_keys_are_a_config_and_a_misspelt_one_names_the_nearest():
    assert arguments.config_of({"model": {"max_position_embeddings": 64}}).data.seq_len == 64
    with pytest.raises(AttributeError) as caught:
        zj.config.default().model.hiden_size = 3
    assert 'Did you mean "hidden_size" instead of "hiden_size"?' in str(caught.value)


def test_what_is_given_wrongly_is_one_clear_line(model, run, settings, golden_dir, tmp_path):
    load, create, ids = zj.load, zj.create, np.zeros((1, 4), int)
    (tmp_path / "empty").mkdir()
    short = {**model.params, "final_norm": {"scale": np.zeros(3)}}
    changed = dataclasses.replace(model, params=short)
    wider = copy.deepcopy(settings)
    wider.model.hidden_size = 24
    for call, *parts in (
        (partial(load, tmp_path / "none"), "none is not a folder"),
        (partial(load, tmp_path / "empty"), "has no checkpoint", "transformers"),
        (partial(load, f"{run}@3"), "no checkpoint of step 3", "it has 2, 4"),
        (partial(load, run, dtype="float16"), "float32, bfloat16"),
        (partial(load, run, mesh={"data": 3}), "mesh has data", "8 devices"),
        (partial(create, "tyni"), "'tyni'", "tiny"),
        (partial(create, settings, seed=2**32), "seed=4294967296 must be"),
        (partial(create, settings, seed=1.5), "seed=1.5 must be"),
        (partial(model.logits, [[1, 264]]), "ids hold 264; expected 0 to 263"),
        (partial(model.logits, np.zeros((1, 65), int)), "max_position_embeddings=64"),
        (partial(model.logits, ids, segments=[[1, 1]]), "segments have shape (1, 2)", "(1, 4)"),
        # 1 in int32
        (partial(model.logits, ids, segments=ids + 2**32 + 1), f"segments hold {2**32 + 1}"),
        (partial(model.loss, ids, ids + 264), "labels hold 264", "or -100"),
        (partial(model.loss, ids, ids - 1), "labels hold -1;"),
        (partial(model.loss, ids, ids - 100), "no label counts"),
        (partial(model.generate, "ab", 2, stop="xy"), "stop='xy' must be a list of texts"),
        (partial(model.generate, ids, 61), "has 4 tokens", "max_position_embeddings=64"),
        (partial(model.save, run), "not empty"),
        (partial(model.to_hf, tmp_path / "hf", dtype="int8"), "dtype='int8'"),
        (partial(changed.save, tmp_path / "a"), "final_norm.scale is [3]", "[16] is needed"),
        (partial(changed.logits, ids), "array params.final_norm.scale is [3]"),
        (partial(changed.generate, ids, 2), "array params.final_norm.scale is [3]"),
        (partial(load(golden_dir / "taps").generate, "a", 2), "no tokenizer", "ids [B, S]"),
        (
            partial(zj.train, wider, run),
            f"{run} was started with config.model.hidden_size=16",
            "now it is 24",
        ),
    ):
        refused(call, *parts)
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


# ################################################################################################
# The pages
# ##################################################################################################


def run_examples(examples, folder, names, monkeypatch):
    runner, said = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS), []
    monkeypatch.chdir(folder)
    monkeypatch.setattr(logs, "_print", lambda line: None)
    for test in examples:
        below = folder / f"examples {test.name}"
        below.mkdir()
        test.globs = {**names, "zj": zj, "np": np, "jax": jax, "folder": below}
        runner.run(test, out=said.append)
    assert not runner.failures, re.sub(r"\n{2,}", "\n", "".join(said))


@pytest.mark.slow
def test_the_examples_of_every_function_and_method(model, run, ids, folder, monkeypatch, settings):
    finder = doctest.DocTestFinder()
    examples = [
        test
        for module in (functions, library, read)
        for test in finder.find(module)
        if test.examples
    ]
    shown = {
        test.name.removeprefix("zaya_jax.").removeprefix("report.").split(".", 1)[1]
        for test in examples
    }
    assert shown == {f"LanguageModel.{name}" for name in OF_A_MODEL} | {
        "LanguageModel.__call__",
        "init",
        "apply",
        "loss",
        "scores",
        "create",
        "load",
        "train",
        "metrics",
        "optimizer",
        "training_loss",
    }
    run_examples(
        examples, folder, {"model": model, "ids": ids, "config": settings, "run": run}, monkeypatch
    )


@pytest.mark.slow
def test_the_examples_of_the_page(folder, monkeypatch):
    page = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
    example = doctest.DocTestParser().get_doctest(page, {}, "library.md", "docs/library.md", 0)
    assert len(example.examples) > 15
    run_examples([example], folder, {}, monkeypatch)


def test_the_page_on_generation_does_as_it_says(run):
    page = (ROOT / "docs" / "generation.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict = {}
    exec(code.replace("runs/tiny", str(run)).replace("100,", "3,"), names)
    assert names["rows"].ended and [len(text) <= 3 for text in names["texts"]] == [True, True]
    short = re.search(r"`model(\.generate\(texts, )100(, temperature=0.8\))`", page)
    assert eval(f"model{short[1]}3{short[2]}", names | {"texts": ["def "]})[0].startswith("def ")
