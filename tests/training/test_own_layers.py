"""Layers and routers of one's own: they generate what their logits say; a program takes them by
name, with a hash of their file, and imports them only where the user names them."""

import dataclasses
import importlib
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models
import tiny_runs
from flax import nnx
from refusals import check_refused, refusal
from rows import slow

import zaya_jax as zj
from experiments import generate
from experiments.configs import finetune
from zaya_jax import cli
from zaya_jax.checkpoint.source import read_meta
from zaya_jax.model import zaya
from zaya_jax.model.layer import Experts
from zaya_jax.model.own_parts import as_named, customized
from zaya_jax.pytorch import exchange

SOURCE = """
import zaya_jax as zj


class Half(zj.Layer):
    def __init__(self, rngs, model, precision):
        super().__init__(rngs, model, precision)
        self.share = zj.weight(rngs, (model.hidden_size,), ("embed",), "ones")

    def __call__(self, h, router_state, balance, rope, placement):
        out = super().__call__(h, router_state, balance, rope, placement)
        return out._replace(h=h + self.share[...] * (out.h - h) / 2)


class Alone(zj.Router):
    def __call__(self, projected, stream, balance):
        return super().__call__(projected, 0 * stream, balance)
"""
LAYER, ROUTER = "own_half:Half", "own_half:Alone"
KEYS = {
    "model__layer": LAYER,
    "model__router": ROUTER,
    "optim__rows": ("layers/share=adamw",),
    "run__num_steps": 2,
    "model__max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a module, and a run with its layer and router."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_half.py").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        assert train(folder / "run") == cli.DONE
        yield folder
        forget()


def forget():
    """The next import reads the file, as another process does."""
    sys.modules.pop("own_half", None)
    importlib.invalidate_caches()


def train(workdir, **keys):
    """A start as the program makes it of a config."""
    return tiny_runs.start(as_named(tiny_runs.settings(**KEYS | keys)), workdir)


@pytest.fixture
def changed(place):
    """The same module with another line, for a test's time."""
    (place / "own_half.py").write_text(SOURCE + "\n# another line\n")
    forget()
    yield
    (place / "own_half.py").write_text(SOURCE)
    forget()


def test_a_run_trains_its_layer_and_records_names_and_hashes(place, tmp_path):
    meta = read_meta(place / "run", 2)
    model = meta["config"]["model"]
    assert model["layer"] == LAYER and "layer_class" not in model
    name, mark = meta["own_parts"]["layer"].split()
    assert name == LAYER and len(mark) == 16
    model = zj.load(place / "run", layer=LAYER, router=ROUTER)
    share = np.asarray(model.params["layers"]["share"])
    assert share.shape == (2, 16) and (share != 1).any()
    layer = model.layer(0)
    assert [type(part).__name__ for part in (layer, layer.router)] == ["Half", "Alone"]
    ids = np.arange(20).reshape(2, 10)
    saved = zj.load(model.save(tmp_path / "saved"), layer=LAYER, router=ROUTER)
    np.testing.assert_array_equal(saved.logits(ids), model.logits(ids))
    without = refusal(train, tmp_path / "other", optim__rows=())
    assert "config.optim.rows='layers/share=adamw'" in without and not (tmp_path / "other").exists()


def test_nothing_is_imported_that_the_user_has_not_named(place, tmp_path, called):
    forget()
    line = refusal(zj.load, place / "run")
    assert f"a layer of its own, {LAYER}, which is imported only where you name it" in line
    code, _, err = called(generate, f"--model={place / 'run'}")
    assert code == cli.BAD_INPUT and f"--layer={LAYER}" in err
    check_refused(
        "transformers' `zaya` has no form", exchange.to_hf, place / "run", tmp_path / "hf"
    )
    tuned = finetune.get_config(str(place / "run"))
    assert tuned.model.layer == tuned.model.router == ""
    assert "own_half" not in sys.modules
    options = ["--num_tokens=2", f"--layer={LAYER}", f"--router={ROUTER}"]
    assert called(generate, f"--model={place / 'run'}", *options)[0] == cli.DONE
    assert "own_half" in sys.modules


def test_weights_of_another_layer_are_refused(place, tmp_path):
    keys = dict(model__layer="", model__router="", optim__rows=(), run__init_from=f"{place}/run")
    line = refusal(train, tmp_path / "plain", **keys)
    assert f"was trained with the layer {LAYER} " in line and "here it is the usual one" in line
    assert not (tmp_path / "plain").exists()


def test_another_source_is_refused_unless_it_is_allowed(place, changed, tmp_path, capsys):
    line = refusal(train, place / "run", run__num_steps=3)
    assert f"was trained with the layer {LAYER} " in line and "config.run.changed_source" in line
    assert "--changed_source" in refusal(zj.load, place / "run", layer=LAYER, router=ROUTER)
    model = zj.load(place / "run", layer=LAYER, router=ROUTER, changed_source=True)
    assert f"note: {place / 'run'}@2 was trained with the layer" in capsys.readouterr().out
    assert model.params["layers"]["share"].shape == (2, 16)
    complete = tiny_runs.settings(**KEYS, run__changed_source=True)
    assert zj.train(complete, place / "run").source.endswith("@2")
    on = shutil.copytree(place / "run", tmp_path / "on")
    assert train(on, run__num_steps=3, run__changed_source=True) == cli.DONE
    marks = [read_meta(on, step)["own_parts"]["layer"] for step in (2, 3)]
    assert marks[0] != marks[1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_half", r"cannot be imported \(AttributeError"),
        ("no_such_module:Half", r"cannot be imported \(ModuleNotFoundError.*PYTHONPATH"),
        ("os:path", r"layer='os:path' must be a subclass of Module"),
    ],
)
def test_a_name_that_is_no_layer_is_one_line(place, name, message):
    check_refused(message, lambda: as_named(tiny_runs.settings(model__layer=name)))


# eight experts and the skip class: `LinearRouter` has a product alone
CONFIG = zj.config.check(small_models.settings(num_experts=8, router_hidden_size=9))


class NormedExperts(Experts):
    """Their matrices have a mean square of 1/4, whatever the weights are."""

    def __call__(self, x, choice, gate, placement):
        graph, weights = nnx.split(self)
        half = lambda w: w / (2 * jnp.sqrt(jnp.mean(w**2, axis=(1, 2), keepdims=True)))  # noqa: E731
        return Experts.__call__(
            nnx.merge(graph, jax.tree.map(half, weights)), x, choice, gate, placement
        )


class Normed(zj.Layer):
    def __init__(self, rngs, model, precision):
        super().__init__(rngs, model, precision)
        self.experts = NormedExperts(rngs, model, precision)


class AroundExperts(zj.Layer):
    """The usual class of experts, called with other weights than its own."""

    def __call__(self, h, router_state, balance, rope, placement):
        self.experts.down[...] = self.experts.down[...] * 3
        return super().__call__(h, router_state, balance, rope, placement)


class MlpAlone(zj.Layer):
    """One MLP in place of experts, without a router; it reads its weights in float32."""

    def __init__(self, rngs, model, precision):
        super().__init__(rngs, model, precision)
        del self.experts, self.router
        self.mlp = nnx.Module()
        for name in ("gate", "up", "down"):
            shape = (model.hidden_size,) * 2
            setattr(self.mlp, name, zj.weight(rngs, shape, ("embed", "embed"), 0.2))

    def __call__(self, h, router_state, balance, rope, placement):
        x, h = self.attn_norm.norm_and_stream(h, self.dtype)
        y, cache = self.cca(x, rope, placement)
        h = self.attn_join(y, h)
        x = self.moe_norm(h).astype(jnp.float32)
        up = jax.nn.silu(x @ self.mlp.gate[...]) * (x @ self.mlp.up[...])
        h = self.moe_join(up @ self.mlp.down[...], h, jnp.ones(h.shape[:-1]))
        choice = jnp.zeros(router_state.shape[:1], jnp.int32)
        return h, router_state, choice, jnp.zeros((len(choice), len(balance))), cache


class LinearRouter(zj.Router):
    """One product of the norm; the config's router width is the number of classes."""

    def __init__(self, rngs, model, precision):
        super().__init__(rngs, model, precision)
        del self.eda, self.norm, self.fc1, self.fc2, self.out

    def __call__(self, projected, stream, balance):
        p = jax.nn.softmax(projected + self.down.bias[...])
        choice = jnp.argmax(p + balance, axis=-1).astype(jnp.int32)
        return choice, jnp.take_along_axis(p, choice[:, None], axis=-1)[:, 0], projected, stream


class Measured(zj.Layer):
    """With a figure: the mean square of the residual stream."""

    def __call__(self, h, router_state, balance, rope, placement):
        out = super().__call__(h, router_state, balance, rope, placement)
        squares = jnp.mean(jnp.square(out.h), axis=-1)
        self.square = zj.TokenSum(jnp.sum(squares * placement.real(h)))
        return out


@pytest.mark.parametrize("padding", [0, 3])
def test_a_layers_figure_is_summed_over_the_real_tokens(padding):
    model = zj.create(CONFIG, 0, layer=Measured)
    ids, real = np.arange(14).reshape(2, 7), slice(7 - padding)
    segments = np.zeros_like(ids)
    segments[:, real] = 1
    rows = zaya.TokenRows(ids, segments if padding else None)
    out = zaya.apply(model.config.model, model.params, model.balance, rows, trace=True)
    wanted = np.sum(np.mean(np.square(out.hidden_states[:, :, real]), axis=-1), axis=(1, 2))
    np.testing.assert_allclose(out.sums["square"], wanted, rtol=1e-5)


@pytest.mark.parametrize(
    "own",
    [
        {"layer": Normed, "router": LinearRouter},
        {"layer": MlpAlone},
        slow({"layer": AroundExperts}),
    ],
)
def test_decoding_gives_the_likeliest_of_the_logits(own):
    model = zj.create(CONFIG, 0, **own)
    draw = np.random.default_rng(0)
    model.params = jax.tree.map(
        lambda x: x + 0.3 * draw.standard_normal(x.shape, np.float32), model.params
    )
    # So that the next token depends on the last one, and is another.
    model.params["embed"]["embedding"] *= 5
    model.params["final_norm"]["scale"] = draw.standard_normal(16).astype(np.float32)
    found = model.generate(draw.integers(0, 256, (2, 5)), 12)
    np.testing.assert_array_equal(found[:, 5:], model.logits(found).argmax(-1)[:, 4:-1])
    assert len(set(found[:, 5:].ravel().tolist())) > 2


def test_weights_of_an_own_layer_are_not_rounded_before_decoding():
    model = customized(CONFIG.model, layer=MlpAlone)
    precision = dataclasses.replace(CONFIG.precision, compute="bfloat16")
    found, _ = jax.eval_shape(
        lambda p: zaya.cast_for_products(model, p, precision), zaya.abstract(model)
    )
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype("float32")}
